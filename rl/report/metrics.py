"""What a run reports: means over ranks, TensorBoard, one JSON line a step, a line on the console.

Names have stable prefixes: reward/ loss/ policy/ rollout/ optim/ eval/ time/ perf/. A mean is kept as a sum and a
count until all ranks have been added up, so it does not depend on who held which sequences.
"""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

CONSOLE = {
    "reward": "reward/mean",
    "eval": "eval/accuracy",
    "loss": "loss/policy",
    "mismatch": "policy/mismatch_kl",
    "length": "rollout/length_mean",
    "tokens/s": "perf/tokens_per_s",
    "seconds": "time/step",
}


class Measures:
    """Sums and means by name. Every rank adds the same names in the same order, also where it has nothing to count."""

    def __init__(self) -> None:
        self._pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}  # totals and counts, on whatever device made them
        self._sums: set[str] = set()

    def mean(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Does not wait for a device that is still computing them."""
        first, second = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (total, count))
        self._pairs.setdefault(name, []).append((first, second))

    def sum(self, name: str, total: Tensor | float) -> None:
        self._sums.add(name)
        self.mean(name, total, 0)

    def reduce(self, pg: dist.ProcessGroup, *only: str) -> dict[str, float]:
        """The values over all ranks of the group, on each of them; a mean over nothing is 0."""
        names = only or tuple(self._pairs)
        table = torch.stack([torch.stack([_sum(part) for part in zip(*self._pairs[name])]) for name in names])
        dist.all_reduce(table, group=pg)
        reduced = {}
        for name, (total, count) in zip(names, table.tolist(), strict=True):
            reduced[name] = total if name in self._sums else total / count if count else 0.0
        return reduced


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum().cpu()


class MetricsWriter:
    """On the leader."""

    def __init__(self, run_dir: Path, num_steps: int, step: int = 0):
        """`step` is the one that the run goes on from; what was written after it is written anew."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self._name, self._num_steps = run_dir.name, num_steps
        path = run_dir / "metrics.jsonl"
        rows = _rows_until(path, step) if step else _set_aside(path)
        if not step:
            _set_aside(run_dir / "eval.jsonl")
        part = path.with_suffix(".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
        part.replace(path)
        self._file = path.open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir), purge_step=step + 1 if step else 0, flush_secs=5)
        self._live = sys.stdout.isatty()
        self._started = time.perf_counter()
        self._rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]

    def write(self, step: int, version: int, values: Mapping[str, float]) -> None:
        """`version` is the newest one published: the one that the next step samples from."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}  # JSON has no others
        self._file.write(json.dumps({"step": step, "version": version, **finite}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        shown = "  ".join(f"{label} {values[name]:.4g}" for label, name in CONSOLE.items() if name in values)
        if shown:  # not at the start of a run that is not evaluated there
            self._print(f"step {step}/{self._num_steps}  {shown}", last=step == self._num_steps)

    def write_text(self, name: str, text: str, step: int) -> None:
        self._board.add_text(name, text, step)

    def close(self, engine_name: str) -> None:
        """Ends with a line that says what came of the run: mean reward of the first and of the last 5 steps."""
        first, last = (sum(part) / max(1, len(part)) for part in (self._rewards[:5], self._rewards[-5:]))
        seconds = time.perf_counter() - self._started
        print(
            f"{self._name}: reward {first:.2f} -> {last:.2f} in {len(self._rewards)} steps, {seconds:.0f} s, engine "
            f"{engine_name}",
            flush=True,
        )
        self._board.close()
        self._file.close()

    def _print(self, line: str, last: bool) -> None:
        """On a terminal one line that is written over, elsewhere a line a step."""
        if not self._live:
            print(line, flush=True)
            return
        width = os.get_terminal_size().columns - 1
        print("\r" + line[:width].ljust(width), end="\n" if last else "", flush=True)


def _rows_until(path: Path, step: int) -> list[dict[str, float]]:
    """What an earlier attempt wrote up to this step; a line that a kill cut off is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row for row in rows if row["step"] <= step]


def _set_aside(path: Path) -> list[dict[str, float]]:
    """Keeps what an earlier run of the same name wrote, beside the new file, which has no rows yet."""
    if path.exists():
        path.rename(path.with_name(f"{path.stem}.{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{path.suffix}"))
    return []
