"""A small process beside each rank, forked before torch is imported: it outlives a rank that is frozen or killed.

It reads the rank's beats from shared memory, tells them to the board (in the watchdog of rank 0) and to its node's run
folder, and asks the board for a verdict when its rank has died or has been silent for longer than its stage may be. It
ends the rank when the board says so, or when the board itself is out of reach.
"""

import json
import math
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rl.ends import Memory
from rl.watch.board import CUT_S, Board
from rl.watch.culprit import Account
from rl.watch.heart import HEART, Heart
from rl.watch.lines import Lines
from rl.watch.recorder import ask_for_collectives
from rl.watch.silence import Limits, Watch
from rl.watch.stacks import ANSWER_S, Stacks, stands_in_collective, write_stacks

TICK_S = 0.1
BEAT_S = 1.0
GRACE_S = 3.0  # from the verdict to the end of a rank that does not end by itself
CLOSE_S = 60.0  # for a rank that is done to close its engines
MAX_LATE_S = 1.0
LAST_WORDS_S = 6.0  # after the rank's end, for the board's verdict
CHILDREN_S = 1.0  # for what a rank leaves to end by itself: Python's tracker of shared memory then removes it
MAX_EARLY_DEATHS = 3
STOPPED = "its process was stopped by a signal"


class Watchdog:
    def __init__(self, pid: int, agent: int, line: socket.socket, heart: Heart, stacks: Stacks):
        """`agent` is the launcher's process, 0 where there is none."""
        self._pid, self._heart, self._stacks = pid, heart, stacks
        self._selector = selectors.DefaultSelector()
        self._rank_line = Lines(line)
        self._exit_fd = os.pidfd_open(pid)
        self._selector.register(line, selectors.EVENT_READ, self._read_rank)
        self._selector.register(self._exit_fd, selectors.EVENT_READ, self._rank_ended)
        self._watch = Watch(Limits())
        self._beat = heart.read()
        self._rank, self._local_rank, self._token = -1, 0, ""
        self._agent = agent
        self._starts = starts_file()
        self._has_raised = False  # before it joined
        self._host = socket.gethostname()
        self._folder: Path | None = None
        self._collectives = ""  # where NCCL's flight recorder writes, less the rank
        self._board: Board | None = None
        self._listener: socket.socket | None = None
        self._board_line: Lines | None = None
        self._peers: dict[int, Lines] = {}
        self._sent_at = self._heard_at = self._told_at = 0.0
        self._round_at = time.monotonic()
        self._sent_tokens: tuple[float, int] = (time.monotonic(), 0)
        self._about_now: dict[str, Any] = {}
        self._status_writer: threading.Thread | None = None
        self._is_done = self._is_ended = self._is_aborted = False
        self._quiet_until = 0.0
        self._account_at: float | None = None
        self._account_due: Account | None = None
        self._kill_at: float | None = None
        self._end_at: float | None = None
        self._kill_children_at: float | None = None

    def run(self) -> None:
        while not self._is_over():
            for key, _ in self._selector.select(TICK_S):
                key.data()
            late = time.monotonic() - self._round_at - TICK_S
            if late > MAX_LATE_S:  # a machine that stood still: what others said in the meantime is not read yet
                self._heard_at += late
                if self._board is not None:
                    self._board.forgive(late)
            self._round_at = time.monotonic()
            self._tick()
        self._start_writing_status()
        if self._status_writer is not None:
            self._status_writer.join(BEAT_S)

    def _is_over(self) -> bool:
        now = time.monotonic()
        if not self._is_ended or self._kill_children_at is not None:
            return False
        if self._end_at is not None and now >= self._end_at:
            return True
        if self._board is not None:  # the last of all
            return (self._is_done or self._board.verdict is not None) and not self._peers
        return self._is_done or self._is_aborted or self._board_line is None

    # The rank

    def _read_rank(self) -> None:
        for message in self._rank_line.receive():
            getattr(self, f"_on_{message.pop('kind')}")(**message)
        if not self._rank_line.is_open:
            self._selector.unregister(self._rank_line.connection)

    def _on_host(self, address: str, token: str) -> None:
        """Of rank 0: the board is to be here."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self._token = token
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._board = Board(self._tell, say)
        self._rank_line.send("hosted", port=self._listener.getsockname()[1])

    def _on_join(self, rank: int, local_rank: int, token: str, board: list[Any]) -> None:
        self._rank, self._local_rank, self._token = rank, local_rank, token
        if local_rank == 0 and self._starts is not None:
            with suppress(OSError):
                self._starts.unlink(missing_ok=True)
        self._heard_at = time.monotonic()
        if self._board is None:
            try:
                connection = socket.create_connection((board[0], board[1]), timeout=CUT_S)
            except OSError as error:
                self._lose_board(f"cannot be reached at {board[0]}:{board[1]}: {error}")
                return
            self._board_line = Lines(connection)
            self._selector.register(connection, selectors.EVENT_READ, self._read_board)
            self._board_line.send("hello", token=token, rank=rank)
        self._send_beat()

    def _on_run(self, folder: str, floor_s: float, cap_s: float, collectives: str) -> None:
        self._folder, self._collectives = Path(folder), collectives
        self._watch.limits = Limits(floor_s, cap_s)
        if self._board is not None:
            self._board.memory = Memory(self._folder)

    def _on_report(self, **report: Any) -> None:
        self._to_board("report", report=report)

    def _on_interrupting(self, **report: Any) -> None:
        self._to_board("interrupting", report=report)

    def _on_done(self) -> None:
        self._is_done = True
        self._kill_at = time.monotonic() + CLOSE_S
        self._to_board("done")

    def _on_raised(self) -> None:
        self._has_raised = True

    def _rank_ended(self) -> None:
        self._selector.unregister(self._exit_fd)
        self._is_ended, self._end_at = True, time.monotonic() + LAST_WORDS_S
        if self._signal_children(signal.SIGTERM):
            self._kill_children_at = time.monotonic() + CHILDREN_S
        remove_segments(self._token)
        if self._rank_line.is_open:
            self._read_rank()  # its last words
        if self._rank < 0:
            self._count_early_death()
        elif not self._is_done and not self._is_aborted:
            self._send_beat()
            self._to_board("died")

    def _count_early_death(self) -> None:
        """Of a rank that raised before it joined, as when a module cannot be imported: torchrun would start it again
        for ever."""
        if not self._has_raised or not self._agent or self._starts is None or os.environ.get("LOCAL_RANK") != "0":
            return
        with suppress(OSError, ValueError):
            count = int(self._starts.read_text()) + 1 if self._starts.exists() else 1
            self._starts.write_text(str(count))
            if count >= MAX_EARLY_DEATHS:
                say(f"oneworld: {count} starts in a row ended before the ranks had met; torchrun is told to stop")
                self._stop_agent()

    def _stop_agent(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._agent, signal.SIGTERM)

    # The board

    def _to_board(self, kind: str, **values: Any) -> None:
        if self._board is not None:
            self._board.handle(self._rank, {"kind": kind, **values})
        elif self._board_line is not None:
            self._board_line.send(kind, **values)

    def _read_board(self) -> None:
        assert self._board_line is not None
        for message in self._board_line.receive():
            self._heard_at = time.monotonic()
            self._obey(message)
        if not self._board_line.is_open:
            self._selector.unregister(self._board_line.connection)
            self._lose_board("is gone: its process ended, or its host was cut off")

    def _lose_board(self, text: str) -> None:
        if self._is_done or self._is_aborted:
            return
        beat = self._beat
        assert beat is not None
        if self._local_rank == 0:  # one line a node: nobody is left to speak for all
            say(f"oneworld: rank 0 {text} (seen by rank {self._rank} on {self._host}, stage {beat.stage})")
        self._obey({"kind": "abort", "stop": False, "fatal": ""})

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "account":
            self._account_due = self._account(
                self._frozen()
            )  # what asking for stacks does to a stopped process is ours
            if ask_for_collectives(self._token[:8], self._rank):
                path = f"{self._collectives}{self._rank}"
                self._account_due = replace(self._account_due, collectives=path)
            self._stacks.ask(is_stopped=self._account_due.frozen == STOPPED)
            self._account_at = time.monotonic() + ANSWER_S
        elif kind == "patience":
            self._quiet_until = time.monotonic() + self._watch.limits.floor_s
        elif kind == "abort" and not self._is_aborted:
            self._is_aborted = True
            self._end(**message)

    def _end(self, stop: bool, fatal: str) -> None:
        if self._local_rank == 0:
            if fatal and self._folder is not None:
                Memory(self._folder).write_fatal(fatal)
            if stop and self._agent:
                self._stop_agent()  # before it sees a dead worker, which it would start again
        self._rank_line.send("abort", stop=stop)
        self._kill_at = time.monotonic() + (0.0 if self._frozen() else GRACE_S)

    # Every moment

    def _tick(self) -> None:
        now = time.monotonic()
        self._beat = self._heart.read() or self._beat
        assert self._beat is not None
        self._watch.see(self._beat)
        if now - self._sent_at >= BEAT_S and self._rank >= 0 and not self._is_ended:
            self._send_beat()
            self._start_writing_status()
        if self._board is not None:
            self._board.tick()
            if now - self._told_at >= BEAT_S:
                self._told_at = now
                for peer in self._peers.values():
                    peer.send("alive")
        elif self._board_line is not None and not self._is_ended:
            self._board_line.flush()
            if now - self._heard_at > CUT_S:
                self._lose_board(f"has not been heard of for {now - self._heard_at:.0f} s: its host is down or cut off")
        if self._account_at is not None and now >= self._account_at:
            self._account_at = None
            assert self._account_due is not None
            stacks = self._stacks.take()
            path = write_stacks(stacks, self._folder, self._rank)
            account = replace(self._account_due, in_collective=stands_in_collective(stacks), stacks=path)
            self._to_board("account", account=asdict(account))
        if self._kill_at is not None and now >= self._kill_at and not self._is_ended:
            self._kill_at = None
            self._kill_rank()
        if self._kill_children_at is not None:
            is_due = now >= self._kill_children_at
            if not self._signal_children(signal.SIGKILL if is_due else 0) or is_due:
                self._kill_children_at = None
        if now >= self._quiet_until and not (self._is_done or self._is_ended or self._is_aborted):
            self._look_for_silence(now)

    def _look_for_silence(self, now: float) -> None:
        assert self._beat is not None
        if not self._watch.is_silent(self._beat, now, self._frozen()):
            return
        self._quiet_until = math.inf  # until the board asks for patience
        if self._board is None and self._board_line is None:  # it has not joined yet
            say(f"oneworld: a rank on {self._host} was silent for {now - self._beat.at:.0f} s before it joined")
            self._kill_rank()
        else:
            self._send_beat()
            self._to_board("silent")

    def _frozen(self) -> str:
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""
        if state in ("T", "t"):
            return STOPPED
        beat = self._beat
        if beat is None or not beat.io_at:  # without an I/O thread nothing shows that the interpreter runs
            return ""
        is_stuck = time.monotonic() - beat.alive_at > self._watch.limits.floor_s
        return "its interpreter is frozen" if is_stuck else ""

    def _account(self, frozen: str = "") -> Account:
        beat, now = self._beat, time.monotonic()
        assert beat is not None
        return Account(
            rank=self._rank,
            host=self._host,
            roles=beat.roles,
            stage=beat.stage,
            step=beat.step,
            version=beat.version,
            item=beat.item,
            waits_for=beat.waits_for,
            silent_s=round(now - (beat.alive_at if frozen else max(beat.at, beat.background_at)), 1),
            stage_s=round(now - beat.stage_at, 1),
            limit_s=self._watch.limits.floor_s if frozen else self._watch.limit_s(beat),
            frozen=frozen,
        )

    def _send_beat(self) -> None:
        self._sent_at = time.monotonic()
        self._about_now = self._about()
        self._to_board("beat", account=asdict(self._account()), about=self._about_now)

    def _about(self) -> dict[str, Any]:
        assert self._beat is not None
        (before, tokens), now = self._sent_tokens, time.monotonic()
        self._sent_tokens = now, self._beat.tokens
        rate = (self._beat.tokens - tokens) / max(now - before, 0.1)
        try:
            pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            pages = 0
        return {"pid": self._pid, "tokens_per_s": round(rate), "memory_mb": pages * os.sysconf("SC_PAGE_SIZE") >> 20}

    def _start_writing_status(self) -> None:
        """For tools/status.py, beside the loop: a disk may take its time."""
        if self._folder is None or (self._status_writer is not None and self._status_writer.is_alive()):
            return
        now = time.time()
        own = asdict(self._account()) | self._about_now | {"world": self._token[:8], "at": now}
        files = {f"rank_{self._rank}": own | {"ended": self._is_ended, "done": self._is_done}}
        if self._board is not None:
            files["board"] = {"at": now, "world": self._token[:8], "ranks": self._board.table()}
        self._status_writer = threading.Thread(target=write_status, args=[self._folder / "status", files], daemon=True)
        self._status_writer.start()

    def _kill_rank(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._exit_fd, signal.SIGKILL)

    def _signal_children(self, number: int) -> bool:
        """Of a rank that torchrun started, which leads a group of its own; whether there are any. 0 only asks."""
        try:
            if self._agent:
                os.killpg(self._pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return bool(self._agent)

    # Of the board's host

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        peer = _Peer(Lines(connection))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read_peer(peer))

    def _read_peer(self, peer: "_Peer") -> None:
        assert self._board is not None
        for message in peer.line.receive():
            if peer.rank is None:
                if message.get("token") != self._token:
                    peer.line.is_open = False
                    break
                peer.rank = message["rank"]
                self._peers[peer.rank] = peer.line
            else:
                self._board.handle(peer.rank, message)
        if not peer.line.is_open:
            self._selector.unregister(peer.line.connection)
            peer.line.connection.close()
            if peer.rank is not None:
                self._peers.pop(peer.rank, None)
                self._board.lost_connection(peer.rank)

    def _tell(self, rank: int, kind: str, **values: Any) -> None:
        if rank == self._rank:
            self._obey({"kind": kind, **values})
        elif rank in self._peers:
            self._peers[rank].send(kind, **values)


class _Peer:
    def __init__(self, line: Lines):
        self.line = line
        self.rank: int | None = None


def starts_file() -> Path | None:
    """In the agent's own folder, which lives as long as it does: how many starts in a row never joined."""
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # FOLDER/attempt_N/LOCAL_RANK/error.json
    return error_file.parents[2] / "oneworld.starts" if len(error_file.parents) > 3 else None


def remove_segments(token: str) -> None:
    """Shared memory of this world's engines, which a rank that was killed while it built one leaves under a name."""
    for segment in Path("/dev/shm").glob(f"oneworld-{token[:8]}-*") if token else ():
        with suppress(OSError):
            segment.unlink()


def say(text: str) -> None:
    with suppress(OSError):  # a full disk must not keep anybody from ending
        os.write(2, (text + "\n").encode(errors="replace"))


def write_status(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """What cannot be written is not worth a failure."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        for name, value in files.items():
            part = folder / f"{name}.{os.getpid()}.part"
            part.write_text(json.dumps(value))
            part.replace(folder / f"{name}.json")


def start() -> Lines:
    """Forks the watchdog of this process; returns the line to it."""
    stacks = Stacks()
    HEART.renew()
    ours, theirs = socket.socketpair()
    pid, agent = os.getpid(), os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if os.fork():
        theirs.close()
        return Lines(ours)
    code = 1
    try:
        ours.close()
        os.setsid()  # what is meant for the rank's group is not meant for it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        Watchdog(pid, agent, theirs, HEART, stacks).run()
        code = 0
    except BaseException:
        say(traceback.format_exc())
        os.kill(pid, signal.SIGKILL)  # a rank that is frozen would not notice that nobody watches it
    finally:
        os._exit(code)
