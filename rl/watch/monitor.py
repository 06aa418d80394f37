"""The watchdog's view of its rank: heartbeats, silence, stacks and collectives."""

import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

from rl.watch.culprit import RankState
from rl.watch.heart import Heart
from rl.watch.process import RankProcess
from rl.watch.recorder import READ_S, Recording
from rl.watch.silence import STOPPED, SilenceDetector
from rl.watch.stacks import ANSWER_S, Stacks, stands_in_collective, write_stacks


class RankMonitor:
    """Watch one rank from its watchdog: read its heartbeats, measure its silence, and diagnose it on request."""

    def __init__(self, heart: Heart, process: RankProcess, stacks: Stacks):
        self.rank, self.world = -1, ""  # set when the rank joins
        self.host = socket.gethostname()
        self.folder: Path | None = None  # of the run, once it is known
        self.collectives = ""  # path of the flight recorder's files, without the rank; empty if nothing is recorded
        self.silence = SilenceDetector()
        beat = heart.read()
        assert beat is not None
        self.beat = beat
        self._heart, self._process, self._stacks = heart, process, stacks
        self._examined: RankState | None = None  # the state for which a diagnosis was requested last
        self._diagnosed: RankState | None = None

    def update(self) -> None:
        self.beat = self._heart.read() or self.beat
        self.silence.see(self.beat)

    def state(self) -> RankState:
        """Return what is known about the rank without a diagnosis."""
        return self.silence.state(self.rank, self.host, self.beat, self._process.state, time.monotonic())

    def start_diagnosis(self) -> None:
        """Ask the rank for its stacks and collectives. `finished_diagnosis` returns the result later."""
        state = self._examined = self.state()  # read it first: a stopped process is woken to write its stacks
        recording = Recording(self.world, self.rank, self.collectives)
        recording.start()
        self._stacks.ask(is_stopped=state.frozen == STOPPED)
        threading.Thread(target=self._diagnose, args=[state, recording], daemon=True).start()

    def _diagnose(self, state: RankState, recording: Recording) -> None:
        """Write the stacks to a file while the flight recorder answers."""
        deadline = time.monotonic() + READ_S
        time.sleep(ANSWER_S)
        stacks = self._stacks.take()
        path = write_stacks(stacks, self.folder, self.rank)
        recording.join(max(0.0, deadline - time.monotonic()))
        if self._examined is state:
            diagnosed = replace(state, in_collective=stands_in_collective(stacks), stacks=path)
            self._diagnosed = replace(diagnosed, is_pending=recording.is_pending, collectives=recording.path)

    def finished_diagnosis(self) -> RankState | None:
        """Return the rank's state with a complete diagnosis, once. Return None before and after that."""
        diagnosed, self._diagnosed = self._diagnosed, None
        return diagnosed
