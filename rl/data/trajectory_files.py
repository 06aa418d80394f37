"""Names of the files between the phases rollout and update. Does not import torch, because --plan lists them.

    RUN/trajectories/step_3/round_1.group_12.safetensors

holds group 12 of the prompt stream, as it was after the first round of step 3.
"""

import re
from pathlib import Path
from typing import NamedTuple

from rl.common.text import format_ranges

TRAJECTORIES = "trajectories"  # subfolder of the run
FILE = re.compile(r"round_([1-9]\d{0,17})\.group_(\d{1,18})\.safetensors", re.ASCII)


class GroupKey(NamedTuple):
    round: int  # of the step, from 1
    number: int  # place in the prompt stream, counted from the start of the run

    @property
    def file(self) -> str:
        return f"round_{self.round}.group_{self.number}.safetensors"


def trajectory_folder(run: Path, step: int) -> Path:
    """Return the folder of the groups that the update of a step trains on."""
    return run / TRAJECTORIES / f"step_{step}"


def list_files(folder: Path) -> dict[GroupKey, Path]:
    """Return the files of a step's folder, in the order of rounds and groups."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := FILE.fullmatch(path.name):
            found[GroupKey(int(match[1]), int(match[2]))] = path
    return dict(sorted(found.items()))


def run_folder(folder: str) -> Path:
    """Return the folder of a run, also if its folder of trajectories or of a step was given."""
    path = Path(folder)
    return next((each.parent for each in (path, path.parent) if each.name == TRAJECTORIES), path)


def describe_steps(run: Path) -> str:
    """Say which steps a run has groups of, for messages."""
    folders = [path for path in (run / TRAJECTORIES).glob("step_*") if path.is_dir()]
    steps = sorted(int(path.name[5:]) for path in folders if path.name[5:].isdecimal())
    return f"{run} has groups of step {format_ranges(steps)}" if steps else f"{run} has none"
