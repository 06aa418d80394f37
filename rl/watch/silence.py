"""How long a rank may be silent: by stage, learnt from what the stage took so far, between a floor and a cap."""

from collections import deque
from dataclasses import dataclass

from rl.watch.heart import Beat

STOPPED = "its process was stopped by a signal"
FROZEN = "its interpreter is frozen"
STRETCH = 5.0  # a stage may be silent for so many times its longest silence so far


@dataclass(frozen=True)
class Limits:
    """Seconds of silence."""

    floor_s: float = 60.0
    cap_s: float = 1800.0  # also of a stage, or of work in it, that was never seen before, and of exceptional work


class Watch:
    """What a watchdog knows of its rank's silence."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._longest: dict[str, float] = {}  # by stage, of visits that have ended
        self._in_visit = 0.0
        self._first_uses: dict[tuple[str, str], float] = {}  # by stage and shape, until it was used again
        self._last: Beat | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=1000)  # ends and lengths

    def see(self, beat: Beat) -> None:
        """A beat that may be the same as before."""
        last, self._last = self._last, beat
        if last is None or beat.beats == last.beats:
            return
        if not last.waits_for and not last.exceptional:
            self._learn(last, beat.at - max(last.at, beat.closed_at))
        if beat.stage != last.stage:
            self._longest[last.stage] = max(self._longest.get(last.stage, 0.0), self._in_visit)
            self._in_visit = 0.0

    def _learn(self, last: Beat, silence_s: float) -> None:
        """The first use of a shape may include a compilation, so its time says nothing about other shapes. It is kept
        as the estimate for the second use, until that has been seen."""
        use = (last.stage, last.shape)
        if last.is_first_use:
            self._first_uses[use] = max(self._first_uses.get(use, 0.0), silence_s)
        else:
            self._first_uses.pop(use, None)
            self._in_visit = max(self._in_visit, silence_s)

    def forgive(self, now: float, seconds: float) -> None:
        """The watchdog itself stood still for so long, and the rank on the same machine probably too."""
        self._pauses.append((now, seconds))

    def silent_s(self, beat: Beat, now: float, frozen: str) -> float:
        """Less what is forgiven."""
        since = beat.alive_at if frozen else beat.got_on_at
        return max(0.0, now - since - sum(seconds for end, seconds in self._pauses if end > since))

    def limit_s(self, beat: Beat) -> float:
        """The start of a run is many things, of which none comes twice. And a disk may be as slow as it likes, while it
        takes anything at all."""
        is_unknown = beat.stage == "start" or beat.is_new or beat.is_first_use or bool(beat.exceptional)
        longest = None if is_unknown or beat.waits_for_itself else self._longest.get(beat.stage)
        if longest is None:
            return self.limits.cap_s
        longest = max(longest, self._first_uses.get((beat.stage, beat.shape), 0.0))
        return min(self.limits.cap_s, max(self.limits.floor_s, STRETCH * longest))

    def frozen(self, beat: Beat, now: float, state: str) -> str:
        """Why nothing in the process runs, by the kernel's letter for its state; empty: something does, or it is gone.
        Without an I/O thread nothing shows that the interpreter runs."""
        if state in ("T", "t"):
            return STOPPED
        is_stuck = self.silent_s(beat, now, FROZEN) > self.limits.floor_s
        return FROZEN if state and beat.io_at and not beat.is_debugged and is_stuck else ""

    def is_silent(self, beat: Beat, now: float, frozen: str) -> bool:
        """A rank that waits for others is not: they are. One in a debugger waits for a person."""
        if beat.is_debugged:
            return False
        limit_s = self.limits.floor_s if frozen else self.limit_s(beat)
        may_wait = beat.waits_for and not beat.waits_for_itself and not frozen
        return not may_wait and self.silent_s(beat, now, frozen) > limit_s
