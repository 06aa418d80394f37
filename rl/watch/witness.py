"""What a watchdog can say of its rank: from beats, from how long there were none, and from stacks."""

import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rl.watch.culprit import Account
from rl.watch.heart import Heart
from rl.watch.process import RankProcess
from rl.watch.recorder import READ_S, Recording
from rl.watch.silence import STOPPED, Limits, Watch
from rl.watch.stacks import ANSWER_S, Stacks, stands_in_collective, write_stacks


@dataclass
class _Inquiry:
    """A question that is not answered yet."""

    at: float
    account: Account
    recording: Recording
    has_stacks: bool = False


class Witness:
    def __init__(self, heart: Heart, process: RankProcess, stacks: Stacks):
        self.rank, self.world = -1, ""  # until the rank joins
        self.host = socket.gethostname()
        self.folder: Path | None = None  # of the run
        self.collectives = ""  # where NCCL's flight recorder writes, less the rank
        self.watch = Watch(Limits())
        beat = heart.read()
        assert beat is not None
        self.beat = beat
        self._heart, self._process, self._stacks = heart, process, stacks
        self._inquiry: _Inquiry | None = None

    def look(self) -> None:
        self.beat = self._heart.read() or self.beat
        self.watch.see(self.beat)

    def frozen(self) -> str:
        return self.watch.frozen(self.beat, time.monotonic(), self._process.state)

    def is_silent(self) -> bool:
        return self.watch.is_silent(self.beat, time.monotonic(), self.frozen())

    def account(self, frozen: str = "") -> Account:
        beat, now = self.beat, time.monotonic()
        return Account(
            rank=self.rank,
            host=self.host,
            roles=beat.roles,
            stage=beat.stage,
            step=beat.step,
            version=beat.version,
            item=beat.item,
            waits_for=beat.waits_for,
            silent_s=round(self.watch.silent_s(beat, now, frozen), 1),
            stage_s=round(now - beat.stage_at, 1),
            limit_s=self.watch.limits.floor_s if frozen else self.watch.limit_s(beat),
            frozen=frozen,
            debugged=beat.is_debugged,
            exceptional=beat.exceptional,
        )

    def ask(self) -> None:
        """For an account with stacks; `answer` has it a moment later."""
        account = self.account(self.frozen())  # before a stopped process is woken to write its stacks
        recording = Recording(self.world, self.rank, self.collectives)
        self._stacks.ask(is_stopped=account.frozen == STOPPED)
        self._inquiry = _Inquiry(time.monotonic(), account, recording)

    def answer(self) -> Account | None:
        """Once, when it is due: the stacks are written while NCCL's recorder is waited for."""
        if self._inquiry is None:
            return None
        inquiry, now = self._inquiry, time.monotonic()
        if not inquiry.has_stacks and now >= inquiry.at + ANSWER_S:
            stacks = self._stacks.take()
            path, in_collective = write_stacks(stacks, self.folder, self.rank), stands_in_collective(stacks)
            inquiry.account = replace(inquiry.account, stacks=path, in_collective=in_collective)
            inquiry.has_stacks = True
        recording = inquiry.recording
        if not inquiry.has_stacks or not (recording.is_over or now >= inquiry.at + READ_S):
            return None
        self._inquiry = None
        return replace(inquiry.account, collectives=recording.path, is_pending=recording.is_pending)
