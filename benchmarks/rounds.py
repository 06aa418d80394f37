"""Compare ways to sample and train, on engines of modelled time. Prints one JSON line.

    python benchmarks/rounds.py [--ranks 8] [--actors 0] [--max-rounds 4] [--mean 64] [--max-num-seqs 0]
        [--steps 16] [--step-ms 20]

It starts its own torchrun, unless torchrun has started it. World, mailbox, dispatcher, rollout service, schedule,
sampler and balancing are real. Engines and learner only sleep, so that the ranks can share few cores. Lengths are
lognormal (sigma 1) and cut at --mean x 4. All ways run in one world, one after the other, with the same prompts and
lengths. Each has an entry in `ways`:
    synchronous           sampling and training take turns, and a round samples whole responses
    limit                 rounds have a token limit: that maximum over --max-rounds
With --actors N, the first N ranks only train, and the others only sample. Then there are also:
    overlap               actors train on the first groups of a batch while the others are sampled (actor.overlap)
    ahead                 engines sample the next round while the actors train (rollout.ahead)
    ahead and limit       both

The figures of a way:
    speedup               tokens that were trained on per second, compared with `synchronous`
    idle                  by role: share of the time in which a rank neither samples, trains nor syncs
    overhead              share of the time that is not on the critical path of the modelled times: what messages,
                          schedule, dispatch and packing cost, and what ranks lose because they share cores. With
                          `overlap` and `ahead`, the critical path of a step is the longer one of sampling and
                          training, which cannot always be reached: some training must follow the last response
    schedule              share of the time in which the leader schedules and dispatches: CPU time of its main thread
                          in the sampler, outside `gather` and `settle`, and of all of its other threads
    cpu                   share of the time in which the busiest rank computes anything at all
    decoded               mean number of sequences in a decode step
    lag_mean, lag_max     of the tokens that were trained on; `lag_bound` is the limit of the schedule

The modelled times have the ratios of a real step (RESULTS.md, "A whole step", aafd79c: 512 responses of 512 tokens to
prompts of 63 tokens; rollout 6.17 s, update 5.16 s, handover and sync 0.14 s):
    a decode step         takes --step-ms, however many sequences run (at most --max-num-seqs; by default, 4 times as
                          many as a round starts on an engine)
    an update             takes 5.16 / 6.17 of the time of a response of mean length; with --actors, it takes that time
    handover and sync     take 0.14 / 6.17 of that time, in each update
    prefill               of a token takes a third of its update without --actors. All tokens of a continued response
                          are prefilled
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

import torch
import torch.distributed as dist

from benchmarks.modelled import (
    NUM_PROMPTS_PER_RANK,
    NUM_SAMPLES,
    Clock,
    Costs,
    InstantRewards,
    NoScores,
    NoTokenizer,
    SleepingEngine,
    SleepingLearner,
)
from benchmarks.program import run_torchrun
from rl.config.schema import AlgoConfig, Config
from rl.data.batch import Batch
from rl.data.prompts import Prompt, PromptStream
from rl.learner.overlap import OverlappedUpdate
from rl.placement.groups import make_groups
from rl.placement.roles import plan
from rl.report.metrics import Measures
from rl.rollout.balance import Balancer, Groups
from rl.rollout.collect import Gathered, Rollouts
from rl.rollout.dispatch import Sampling
from rl.rollout.engine import Engine
from rl.rollout.overlap import OverlapService
from rl.rollout.recovery import EngineHost
from rl.rollout.sampler import Sampler
from rl.rollout.schedule import Schedule, SchedulePlan
from rl.rollout.service import RolloutService
from rl.world.bootstrap import enable_garbage_collection
from rl.world.messages import Letter, Message
from rl.world.service import Service, serve
from rl.world.world import World, join

HIDDEN_SIZE = 2048
MAX_OVER_MEAN = 4
SLOTS_PER_RESPONSE = 4  # of an engine, for each response that a round starts on it
TIMEOUT_S = 60


@dataclass(frozen=True)
class Way:
    """How a run samples and trains."""

    limit: int = 0  # tokens per round; 0: none
    ahead: int = 0
    overlaps: bool = False


class TimedRollouts(Rollouts):
    """Measure the CPU time that an actor samples and balances, rather than schedules. Only some ways overlap."""

    elsewhere_s = 0.0

    def use(self, overlap: OverlapService | None) -> None:
        self._overlap = overlap

    def gather(self, batch: int) -> Gathered:
        started = time.thread_time()
        gathered = super().gather(batch)
        self.elsewhere_s += time.thread_time() - started
        return gathered

    def settle(self, groups: Groups, owners: Sequence[int]) -> Batch:
        started = time.thread_time()
        batch = super().settle(groups, owners)
        self.elsewhere_s += time.thread_time() - started
        return batch


@dataclass(frozen=True)
class NewVersion(Message):
    """Tell a rank that only samples that its engine has this version now."""

    version: int


class Marks:
    """What a rank has done by the beginning of each step."""

    columns = (
        "wall",
        "cpu",
        "main thread",
        "schedule",
        "engine",
        "update",
        "sync",
        "decode steps",
        "decoded tokens",
        "trained tokens",
        "lags",
    )

    def __init__(self, clock: Clock):
        self._clock = clock
        self._rows: list[list[float]] = []

    def add(self) -> None:
        spent = self._clock.spent
        now = [time.perf_counter(), time.process_time(), time.thread_time()]
        self._rows.append([*now, *(spent[name] for name in self.columns[3:])])

    def gather(self, pg: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        """Return what the ranks of the group did between the marks, by column as [rank, step]. Start anew."""
        own = torch.tensor(self._rows, dtype=torch.float64).diff(dim=0)
        self._rows = []
        parts = [torch.empty_like(own) for _ in range(pg.size())]
        dist.all_gather(parts, own, group=pg)
        return dict(zip(self.columns, torch.stack(parts).unbind(2)))


class VersionService(Service):
    """Take new versions on a rank that only samples. Each one begins a step."""

    kinds = (NewVersion,)

    def __init__(self, engine: Engine, marks: Marks, count_sync: Callable[[], None]):
        self.num_versions = 0
        self._engine, self._marks, self._count_sync = engine, marks, count_sync

    def handle(self, letter: Letter[NewVersion]) -> None:
        self._engine.confirm(letter.message.version)
        self._count_sync()
        self._marks.add()
        self.num_versions += 1


class Benchmark:
    """One rank of the benchmark."""

    def __init__(self, world: World, args: argparse.Namespace):
        self._world, self._args = world, args
        self._mean, self._prompt, self._longest = args.mean, max(1, args.mean // 8), MAX_OVER_MEAN * args.mean
        self._costs = Costs.like_a_real_step(args.step_ms / 1000, self._mean, self._prompt)
        if args.actors:
            num_responses = NUM_PROMPTS_PER_RANK * NUM_SAMPLES * world.size / args.actors
            num_tokens = num_responses * (self._mean + self._prompt)
            self._costs = self._costs.with_updates_of(self._mean * args.step_ms / 1000, num_tokens)
        roles = {"actor": f"{args.actors} ranks", "rollout": "rest"} if args.actors else {"actor,rollout": "all"}
        self._placement = plan(roles, 1, world.size)
        num_new = NUM_PROMPTS_PER_RANK * NUM_SAMPLES * world.size / len(self._placement.engines)
        self.max_num_seqs = args.max_num_seqs or round(SLOTS_PER_RESPONSE * num_new)
        world.progress.set_roles(",".join(self._placement.roles[world.rank]))
        world.connect(share_gpu=False, timeout_s=TIMEOUT_S)
        self._pg = make_groups(self._placement, world.rank, "cpu", TIMEOUT_S).actor_pg
        self._all = dist.new_group(list(range(world.size)))
        self._clock = Clock()
        self._marks = Marks(self._clock)
        self._version = 0
        self._service = self._build_service()
        self._rollouts: TimedRollouts | None = None
        self._learner = SleepingLearner(self._clock, self._costs, self._pg)
        self._overlap: OverlapService | None = None
        if world.rank in self._placement.actors:
            balancer = Balancer(world.mail, self._pg, self._placement.actors, HIDDEN_SIZE)
            self._overlap = self._build_overlap(balancer) if args.actors else None
            self._rollouts = TimedRollouts(
                world, self._placement, 1, self._service, lambda action: None, balancer, overlap=self._overlap
            )
        enable_garbage_collection()

    def _build_overlap(self, balancer: Balancer) -> OverlapService:
        update = OverlappedUpdate(self._learner, NoScores(), Config(), self._pg)
        num_at_once = self.max_num_seqs // NUM_SAMPLES * len(self._placement.engines)
        return OverlapService(self._world.mail, self._placement.leader, balancer, update, num_at_once)

    def _build_service(self) -> RolloutService | None:
        world, index = self._world, self._placement.engine_of(self._world.rank)
        if index is None:
            return None
        engine = SleepingEngine(self._clock, self._costs, self._mean, self._prompt, self.max_num_seqs)
        host = EngineHost(world, self._placement.engines[index], engine, lambda failed: failed)
        max_num_groups, leader = self.max_num_seqs // NUM_SAMPLES, self._placement.leader
        return RolloutService(world, host, InstantRewards(world), NoTokenizer(), max_num_groups, 0, leader)

    def run(self, way: Way) -> dict[str, Any]:
        """Run all steps, and return the figures."""
        longest, num_prompts, limit = self._longest, NUM_PROMPTS_PER_RANK * self._world.size, way.limit
        plan = SchedulePlan(num_prompts, max_rounds=-(-longest // limit) if limit else 1, ahead=way.ahead)
        num_warm_up = 2 * (plan.max_rounds + plan.ahead)
        num_steps = num_warm_up + self._args.steps
        largest_lags = [0] * num_steps
        if self._rollouts is None:
            self._serve(num_steps)
        else:
            prompts = [Prompt(index, 0, "", "", [1] * self._prompt) for index in range(num_steps * num_prompts)]
            stream = PromptStream(prompts, seed=0) if self._world.rank == self._placement.leader else None
            sampling = Sampling(NUM_SAMPLES, 1.0, longest, max_tokens_per_round=limit)
            sampler = Sampler(self._rollouts, stream, self._pg, Schedule(plan), sampling, AlgoConfig(), ["none"])
            overlap = self._overlap if way.overlaps else None
            self._rollouts.use(overlap)
            self._publish()
            for step in range(num_steps):
                largest_lags[step] = self._step(sampler, overlap.update if overlap is not None else None)
                self._publish()
        columns = {name: column[:, num_warm_up:] for name, column in self._marks.gather(self._all).items()}
        lag_max = torch.tensor(max(largest_lags[num_warm_up:]))
        dist.all_reduce(lag_max, dist.ReduceOp.MAX, group=self._all)
        lags = {"lag_mean": share(columns["lags"], columns["trained tokens"]), "lag_max": int(lag_max)}
        return self._figures(columns, way) | lags | {"lag_bound": plan.max_lag}

    def _serve(self, num_steps: int) -> None:
        """Sample on a rank that only samples."""
        assert self._service is not None
        versions = VersionService(self._service.engine, self._marks, self._count_sync)
        serve(self._world, [self._service, versions], until=lambda: versions.num_versions == num_steps + 1)

    def _count_sync(self) -> None:
        """Count a sync on a rank that only samples, which has waited for it."""
        self._clock.spent["sync"] += self._costs.sync

    @contextmanager
    def _scheduling(self) -> Iterator[None]:
        """Count the CPU time of the schedule."""
        assert self._rollouts is not None
        started, elsewhere_s = time.thread_time(), self._rollouts.elsewhere_s
        yield
        self._clock.spent["schedule"] += time.thread_time() - started - (self._rollouts.elsewhere_s - elsewhere_s)

    def _step(self, sampler: Sampler, overlap: OverlappedUpdate | None) -> int:
        """Sample and train, in the order of train.py. Return the largest lag of this rank's tokens."""
        with self._scheduling():
            batch = sampler.sample(self._version, Measures()).batch
        if overlap is None:
            self._learner.train(batch)
        else:
            overlap.end(overlap.score_rest(batch), Measures())
        self._clock.spent["trained tokens"] += int(batch.loss_mask.sum())
        with self._scheduling():
            sampler.end_round()
        dist.barrier(group=self._pg)
        self._clock.spend("sync", self._costs.sync)
        if batch.lags is None or not batch.num_tokens:
            return 0
        self._clock.spent["lags"] += int(batch.lags.sum())
        return int(batch.lags.max())

    def _publish(self) -> None:
        """Give the next version to all engines, and begin a step."""
        self._version += 1
        if self._service is not None:
            self._service.engine.confirm(self._version)
        dist.barrier(group=self._pg)
        if self._world.rank == self._placement.leader:
            for rank in set(range(self._world.size)) - set(self._placement.actors):
                self._world.mail.send(rank, NewVersion(self._version))
        self._marks.add()

    def _figures(self, columns: dict[str, torch.Tensor], way: Way) -> dict[str, Any]:
        """Return the figures of the measured steps. Each column is [rank, step]."""
        wall, leader = columns["wall"], self._placement.leader
        seconds = float(wall[leader].sum())
        other_threads = columns["cpu"] - columns["main thread"]
        busy = columns["engine"] + columns["update"] + columns["sync"]
        sampling, training, syncing = (columns[name].amax(0) for name in ("engine", "update", "sync"))
        is_parallel = way.ahead > 0 or way.overlaps
        critical = (torch.maximum(sampling, training) if is_parallel else sampling + training) + syncing
        roles = [",".join(roles) for roles in self._placement.roles]
        members = {role: [rank for rank, own in enumerate(roles) if own == role] for role in roles}
        return {
            "steps_per_s": round(wall.shape[1] / seconds, 4),
            "tokens_per_s": round(float(columns["trained tokens"].sum()) / seconds, 1),
            "idle": {role: round(1 - share(busy[ranks], wall[ranks]), 4) for role, ranks in members.items()},
            "overhead": round(1 - float(critical.sum()) / seconds, 4),
            "schedule": share((columns["schedule"] + other_threads)[leader], wall[leader]),
            "cpu": round(float((columns["cpu"].sum(1) / wall.sum(1)).max()), 4),
            "decoded": share(columns["decoded tokens"], columns["decode steps"]),
        }


def share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return round(float(part.sum() / whole.sum()), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--actors", type=int, default=0, help="ranks that only train; 0: every rank trains and samples")
    parser.add_argument("--max-rounds", type=int, default=4, help="rounds that the longest response takes")
    parser.add_argument("--mean", type=int, default=64, help="mean length of a response, in tokens")
    parser.add_argument(
        "--max-num-seqs", type=int, default=0, help="sequences that an engine decodes at once; 0: 4 per new response"
    )
    parser.add_argument("--steps", type=int, default=16, help="measured after two warm-up steps per round")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a decode step")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        run_torchrun(args.ranks, str(Path(__file__).resolve()), *sys.argv[1:])
        return
    with join() as world:
        benchmark = Benchmark(world, args)
        limit = -(-MAX_OVER_MEAN * args.mean // args.max_rounds)
        ways = {"synchronous": Way(), "limit": Way(limit)}
        if args.actors:
            ways |= {"overlap": Way(overlaps=True), "ahead": Way(ahead=1), "ahead and limit": Way(limit, ahead=1)}
        found = {name: benchmark.run(way) for name, way in ways.items()}
        if world.rank == 0:
            row = {"benchmark": "rounds", "ranks": world.size, "actors": args.actors or world.size}
            row |= {"mean": args.mean, "max_new_tokens": MAX_OVER_MEAN * args.mean, "max_tokens_per_round": limit}
            row |= {"max_num_seqs": benchmark.max_num_seqs}
            base = found["synchronous"]["tokens_per_s"]
            speedups = {name: {"speedup": round(way["tokens_per_s"] / base, 3)} for name, way in found.items()}
            print(json.dumps(row | {"ways": {name: speedups[name] | found[name] for name in found}}), flush=True)


if __name__ == "__main__":
    main()
