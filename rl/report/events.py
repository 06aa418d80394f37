"""The events of a run that the leader writes: where an attempt starts, and why. rl/common/events.py has the file."""

from collections.abc import Sequence
from pathlib import Path

from rl.common.events import EVENTS, Event, Kind, read_events, write_event
from rl.report.rows import set_aside

__all__ = ["Event", "Kind", "begin_events", "read_events", "write_event"]
ENDINGS: tuple[Kind, ...] = ("fault", "stop", "end")
STARTS: tuple[Kind, ...] = ("start", "resume")


def begin_events(run_dir: Path, step: int, attempt: int, world: str, details: Sequence[str], is_restart: bool) -> None:
    """Write the start of an attempt from `step`, and what came before it.

    If the run starts over, events of an earlier run with the same name are set aside. `is_restart` says that an
    earlier attempt of the same launch has written to the folder. Then its events stay, even if it saved no step.
    `details` are added to the event, if they are not empty.
    """
    if not step and not is_restart:
        set_aside(run_dir / EVENTS)
    before = read_events(run_dir)
    texts = [f"attempt {attempt}"]
    if step:
        texts[0] += f" continues after step {step}"
    if before:
        texts.append(_describe_end(before))
    texts += [detail for detail in details if detail]
    write_event(run_dir, "resume" if before or step else "start", step, "; ".join(texts), world)


def _describe_end(events: list[Event]) -> str:
    """Say how the attempt before this one ended."""
    last = next((event for event in reversed(events) if event.kind in (*ENDINGS, *STARTS)), None)
    if last is None or last.kind in STARTS:
        return "the attempt before it was killed, or its node was lost: it left no report"
    return f"before it: {last.text}"
