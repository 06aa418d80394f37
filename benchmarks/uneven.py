"""Measure what one slow engine of several costs a round, on engines of modelled time. Prints one JSON line.

    python benchmarks/uneven.py [--engines 4] [--speed 0.5] [--waves 4] [--mean 32] [--rounds 6] [--step-ms 20]

It starts its own torchrun, unless torchrun has started it. Rank 0 leads, and each of the other ranks has an engine.
World, mailbox, dispatcher, rollout service and speeds are real. Engines only sleep, so that the ranks can share few
cores. Lengths are lognormal (sigma 1) and cut at --mean x 4. A round has --waves times as many groups of 8 responses as
all engines sample at once, 8 groups each. All ways run in one world, with the same prompts and lengths:
    ideal                 all engines have the same speed, and together that of the next two ways
    even shares           the last engine has --speed, the others have speed 1. The dispatcher takes all engines for
                          equally fast: an engine holds at most an even share of the round at a time
    auto                  the same engines. Shares follow from measured speeds (placement.rank_weights=auto)

The figures, by way:
    round_s               mean seconds of a round, which is the time/rollout of a step. A step also has an update, which
                          takes the same time in all ways, and would make the ratios look better
    ratio                 that time compared with `ideal`
    groups                share of the groups that the last engine has sampled
    slowest               rank, speed and cost of the slowest engine in the last round, as in perf/slowest_engine*

The time of a decode step is a fixed part and a part in proportion to the number of sequences. With all sequences of an
engine it takes --step-ms, of which 3.4 / 6.06 are in proportion to the sequences: in a real step (RESULTS.md, "A whole
step", 91226c4), attention over the KV cache took 3.4 s of 6.06 s of rollout with 512 sequences. A prompt takes no time.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.modelled import NUM_SAMPLES, Clock, Costs, InstantRewards, NoTokenizer, SleepingEngine
from benchmarks.program import run_torchrun
from rl.data.prompts import Prompt
from rl.placement.groups import make_groups
from rl.placement.roles import plan
from rl.rollout.balance import Balancer
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import Dispatcher, Sampling
from rl.rollout.recovery import EngineHost
from rl.rollout.service import RolloutService
from rl.rollout.speeds import EngineSpeeds
from rl.world.bootstrap import enable_garbage_collection
from rl.world.messages import Letter, Message
from rl.world.service import EndRun, EndService, Service, serve
from rl.world.world import World, join

NUM_GROUPS = 8  # that an engine samples at once
MAX_OVER_MEAN = 4
NUM_WARM_UP = 3  # rounds of each way, in which the speeds are found
SEQUENCE_PART = 3.4 / 6.06  # of a decode step with all sequences
HIDDEN_SIZE, TIMEOUT_S = 2048, 60


class EqualSpeeds(EngineSpeeds):
    """Take all engines for equally fast."""

    def measure(self) -> dict[int, float]:
        return dict.fromkeys(super().measure(), 1.0)


class MeasuredRollouts(Rollouts):
    """Show who has sampled what, and replace the measured speeds."""

    @property
    def dispatcher(self) -> Dispatcher:
        assert isinstance(self._dispatcher, Dispatcher)
        return self._dispatcher


@dataclass(frozen=True)
class Begin(Message):
    """Tell an engine's rank the speed of the next way."""

    speed: float


class BeginService(Service):
    """Change the speed of an engine."""

    kinds = (Begin,)

    def __init__(self, engine: SleepingEngine):
        self._engine, self._costs = engine, engine.costs

    def handle(self, letter: Letter[Begin]) -> None:
        self._engine.costs = self._costs.at_speed(letter.message.speed)


def serve_engine(world: World, args: argparse.Namespace, leader: int) -> None:
    """Sample on an engine until the leader ends the run."""
    step_s, slots = args.step_ms / 1000, NUM_GROUPS * NUM_SAMPLES
    costs = Costs((1 - SEQUENCE_PART) * step_s, 0.0, 0.0, 0.0, SEQUENCE_PART * step_s / slots)
    engine = SleepingEngine(Clock(), costs, args.mean, prompt=1, max_num_seqs=slots)
    engine.confirm(1)
    host = EngineHost(world, (world.rank,), engine, lambda failed: failed)
    service = RolloutService(world, host, InstantRewards(world), NoTokenizer(), NUM_GROUPS, 0, leader)
    end = EndService()
    serve(world, [service, BeginService(engine), end], until=lambda: end.ended)


class Leader:
    """Rank 0, which times the rounds."""

    def __init__(self, world: World, args: argparse.Namespace, rollouts: MeasuredRollouts):
        self._mail, self._args, self._rollouts = world.mail, args, rollouts
        self.engines = list(range(1, world.size))

    def run(self, speeds: list[float], measured: EngineSpeeds) -> dict[str, Any]:
        """Run the rounds of a way, and return its figures."""
        self._rollouts.dispatcher.measured = measured
        for rank, speed in zip(self.engines, speeds, strict=True):
            self._mail.send(rank, Begin(speed))
        sampling = Sampling(NUM_SAMPLES, 1.0, MAX_OVER_MEAN * self._args.mean)
        size, rounds, groups = self._args.waves * NUM_GROUPS * len(speeds), list[float](), 0
        for number in range(NUM_WARM_UP + self._args.rounds):
            prompts = [Prompt(number * size + index, 0, "", "", [1]) for index in range(size)]
            started = time.perf_counter()
            self._rollouts.gather(self._rollouts.start(prompts, sampling, version=1))
            if number >= NUM_WARM_UP:
                rounds.append(time.perf_counter() - started)
                groups += self._rollouts.dispatcher.num_taken[self.engines[-1]]
        last = self._rollouts.take_times()[-1]
        slowest = {"engine": last.slowest, "speed": round(last.speed, 3), "cost_s": round(last.cost_s, 3)}
        return {
            "round_s": round(statistics.fmean(rounds), 3),
            "groups": round(groups / (size * len(rounds)), 4),
            "slowest": slowest,
        }

    def end(self) -> None:
        for rank in self.engines:
            self._mail.send(rank, EndRun())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--speed", type=float, default=0.5, help="of the last engine; the others have speed 1")
    parser.add_argument("--waves", type=int, default=4, help="groups of a round over those sampled at once")
    parser.add_argument("--mean", type=int, default=32, help="mean length of a response, in tokens")
    parser.add_argument("--rounds", type=int, default=6, help=f"measured after {NUM_WARM_UP} warm-up rounds")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a decode step with all sequences")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        run_torchrun(1 + args.engines, str(Path(__file__).resolve()), *sys.argv[1:])
        return
    with join() as world:
        placement = plan({"actor": "1 rank", "rollout": "rest"}, 1, world.size)
        world.progress.set_roles(",".join(placement.roles[world.rank]))
        world.connect(share_gpu=False, timeout_s=TIMEOUT_S)
        pg = make_groups(placement, world.rank, "cpu", TIMEOUT_S).actor_pg
        enable_garbage_collection()
        if world.rank != placement.leader:
            serve_engine(world, args, placement.leader)
            return
        balancer = Balancer(world.mail, pg, placement.actors, HIDDEN_SIZE)
        rollouts = MeasuredRollouts(world, placement, 1, None, lambda action: None, balancer)
        leader = Leader(world, args, rollouts)
        uneven = [1.0] * (args.engines - 1) + [args.speed]
        ideal = [sum(uneven) / args.engines] * args.engines
        found = {
            "ideal": leader.run(ideal, EngineSpeeds(leader.engines)),
            "even shares": leader.run(uneven, EqualSpeeds(leader.engines)),
            "auto": leader.run(uneven, EngineSpeeds(leader.engines)),
        }
        leader.end()
        row = {"benchmark": "uneven", "engines": args.engines, "speed": args.speed, "waves": args.waves}
        row |= {"mean": args.mean, "rounds": args.rounds}
        row |= {figure: {name: way[figure] for name, way in found.items()} for figure in found["ideal"]}
        best = found["ideal"]["round_s"]
        row["ratio"] = {name: round(way["round_s"] / best, 3) for name, way in found.items()}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
