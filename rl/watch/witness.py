"""What a watchdog can say of its rank: from beats, from how long there were none, and from stacks."""

import socket
import time
from dataclasses import replace
from pathlib import Path

from rl.watch.culprit import Account
from rl.watch.heart import Heart
from rl.watch.process import RankProcess
from rl.watch.recorder import READ_S, Recording
from rl.watch.silence import STOPPED, Limits, Watch
from rl.watch.stacks import ANSWER_S, Stacks, stands_in_collective, write_stacks


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
        self._asked: tuple[float, Account, Recording] | None = None  # when its stacks will be there

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
            silent_s=round(now - (beat.alive_at if frozen else max(beat.worked_at, beat.background_at)), 1),
            stage_s=round(now - beat.stage_at, 1),
            limit_s=self.watch.limits.floor_s if frozen else self.watch.limit_s(beat),
            frozen=frozen,
            debugged=beat.is_debugged,
        )

    def ask(self) -> None:
        """For an account with stacks; `answer` has it a moment later."""
        account = self.account(self.frozen())  # before a stopped process is woken to write its stacks
        recording = Recording(self.world, self.rank, self.collectives)
        self._stacks.ask(is_stopped=account.frozen == STOPPED)
        self._asked = time.monotonic() + ANSWER_S, account, recording

    def answer(self) -> Account | None:
        """Once, when it is due."""
        if self._asked is None:
            return None
        due, account, recording = self._asked
        now = time.monotonic()
        if now < due or not (recording.is_over or now > due + READ_S):
            return None
        self._asked = None
        stacks = self._stacks.take()
        return replace(
            account,
            in_collective=stands_in_collective(stacks) or recording.is_pending,
            stacks=write_stacks(stacks, self.folder, self.rank),
            collectives=recording.path,
        )
