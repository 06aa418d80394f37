"""Measure what reporting costs the leader: metrics, TensorBoard, console, accounting, health rules and Prometheus.

    python benchmarks/reporting.py [--ranks 32 1000] [--steps 300] [--metrics 150] [--responses 256]

The Reporter of a run gets the rows of a run with so many ranks, half of them engines. Nothing else works meanwhile, and
the world around it is a stand-in. Samples are written every 10 steps, and a scrape of the endpoint follows every step.
Prints one JSON line. By number of ranks:
    wall_ms       time per step that the loop waits, the median
    loop_cpu_ms   time of the processor per step in the thread of the loop, the mean; other work changes it less
    cpu_ms        the same in all threads of the leader, with the scrapes
    io_cpu_ms     time of the processor per step to add up the ledgers and measurements of all ranks; the I/O thread of
                  a run does so, after it has read them from its sockets
    share         loop_cpu_ms as a share of a step of 1 s
    metrics       metrics in a row
    megabytes     size of each file after 10,000 steps, from its growth in the measured steps
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.random_batch import random_batch
from rl.config.load import load_config
from rl.config.schema import Config
from rl.model.tokenizer import load_tokenizer
from rl.placement.nodes import Nodes
from rl.report.health import Health
from rl.report.histogram import Histogram
from rl.report.metrics_writer import MetricsWriter
from rl.report.prometheus import PrometheusEndpoint
from rl.report.samples import ReportedSample, shows_samples
from rl.rollout.dispatch import BatchTime
from rl.rollout.use import EngineUse
from rl.run.reporter import Reporter
from rl.run.reporting import HealthWatch
from rl.watch.usage import ResourceUse
from rl.world.accounts import Accounts, LedgerOfStep
from rl.world.messages import Letter

NUM_STEPS = 10_000  # for which the size of files is given
RANKS_PER_NODE = 8
STAGES = ("handover", "rollout", "logprobs", "advantages", "update", "sync", "checkpoint")
ENGINE_SECONDS = {"busy/rollout": 0.5, "wait/actor": 0.4, "wait/sync": 0.1}
ACTOR_SECONDS = {"busy/update": 0.3, "busy/logprobs": 0.1, "wait/rollout": 0.5, "wait/sync": 0.1}
COSTS = {"decode": [100.0, 6400.0, 409_600.0, 0.5, 32.0], "prefill": [4.0, 256.0, 0.1, 4096.0]}
VALUES = {
    **{"reward/mean": 0.4, "reward/std": 0.49, "reward/no_signal": 0.3, "reward/timeouts": 0.0, "reward/errors": 0.0},
    **{"rollout/tokens": 1e6, "rollout/length_mean": 512.0, "rollout/truncated": 0.1, "rollout/lag_mean": 0.5},
    **{"loss/policy": 0.01, "policy/entropy": 0.5, "policy/mismatch_kl": 1e-3, "policy/tokens": 1e6},
    **{"optim/grad_norm": 0.8, "optim/skipped_steps": 0.0, "optim/lr": 1e-6},
}


class StandInWorld:
    """What the Reporter asks of the world, with ledgers and measurements of `num_ranks` ranks in every step."""

    def __init__(self, num_ranks: int):
        self.rank, self.step, self.id, self.device = 0, 0, "benchmark", torch.device("cpu")
        self.nodes = Nodes.from_local_ranks([rank % RANKS_PER_NODE for rank in range(num_ranks)])
        seconds = dict.fromkeys((*STAGES, "step"), 0.125) | {"step": 1.0}
        progress: Any = SimpleNamespace(take_seconds=lambda: seconds)
        mail: Any = SimpleNamespace(on=self._listen)
        self.progress, self.accounts = progress, Accounts(mail, progress)
        self.tell_rewards = lambda first, last: None
        self._usage, self._num_ranks, self._chance = ResourceUse(), num_ranks, random.Random(0)

    def _listen(self, kind: type[LedgerOfStep], handler: Callable[[Letter[LedgerOfStep]], None]) -> None:
        self._receive = handler

    def send_measurements(self, version: int) -> Callable[[], None]:
        """Make up what all ranks and watchdogs send in a step. Return a function that receives it."""
        letters = [Letter(rank, self._make_ledger(rank, version)) for rank in range(self._num_ranks)]
        rows = [
            [rank, self._chance.randint(8000, 9000), self._chance.randint(60_000, 70_000), self._chance.randint(90, 99)]
            for rank in range(self._num_ranks)
        ]

        def receive() -> None:
            for letter in letters:
                self._receive(letter)
            self._usage.add(rows)

        return receive

    def _make_ledger(self, rank: int, version: int) -> LedgerOfStep:
        is_engine = rank < self._num_ranks // 2
        role, usual = ("rollout", ENGINE_SECONDS) if is_engine else ("actor", ACTOR_SECONDS)
        seconds = {name: value * self._chance.uniform(0.9, 1.1) for name, value in usual.items()}
        return LedgerOfStep(version, role, seconds, COSTS if is_engine else {})

    def take_usage(self) -> dict[str, float]:
        return self._usage.take(self.nodes.numbers)


def build_reporter(
    config: Config, folder: Path, writer: MetricsWriter, num_ranks: int
) -> tuple[Reporter, StandInWorld]:
    world: Any = StandInWorld(num_ranks)
    uses = {rank: EngineUse(30_000 + rank, 0.5, 0.2, 0.6, 1 << 30) for rank in range(num_ranks // 2)}
    rollouts: Any = SimpleNamespace(take_times=lambda: [BatchTime(0.5, 0, 0.01)], take_uses=lambda: uses)
    health = HealthWatch(Health(config, max_lag=2), writer, lambda finding: None)
    tokenizer = load_tokenizer(Path(config.model.path))
    reporter = Reporter(world, config, folder, tokenizer, rollouts, writer, range(num_ranks // 2, num_ranks), health)
    return reporter, world


def measure(num_ranks: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Report steps of a run with so many ranks, and return the figures."""
    config = load_config()
    endpoint = PrometheusEndpoint("127.0.0.1", 0)
    writer = MetricsWriter(folder, NUM_STEPS, endpoint=endpoint)
    reporter, world = build_reporter(config, folder, writer, num_ranks)
    lengths = torch.full((args.responses,), 16 + 512)
    batch = random_batch(lengths, torch.full_like(lengths, 16), vocab=20)
    exchange: Any = SimpleNamespace(samples=[])
    reporter.exchange = exchange
    samples = [ReportedSample(batch.select([0]), "12", {"status": "ok", "parts": {"exact_match": 1.0}}, [0.0, 1.0])] * 4
    histograms = {"rollout/lengths": Histogram(list(range(33)), [8] * 32)}
    others = {f"reward/part_{number}": number / 7 for number in range(args.metrics - len(VALUES))}
    waits_s, loop_s, cpu_s, io_s = [], 0.0, 0.0, 0.0
    sizes: dict[str, int] = {}
    num_warm = max(20, args.steps // 10)  # also covers the first samples
    for step in range(1, num_warm + args.steps + 1):
        world.step, receive = step, world.send_measurements(step + 1)
        io_before = time.thread_time()
        receive()
        received_s = time.thread_time() - io_before
        exchange.samples = samples if shows_samples(config.metrics, step) else []
        values = {name: value * (1 + step / 1e6) for name, value in (VALUES | others).items()}
        started, loop_before, cpu_before = time.perf_counter(), time.thread_time(), time.process_time()
        reporter.report(step, step + 1, values, batch, histograms)
        waited_s, used_s = time.perf_counter() - started, time.thread_time() - loop_before
        scrape(endpoint)
        if step == num_warm:
            time.sleep(6.0)  # until TensorBoard's thread has flushed
            sizes = file_sizes(folder)
        elif step > num_warm:
            waits_s.append(waited_s)
            loop_s, cpu_s, io_s = loop_s + used_s, cpu_s + time.process_time() - cpu_before, io_s + received_s
    writer.close_files()
    grown = {name: size - sizes.get(name, 0) for name, size in file_sizes(folder).items()}
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return {
        "wall_ms": round(1000 * statistics.median(waits_s), 3),
        "loop_cpu_ms": round(1000 * loop_s / args.steps, 3),
        "cpu_ms": round(1000 * cpu_s / args.steps, 3),
        "io_cpu_ms": round(1000 * io_s / args.steps, 3),
        "share": round(loop_s / args.steps, 5),
        "metrics": sum(isinstance(value, float) for value in row.values()),
        "megabytes": {name: round(size / args.steps * NUM_STEPS / 1e6, 1) for name, size in sorted(grown.items())},
    }


def scrape(endpoint: PrometheusEndpoint) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=30) as answer:
        assert b"reward_mean" in answer.read()


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of a run's files by name. TensorBoard's files are one."""
    sizes = defaultdict[str, int](int)
    for path in folder.rglob("*"):
        if path.is_file():
            sizes[re.sub(r"^events\.out\..*", "tensorboard", path.name)] += path.stat().st_size
    return dict(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 1000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--metrics", type=int, default=150, help="metrics of a row besides those of ranks and nodes")
    parser.add_argument("--responses", type=int, default=256)
    args = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        for num_ranks in args.ranks:
            figures[str(num_ranks)] = measure(num_ranks, args, Path(folder) / str(num_ranks))
    names = ("wall_ms", "loop_cpu_ms", "cpu_ms", "io_cpu_ms", "share", "metrics", "megabytes")
    line: dict[str, Any] = {"benchmark": "reporting", "steps": args.steps}
    line |= {name: {ranks: figure[name] for ranks, figure in figures.items()} for name in names}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
