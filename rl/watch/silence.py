"""How long a rank may be silent: learnt for each stage from its longest silence so far, between a floor and a cap."""

from collections import deque
from dataclasses import dataclass

from rl.watch.heart import Heartbeat

STOPPED = "its process was stopped by a signal"
FROZEN = "its interpreter is frozen"
STRETCH = 5.0  # a stage may be silent for this many times its longest silence so far


@dataclass(frozen=True)
class Limits:
    """Seconds of silence. The cap is also the limit of exceptional work, and of a stage or work not seen before."""

    floor_s: float = 60.0
    cap_s: float = 1800.0


class SilenceDetector:
    """Decides from heartbeats whether a rank has been silent for too long."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._longest: dict[str, float] = {}  # by stage, of visits that have ended
        self._in_visit = 0.0
        self._first_uses: dict[tuple[str, str], float] = {}  # by stage and shape, until it is used again
        self._last: Heartbeat | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=1000)  # ends and lengths

    def see(self, beat: Heartbeat) -> None:
        """Learn from the newest heartbeat, which may be the same as before."""
        last, self._last = self._last, beat
        if last is None or beat.count == last.count:
            return
        stage = last.activity.stage
        if not last.activity.waits_for and not last.activity.exceptional:
            self._learn(last, beat.times.at - max(last.times.at, beat.times.debugger_closed_at))
        if beat.activity.stage != stage:
            self._longest[stage] = max(self._longest.get(stage, 0.0), self._in_visit)
            self._in_visit = 0.0

    def _learn(self, last: Heartbeat, silence_s: float) -> None:
        """Remember how long the work of the last heartbeat took.

        The first use of a shape may include a compilation, so its time says nothing about other shapes. It is kept
        as the estimate for the second use, until that has been seen.
        """
        use = (last.activity.stage, last.novelty.shape)
        if last.novelty.is_first_use:
            self._first_uses[use] = max(self._first_uses.get(use, 0.0), silence_s)
        else:
            self._first_uses.pop(use, None)
            self._in_visit = max(self._in_visit, silence_s)

    def exclude_pause(self, now: float, seconds: float) -> None:
        """Do not count the last `seconds`: the watchdog itself stood still, and so did probably the rank beside it."""
        self._pauses.append((now, seconds))

    def silent_s(self, beat: Heartbeat, now: float, frozen: str) -> float:
        """Return the seconds of silence, without pauses of the machine."""
        since = beat.times.alive_at if frozen else beat.progress_at
        return max(0.0, now - since - sum(seconds for end, seconds in self._pauses if end > since))

    def limit_s(self, beat: Heartbeat) -> float:
        """Return how long the rank may be silent now.

        The start of a run does many things once, so nothing is learnt from it. A disk may be arbitrarily slow as long
        as it makes progress.
        """
        activity, novelty = beat.activity, beat.novelty
        is_unknown = activity.stage == "start" or novelty.is_new or novelty.is_first_use or bool(activity.exceptional)
        longest = None if is_unknown or activity.waits_for_itself else self._longest.get(activity.stage)
        if longest is None:
            return self.limits.cap_s
        longest = max(longest, self._first_uses.get((activity.stage, novelty.shape), 0.0))
        return min(self.limits.cap_s, max(self.limits.floor_s, STRETCH * longest))

    def frozen(self, beat: Heartbeat, now: float, state: str) -> str:
        """Return why nothing in the process runs; empty if something runs, or if the process is gone.

        `state` is the kernel's letter. A process without an I/O thread cannot show that its interpreter runs.
        """
        if state in ("T", "t"):
            return STOPPED
        is_stuck = self.silent_s(beat, now, FROZEN) > self.limits.floor_s
        return FROZEN if state and beat.times.io_at and not beat.times.is_in_debugger and is_stuck else ""

    def is_silent(self, beat: Heartbeat, now: float, frozen: str) -> bool:
        """Whether the rank has been silent for too long. One that waits for others, or for a person, has not."""
        if beat.times.is_in_debugger:
            return False
        limit_s = self.limits.floor_s if frozen else self.limit_s(beat)
        may_wait = beat.activity.waits_for and not beat.activity.waits_for_itself and not frozen
        return not may_wait and self.silent_s(beat, now, frozen) > limit_s
