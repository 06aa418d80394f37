"""How long a rank may be silent: by stage, learnt from what the stage took so far, between a floor and a cap."""

from dataclasses import dataclass

from rl.watch.heart import Beat

STOPPED = "its process was stopped by a signal"
STRETCH = 5.0  # a stage may be silent for so many times its longest silence so far


@dataclass(frozen=True)
class Limits:
    """Seconds of silence."""

    floor_s: float = 60.0
    cap_s: float = 1800.0  # also of a stage, or of work in it, that was never seen before


class Watch:
    """What a watchdog knows of its rank's silence."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._longest: dict[str, float] = {}  # by stage, of visits that have ended
        self._in_visit = 0.0
        self._last: Beat | None = None

    def see(self, beat: Beat) -> None:
        """A beat that may be the same as before."""
        last, self._last = self._last, beat
        if last is None or beat.beats == last.beats:
            return
        if not last.waits_for:
            self._in_visit = max(self._in_visit, beat.at - max(last.at, beat.closed_at))
        if beat.stage != last.stage:
            self._longest[last.stage] = max(self._longest.get(last.stage, 0.0), self._in_visit)
            self._in_visit = 0.0

    def limit_s(self, beat: Beat) -> float:
        """The start of a run is many things, of which none comes twice. And a disk may be as slow as it likes, while it
        takes anything at all."""
        is_known = beat.stage != "start" and not beat.is_new and not beat.waits_for_itself
        longest = self._longest.get(beat.stage) if is_known else None
        if longest is None:
            return self.limits.cap_s
        return min(self.limits.cap_s, max(self.limits.floor_s, STRETCH * longest))

    def frozen(self, beat: Beat, now: float, state: str) -> str:
        """Why nothing in the process runs, by the kernel's letter for its state; empty: something does, or it is gone.
        Without an I/O thread nothing shows that the interpreter runs."""
        if state in ("T", "t"):
            return STOPPED
        is_stuck = state and beat.io_at and not beat.is_debugged and now - beat.alive_at > self.limits.floor_s
        return "its interpreter is frozen" if is_stuck else ""

    def is_silent(self, beat: Beat, now: float, frozen: str) -> bool:
        """A rank that waits for others is not: they are. One in a debugger waits for a person."""
        if beat.is_debugged:
            return False
        if frozen:
            return now - beat.alive_at > self.limits.floor_s
        return (not beat.waits_for or beat.waits_for_itself) and now - beat.got_on_at > self.limit_s(beat)
