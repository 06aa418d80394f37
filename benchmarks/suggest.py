"""Start runs badly, ask tools/suggest_placement.py, and run what it suggests, on modelled time. Prints one JSON line.

    python benchmarks/suggest.py [--ranks 6] [--prompts 2] [--mean 24] [--steps 12] [--step-ms 40] [--start NAME]

Every run has its own torchrun. World, mailbox, dispatcher, rollout service, schedule, sampler, balancing, accounting
and metrics are real. Engines, learner and weight sync only sleep, so that the ranks can share few cores. Lengths are
lognormal (sigma 1) and cut at --mean x 4. The bad starts, each with --prompts groups of 8 responses per rank and step:
    rollout-bound         a quarter of the ranks samples, and updates are short
    actor-bound           a quarter of the ranks trains, and updates are long
    long-tail             all ranks sample and train. Few long responses hold up every step
    turns                 half of the ranks samples. Engines and actors wait for each other

The figures of a start:
    bound                 what bounds its last step, as the console shows it
    changes               what the tool suggests
    before_s, after_s     mean seconds of a step, measured (time/step)
    predicted, measured   how many times as fast the suggestion is
    error                 predicted over measured gain, minus 1
    explained             the tool's estimate of the bad start itself, over its measured time
    refused               instead of all this: why the tool suggests nothing

A decode step takes --step-ms with all sequences of an evenly split world. Half of that is in proportion to the
sequences. A token that is read takes a tenth of the time of a trained one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

import torch.distributed as dist

from benchmarks.modelled import (
    NUM_SAMPLES,
    Clock,
    Costs,
    InstantRewards,
    NoTokenizer,
    SleepingEngine,
    SleepingLearner,
)
from benchmarks.program import run_torchrun
from launch.environment import ROOT
from rl.common.files import write_atomically
from rl.config.load import load_config
from rl.config.schema import Config
from rl.data.prompts import Prompt, PromptStream
from rl.placement.groups import make_groups
from rl.placement.roles import plan
from rl.report.describe import describe
from rl.report.metrics import Measures
from rl.report.metrics_writer import MetricsWriter
from rl.report.rows import METRICS, read_metrics
from rl.rollout.balance import Balancer
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import Sampling
from rl.rollout.recovery import EngineHost
from rl.rollout.sampler import Sampler
from rl.rollout.schedule import Schedule, plan_schedule
from rl.rollout.service import RolloutService
from rl.run.reporter import Reporter
from rl.run.suggest import count_warm_up
from rl.watch.heart import HEART
from rl.world.bootstrap import enable_garbage_collection
from rl.world.messages import Letter, Message
from rl.world.service import Service, serve
from rl.world.world import World, join

MAX_OVER_MEAN = 4
HIDDEN_SIZE, TIMEOUT_S = 2048, 60


@dataclass(frozen=True)
class Start:
    """A badly placed run. `update` is the time of an update on half of the ranks, over that of a mean response."""

    placement: Mapping[str, str]
    update: float


def ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def make_starts(num_ranks: int) -> dict[str, Start]:
    few = max(1, num_ranks // 4)
    return {
        "rollout-bound": Start({"rollout": ranks(few), "actor": "rest"}, update=0.5),
        "actor-bound": Start({"rollout": ranks(num_ranks - few), "actor": "rest"}, update=2.0),
        "long-tail": Start({"actor,rollout": "all"}, update=1.0),
        "turns": Start({"rollout": ranks(num_ranks // 2), "actor": "rest"}, update=2.0),
    }


@dataclass(frozen=True)
class TakeVersion(Message):
    """Tell a rank that only samples that its engine has this version now."""

    version: int


@dataclass(frozen=True)
class VersionTaken(Message):
    """Tell the leader that a rank has taken a version. Its ledger was sent before."""

    awaited = "the engines to take a version"


class TakeService(Service):
    """Take new versions on a rank that only samples."""

    name = "sync"
    kinds = (TakeVersion,)

    def __init__(self, run: "ModelledRun"):
        self.num_versions, self._run = 0, run

    def handle(self, letter: Letter[TakeVersion]) -> None:
        self._run.take_version(letter.message.version)
        self.num_versions += 1


class ModelledRun:
    """One rank of a run on modelled time, which writes the files of a run."""

    def __init__(self, world: World, config: Config, costs: Costs, folder: Path):
        self._world, self._config, self._costs, self._folder = world, config, costs, folder
        self._placement = plan(config.placement, 1, world.size)
        world.progress.set_roles(",".join(self._placement.roles[world.rank]))
        world.connect(share_gpu=False, timeout_s=TIMEOUT_S)
        self._pg = make_groups(self._placement, world.rank, "cpu", TIMEOUT_S).actor_pg
        self._clock, self._version = Clock(), 0
        self._service = self._build_service()
        enable_garbage_collection()

    @property
    def _is_leader(self) -> bool:
        return self._world.rank == self._placement.leader

    def _build_service(self) -> RolloutService | None:
        world, rollout, index = self._world, self._config.rollout, self._placement.engine_of(self._world.rank)
        if index is None:
            return None
        mean, prompt = rollout.max_new_tokens // MAX_OVER_MEAN, prompt_tokens(self._config)
        engine = SleepingEngine(self._clock, self._costs, mean, prompt, rollout.max_num_seqs)
        host = EngineHost(world, self._placement.engines[index], engine, lambda failed: failed)
        leader, num_groups = self._placement.leader, rollout.max_num_groups
        return RolloutService(world, host, InstantRewards(world), NoTokenizer(), num_groups, 0, leader)

    def run(self) -> None:
        num_steps = self._config.train.num_steps
        if self._world.rank in self._placement.actors:
            self._train(num_steps)
        else:
            assert self._service is not None
            versions = TakeService(self)
            with self._world.stage("serve"):
                serve(self._world, [self._service, versions], until=lambda: versions.num_versions == num_steps + 1)

    def _train(self, num_steps: int) -> None:
        """Sample and train, in the order of train.py."""
        world, config, rollout = self._world, self._config, self._config.rollout
        balancer = Balancer(world.mail, self._pg, self._placement.actors, HIDDEN_SIZE)
        rollouts = Rollouts(world, self._placement, 1, self._service, lambda action: None, balancer)
        count = (num_steps + 2 * (rollout.max_rounds + rollout.ahead)) * config.train.num_prompts_per_step
        prompts = [Prompt(index, 0, "", "", [1] * prompt_tokens(config)) for index in range(count)]
        stream = PromptStream(prompts, seed=0) if self._is_leader else None
        limit = rollout.max_tokens_per_round
        sampling = Sampling(NUM_SAMPLES, 1.0, rollout.max_new_tokens, max_tokens_per_round=limit)
        schedule = Schedule(plan_schedule(config))
        sampler = Sampler(rollouts, stream, self._pg, schedule, sampling, config.algo, ["none"])
        writer = MetricsWriter(self._folder, num_steps) if self._is_leader else None
        reporter = Reporter(world, config, self._folder, NoTokenizer(), rollouts, writer, self._placement.actors)
        learner = SleepingLearner(self._clock, self._costs, self._pg)
        with world.stage("sync"):
            self._publish()
        for step in range(1, num_steps + 1):
            world.progress.begin_step(step)
            measures = Measures()
            with world.stage("step"):
                with world.stage("rollout"):
                    batch, _ = sampler.sample(self._version, measures)
                with world.stage("update"):
                    learner.train(batch)
                    values = describe(batch).reduce(self._pg) | measures.reduce(self._pg)
                with world.stage("rollout"):
                    sampler.end_round()
                with world.stage("sync"):
                    self._publish()
            reporter.report(step, self._version, values, batch, measures.histograms)
        if writer is not None:
            writer.close("modelled")

    def _publish(self) -> None:
        """Give the next version to all engines. As in a real sync, the leader hears from every rank."""
        with HEART.in_collective("actor"):
            dist.barrier(group=self._pg)
        self.take_version(self._version + 1)
        serving = [rank for rank in range(self._placement.world_size) if rank not in self._placement.actors]
        if self._is_leader:
            for rank in serving:
                self._world.mail.send(rank, TakeVersion(self._version))
            for _ in range(self._placement.world_size):
                self._world.mail.receive(VersionTaken)
        self._clock.spend("sync", self._costs.sync)
        with HEART.in_collective("actor"):
            dist.barrier(group=self._pg)

    def take_version(self, version: int) -> None:
        self._world.accounts.close_window(self._placement.leader, version)
        self._version = version
        if self._service is not None:
            self._service.engine.confirm(version)
        self._world.mail.send(self._placement.leader, VersionTaken())


def prompt_tokens(config: Config) -> int:
    return max(1, config.rollout.max_new_tokens // MAX_OVER_MEAN // 8)


def make_config(args: argparse.Namespace, placement: Mapping[str, str], changes: list[str]) -> Config:
    """Return the settings of a run: those of the start, then those that the tool suggests."""
    num_prompts = args.prompts * args.ranks
    settings = [f"placement.{roles}={ranks}" for roles, ranks in placement.items()]
    if any(change.startswith("placement.") for change in changes):
        settings = []
    settings += [f"train.num_prompts_per_step={num_prompts}"]
    settings += [f"rollout.num_samples_per_prompt={NUM_SAMPLES}", f"rollout.max_new_tokens={MAX_OVER_MEAN * args.mean}"]
    settings += [f"rollout.max_num_seqs={2 * num_prompts * NUM_SAMPLES}", "metrics.samples_interval=0"]
    config = load_config(None, [*settings, *changes])
    return load_config(None, [*settings, *changes, f"train.num_steps={args.steps + count_warm_up(config)}"])


def make_costs(args: argparse.Namespace, start: Start) -> Costs:
    step_s, num_responses = args.step_ms / 1000, args.prompts * NUM_SAMPLES * args.ranks
    per_engine = num_responses / (args.ranks / 2)
    num_tokens = num_responses * (args.mean + max(1, args.mean // 8)) / (args.ranks / 2)  # of one of half of the ranks
    update_token = start.update * args.mean * step_s / num_tokens
    return Costs(step_s / 2, update_token, update_token / 10, step_s, step_s / 2 / per_engine)


def run_rank(text: str) -> None:
    """Run one rank. `text` has what the program's first process has chosen."""
    told = json.loads(text)
    args = argparse.Namespace(**told["args"])
    with join() as world:
        config = make_config(args, told["placement"], told["changes"])
        folder = Path(told["folder"])
        if world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / "run.json", json.dumps({"config": asdict(config)}))
        ModelledRun(world, config, Costs(**told["costs"]), folder).run()


def measure(args: argparse.Namespace, start: Start, changes: list[str], folder: Path) -> float:
    """Run a start with some changes. Return the mean seconds of a step."""
    told = {"args": vars(args), "placement": start.placement, "changes": changes, "folder": str(folder)}
    told["costs"] = asdict(make_costs(args, start))
    run_torchrun(args.ranks, str(Path(__file__).resolve()), "--rank-of", json.dumps(told), quiet=True)
    return fmean(row["time/step"] for row in read_metrics(folder / METRICS)[-args.steps :])


def compare(args: argparse.Namespace, start: Start, folder: Path) -> dict[str, Any]:
    before_s = measure(args, start, [], folder / "before")
    command = [sys.executable, "tools/suggest_placement.py", str(folder / "before"), "--json"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if asked.returncode:
        return {"before_s": round(before_s, 4), "refused": asked.stderr.strip()}
    found = json.loads(asked.stdout)
    row = {"bound": found["bound"], "changes": found["changes"], "before_s": round(before_s, 4)}
    row["explained"] = round(found["modelled_s"] / before_s, 3)
    if not found["changes"]:
        return row
    after_s = measure(args, start, found["changes"], folder / "after")
    row |= {
        "after_s": round(after_s, 4),
        "predicted": round(found["gain"], 3),
        "measured": round(before_s / after_s, 3),
    }
    return row | {"max_lag": found["max_lag"], "error": round(found["gain"] / (before_s / after_s) - 1, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=2, help="groups per rank and step")
    parser.add_argument("--mean", type=int, default=24, help="mean length of a response, in tokens")
    parser.add_argument(
        "--steps", type=int, default=12, help="measured after a warm-up, whose length depends on Q and K"
    )
    parser.add_argument("--step-ms", type=float, default=40.0, help="time of a decode step, evenly split")
    parser.add_argument("--start", choices=[*make_starts(4)], help="run only this one")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args.rank_of)
        return
    del args.rank_of
    names, found = [args.start] if args.start else [*make_starts(args.ranks)], dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            found[name] = compare(args, make_starts(args.ranks)[name], Path(folder) / name)
    row = {
        "benchmark": "suggest",
        "ranks": args.ranks,
        "prompts": args.prompts,
        "mean": args.mean,
        "steps": args.steps,
        "step_ms": args.step_ms,
    }
    print(json.dumps(row | {"starts": found}), flush=True)


if __name__ == "__main__":
    main()
