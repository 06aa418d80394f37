"""Show what each rank of a run is doing, or was doing at its end.

    python tools/status.py [RUN] [--follow]

RUN is the directory of a run (default: the newest under runs/). The node of rank 0 shows every rank, other nodes show
their own.
"""

import argparse
import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.common.text import count_of
from rl.report.printing import print_or_exit
from rl.watch.activities import describe_doing

STALE_S = 5.0  # without news, after which a run does not count as running
COLUMNS = ["rank", "host", "roles", "stage", "step", "version"]
GPU_COLUMNS = ["gpu_memory_mb", "gpu_utilization"]  # shown if any rank has a GPU that NVML knows
LIVE_COLUMNS = ["stage_s", "silent_s", "tokens_per_s", "memory_mb", *GPU_COLUMNS]  # not shown after the end
COLUMNS += [*LIVE_COLUMNS, "doing"]
TITLES = {"stage_s": "in stage s", "silent_s": "silent s", "tokens_per_s": "tokens/s", "memory_mb": "MB"}
TITLES |= {"gpu_memory_mb": "GPU MB", "gpu_utilization": "GPU %"}


def find_run(run: Path | None) -> Path:
    """Return the directory of the run that was given, or of the newest one under runs/."""
    if run is None:
        statuses = sorted(Path("runs").glob("*/status"), key=lambda path: path.stat().st_mtime)
        if not statuses:
            remedy = "give the directory of a run: tools/status.py RUN"
            raise SystemExit(f"there is no run with status files in runs; {remedy}")
        return statuses[-1].parent
    if not run.is_dir():
        raise SystemExit(f"there is no directory {run}; give the directory of a run, such as runs/demo")
    return run


class Status(NamedTuple):
    """What the status files of a run say."""

    rows: list[dict[str, Any]]  # of each rank
    at: float  # time of the newest file
    end: str  # how the world ended; empty while it runs, after a normal end, or if nobody could write it


def read(run: Path) -> Status:
    return merge([path.read_text() for path in sorted(run.glob("status/*.json"))])


def merge(texts: list[str]) -> Status:
    """Do the same as `read` with the contents of status files, which may come from several nodes."""
    values: list[dict[str, Any]] = []
    for text in texts:
        with suppress(ValueError):  # half written on a full disk
            values.append(json.loads(text))
    newest = max(values, key=lambda value: value["at"], default=dict[str, Any](at=0.0, world=""))
    rows: dict[int, dict[str, Any]] = {}
    end = ""
    for value in values:
        end = end or (value.get("end", "") if value["world"] == newest["world"] else "")
        # Another world is an earlier start, which may have had more ranks.
        for row in value.get("ranks", [value]) if value["world"] == newest["world"] else ():
            row["at"] = value["at"] - row.get("heard_s_ago", 0.0)
            if row["rank"] not in rows or row["at"] > rows[row["rank"]]["at"]:
                rows[row["rank"]] = row
    return Status([rows[rank] for rank in sorted(rows)], newest["at"], end)


def align(rows: list[list[str]]) -> str:
    """Return the rows of a table with their columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def show(run: Path) -> str:
    fatal = run / "FATAL"
    return describe(run, read(run), fatal.read_text() if fatal.exists() else "")


def describe(run: Path, status: Status, fatal: str) -> str:
    """Return the run's state, or how it ended, and a table of its ranks. `fatal` is the content of its file FATAL."""
    rows, at, end = status
    if not rows:
        return f"{run}: no rank has written a status yet"
    reason = ""
    if fatal:  # its first line says what `end` says
        reason = f"\nthe whole report: {run / 'FATAL'}" if end else f"\n{run / 'FATAL'}: {fatal.splitlines()[0]}"
    is_done = all(row["done"] for row in rows)  # then the last stage says nothing
    hidden = [*LIVE_COLUMNS, *(["stage"] if is_done else [])] if end or is_done else []
    hidden += [name for name in GPU_COLUMNS if not any(name in row for row in rows)]
    columns = [name for name in COLUMNS if name not in hidden]
    cells = [[str((row | {"doing": describe_doing(row)}).get(name, "")) for name in columns] for row in rows]
    table = align([[TITLES.get(name, name) for name in columns], *cells])
    return f"{run}: {describe_state(rows, time.time() - at, end)}{reason}\n{table}"


def describe_state(rows: list[dict[str, Any]], age_s: float, end: str) -> str:
    """Return the run's state, or how it ended. The newest status is `age_s` seconds old."""
    step, num_steps = max(row["step"] for row in rows), max(row.get("num_steps", 0) for row in rows)
    if all(row["done"] for row in rows):
        return f"done after {num_steps} of {count_of(num_steps, 'step')}" if num_steps else "done"
    if end:
        return end
    reached = f"step {step} of {num_steps}" if num_steps else f"step {step}"
    if age_s < STALE_S:
        return f"running, {reached}, {count_of(len(rows), 'rank')}"
    return (
        f"no status for {age_s:.0f} s, at {reached}, {count_of(len(rows), 'rank')}; it was killed, or its node is gone"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="the directory of a run")
    parser.add_argument("--follow", action="store_true", help="repeat every second")
    args = parser.parse_args(arguments)
    run = find_run(args.run)
    print_or_exit(show(run))
    while args.follow:
        time.sleep(1.0)
        print_or_exit(f"\033[2J\033[H{show(run)}" if sys.stdout.isatty() else show(run))


if __name__ == "__main__":
    main()
