"""Advantages from rewards, as pure tensor functions.

S sequences have T response tokens in total, concatenated. `segment_ids` [T] is the index of each token's sequence.
`lengths` [S] is the number of tokens of each sequence, which may be 0. Sequences with equal `group_ids` [S] form a
group. Functions that return [S] give all tokens of a sequence the same advantage. Sums are float64: in float32 the mean
of equal rewards may differ from that reward, and the division by the standard deviation would turn the rounding error
into advantages.
"""

import torch
from torch import Tensor

from rl.algo.segments import discounted_sums


def group_relative(rewards: Tensor, group_ids: Tensor, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """Return GRPO's advantage (arXiv 2402.03300): reward minus group mean, divided by the group's std (n - 1).

    Without `normalize_std` this is Dr.GRPO (arXiv 2503.20783). It is also the first half of REINFORCE++-baseline (arXiv
    2501.03262), whose second half is `standardize` over all tokens of the batch. A group of equal rewards has advantage
    0. Shapes: rewards [S], group_ids [S] -> [S].
    """
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    centred = rewards.double() - (_group_sums(rewards, group, count) / count)[group]
    if normalize_std:
        variance = _group_sums(centred.square(), group, count) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + eps)
    return centred.to(rewards.dtype)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return RLOO's advantage (arXiv 2402.14740): reward minus the mean reward of the group's other sequences.
    The advantage of a group of one is its reward. Shapes: rewards [S], group_ids [S] -> [S]."""
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    others = _group_sums(rewards, group, count)[group] - rewards.double()
    return (rewards.double() - others / (count - 1).clamp(min=1)[group]).to(rewards.dtype)


def is_informative(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return whether the rewards of a group differ. DAPO's dynamic sampling (arXiv 2503.14476) keeps only such groups.
    rewards [S], group_ids [S] -> [S] bool, the same for all sequences of a group."""
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    blank = rewards.new_zeros(count.shape)
    highest = blank.scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = blank.scatter_reduce(0, group, rewards, "amin", include_self=False)
    return (highest > lowest)[group]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476), which is added to rewards.
    It is 0 up to max_length - buffer tokens and then falls linearly to -1 at max_length. lengths [S] -> [S] float32."""
    assert 0 < buffer <= max_length, (buffer, max_length)
    return ((max_length - buffer - lengths).float() / buffer).clamp(-1.0, 0.0)


def token_rewards(
    sequence_rewards: Tensor, kl: Tensor | None, kl_coef: float, segment_ids: Tensor, lengths: Tensor
) -> Tensor:
    """Put the sequence's reward at its last token, and subtract kl_coef * KL at each token (arXiv 1909.08593).
    sequence_rewards [S], kl [T], segment_ids [T], lengths [S] -> [T]. A sequence without tokens loses its reward."""
    rewards = sequence_rewards.new_zeros(segment_ids.shape) if kl is None else -kl_coef * kl.detach()
    last = (lengths.cumsum(0) - 1)[lengths > 0]
    return rewards.index_add(0, last, sequence_rewards[lengths > 0].to(rewards.dtype))


def returns_to_go(token_rewards: Tensor, segment_ids: Tensor, gamma: float) -> Tensor:
    """Return the discounted sum of rewards from each token to the end of its sequence.
    With `standardize` this is REINFORCE++ (arXiv 2501.03262). token_rewards [T], segment_ids [T] -> [T]."""
    return discounted_sums(token_rewards, segment_ids, gamma).to(token_rewards.dtype)


def gae(token_rewards: Tensor, values: Tensor, segment_ids: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return PPO's advantages (arXiv 1506.02438) and the returns, which are the targets of the critic.

    The value after a sequence's last token is 0, even if the sequence was truncated.
    token_rewards [T], values [T], segment_ids [T] -> advantages [T], returns [T].
    """
    old_values = values.detach().double()
    next_values = torch.zeros_like(old_values)
    next_values[:-1] = torch.where(segment_ids[1:] == segment_ids[:-1], old_values[1:], 0.0)
    td_errors = token_rewards.double() + gamma * next_values - old_values
    advantages = discounted_sums(td_errors, segment_ids, gamma * lam)
    return advantages.to(token_rewards.dtype), (advantages + old_values).to(token_rewards.dtype)


def moments(values: Tensor) -> Tensor:
    """Return count, sum and sum of squares, which the ranks add up before `standardize`: values [N] -> [3] float64."""
    exact = values.detach().double()
    return torch.stack([torch.ones_like(exact).sum(), exact.sum(), exact.square().sum()])


def standardize(values: Tensor, moments: Tensor, eps: float = 1e-8) -> Tensor:
    """Subtract the mean and divide by the std (n - 1) of `moments`. Equal values become 0. values [N] -> [N]."""
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)
    return ((values.double() - mean) / (variance + eps).sqrt()).to(values.dtype)


def _group_sums(values: Tensor, group: Tensor, count: Tensor) -> Tensor:
    """Return the sum over each of G groups, [G] float64. `group` [S] is the group's index, `count` [G] its size."""
    return torch.zeros(count.shape, dtype=torch.float64, device=values.device).index_add_(0, group, values.double())
