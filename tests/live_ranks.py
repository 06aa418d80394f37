"""Processes that share a terminal as ranks do: a leader with a live view, and others that only print.

    python -m tests.live_ranks leader FOLDER [CHILD...] | printer FOLDER NAME COUNT

The leader goes on while FOLDER has no file `stop`, and counts its steps in FOLDER/step. A printer begins when there is
a file FOLDER/print. The leader starts the command CHILD, which keeps the console open as a rank's watchdog does.
"""

import subprocess
import sys
import time
from pathlib import Path

from rl.watch.tee import start_tee

LINK = start_tee()  # before threads are started, as in a rank
from rl.common.notices import NOTICES  # noqa: E402
from rl.report.console import RunConsole  # noqa: E402
from rl.report.live import open_view  # noqa: E402
from rl.watch.activities import RoleActivity  # noqa: E402

NUM_STEPS = 1000


def lead(folder: Path) -> None:
    roles = [RoleActivity("0-1", "rollout,actor", "update", 3.0, "micro-batch 1 of 2", 4000)]
    LINK.write_log(folder / "leader.log")
    view = open_view("shared", LINK, lambda: lambda: roles)
    console = RunConsole("shared", NUM_STEPS, [], 0, view)
    step = 0
    while not (folder / "stop").exists():
        step += 1
        seconds = {"time/step": 0.2, "time/rollout": 0.1, "time/update": 0.1}
        console.write(step, {"reward/mean": step / NUM_STEPS, **seconds})
        if step % 3 == 1:
            NOTICES.warn("the disk is slow")
        (folder / "step").write_text(str(step))
        time.sleep(0.05)
    NOTICES.summarize()
    if view is not None:
        view.close()
    console.close("none")


def print_lines(folder: Path, name: str, count: int) -> None:
    """Print numbered lines of different lengths."""
    while not (folder / "print").exists():
        time.sleep(0.05)
    for number in range(count):
        print(f"{name} {number:05} {'x' * (number % 60)} end", flush=True)
        time.sleep(0.001)


if __name__ == "__main__":
    if sys.argv[1] == "leader":
        if sys.argv[3:]:
            subprocess.Popen(sys.argv[3:])
        lead(Path(sys.argv[2]))
    else:
        print_lines(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
