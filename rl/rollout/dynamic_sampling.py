"""Draw batches from the prompt stream, with or without dynamic sampling.

A group whose rewards are all equal has no advantages. So DAPO (arXiv 2503.14476) drops it, and draws further prompts
until enough groups are informative. The number of prompts depends on rewards alone, never on timing. Of the informative
groups, the first ones in stream order are kept.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl.algo.advantages import is_informative
from rl.config.schema import AlgoConfig
from rl.data.batch import Batch
from rl.data.prompts import PromptStream
from rl.report.metrics import Measures
from rl.rewards.totals import Totals, add
from rl.rollout.collect import Gathered, Rollouts
from rl.rollout.dispatch import Sampling


class Sampled(NamedTuple):
    batch: Batch  # this actor's share
    num_prompts: int  # of the whole batch
    totals: Totals  # over everything that was sampled, by all actors


@dataclass(frozen=True)
class Sampler:
    """Draw batches from the prompt stream. Runs on every actor; only the leader has the stream."""

    rollouts: Rollouts
    stream: PromptStream | None
    pg: dist.ProcessGroup  # of the actors
    num_prompts: int  # per batch
    sampling: Sampling
    algo: AlgoConfig  # without dynamic_sampling, groups with equal rewards stay in the batch

    def sample(self, version: int, measures: Measures) -> Sampled:
        """Sample the next batch from this version of the weights."""
        groups: dict[int, Batch] = {}  # of this rank, by position among all drawn prompts
        owners: list[int] = []  # of all groups
        informative: list[int] = []  # positions, of all ranks
        totals: list[Totals] = []
        for _ in range(self.algo.max_sampling_rounds if self.algo.dynamic_sampling else 1):
            first, count = len(owners), next_count(self.num_prompts, len(owners), len(informative))
            prompts = self.stream.take(count) if self.stream is not None else None
            batch = self.rollouts.start(prompts, self.sampling, version)
            gathered = self.rollouts.gather(batch)
            groups |= {first + position: group for position, group in gathered.groups.items()}
            owners += gathered.owners
            totals.append(gathered.totals)
            informative += [first + position for position in self._informative(gathered)]
            if len(informative) >= self.num_prompts:
                break
        if self.algo.dynamic_sampling:
            is_leader = float(self.stream is not None)
            measures.sum("rollout/sampled_prompts", is_leader * len(owners))
            measures.sum("rollout/informative_prompts", is_leader * len(informative))
        kept = informative[: self.num_prompts] or list(range(min(self.num_prompts, len(owners))))
        renumbered = {
            place: groups[position].replace(group_ids=torch.full_like(groups[position].group_ids, place))
            for place, position in enumerate(kept)
            if position in groups
        }
        settled = self.rollouts.settle(batch, renumbered, [owners[position] for position in kept])
        return Sampled(settled, len(kept), add(totals))

    def _informative(self, gathered: Gathered) -> list[int]:
        """Return the positions of the groups to train on, of all ranks. Masked responses make no group informative."""
        if not self.algo.dynamic_sampling:
            return list(range(len(gathered.owners)))
        flags = torch.zeros(len(gathered.owners), dtype=torch.int64)
        for position, group in gathered.groups.items():
            trained = group.select(group.trained_sequences(self.algo.mask_truncated))
            flags[position] = is_informative(trained.rewards, trained.group_ids).any()
        dist.all_reduce(flags, group=self.pg)
        return flags.nonzero().flatten().tolist()


def next_count(wanted: int, sampled: int, found: int) -> int:
    """Return how many prompts fill the batch, at most `wanted`, if the fraction of informative ones stays the same."""
    return min(wanted, -(-(wanted - found) * sampled // max(found, 1))) if sampled else wanted
