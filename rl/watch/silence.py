"""How long a rank may be silent. The limit is learnt for each stage from its longest silence so far."""

from collections import deque

from rl.watch.culprit import RankState
from rl.watch.heart import Heartbeat

STOPPED = "its process was stopped by a signal"
FROZEN = "its interpreter is frozen"
STRETCH = 5.0  # a stage may be silent for this many times its longest silence so far


class SilenceDetector:
    """Decide from heartbeats whether a rank has been silent for too long."""

    def __init__(self, floor_s: float = 60.0, cap_s: float = 1800.0):
        self.floor_s, self.cap_s = floor_s, cap_s  # bounds of the limit; the watchdog sets them again from the config
        self._longest: dict[str, float] = {}  # by stage; only visits that have ended count
        self._in_visit = 0.0  # longest silence of the current visit, which began when the stage was entered
        self._first_uses: dict[tuple[str, str], float] = {}  # by stage and shape, until the second use
        self._last: Heartbeat | None = None
        self._pauses: deque[tuple[float, float]] = deque(maxlen=1000)  # (end, seconds)

    def see(self, beat: Heartbeat) -> None:
        """Learn from the newest heartbeat. Seeing the same one again changes nothing."""
        last, self._last = self._last, beat
        if last is None or beat.count == last.count:
            return
        stage = last.activity.stage
        if not last.activity.waits_for and not last.activity.exceptional:
            self._learn(last, beat.at - max(last.at, beat.debugger_closed_at))
        if beat.stage_at != last.stage_at:  # compare times, not names: all other stages may pass between two looks
            self._longest[stage] = max(self._longest.get(stage, 0.0), self._in_visit)
            self._in_visit = 0.0

    def _learn(self, last: Heartbeat, silence_s: float) -> None:
        """Remember how long the work of the last heartbeat took."""
        use = (last.activity.stage, last.shape)
        if last.is_first_use:  # may include a compilation, so it is an estimate for the second use only
            self._first_uses[use] = max(self._first_uses.get(use, 0.0), silence_s)
        else:
            self._first_uses.pop(use, None)
            self._in_visit = max(self._in_visit, silence_s)

    def exclude_pause(self, now: float, seconds: float) -> None:
        """Do not count the last `seconds`. The watchdog itself did not run, so the rank probably did not either."""
        self._pauses.append((now, seconds))

    def limit_s(self, beat: Heartbeat) -> float:
        """Return how long the rank may be silent now.

        It is the cap in these cases: the start of a run, whose work happens only once; work not seen before;
        exceptional work; and a wait for the rank's own threads, because a disk may be slow.
        """
        activity = beat.activity
        is_unknown = activity.stage == "start" or beat.is_new or beat.is_first_use or bool(activity.exceptional)
        longest = None if is_unknown or activity.waits_for_itself else self._longest.get(activity.stage)
        if longest is None:
            return self.cap_s
        longest = max(longest, self._first_uses.get((activity.stage, beat.shape), 0.0))
        return min(self.cap_s, max(self.floor_s, STRETCH * longest))

    def state(self, rank: int, host: str, beat: Heartbeat, letter: str, now: float) -> RankState:
        """Return the rank's state. `letter` is the kernel's state of its process, or "" if the process is gone."""
        alive_at = max(beat.at, beat.io_at, beat.debugger_closed_at)
        frozen = STOPPED if letter in ("T", "t") else ""
        if letter and beat.io_at and not beat.is_in_debugger and self._seconds_since(alive_at, now) > self.floor_s:
            frozen = frozen or FROZEN
        return RankState(
            **vars(beat.activity),
            rank=rank,
            host=host,
            silent_s=self._seconds_since(alive_at if frozen else beat.progress_at, now),
            stage_s=round(now - beat.stage_at, 1),
            limit_s=self.floor_s if frozen else self.limit_s(beat),
            frozen=frozen,
            debugged=beat.is_in_debugger,
        )

    def _seconds_since(self, at: float, now: float) -> float:
        """Return the seconds of silence, without pauses of the machine."""
        return max(0.0, round(now - at - sum(seconds for end, seconds in self._pauses if end > at), 1))
