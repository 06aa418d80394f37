"""Batches of conversations that tests write down turn by turn."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rl.data.batch import Batch


class Said(NamedTuple):
    """Tokens of the policy, in a turn."""

    turn: int
    tokens: Sequence[int]


class Sample(NamedTuple):
    """A conversation. A stretch is a prompt, then in turn what the policy `Said` and the tokens of an observation."""

    reward: float
    stretches: Sequence[Sequence[Said | Sequence[int]]]
    is_truncated: bool = False


def batch_of_conversations(groups: Sequence[Sequence[Sample]]) -> Batch:
    """Return a batch of these samples, by group. The logprob of each sampled token is -1, and its version is 3."""
    tokens: list[int] = []
    turns: list[int] = []
    sequences: list[tuple[int, int, float, int, bool, int]] = []
    for group_id, group in enumerate(groups):
        for number, sample in enumerate(group):
            for stretch in sample.stretches:
                start = len(tokens)
                for part in stretch:
                    turn, added = (part.turn, part.tokens) if isinstance(part, Said) else (-1, part)
                    tokens += added
                    turns += [turn] * len(added)
                assert not isinstance(stretch[0], Said)
                sizes = (len(tokens) - start, len(stretch[0]))
                sequences.append((*sizes, sample.reward, group_id, sample.is_truncated, number))
    lengths, prompt_lengths, rewards, group_ids, truncated, samples = zip(*sequences, strict=True)
    loss_mask = torch.tensor(turns) >= 0
    return Batch(
        tokens=torch.tensor(tokens),
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.tensor(prompt_lengths),
        loss_mask=loss_mask,
        versions=torch.where(loss_mask, 3, -1).int(),
        rollout_logprobs=-loss_mask.float(),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor(group_ids),
        truncated=torch.tensor(truncated),
        turns=torch.tensor(turns, dtype=torch.int32),
        samples=torch.tensor(samples),
    )
