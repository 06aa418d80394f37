"""A batch of the prompt stream: a fixed interval of it, or with dynamic sampling one that grows until enough of its
groups say something.

A group of equal rewards has no advantages, so DAPO (arXiv 2503.14476) leaves it out and draws further prompts. How far
the interval grows depends on rewards alone, never on timing, and the first groups in stream order are kept.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl.algo.advantages import is_informative
from rl.data.batch import Batch
from rl.data.prompts import PromptStream
from rl.report.metrics import Measures
from rl.rewards.totals import Totals, add
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import Sampling


class Sampled(NamedTuple):
    batch: Batch  # this actor's share
    num_prompts: int  # of the whole
    totals: Totals  # of all that was sampled


@dataclass(frozen=True)
class DynamicSampling:
    max_rounds: int
    mask_truncated: bool  # truncated responses are not learnt from, so their rewards make no group informative


def sample(
    rollouts: Rollouts,
    stream: PromptStream | None,
    num_prompts: int,
    dynamic: DynamicSampling | None,
    sampling: Sampling,
    version: int,
    pg: dist.ProcessGroup,
    measures: Measures,
) -> Sampled:
    """Sample on every actor; the leader alone has the stream. Without `dynamic` groups of equal rewards stay in it."""

    def start(count: int) -> int:
        return rollouts.start(stream.take(count) if stream else None, sampling, version)

    if dynamic is None:
        batch = start(num_prompts)
        gathered = rollouts.gather(batch)
        return Sampled(rollouts.settle(batch, gathered.groups, gathered.owners), num_prompts, gathered.totals)
    groups: dict[int, Batch] = {}  # this rank's, by position in the interval
    owners: list[int] = []  # of all groups
    informative: list[int] = []  # positions, of all ranks
    totals: list[Totals] = []
    for _ in range(dynamic.max_rounds):
        first, count = len(owners), next_count(num_prompts, len(owners), len(informative))
        batch = start(count)
        gathered = rollouts.gather(batch)
        flags = torch.zeros(count, dtype=torch.int64)
        for position, group in gathered.groups.items():
            learnt = group.select(group.trained_sequences(dynamic.mask_truncated))
            flags[position] = is_informative(learnt.rewards, learnt.group_ids).any()
        dist.all_reduce(flags, group=pg)
        groups |= {first + position: group for position, group in gathered.groups.items()}
        owners += gathered.owners
        totals.append(gathered.totals)
        informative += [first + position for position in flags.nonzero().flatten().tolist()]
        if len(informative) >= num_prompts:
            break
    is_leader = float(stream is not None)
    measures.sum("rollout/sampled_prompts", is_leader * len(owners))
    measures.sum("rollout/informative_prompts", is_leader * len(informative))
    kept = informative[:num_prompts] or list(range(min(num_prompts, len(owners))))
    renumbered = {
        place: groups[position].replace(group_ids=torch.full_like(groups[position].group_ids, place))
        for place, position in enumerate(kept)
        if position in groups
    }
    settled = rollouts.settle(batch, renumbered, [owners[position] for position in kept])
    return Sampled(settled, len(kept), add(totals))


def next_count(wanted: int, sampled: int, found: int) -> int:
    """How many prompts to draw next: as many as fill the batch if the share of informative ones stays what it was, and
    at most a batch at a time."""
    if not sampled:
        return wanted
    missing = wanted - found
    return min(wanted, -(-missing * sampled // max(found, 1)))
