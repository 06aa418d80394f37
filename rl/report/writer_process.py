"""The process that passes metrics on to wandb or swanlab. rl/report/writers.py starts it and sends lines of JSON.

It has the packages to itself: neither their imports, threads and exit handlers nor a slow network reach the rank. It
ends when its input ends, that is when the rank closes it or dies.
"""

import json
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

END_S = 15  # maximum seconds from the last row to the end of the process

Values = Mapping[str, float]


class Target(NamedTuple):
    """An open run of wandb or swanlab."""

    log: Callable[[Values, int], Any]
    finish: Callable[[], Any]


def open_wandb(about: Mapping[str, Any], run_id: str, folder: Path) -> Target:
    import wandb

    # Nothing but our metrics and settings: command lines and addresses of git remotes may hold credentials.
    settings = wandb.Settings(
        console="off",
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    run = wandb.init(
        project=about["project"],
        name=about["name"],
        id=run_id,
        dir=str(folder),
        config=about["config"],
        resume="allow",
        settings=settings,
    )
    return Target(lambda values, step: run.log(dict(values), step=step), run.finish)


def open_swanlab(about: Mapping[str, Any], run_id: str, folder: Path) -> Target:
    import swanlab

    probes = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
    swanlab.init(
        project=about["project"],
        name=about["name"],
        id=run_id,
        log_dir=str(folder / "swanlab"),
        config=about["config"],
        resume="allow",
        settings=swanlab.Settings(probe=probes, terminal={"proxy_type": "none"}),
    )
    return Target(lambda values, step: swanlab.log(dict(values), step=step), swanlab.finish)


OPENERS = {"wandb": open_wandb, "swanlab": open_swanlab}


class Mark:
    """The file that keeps the run's id there, and the last step that was written, between starts of a run."""

    def __init__(self, path: Path, is_new: bool):
        self._path = path
        found = {} if is_new or not path.exists() else json.loads(path.read_text())
        self.run_id, self.step = found.get("id") or secrets.token_hex(8), found.get("step", -1)

    def write(self, step: int) -> None:
        self.step = step
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"id": self.run_id, "step": step}))
        part.replace(self._path)


def rows_after(lines: Iterator[str], step: int) -> Iterator[tuple[int, Values]]:
    """Yield the rows of later steps. A resumed run repeats steps, and both services accept only growing ones."""
    for line in lines:
        row = json.loads(line)
        if row["step"] > step:
            step = row["step"]
            yield step, row["values"]


def main(name: str) -> None:
    signal.signal(signal.SIGALRM, lambda number, frame: sys.exit(f"not ended within {END_S} s"))
    about = json.loads(sys.stdin.readline())
    folder = Path(about["folder"])
    mark = Mark(folder / f"{name}.json", about["is_new"])
    target = OPENERS[name](about, mark.run_id, folder)
    for step, values in rows_after(iter(sys.stdin.readline, ""), mark.step):
        target.log(values, step)
        mark.write(step)
    signal.alarm(END_S)
    target.finish()
