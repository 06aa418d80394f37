"""A small process beside each rank, forked before torch is imported: it outlives a rank that is frozen or killed.

It reads the rank's beats from shared memory, tells them to the board (in the watchdog of rank 0) and to its node's run
folder, and asks the board for a verdict when its rank has died or has been silent for longer than its stage may be. It
ends the rank when the board says so, or when the board itself is out of reach.

    heart.py -> witness.py (silence.py, stacks.py, recorder.py) -> this file -> host.py or link.py -> board.py

The board answers with orders: an account, patience, the end. What is done then is in process.py, of the rank, and in
launcher.py, of torchrun; status.py writes what people are shown.
"""

import math
import os
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.watch.board import BEAT_S
from rl.watch.heart import Heart
from rl.watch.host import Host
from rl.watch.in_time import WAIT_S
from rl.watch.launcher import Launcher
from rl.watch.lines import Lines
from rl.watch.link import Link
from rl.watch.process import RankProcess, remove_segments
from rl.watch.reports import Memory
from rl.watch.silence import Limits
from rl.watch.stacks import Stacks
from rl.watch.status import Status
from rl.watch.witness import Witness

TICK_S = 0.1
GRACE_S = 3.0  # from the verdict to the end of a rank that does not end by itself
CLOSE_S = 60.0  # for a rank that is done to close its engines
MAX_LATE_S = 1.0
LAST_WORDS_S = 6.0  # after the rank's end, for the board's verdict
MAX_EARLY_DEATHS = 3


class Watchdog:
    def __init__(self, pid: int, agent: int, line: socket.socket, heart: Heart, stacks: Stacks):
        """`agent` is the launcher's process, 0 where there is none."""
        self._process, self._launcher = RankProcess(pid, leads_group=bool(agent)), Launcher(agent)
        self._witness, self._status = Witness(heart, self._process, stacks), Status(self._process)
        self._selector = selectors.DefaultSelector()
        self._rank_line = Lines(line)
        self._selector.register(line, selectors.EVENT_READ, self._read_rank)
        self._selector.register(self._process.exit_fd, selectors.EVENT_READ, self._rank_ended)
        self._local_rank = 0
        self._host: Host | None = None  # of the board; or else, once the rank has joined, the link to it
        self._link: Link | None = None
        self._round_at, self._sent_at = time.monotonic(), 0.0
        self._has_raised = self._is_done = self._is_aborted = False
        self._quiet_until = 0.0
        self._kill_at: float | None = None
        self._noter: threading.Thread | None = None  # writes down how it ended
        self._end_at: float | None = None  # at the latest; None: the rank lives

    def run(self) -> None:
        while not self._is_over():
            for key, _ in self._selector.select(TICK_S):
                key.data()
            now = time.monotonic()
            if (late := now - self._round_at - TICK_S) > MAX_LATE_S:  # a machine that stood still
                self._witness.watch.forgive(now, late)
                if self._board is not None:
                    self._board.forgive(late)  # what others said meanwhile is not read yet
            self._round_at = now
            self._tick()
        self._write_status()
        self._status.wait()
        if self._noter is not None:
            self._noter.join(WAIT_S)

    def _is_over(self) -> bool:
        if self._end_at is None or self._process.has_children_left:
            return False
        if time.monotonic() >= self._end_at or self._board is None:
            return True
        return self._board.may_end(self._is_settled)

    @property
    def _board(self) -> Host | Link | None:
        return self._host or self._link

    @property
    def _has_joined(self) -> bool:
        return self._witness.rank >= 0

    @property
    def _is_settled(self) -> bool:
        """The rank may end, or has to."""
        return self._is_done or self._is_aborted

    # What the rank says

    def _read_rank(self) -> None:
        for message in self._rank_line.receive():
            getattr(self, f"_on_{message.pop('kind')}")(**message)
        if not self._rank_line.is_open:
            self._selector.unregister(self._rank_line.connection)

    def _on_host(self, address: str, token: str) -> None:
        """Of rank 0: the board is to be here."""
        self._witness.world = token[:8]
        self._host = Host(address, token, self._selector, self._obey, say)
        self._rank_line.send("hosted", port=self._host.port)

    def _on_join(self, rank: int, local_rank: int, token: str, board: list[Any]) -> None:
        self._local_rank, self._witness.rank, self._witness.world = local_rank, rank, token[:8]
        if self._host is None:
            try:
                self._link = Link((board[0], board[1]), self._selector, self._obey, self._lose_board)
            except OSError as error:
                self._lose_board(f"cannot be reached at {board[0]}:{board[1]}: {error}")
                return
            self._link.send("hello", token=token, rank=rank)
        self._send_beat()

    def _on_run(self, folder: str, floor_s: float, cap_s: float, collectives: str) -> None:
        self._witness.folder, self._witness.collectives = Path(folder), collectives
        self._witness.watch.limits = Limits(floor_s, cap_s)
        if self._local_rank == 0:
            self._launcher.forget_early_deaths()
        if self._host is not None:
            self._host.board.memory = Memory(Path(folder))

    def _on_report(self, **report: Any) -> None:
        self._to_board("report", report=report)

    def _on_interrupting(self, **report: Any) -> None:
        self._to_board("interrupting", report=report)

    def _on_done(self) -> None:
        self._is_done = True
        self._kill_at = time.monotonic() + CLOSE_S
        self._witness.look()
        self._send_beat()  # the last that people see of it
        self._to_board("done")

    def _on_raised(self) -> None:
        """Before it joined, as when a module cannot be imported."""
        self._has_raised = True

    def _rank_ended(self) -> None:
        self._selector.unregister(self._process.exit_fd)
        self._end_at = time.monotonic() + LAST_WORDS_S
        self._process.end_children()
        remove_segments(self._witness.world)
        if self._rank_line.is_open:
            self._read_rank()  # its last words
        if not self._has_joined:
            is_own_end = self._has_raised or self._process.has_crashed
            if is_own_end and (count := self._launcher.count_early_death()) >= MAX_EARLY_DEATHS:
                say(f"oneworld: {count} starts in a row ended before the ranks had met; torchrun is told to stop")
                self._launcher.stop()
        elif not self._is_settled:
            self._send_beat()
            self._to_board("died")

    # What the board says

    def _to_board(self, kind: str, **values: Any) -> None:
        if self._board is not None:
            self._board.send(kind, **values)

    def _lose_board(self, text: str) -> None:
        if self._is_settled:
            return
        if self._local_rank == 0:  # one line a node: nobody is left to speak for all
            us = self._witness
            say(f"oneworld: rank 0 {text} (seen by rank {us.rank} on {us.host}, stage {us.beat.stage})")
        self._obey({"kind": "abort", "stop": False, "fatal": ""})

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "account":
            self._witness.ask()
        elif kind == "patience":
            self._quiet_until = time.monotonic() + self._witness.watch.limits.floor_s
        elif kind == "abort" and not self._is_aborted:
            self._is_aborted = True
            self._end(**message)

    def _end(self, stop: bool, fatal: str) -> None:
        if stop and self._local_rank == 0:
            self._launcher.stop()  # before it sees a dead worker, which it would start again
        self._rank_line.send("abort", stop=stop)
        self._kill_at = time.monotonic() + (0.0 if self._witness.frozen() else GRACE_S)
        if self._local_rank == 0 and self._witness.folder is not None:
            memory, step = Memory(self._witness.folder), self._witness.beat.step
            self._noter = threading.Thread(target=self._note_end, args=[memory, step, fatal], daemon=True)
            self._noter.start()

    def _note_end(self, memory: Memory, step: int, fatal: str) -> None:
        """Beside the loop, which has others to tell: the folder may hang."""
        if fatal:
            memory.write_fatal(fatal)
        if self._host is not None:
            memory.note_end(step)

    # Every moment

    def _tick(self) -> None:
        now, is_ended = time.monotonic(), self._end_at is not None
        self._witness.look()
        if now - self._sent_at >= BEAT_S and self._has_joined and not is_ended:
            self._send_beat()
            self._write_status()
        if self._host is not None:
            self._host.tick()
        elif self._link is not None and not is_ended:
            self._link.tick()
        if (account := self._witness.answer()) is not None:
            self._to_board("account", account=asdict(account))
        if self._kill_at is not None and now >= self._kill_at and not is_ended:
            self._kill_at = None
            self._process.kill()
        self._process.tick()
        if now >= self._quiet_until and not (self._is_settled or is_ended) and self._witness.is_silent():
            self._tell_silence()

    def _tell_silence(self) -> None:
        self._quiet_until = math.inf  # until the board asks for patience
        if self._board is None:  # it has not joined yet
            silent_s = time.monotonic() - self._witness.beat.at
            say(f"oneworld: a rank on {self._witness.host} was silent for {silent_s:.0f} s before it joined")
            self._process.kill()
        else:
            self._send_beat()
            self._to_board("silent")

    def _send_beat(self) -> None:
        self._sent_at = time.monotonic()
        about = self._status.look(self._witness.beat.tokens)
        self._to_board("beat", account=asdict(self._witness.account(self._witness.frozen())), about=about)

    def _write_status(self) -> None:
        us = self._witness
        if us.folder is None or self._status.is_writing:
            return
        stamp = {"world": us.world, "at": time.time()}
        ends = {"ended": self._end_at is not None, "done": self._is_done}
        files = {f"rank_{us.rank}": asdict(us.account(us.frozen())) | self._status.about | stamp | ends}
        if self._host is not None:
            files["board"] = stamp | {"ranks": self._host.board.table()}
        self._status.start_writing(us.folder, files)


def say(text: str) -> None:
    with suppress(OSError):  # a full disk must not keep anybody from ending
        os.write(2, (text + "\n").encode(errors="replace"))
