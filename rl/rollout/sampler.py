"""Sample the batches that the schedule asks for, on every actor.

With dynamic sampling, a group whose rewards are all equal is not trained on, because it has no advantages (DAPO,
arXiv 2503.14476). The schedule then asks for further prompts until enough groups are informative.
"""

from dataclasses import dataclass, field
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
from rl.rollout.schedule import Schedule, SchedulePlan


class Sampled(NamedTuple):
    batch: Batch  # this actor's share
    num_prompts: int  # of the whole batch
    totals: Totals  # over everything that was sampled, by all actors


@dataclass
class HeldGroups:
    """Sampled groups that no update has trained on yet, by their numbers in the schedule."""

    owners: dict[int, int] = field(default_factory=dict)  # of the groups of all actors; indices into the actors
    groups: dict[int, Batch] = field(default_factory=dict)  # of this actor

    def keep(self, numbers: set[int]) -> None:
        self.owners = {number: owner for number, owner in self.owners.items() if number in numbers}
        self.groups = {number: group for number, group in self.groups.items() if number in numbers}


class Sampler:
    """Draw batches from the prompt stream. Runs on every actor; only the leader has the stream."""

    def __init__(
        self,
        rollouts: Rollouts,
        stream: PromptStream | None,
        pg: dist.ProcessGroup,  # of the actors
        plan: SchedulePlan,
        sampling: Sampling,
        algo: AlgoConfig,  # without dynamic_sampling, groups with equal rewards stay in the batch
    ):
        self.rollouts, self.stream, self.pg = rollouts, stream, pg
        self._schedule, self.sampling, self._algo = Schedule(plan), sampling, algo
        self._held = HeldGroups()

    def sample(self, version: int, measures: Measures) -> Sampled:
        """Return the next batch. Sample rounds from this version of the weights until the schedule has one."""
        totals: list[Totals] = []
        num_sampled = num_informative = 0
        while (numbers := self._schedule.take_batch()) is None:
            now = self._schedule.begin_round()
            prompts = self.stream.take(len(now.started)) if self.stream is not None else None
            gathered = self.rollouts.gather(self.rollouts.start(prompts, self.sampling, version))
            totals.append(gathered.totals)
            for position, owner in enumerate(gathered.owners):
                self._held.owners[now.started[position]] = owner
            for position, group in gathered.groups.items():
                self._held.groups[now.started[position]] = group
            informative = {now.started[position] for position in self._informative(gathered)}
            self._schedule.end_round(now, now.started, informative)
            num_sampled, num_informative = num_sampled + len(now.started), num_informative + len(informative)
        if self._algo.dynamic_sampling:
            is_leader = float(self.stream is not None)
            measures.sum("rollout/sampled_prompts", is_leader * num_sampled)
            measures.sum("rollout/informative_prompts", is_leader * num_informative)
        batch = self._settle(numbers)
        self._held.keep({*self._schedule.state.queue})
        return Sampled(batch, len(numbers), add(totals))

    def _settle(self, numbers: list[int]) -> Batch:
        """Number the groups by their places in the batch, and balance them between the actors."""
        groups = self._held.groups
        renumbered = {
            place: groups[number].replace(group_ids=torch.full_like(groups[number].group_ids, place))
            for place, number in enumerate(numbers)
            if number in groups
        }
        return self.rollouts.settle(renumbered, [self._held.owners[number] for number in numbers])

    def _informative(self, gathered: Gathered) -> list[int]:
        """Return the positions of the groups to train on, of all ranks. Masked responses make no group informative."""
        if not self._algo.dynamic_sampling:
            return list(range(len(gathered.owners)))
        flags = torch.zeros(len(gathered.owners), dtype=torch.int64)
        for position, group in gathered.groups.items():
            trained = group.select(group.trained_sequences(self._algo.mask_truncated))
            flags[position] = is_informative(trained.rewards, trained.group_ids).any()
        dist.all_reduce(flags, group=self.pg)
        return flags.nonzero().flatten().tolist()
