"""Reduce metrics over ranks. Write them to TensorBoard, to metrics.jsonl (one line per step) and to the console.
rl/report/writers.py passes them on to other services.

Names have stable prefixes: reward/ loss/ policy/ rollout/ environment/ optim/ eval/ time/ perf/ gpu/. A mean is kept as
a sum and a count until the ranks are summed up, so it does not depend on which rank held which sequences.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from rl.common.files import write_atomically
from rl.common.text import count_of
from rl.report.writers import ProcessWriter

METRICS = "metrics.jsonl"  # one line per step, in the run's folder
# Labels and metrics of the line that a step prints.
CONSOLE = {"reward": "reward/mean", "errors": "reward/errors", "timeouts": "reward/timeouts", "eval": "eval/accuracy"}
CONSOLE |= {"loss": "loss/policy", "mismatch": "policy/mismatch_kl", "length": "rollout/length_mean"}
CONSOLE |= {"tokens/s": "perf/tokens_per_s", "seconds": "time/step"}
WAITS = {"sampling": "perf/waits_for_sampling", "training": "perf/waits_for_training"}
WAITS |= {"publishing": "perf/waits_for_publishing"}
FAILURES = ("errors", "timeouts")  # counts that are shown only if they are not 0


class Measures:
    """Sums and means by name. Every rank adds the same names in the same order, even if it has nothing to count."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}  # totals and counts, on any device
        self._sums: set[str] = set()
        self._optional: set[str] = set()  # means that are left out if they are over nothing

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean. This does not wait for a device that is still computing the arguments."""
        total, count = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (total, count))
        self._pairs.setdefault(name, []).append((total, count))

    def mean_if_any(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add to a mean that `reduce` leaves out if the count is 0 on all ranks."""
        self._optional.add(name)
        self.mean(name, total, count)

    def sum(self, name: str, total: Tensor | float) -> None:
        self._sums.add(name)
        self.mean(name, total, 0)

    def include(self, other: "Measures") -> None:
        """Add everything that `other` has."""
        self._sums |= other._sums
        self._optional |= other._optional
        for name, pairs in other._pairs.items():
            self._pairs.setdefault(name, []).extend(pairs)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._pairs)

    def reduce(self, pg: dist.ProcessGroup, *only: str) -> dict[str, float]:
        """Return the values over all ranks of the group, which all call this. A mean over nothing is 0, or left out."""
        names = only or self.names
        parts = [part for name in names for part in zip(*self._pairs[name])]  # totals and counts in turn
        table = torch.stack([torch.stack(part).sum().cpu() for part in parts]).reshape(-1, 2)
        dist.all_reduce(table, group=pg)
        reduced = {}
        for name, (total, count) in zip(names, table.tolist(), strict=True):
            if name in self._optional and not count:
                continue
            reduced[name] = total if name in self._sums else total / count if count else 0.0
        return reduced


class MetricsWriter:
    """Write the metrics of a run. Only the leader has a writer.

    `step` is the step from which the run resumes. Rows after it are dropped, since the run writes them again. If it is
    0, the files of an earlier run with the same name are renamed, unless this command `continues` a run in phases.
    `others` are the writers of metrics.writers.
    """

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        step: int = 0,
        others: Sequence[ProcessWriter] = (),
        continues: bool = False,
    ):
        run_dir.mkdir(parents=True, exist_ok=True)
        self._others = others
        self._name, self._num_steps, self._started = run_dir.name, num_steps, time.perf_counter()
        path = run_dir / METRICS
        for old in (path, run_dir / "eval.jsonl"):
            if not step and not continues and old.exists():
                stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
                old.rename(old.with_name(f"{old.stem}.{stamp}{old.suffix}"))
        rows = [row for row in read_metrics(path) if row["step"] <= step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = path.open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir), purge_step=step + 1 if step or continues else 0, flush_secs=5)
        self._rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
        self._num_before = len(self._rewards)  # steps of earlier starts

    def write(self, step: int, version: int, values: Mapping[str, float]) -> None:
        """Write a step's metrics. `version` is the newest published version, from which the next step samples."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no NaN
        self._file.write(json.dumps({"step": step, "version": version, **finite}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        for writer in self._others:
            writer.write(step, values)
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        shown = "  ".join(
            f"{label} {values[name]:{'.0f' if label in FAILURES else '.4g'}}"
            for label, name in CONSOLE.items()
            if name in values and (values[name] or label not in FAILURES)
        )
        line = f"step {step}/{self._num_steps}  {shown}{_describe_bound(values)}"
        if shown and sys.stdout.isatty():  # overwrite the previous line
            width = os.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="\n" if step == self._num_steps else "", flush=True)
        elif shown:  # before the first step there is nothing to show without an evaluation
            print(line, flush=True)

    def write_text(self, name: str, text: str, step: int) -> None:
        self._board.add_text(name, text, step)

    def close(self, engine_name: str) -> None:
        """Close the files and print a summary: the mean reward of the first and of the last 5 steps of the run, and the
        seconds of this start. After a resume, the summary says how many of the steps these seconds are for."""
        first, last = (sum(part) / max(1, len(part)) for part in (self._rewards[:5], self._rewards[-5:]))
        took, num_now = f"{time.perf_counter() - self._started:.0f} s", len(self._rewards) - self._num_before
        if self._num_before:
            took = (
                f"the last {num_now} of them in {took} after a resume" if num_now else "none of them after the resume"
            )
        steps = count_of(len(self._rewards), "step")
        engine = engine_name and f", engine {engine_name}"  # without one, nothing was sampled
        print(f"{self._name}: reward {first:.2f} -> {last:.2f} in {steps}, {took}{engine}", flush=True)
        self.close_files()

    def close_files(self) -> None:
        self._board.close()
        self._file.close()
        for writer in self._others:
            writer.close()


def _describe_bound(values: Mapping[str, float]) -> str:
    """Return the end of a step's line: what most of the step was spent waiting for, and its share of the step."""
    waits = {what: values[name] for what, name in WAITS.items() if name in values}
    if not waits:
        return ""
    bound = max(waits, key=waits.__getitem__)
    return f"  waits {waits[bound]:.0%} for {bound}"


def last_step(path: Path) -> int:
    """Return the last step in a file of metrics, or 0 if there is none."""
    return max((row["step"] for row in read_metrics(path)), default=0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of metrics. There are none if the file does not exist."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with suppress(ValueError):  # a kill has cut the line off
            rows.append(json.loads(line))
    return rows
