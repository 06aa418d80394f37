"""Sample the batches that the schedule asks for, on every actor.

With dynamic sampling, a group whose rewards are all equal is not trained on, because it has no advantages (DAPO,
arXiv 2503.14476). The schedule then asks for further prompts until enough groups are informative.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl.algo.advantages import is_informative
from rl.config.schema import AlgoConfig
from rl.data.batch import Batch
from rl.data.prompts import PromptStream
from rl.data.rollout_state import RolloutState
from rl.report.metrics import Measures
from rl.rewards.totals import total
from rl.rollout.collect import Gathered, Rollouts
from rl.rollout.dispatch import Sampling
from rl.rollout.held import HeldGroups
from rl.rollout.schedule import Round, Schedule

CARRIED, FINISHED, INFORMATIVE = range(3)  # what a round has made of a group


class Sampled(NamedTuple):
    batch: Batch  # this actor's share
    groups: list[int]  # of the whole batch, as numbers of the schedule


class Sampler:
    """Draw batches from the prompt stream. Runs on every actor; only the leader has the stream."""

    def __init__(
        self,
        rollouts: Rollouts,
        stream: PromptStream | None,
        pg: dist.ProcessGroup,  # of the actors
        schedule: Schedule,
        sampling: Sampling,
        algo: AlgoConfig,  # without dynamic_sampling, groups with equal rewards stay in the batch
        rewards: Sequence[str],  # names of the reward functions
        held: HeldGroups | None = None,  # of a resumed run
    ):
        self.rollouts, self.stream, self.pg = rollouts, stream, pg
        self._schedule, self.sampling, self._algo, self._rewards = schedule, sampling, algo, rewards
        self._held = held if held is not None else HeldGroups()

    def sample(self, version: int, measures: Measures) -> Sampled:
        """Return the next batch. Sample rounds from this version of the weights until the schedule has one."""
        schedule, state, held = self._schedule, self._schedule.state, self._held
        measures.sum("rollout/preemptions", 0.0)  # also in a step without a round
        if schedule.plan.carries:
            measures.sum("rollout/kept_kv_tokens", 0.0)
        num_sampled = num_informative = 0
        while (numbers := schedule.take_batch()) is None:
            now = schedule.begin_round()
            made = self._run(now, version, measures)
            informative = [number for number, outcome in made.items() if outcome == INFORMATIVE]
            schedule.end_round(now, [n for n, outcome in made.items() if outcome != CARRIED], informative)
            num_sampled, num_informative = num_sampled + len(now.started), num_informative + len(informative)
        if self._algo.dynamic_sampling:
            self._count(measures, "rollout/sampled_prompts", num_sampled)
            self._count(measures, "rollout/informative_prompts", num_informative)
        batch = self._settle(numbers)
        if state.max_lag:
            batch = self._with_lags(batch, version, measures)
            self._count(measures, "rollout/carried", len(state.carried))
            self._count(measures, "rollout/queue", len(state.queue))
        kept = {*state.carried, *state.queue, *state.spare}
        self._measure_rewards(kept, measures)
        held.drop_others(kept)
        return Sampled(batch, numbers)

    def save(self) -> RolloutState:
        """Return the state after an update, for a checkpoint."""
        state, held = dataclasses.asdict(self._schedule.state), self._held.copy()
        facts = {"position": state["num_started"], "schedule": state, "owners": held.owners}
        if self.stream is not None:
            facts["data"] = self.stream.digest
        return RolloutState(facts, held.to_bytes if held.groups else None)

    def _run(self, now: Round, version: int, measures: Measures) -> dict[int, int]:
        """Run a round. Return what it has made of each group."""
        numbers = [*now.carried, *now.started]
        prompts = [self.stream.at(number) for number in numbers] if self.stream is not None else None
        carried = self._held.to_continue(now.carried)
        gathered = self.rollouts.gather(self.rollouts.start(prompts, self.sampling, version, carried))
        self._held.add(numbers, gathered)
        measures.sum("rollout/preemptions", gathered.num_preemptions)
        if self._schedule.plan.carries:
            measures.sum("rollout/kept_kv_tokens", gathered.num_kept_tokens)
        return dict(zip(numbers, self._outcomes(gathered), strict=True))

    def _outcomes(self, gathered: Gathered) -> list[int]:
        """Return what became of the groups of all actors. Masked responses make no group informative."""
        is_dynamic, plan = self._algo.dynamic_sampling, self._schedule.plan
        if not is_dynamic and not plan.carries:
            return [INFORMATIVE] * len(gathered.owners)
        outcomes = torch.zeros(len(gathered.owners), dtype=torch.int64)
        for position, group in gathered.groups.items():
            if group.ended is not None:
                continue
            trained = group.select(group.trained_sequences(self._algo.mask_truncated))
            is_kept = not is_dynamic or is_informative(trained.rewards, trained.group_ids).any()
            outcomes[position] = INFORMATIVE if is_kept else FINISHED
        dist.all_reduce(outcomes, group=self.pg)  # only the owner of a group adds something
        return outcomes.tolist()

    def _settle(self, numbers: list[int]) -> Batch:
        """Number the groups by their places in the batch, and balance them between the actors."""
        groups = self._held.groups
        renumbered = {
            place: groups[number].replace(group_ids=torch.full_like(groups[number].group_ids, place))
            for place, number in enumerate(numbers)
            if number in groups
        }
        return self.rollouts.settle(renumbered, [self._held.owners[number] for number in numbers])

    def _with_lags(self, batch: Batch, version: int, measures: Measures) -> Batch:
        """Add the lag of each token. Raise if the schedule's bound does not hold."""
        lags = torch.where(batch.loss_mask, version - batch.versions, 0).int()
        most = torch.tensor([int(lags.max()), -int(lags.min())] if lags.numel() else [0, 0])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.pg)
        largest, bound = int(most[0]), self._schedule.state.max_lag
        if largest > bound or most[1] > 0:
            raise RuntimeError(
                f"tokens of this batch were sampled {largest} updates ago, but the schedule allows at most {bound}; "
                "this is a bug in the order of rounds and updates"
            )
        self._count(measures, "rollout/lag_max", largest)
        return batch.replace(lags=lags)

    def _measure_rewards(self, kept: set[int], measures: Measures) -> None:
        """Add the scores of the groups that are now trained on or dropped. So every group counts once."""
        left = [results for number, results in sorted(self._held.results.items()) if number not in kept]
        totals = total(result for results in left for result in results if result is not None)
        for name in self._rewards:
            measures.mean(f"reward/{name}", *totals.get(f"reward/{name}", (0.0, 0.0)))
        for name in ("reward/timeouts", "reward/errors"):
            measures.sum(name, totals[name][0])

    def _count(self, measures: Measures, name: str, count: int) -> None:
        """Add a number that every actor knows."""
        measures.sum(name, count if self.stream is not None else 0)
