"""The watchdog's view of its rank: heartbeats, silence, stacks and collectives."""

import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rl.watch.culprit import Diagnosis, RankState, Silence
from rl.watch.heart import Heart
from rl.watch.process import RankProcess
from rl.watch.recorder import READ_S, Recording
from rl.watch.silence import STOPPED, Limits, SilenceDetector
from rl.watch.stacks import ANSWER_S, Stacks, stands_in_collective, write_stacks


@dataclass
class _Examination:
    """A diagnosis that is not complete yet."""

    began_at: float
    state: RankState
    recording: Recording
    diagnosis: Diagnosis | None = None  # from the stacks; the collectives follow


class RankMonitor:
    """Watch one rank from its watchdog: read its heartbeats, measure its silence, and diagnose it on request."""

    def __init__(self, heart: Heart, process: RankProcess, stacks: Stacks):
        self.rank, self.world = -1, ""  # set when the rank joins
        self.host = socket.gethostname()
        self.folder: Path | None = None  # of the run, once it is known
        self._collectives = ""
        self.silence = SilenceDetector(Limits())
        beat = heart.read()
        assert beat is not None
        self.beat = beat
        self._heart, self._process, self._stacks = heart, process, stacks
        self._examination: _Examination | None = None

    def join(self, rank: int, world: str) -> None:
        """Record the rank's number and the id of its world."""
        self.rank, self.world = rank, world

    def begin_run(self, folder: Path, collectives: str, limits: Limits) -> None:
        """Use the run's folder and its limits of silence from now on.

        `collectives` is the path of the flight recorder's files, without the rank. It is empty if nothing is recorded.
        """
        self.folder, self._collectives = folder, collectives
        self.silence.set_limits(limits)

    def update(self) -> None:
        """Read the newest heartbeat."""
        self.beat = self._heart.read() or self.beat
        self.silence.see(self.beat)

    def frozen(self) -> str:
        """Return why no thread of the rank runs, or "" if one does."""
        return self.silence.frozen(self.beat, time.monotonic(), self._process.state)

    def is_silent(self) -> bool:
        """Return whether the rank has been silent for longer than its limit."""
        return self.silence.is_silent(self.beat, time.monotonic(), self.frozen())

    def state(self) -> RankState:
        """Return what is known about the rank without examining it."""
        beat, now, frozen = self.beat, time.monotonic(), self.frozen()
        silence = Silence(
            silent_s=round(self.silence.silent_s(beat, now, frozen), 1),
            stage_s=round(now - beat.times.stage_at, 1),
            limit_s=self.silence.limits.floor_s if frozen else self.silence.limit_s(beat),
            frozen=frozen,
            debugged=beat.times.is_in_debugger,
        )
        return RankState(self.rank, self.host, beat.activity, silence)

    def start_diagnosis(self) -> None:
        """Ask the rank for its stacks and collectives. `finished_diagnosis` returns the result later."""
        state = self.state()  # read it first: a stopped process is woken to write its stacks
        recording = Recording(self.world, self.rank, self._collectives)
        self._stacks.ask(is_stopped=state.silence.frozen == STOPPED)
        self._examination = _Examination(time.monotonic(), state, recording)

    def finished_diagnosis(self) -> RankState | None:
        """Return the rank's state with a complete diagnosis, once. Return None before and after that.

        The stacks are written to a file while the flight recorder answers.
        """
        if self._examination is None:
            return None
        examination, now = self._examination, time.monotonic()
        if examination.diagnosis is None and now >= examination.began_at + ANSWER_S:
            stacks = self._stacks.take()
            path = write_stacks(stacks, self.folder, self.rank)
            examination.diagnosis = Diagnosis(in_collective=stands_in_collective(stacks), stacks=path)
        recording, diagnosis = examination.recording, examination.diagnosis
        if diagnosis is None or not (recording.is_over or now >= examination.began_at + READ_S):
            return None
        self._examination = None
        diagnosis = replace(diagnosis, is_pending=recording.is_pending, collectives=recording.path)
        return replace(examination.state, diagnosis=diagnosis)
