"""Read the turns of conversations from a batch: what the policy wrote, and what it read in between."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl.data.batch import Batch

Role = Literal["model", "environment"]


class Turn(NamedTuple):
    role: Role
    tokens: list[int]


@dataclass(frozen=True)
class Conversation:
    """One sample of a batch with `turns`."""

    prompt: list[int]  # with what the environment added before the first turn
    turns: list[Turn]  # in the order of the sequences
    reward: float
    is_truncated: bool

    @property
    def last_response(self) -> list[int]:
        """Return what the model wrote in its last turn."""
        return next((turn.tokens for turn in reversed(self.turns) if turn.role == "model"), [])

    @property
    def num_model_turns(self) -> int:
        return sum(turn.role == "model" for turn in self.turns)

    @property
    def num_model_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns if turn.role == "model")


def read_conversations(batch: Batch) -> Iterator[Conversation]:
    """Yield the conversations of a batch, in its order. If one has several sequences, what a later one begins with is
    a turn of the environment, without the tokens with which the sequence before begins too."""
    assert batch.turns is not None
    rewards, truncated = batch.rewards.tolist(), batch.truncated.tolist()
    firsts = batch.starts_conversation.nonzero().flatten().tolist()
    starts, prompts = batch.cu_lengths.tolist(), batch.prompt_lengths.tolist()
    repeated = _count_repeated(batch).tolist()
    for first, end in zip(firsts, [*firsts[1:], batch.num_sequences]):
        turns: list[Turn] = []
        for sequence in range(first, end):
            skipped = prompts[sequence] if sequence == first else repeated[sequence]
            span = slice(starts[sequence] + skipped, starts[sequence + 1])
            numbers, counts = torch.unique_consecutive(batch.turns[span], return_counts=True)
            parts = batch.tokens[span].split(counts.tolist())
            for number, tokens in zip(numbers.tolist(), parts, strict=True):
                turns.append(Turn("environment" if number < 0 else "model", tokens.tolist()))
        prompt = batch.tokens[starts[first] : starts[first] + prompts[first]].tolist()
        yield Conversation(prompt, turns, rewards[first], truncated[first])


def count_observed(batch: Batch) -> Tensor:
    """Return how many tokens the policy has read in each conversation besides the prompt and its own tokens: the
    observations, and what a later sequence does not repeat from the sequence before it."""
    observed = batch.lengths - batch.response_lengths
    observed -= torch.where(batch.starts_conversation, batch.prompt_lengths, _count_repeated(batch))
    return batch.sum_conversations(observed)


def _count_repeated(batch: Batch) -> Tensor:
    """Return [S]: how many tokens of its prompt a sequence has in common with the sequence before it in the same
    conversation."""
    starts, before = batch.cu_lengths[:-1], batch.cu_lengths[:-1].roll(1)
    most = torch.minimum(batch.prompt_lengths, batch.lengths.roll(1)).where(~batch.starts_conversation, 0)
    sequences = torch.repeat_interleave(torch.arange(batch.num_sequences), most)
    places = torch.arange(len(sequences)) - torch.repeat_interleave(most.cumsum(0) - most, most)
    is_other = batch.tokens[starts[sequences] + places] != batch.tokens[before[sequences] + places]
    return most.scatter_reduce(0, sequences[is_other], places[is_other], "amin")
