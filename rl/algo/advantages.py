"""Advantages: rewards in, advantages out. Pure tensor math.

S sequences; T response tokens, laid end to end; `segment_ids` [T] is the sequence of each token, `lengths` [S] the
tokens of each sequence, which may be none. A group is given by equal `group_ids` [S]. What a sequence's advantage is,
each of its tokens has. Sums are float64: in float32 the mean of equal rewards is not that reward, and the standard
deviation of what is left would make advantages of rounding errors.
"""

import torch
from torch import Tensor

from rl.algo.segments import discounted_sums


def group_relative(rewards: Tensor, group_ids: Tensor, normalize_std: bool, eps: float = 1e-6) -> Tensor:
    """GRPO (arXiv 2402.03300): reward minus the group's mean, over the group's standard deviation (n - 1); without
    the latter Dr.GRPO (arXiv 2503.20783).

    rewards [S], group_ids [S] -> [S]. A group of equal rewards has advantage 0.
    """
    group, count = _groups(group_ids)
    centred = rewards.double() - (_group_sums(rewards, group, count) / count)[group]
    if normalize_std:
        variance = _group_sums(centred.square(), group, count) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[group] + eps)
    return centred.to(rewards.dtype)


def minus_group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """REINFORCE++-baseline (arXiv 2501.03262), whose other half is `standardize` over all tokens of the batch.

    rewards [S], group_ids [S] -> [S].
    """
    return group_relative(rewards, group_ids, normalize_std=False)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): reward minus the mean of the group's others.

    rewards [S], group_ids [S] -> [S]. A group of one has no others, so its advantage is its reward.
    """
    group, count = _groups(group_ids)
    others = _group_sums(rewards, group, count)[group] - rewards.double()
    return (rewards.double() - others / (count - 1).clamp(min=1)[group]).to(rewards.dtype)


def is_informative(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """DAPO's dynamic sampling (arXiv 2503.14476) keeps the groups whose rewards are not all equal.

    rewards [S], group_ids [S] -> [S] bool, the same for all sequences of a group.
    """
    group, count = _groups(group_ids)
    blank = rewards.new_zeros(count.shape)
    highest = blank.scatter_reduce(0, group, rewards, "amax", include_self=False)
    lowest = blank.scatter_reduce(0, group, rewards, "amin", include_self=False)
    return (highest > lowest)[group]


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476), to be added to rewards: 0 up to max_length - buffer tokens,
    then falling linearly to -1 at max_length.

    lengths [S] -> [S] float32.
    """
    assert 0 < buffer <= max_length, (buffer, max_length)
    return ((max_length - buffer - lengths).float() / buffer).clamp(-1.0, 0.0)


def token_rewards(
    sequence_rewards: Tensor, kl: Tensor | None, kl_coef: float, segment_ids: Tensor, lengths: Tensor
) -> Tensor:
    """The sequence's reward at its last token, and at each token minus kl_coef times its KL (arXiv 1909.08593).

    sequence_rewards [S], kl [T], segment_ids [T], lengths [S] -> [T]. A sequence without tokens loses its reward.
    """
    rewards = sequence_rewards.new_zeros(segment_ids.shape) if kl is None else -kl_coef * kl.detach()
    last = (lengths.cumsum(0) - 1)[lengths > 0]
    return rewards.index_add(0, last, sequence_rewards[lengths > 0].to(rewards.dtype))


def returns_to_go(token_rewards: Tensor, segment_ids: Tensor, gamma: float) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262), whose other half is `standardize`: the discounted sum of rewards from a token to
    the end of its sequence.

    token_rewards [T], segment_ids [T] -> [T].
    """
    return discounted_sums(token_rewards, segment_ids, gamma).to(token_rewards.dtype)


def gae(token_rewards: Tensor, values: Tensor, segment_ids: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """PPO's advantages (arXiv 1506.02438) and the returns that the critic is fitted to. Nothing is worth anything
    after a sequence's last token, also where a token limit cut it.

    token_rewards [T], values [T], segment_ids [T] -> advantages [T], returns [T].
    """
    old_values = values.detach().double()
    next_values = torch.zeros_like(old_values)
    next_values[:-1] = torch.where(segment_ids[1:] == segment_ids[:-1], old_values[1:], 0.0)
    surprise = token_rewards.double() + gamma * next_values - old_values
    advantages = discounted_sums(surprise, segment_ids, gamma * lam)
    return advantages.to(token_rewards.dtype), (advantages + old_values).to(token_rewards.dtype)


def moments(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [3] float64: count, sum and sum of squares, which ranks add before `standardize`. A weight is how often a
    value counts: the lengths, where each token has its sequence's value.

    values [N], weights [N] -> [3].
    """
    exact = values.detach().double()
    times = torch.ones_like(exact) if weights is None else weights.double()
    return torch.stack([times.sum(), (times * exact).sum(), (times * exact.square()).sum()])


def standardize(values: Tensor, moments: Tensor, eps: float = 1e-8) -> Tensor:
    """Values minus their mean over their standard deviation (n - 1), of which `moments` speaks; equal values are 0.

    values [N], moments [3] -> [N].
    """
    count, total, squares = moments.unbind()
    mean = total / count.clamp(min=1)
    variance = ((squares - total * mean) / (count - 1).clamp(min=1)).clamp(min=0)
    return ((values.double() - mean) / (variance + eps).sqrt()).to(values.dtype)


def _groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """[S] place of each sequence's group among the G groups, and [G] their sizes."""
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return group, count


def _group_sums(values: Tensor, group: Tensor, count: Tensor) -> Tensor:
    """[G] float64."""
    return torch.zeros(count.shape, dtype=torch.float64, device=values.device).index_add_(0, group, values.double())
