"""A cluster of four nodes with two ranks each, which trains while something is broken on purpose.

Nodes are network namespaces with run folders of their own. Placement is in shares, and a checkpoint is saved after
every step. A run that ends leaves no process and nothing in /dev/shm.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.cluster import Node, cluster, end
from tests.launcher import MARK

NUM_STEPS = 8
FLOOR_S = 4.0  # silence after which a rank is named
SETTINGS = [
    "placement.rollout=50%",
    "placement.inference=25%",
    "placement.actor=rest",
    "rollout.engine=fake",
    "algo.old_logprobs=always",
    "eval.interval=0",
    "train.num_prompts_per_step=8",
    f"train.num_steps={NUM_STEPS}",
    "checkpoint.save_interval=1",
    f"world.silence_floor_s={FLOOR_S}",
    "run.name=x",
]
BROKEN = "slow engines + varied rewards"
WAIT_S = 120.0
END_S = 10.0  # limit on the end of watchdogs and of what a killed agent leaves
CLOSE = ("loss/policy", "policy/entropy", "optim/grad_norm")
SAME = ("reward/mean", "rollout/tokens", "rollout/length_mean")
BLOCK = re.compile(r"oneworld: rank .*(?:\n  .*)*")  # a report of who failed
Report = tuple[int | None, str]  # the node that reports (None: any), and a pattern of the report


class Cluster:
    """A running cluster."""

    def __init__(
        self,
        nodes: list[Node],
        folder: Path,
        *settings: str,
        nnodes: str = "4",
        nproc: int = 2,
        loop: bool = False,
        broken: str = "",
        culprit: int = 0,
    ):
        """With `loop` every agent runs in an outer loop, as launchers have one."""
        self.nodes, self.folder, self.loop = nodes, folder, loop
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self._num_ranks = len(nodes) * nproc
        self._expected: list[Report] = []
        self._num_checked = [0 for _ in nodes]  # blocks of each node
        self._mark = f"chaos-{os.getpid()}-{time.monotonic_ns()}"
        what = f"{BROKEN} + {broken}" if broken else BROKEN
        torchrun = f"torchrun --nnodes {nnodes} --nproc-per-node {nproc} --rdzv-endpoint head:29500"
        self._command = " ".join([torchrun, f'tests/e2e/broken_train.py "{what}" {culprit}', *SETTINGS, *settings])

    def start(self, node: int) -> None:
        command = f"{self._command} run.dir={self.folder / self.nodes[node].name}"
        if self.loop:
            fatal = self.run_folder(node) / "FATAL"
            command = f"bash -c 'until {command}; do [ -e {fatal} ] && exit 1; sleep 1; done'"
        self.agents[node] = self.nodes[node].start(f"env {MARK}={self._mark} {command}")

    def run_folder(self, node: int) -> Path:
        return self.folder / self.nodes[node].name / "x"

    def status(self) -> dict[int, dict[str, Any]]:
        """Return the status file of each rank of the newest world, from all nodes."""
        rows = [json.loads(path.read_text()) for path in self.folder.glob("node*/x/status/rank_*.json")]
        newest = max((row["at"], row["world"]) for row in rows)[1] if rows else ""
        return {row["rank"]: row for row in rows if row["world"] == newest and not row["ended"]}

    def rank_of(self, role: str, besides: tuple[int, ...] = (0,)) -> int:
        return next(rank for rank, row in sorted(self.status().items()) if role in row["roles"] and rank not in besides)

    def ranks_on(self, node: int) -> list[int]:
        return [rank for rank, row in sorted(self.status().items()) if row["host"] == f"node{node}"]

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.status()[rank]["pid"], number)

    def kill_agent(self, node: int) -> None:
        """Kill torchrun on a node, but not its outer loop."""
        psutil.Process(self.status()[self.ranks_on(node)[0]]["pid"]).parent().kill()

    def kill_node(self, node: int) -> None:
        self.nodes[node].kill()
        self.agents.pop(node).wait()

    def output(self) -> str:
        return "\n".join(node.output for node in self.nodes)

    def expect(self, *reports: Report) -> None:
        """Expect these reports and no others between two checks. One that is given twice is expected twice."""
        self._expected += reports

    def reported(self, report: Report) -> int:
        """Return how often this was reported since the last check."""
        node, pattern = report
        return sum(bool(re.match(pattern, block)) for teller, block in self._blocks() if node in (None, teller))

    def assert_reported(self) -> None:
        """Check that each failure was reported once, and nobody else was named."""
        blocks, expected = self._blocks(), self._expected
        told = "\n".join(block for _, block in blocks)
        assert len(blocks) == len(expected), f"{expected} expected, but told was:\n{told}"
        for report in expected:
            assert self.reported(report) == expected.count(report), f"{report} expected, but told was:\n{told}"
        self._expected = []
        for node, _ in blocks:
            self._num_checked[node] += 1

    def _blocks(self) -> list[tuple[int, str]]:
        told = [BLOCK.findall(node.output)[checked:] for node, checked in zip(self.nodes, self._num_checked)]
        return [(node, block) for node, blocks in enumerate(told) for block in blocks]

    def wait_until(self, what: str, is_so: Callable[[], bool], timeout_s: float = WAIT_S) -> float:
        started = time.monotonic()
        while not is_so():
            assert time.monotonic() - started < timeout_s, f"no {what} within {timeout_s} s:\n{self.output()[-5000:]}"
            time.sleep(0.1)
        return time.monotonic() - started

    def wait_for_step(self, step: int, timeout_s: float = WAIT_S) -> float:
        """Wait until all nodes have done a step. With --nnodes 3:4, three of them may begin without the fourth."""
        return self.wait_until(
            f"step {step}", lambda: self.last_step() >= step and len(self.status()) == self._num_ranks, timeout_s
        )

    def num_steps_told(self) -> int:
        """Return the number of steps on all consoles. One that was done twice counts twice."""
        return sum(line.startswith("step ") for line in self.output().splitlines())

    def last_step(self) -> int:
        return max((row["step"] for row in self.metrics()), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per step. Leaders come and go with their nodes; the last one to write a step counts."""
        rows: dict[int, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("node*/x/metrics.jsonl"), key=lambda path: path.stat().st_mtime):
            found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            rows |= {row["step"]: row for row in found if row["step"] > 0}
        return [rows[step] for step in sorted(rows)]

    def finish(self, timeout_s: float = 200) -> list[int]:
        """Wait for the end, and return the exit codes of all nodes. Only expected failures may have been reported."""
        deadline = time.monotonic() + timeout_s
        codes = []
        for node in sorted(self.agents):
            try:
                codes.append(self.agents[node].wait(timeout=max(1.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running after {timeout_s} s:\n{self.output()[-6000:]}") from None
        self.assert_reported()
        return codes

    def finish_well(self, undisturbed: list[dict[str, Any]], timeout_s: float = 200) -> None:
        """Wait for a successful end, with the same data in the same order as an undisturbed run."""
        codes = self.finish(timeout_s)
        assert codes == [0] * len(codes), self.output()[-6000:]
        assert_same(self.metrics(), undisturbed)

    def members(self) -> list[psutil.Process]:
        alive = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
            except psutil.Error:
                continue
        return alive

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + END_S
        while (orphans := self.members()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not orphans, f"orphans: {[process.cmdline()[-4:] for process in orphans]}"
        segments = [str(path) for node in self.nodes for path in node.shared_memory.iterdir()]
        assert not segments, f"left in /dev/shm: {segments}"


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert {name: row[name] for name in SAME} == {name: other[name] for name in SAME}, row["step"]
        for name in CLOSE:  # they would differ with other weights or optimizer state
            assert abs(row[name] - other[name]) < 1e-4 * max(0.1, abs(other[name])), (row["step"], name, row[name])


@contextmanager
def running(folder: Path, *settings: str, **options: Any) -> Iterator[Cluster]:
    """Start a cluster, and check at its end that nothing is left, unless something else has failed."""
    with cluster(4) as nodes:
        world = Cluster(nodes, folder, *settings, **options)
        try:
            for node in range(4):
                world.start(node)
            yield world
            world.assert_nothing_is_left()
        finally:
            end(list(world.agents.values()))
            for process in world.members():
                process.kill()
