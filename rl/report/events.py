"""events.jsonl: what happened to a run besides its steps, such as starts, checkpoints and warnings."""

import json
import time
from pathlib import Path
from typing import Literal, NamedTuple

from rl.report.rows import read_metrics

EVENTS = "events.jsonl"  # in the run's folder, of all starts of the run
Kind = Literal["start", "resume", "checkpoint", "evaluation", "warning", "fault", "stop", "end"]


class Event(NamedTuple):
    at: float  # seconds since 1970
    step: int
    kind: Kind
    text: str


def write_event(run_dir: Path, kind: Kind, step: int, text: str) -> None:
    """Add a line. Called on the leader."""
    with (run_dir / EVENTS).open("a") as file:
        file.write(json.dumps(Event(round(time.time(), 3), step, kind, text)._asdict()) + "\n")


def read_events(run_dir: Path) -> list[Event]:
    return [Event(**row) for row in read_metrics(run_dir / EVENTS)]
