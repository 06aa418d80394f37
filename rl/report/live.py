"""The live view of a run on the leader's terminal, in a thread of its own.

    steps, warnings, bars, activities of ranks --> LiveView --> frame.py: lines --> tee of the leader: terminal

The thread draws and sends; the tee process paints (rl/watch/tee.py). So no step ever waits for the terminal. The tee
removes the view when the leader ends, however it ends.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from rl.common.bars import BARS
from rl.common.notices import NOTICES
from rl.report.frame import LEAST_COLUMNS, LEAST_ROWS, RunView, render
from rl.watch.activities import RoleActivity
from rl.watch.screen import Size, ViewFrame, find_terminal_owner, is_in_foreground

REFRESH_S = 0.5
NUM_RECENT = 20  # steps whose duration predicts that of the others
LEAST_AGE_S = 1.5  # of work that is shown as a bar; shorter work would flicker
SHRINK_S = 10.0  # after which a view that needs fewer rows gets smaller; the rows of roles and bars come and go
MAX_REWARDS = 2000  # newest steps in the curve of rewards


class Painter(Protocol):
    """The process that paints frames (TeeLink)."""

    def show(self, frame: ViewFrame | None) -> None: ...

    def log(self, text: str) -> None: ...


class LiveView:
    """Keep the view of a run up to date. `activities` returns what the ranks are doing now."""

    def __init__(self, name: str, terminal: Painter, activities: Callable[[], Sequence[RoleActivity]]):
        self._terminal, self._activities = terminal, activities
        self._started_at = self._reached_at = time.monotonic()
        self._durations: deque[float] = deque(maxlen=NUM_RECENT)  # of steps with all that comes between them
        self._view = RunView(name)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._height, self._tall_at = 0, 0.0  # rows of the view, and when it last needed so many
        self._owner = find_terminal_owner(os.getpid(), os.getppid())
        self._is_shown = self._may_show(_terminal_size())
        NOTICES.is_in_view = True
        self._thread = threading.Thread(target=self._run, name="live view", daemon=True)
        self._thread.start()

    @property
    def is_shown(self) -> bool:
        """Whether there is room for the view and the job is in the foreground. If not, steps are printed as lines."""
        return self._is_shown

    def begin(self, num_steps: int, step: int, rewards: Sequence[float]) -> None:
        """Show the progress of a run that continues after `step`. `rewards` are those of the steps so far."""
        with self._lock:
            self._view = replace(self._view, num_steps=num_steps, step=step, rewards=rewards)
            self._reached_at = time.monotonic()

    def write(self, step: int, values: Mapping[str, float], rewards: Sequence[float], bound: str) -> None:
        """Show the values of a step that has ended."""
        now = time.monotonic()
        with self._lock:
            view = self._view
            if step > view.step:
                self._durations.append((now - self._reached_at) / (step - view.step))
            self._reached_at = now
            if "eval/accuracy" in values:
                view.evaluation = (step, values["eval/accuracy"])
            view.step, view.rewards = step, rewards
            if "time/step" in values and "reward/mean" in values:  # not the evaluation before the first step
                view.values, view.bound = dict(values), bound

    def log(self, line: str) -> None:
        """Write a line to the rank's log, but not to the terminal."""
        self._terminal.log(line + "\n")

    def close(self) -> None:
        """Remove the view from the terminal."""
        self._closing.set()
        self._thread.join(1.0)
        NOTICES.is_in_view = False
        self._terminal.show(None)

    def _run(self) -> None:
        shown: ViewFrame | None = None
        while not self._closing.wait(REFRESH_S):
            frame = self._draw()
            if frame != shown and not self._closing.is_set():
                self._terminal.show(frame)
                shown = frame

    def _draw(self) -> ViewFrame | None:
        size, now = _terminal_size(), time.monotonic()
        self._is_shown = self._may_show(size)
        if not self._is_shown:
            return None
        with self._lock:
            view = replace(self._view, rewards=self._view.rewards[-MAX_REWARDS:], elapsed_s=now - self._started_at)
            if self._durations:
                mean_s = sum(self._durations) / len(self._durations)
                in_step_s = min(mean_s, now - self._reached_at)
                view.left_s = max(0.0, mean_s * (view.num_steps - view.step) - in_step_s)
        view.activities, view.warning = self._activities(), NOTICES.last
        view.bars = [bar for bar in BARS.read() if bar.age_s >= LEAST_AGE_S]
        lines = render(view, *size)
        if len(lines) >= self._height or now - self._tall_at > SHRINK_S:
            self._height, self._tall_at = len(lines), now
        return ViewFrame((*lines, *[""] * (min(self._height, size.rows // 2) - len(lines))), size)

    def _may_show(self, size: Size) -> bool:
        return size.columns >= LEAST_COLUMNS and size.rows >= LEAST_ROWS and is_in_foreground(self._owner)


def open_view(
    name: str, terminal: Painter | None, collect: Callable[[], Callable[[], Sequence[RoleActivity]]]
) -> LiveView | None:
    """Open the live view if the console is a terminal that can show it. `collect` asks for the ranks' activities."""
    is_able = terminal is not None and sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return LiveView(name, terminal, collect()) if is_able and terminal is not None else None


def _terminal_size() -> Size:
    try:
        return Size(*os.get_terminal_size(sys.stdout.fileno()))
    except (OSError, ValueError):
        return Size(0, 0)
