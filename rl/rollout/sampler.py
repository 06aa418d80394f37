"""Run the rounds of the schedule on every actor, and return the batches that it cuts from them.

With rollout.ahead, `sample` returns while the next round is in flight. `end_round` waits for it after the update.

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
from rl.rewards.totals import PROBLEMS, total
from rl.rollout.collect import Gathered, Rollouts
from rl.rollout.dispatch import Sampling
from rl.rollout.held import HeldGroups
from rl.rollout.sample_exchange import SampleExchange
from rl.rollout.schedule import Round, Schedule
from rl.watch.heart import HEART

PROBLEM_METRICS = frozenset(f"environment/{name}" for name in PROBLEMS)
MAX_BINS = 32  # of the histogram of lengths
CARRIED, FINISHED, INFORMATIVE, MISSING = range(4)  # what a round has made of a group


class Sampled(NamedTuple):
    """What an update trains on."""

    batch: Batch  # this actor's share
    groups: list[int]  # of all actors, as numbers of the schedule


class InFlight(NamedTuple):
    """A round that the engines sample now."""

    round: Round
    batch: int  # its number in `Rollouts`


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
        self._in_flight: InFlight | None = None
        self.exchange: SampleExchange | None = None  # set it before the first batch to show samples
        self._scored: set[str] = set()  # names of scores so far, including parts; equal on all actors

    @property
    def max_lag(self) -> int:
        """The largest lag that a token can have when it is trained on."""
        return self._schedule.state.max_lag

    def sample(self, version: int, measures: Measures) -> Sampled:
        """Return the next batch. Sample rounds from this version of the weights until the schedule has one. A round
        that the schedule allows to run during the update is then in flight."""
        state, held, numbers = self._schedule.state, self._held, self.sample_rounds(version)
        for name in self._counted:
            self._count(measures, name, held.counts[name])
        if num_read := held.counts["read tokens"]:
            num_cached = held.counts["cached tokens"] if self.stream is not None else 0
            measures.mean("rollout/prefix_hit_rate", num_cached, num_read if self.stream is not None else 0)
        held.counts.clear()
        batch = self._settle(numbers)
        if state.max_lag:
            batch = self._with_lags(batch, version, measures)
            self._count(measures, "rollout/carried", len(state.carried))
            self._count(measures, "rollout/queue", len(state.queue) + sum(map(len, state.batches)))
        measures.histogram("rollout/lengths", batch.conversation_lengths, length_edges(self.sampling.max_new_tokens))
        kept = {*state.carried, *state.finished}
        self._measure_rewards(kept, measures)
        if self.sampling.num_samples > 1:  # a group of one sample has no other reward to differ from
            self._measure_signal(kept, measures)
        if self.exchange is not None:
            self.exchange.collect(numbers, held, self.stream)
        held.drop_others(kept)
        return Sampled(batch, numbers)

    def sample_rounds(self, version: int) -> list[int]:
        """Sample rounds until the schedule has a batch. Return its groups, as numbers of the schedule."""
        self._begin_round(version)
        while (numbers := self._schedule.take_batch()) is None:
            assert self._in_flight is not None, "the schedule has neither a batch nor a round"
            self.end_round()
            self._begin_round(version)
        return numbers

    def _begin_round(self, version: int) -> None:
        """Hand the next round to the engines, if the schedule allows one now."""
        now = self._schedule.begin_round()
        if now is None:
            return
        prompts = [self.stream.at(number) for number in now.groups] if self.stream is not None else None
        batch = self.rollouts.start(prompts, self.sampling, version, self._held.to_continue(now.carried))
        self._in_flight = InFlight(now, batch)

    def end_round(self) -> None:
        """Wait for the round in flight, if there is one, and take its groups. No rank waits in a collective."""
        if self._in_flight is None:
            return
        (now, batch), self._in_flight = self._in_flight, None
        gathered = self.rollouts.gather(batch)
        self._scored |= gathered.scored
        self._held.add(now.groups, gathered)
        outcomes = dict(zip(now.groups, self._outcomes(gathered), strict=True))
        informative = [number for number, outcome in outcomes.items() if outcome == INFORMATIVE]
        self._held.counts["rollout/sampled_prompts"] += len(now.started)
        self._held.counts["rollout/informative_prompts"] += len(informative)
        finished = [number for number, outcome in outcomes.items() if outcome in (FINISHED, INFORMATIVE)]
        missing = [number for number, outcome in outcomes.items() if outcome == MISSING]
        self._schedule.end_round(now, finished, informative, missing)

    def save(self) -> RolloutState:
        """Return the state after an update, for a checkpoint. No round may be in flight."""
        assert self._in_flight is None, "the round in flight must end before its state is saved"
        state, held = dataclasses.asdict(self._schedule.state), self._held.copy()
        facts = {"position": state["num_started"], "schedule": state, "owners": held.owners, "counts": held.counts}
        if self.stream is not None:
            facts["data"] = self.stream.digest
        return RolloutState(facts, held.to_bytes if held.groups else None)

    @property
    def _counted(self) -> list[str]:
        """The metrics that are counted in each round."""
        names = ["rollout/preemptions"]
        names += ["rollout/kept_kv_tokens"] if self._schedule.plan.carries else []
        is_dynamic = self._algo.dynamic_sampling
        return names + (["rollout/sampled_prompts", "rollout/informative_prompts"] if is_dynamic else [])

    def _outcomes(self, gathered: Gathered) -> list[int]:
        """Return what became of the groups of all actors. Masked responses make no group informative."""
        is_dynamic = self._algo.dynamic_sampling
        counts = [gathered.num_preemptions, gathered.num_kept_tokens]
        counts += [gathered.num_read_tokens, gathered.num_cached_tokens]
        outcomes = torch.zeros(len(gathered.owners) + len(counts), dtype=torch.int64)
        for position, group in gathered.groups.items():
            if group.ended is not None:
                continue
            trained = group.select(group.trained_sequences(self._algo.mask_truncated)) if is_dynamic else group
            is_kept = not is_dynamic or is_informative(trained.rewards, trained.group_ids).any()
            outcomes[position] = INFORMATIVE if is_kept else FINISHED
        outcomes[list(gathered.missing)] = MISSING
        outcomes[len(gathered.owners) :] = torch.tensor(counts)
        with HEART.in_collective("actor"):
            dist.all_reduce(outcomes, group=self.pg)  # only the owner of a group adds something
        *found, num_preemptions, num_kept_tokens, num_read_tokens, num_cached_tokens = outcomes.tolist()
        self._held.counts["rollout/preemptions"] += num_preemptions
        self._held.counts["rollout/kept_kv_tokens"] += num_kept_tokens
        self._held.counts["read tokens"] += num_read_tokens
        self._held.counts["cached tokens"] += num_cached_tokens
        return found

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
        with HEART.in_collective("actor"):
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
        for name in sorted(self._scored - set(measures.names)):  # parts, whose names only functions know; conversations
            if name in PROBLEM_METRICS:
                measures.sum(name, totals.get(name, (0.0, 0.0))[0])
            else:
                measures.mean_if_any(name, *totals.get(name, (0.0, 0.0)))

    def _measure_signal(self, kept: set[int], measures: Measures) -> None:
        """Add the share of groups whose rewards are all equal, over the groups that are now trained on or dropped.
        Masked responses do not count."""
        groups = [group for number, group in sorted(self._held.groups.items()) if number not in kept]
        sizes = torch.tensor([group.num_sequences for group in groups], dtype=torch.int64)
        group_ids = torch.repeat_interleave(torch.arange(len(groups)), sizes)
        rewards = torch.cat([torch.empty(0), *(group.rewards for group in groups)])
        if self._algo.mask_truncated:
            is_trained = ~torch.cat([torch.empty(0, dtype=torch.bool), *(group.truncated for group in groups)])
            rewards, group_ids = rewards[is_trained], group_ids[is_trained]
        num_informative = group_ids[is_informative(rewards, group_ids)].unique().numel()
        measures.mean("reward/no_signal", len(groups) - num_informative, len(groups))

    def _count(self, measures: Measures, name: str, count: int) -> None:
        """Add a number that every actor knows."""
        measures.sum(name, count if self.stream is not None else 0)


def length_edges(max_new_tokens: int) -> list[int]:
    """Return the edges of the bins in which lengths of responses are counted: whole numbers from 0 to the maximum."""
    num_bins = min(MAX_BINS, max_new_tokens)
    return [place * max_new_tokens // num_bins for place in range(num_bins + 1)]
