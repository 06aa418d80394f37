"""The watchdog: a small process beside each rank, forked before torch is imported. It survives a frozen or killed rank.

The watchdog reads the rank's heartbeats from shared memory. It sends them to the board, which lives in the watchdog of
rank 0, and writes them to the run folder of its node. If the rank dies or is silent for too long, it asks the board for
a verdict. The board answers with orders: diagnose the rank, wait longer, or abort. The watchdog kills the rank when the
board says so, or when the board cannot be reached.
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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.common.events import Kind, write_end_of_world
from rl.common.files import WAIT_S, write_atomically
from rl.common.handshake import Refusals
from rl.common.json_channel import JsonChannel
from rl.watch.board import BEAT_S
from rl.watch.board_link import BoardClient, BoardServer
from rl.watch.death import OutOfMemoryKills, describe_end
from rl.watch.gpu import GpuMeter
from rl.watch.heart import HEART, Heart
from rl.watch.launcher import Launcher
from rl.watch.lease import RENEW_S, Lease, LeaseKeeper, LeaseOwner, ProcessIdentity
from rl.watch.monitor import RankMonitor
from rl.watch.parent import leave_rank
from rl.watch.process import RankProcess, remove_segments
from rl.watch.reports import AttemptHistory, Cause, Report
from rl.watch.stacks import Stacks
from rl.watch.teller import EndOfWorld, Teller
from rl.watch.told import VERDICT_S
from rl.watch.usage import HOST_MEMORY

TICK_S = 0.1
GRACE_S = 3.0  # after the verdict, before a rank that has not exited is killed
CLOSE_S = 60.0  # limit for a finished rank to close its engines
MAX_LATE_S = 1.0  # a longer delay of a tick counts as a pause of the machine
MAX_EARLY_DEATHS = 3
BEFORE_JOIN = "before the ranks had met"


def start_watchdog() -> JsonChannel:
    """Fork the watchdog of this process and return the connection to it."""
    stacks = Stacks()
    HEART.renew()
    ours, theirs = socket.socketpair()
    pid, agent = os.getpid(), os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    if os.fork():
        theirs.close()
        return JsonChannel(ours)
    code = 1
    try:
        ours.close()
        leave_rank()
        Watchdog(pid, agent, theirs, HEART, stacks).run()
        code = 0
    except BaseException:
        say(traceback.format_exc())
        os.kill(pid, signal.SIGKILL)  # a frozen rank would not notice that its watchdog is gone
    finally:
        os._exit(code)


class Watchdog:
    """The main loop of a watchdog process. `pid` and `connection` belong to the rank, `agent` is torchrun's id or 0."""

    def __init__(self, pid: int, agent: int, connection: socket.socket, heart: Heart, stacks: Stacks):
        self._process, self._launcher = RankProcess(pid, leads_group=bool(agent)), Launcher(agent)
        self._monitor = RankMonitor(heart, self._process, stacks)
        self._selector = selectors.DefaultSelector()
        self._rank_channel = JsonChannel(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._read_rank)
        self._selector.register(self._process.exit_fd, selectors.EVENT_READ, self._rank_ended)
        self._local_rank = int(os.environ.get("LOCAL_RANK", 0)) if agent else 0
        self._out_of_memory_kills = OutOfMemoryKills()
        self._server: BoardServer | None = None  # only in the watchdog of rank 0
        self._board: BoardServer | BoardClient | None = None  # once the rank has joined
        self._round_at = time.monotonic()
        self._sent_at, self._sent_tokens = 0.0, 0  # of the last heartbeat that was sent
        self._about: dict[str, int] = {}  # about the process and its GPU, for status files
        self._gpu = GpuMeter("")  # until the rank names its card
        self._has_raised = self._is_unfit = self._is_done = self._is_aborted = self._is_final = self._is_told = False
        self._end, self._end_step = "", 0  # how the world ended, and at which step, for status files and events
        self._lease: LeaseKeeper | None = None  # only in the watchdog of a node's first rank
        self._renewed_at = 0.0
        self._quiet_until = 0.0
        self._kill_at = math.inf
        self._writers: dict[str, threading.Thread] = {}
        self._teller = Teller(self._launcher, self._monitor)
        self._end_at: float | None = None  # when this process ends at the latest; None while the rank lives

    def run(self) -> None:
        if self._local_rank == 0:
            self._launcher.begin()
        while not self._is_over():
            for key, _ in self._selector.select(TICK_S):
                key.data()
            now = time.monotonic()
            if (late := now - self._round_at - TICK_S) > MAX_LATE_S:  # the machine was suspended or overloaded
                self._monitor.silence.exclude_pause(now, late)
                if self._board is not None:
                    self._board.exclude_pause(late)  # messages of the other watchdogs may wait unread
            self._round_at = now
            self._tick()
        self._write_status()
        self._join_writers()
        is_final = self._is_done or self._is_final
        if self._lease is not None and (is_final or not self._is_told):
            self._write("lease", self._lease.end, is_final)
            self._join_writers()
        self._teller.join()
        if line := self._launcher.wait_to_repeat(is_end=self._is_final or self._is_told):
            say(line)
        self._teller.stay()
        self._launcher.end()

    def _is_over(self) -> bool:
        if self._end_at is None or self._process.has_children_left:
            return False
        return self._board is None or time.monotonic() >= self._end_at or self._board.may_end(self._is_settled)

    @property
    def _is_settled(self) -> bool:
        return self._is_done or self._is_aborted

    # Messages of the rank: `_on_KIND` handles messages of that kind. The board handles reports.

    def _read_rank(self) -> None:
        for message in self._rank_channel.receive():
            kind = message.pop("kind")
            if kind in ("report", "interrupting"):
                self._send(kind, report=message)
            else:
                getattr(self, f"_on_{kind}")(**message)
        if not self._rank_channel.is_open:
            self._selector.unregister(self._rank_channel.connection)

    def _on_host(self, address: str, key: str, size: int) -> None:
        """Open the board. Only rank 0 asks for this."""
        board = BoardServer(address, bytes.fromhex(key), size, self._selector, self._handle_board_message, say)
        self._board = self._server = board
        self._rank_channel.send("hosted", port=board.port)

    def _on_join(self, rank: int, local_rank: int, world: str, key: str, board: list[Any]) -> None:
        self._local_rank = local_rank
        self._monitor.rank, self._monitor.world = rank, world
        if self._server is None:
            handlers = self._handle_board_message, self._on_lost_board
            try:
                self._board = BoardClient((board[0], board[1]), bytes.fromhex(key), self._selector, *handlers)
            except OSError as error:
                self._on_lost_board(f"cannot be reached at {board[0]}:{board[1]}: {error}")
                return
            self._send("hello", rank=rank)
        self._send_beat()
        if local_rank == 0 and isinstance(self._board, BoardClient):
            address = self._teller.become_deputy(rank, self._board.own_host, bytes.fromhex(key), Refusals(say))
            if address is not None:
                self._send("deputy", host=address[0], port=address[1])

    def _on_run(self, folder: str, floor_s: float, cap_s: float, collectives: str) -> None:
        self._monitor.folder, self._monitor.collectives = Path(folder), collectives
        self._monitor.silence.floor_s, self._monitor.silence.cap_s = floor_s, cap_s
        if self._local_rank == 0:
            self._launcher.forget_early_deaths()
            self._launcher.begin_world(self._teller.world)
        if self._server is not None:
            self._server.board.history = AttemptHistory(Path(folder))

    def _on_gpu(self, uuid: str) -> None:
        """Measure this card from now on."""
        self._gpu = GpuMeter(uuid)

    def _on_collect_usage(self) -> None:
        """Pass the measurements of all ranks to this rank from now on. Only the leader asks for this."""
        self._send("collect_usage")

    def _on_rewards(self, first: float, last: float) -> None:
        """Keep the rewards of the run for the message about its end. Only the leader sends them."""
        self._send("rewards", first=first, last=last)

    def _on_collect_activities(self) -> None:
        """Pass on to this rank what all ranks are doing. Only a leader with a live view asks for this."""
        self._send("collect_activities")

    def _on_lease(self, folder: str, number: int, owner: dict[str, Any], token: str, renews: bool) -> None:
        """Renew the lease on the run folder from now on."""
        launchers = [ProcessIdentity(**launcher) for launcher in owner.pop("launchers")]
        lease = Lease(Path(folder), number, LeaseOwner(launchers=launchers, **owner), token)
        self._lease = LeaseKeeper(lease, renews)

    def _on_done(self) -> None:
        self._is_done = True
        self._kill_at = time.monotonic() + CLOSE_S
        self._monitor.update()
        self._send_beat()  # so that status files show the final state
        self._send("done")
        if self._server is not None:
            self._teller.finish(self._monitor.beat.activity.step)

    def _on_unfit(self, line: str) -> None:
        """Stop torchrun, because a setting keeps this node's ranks from joining. The first of them has printed why."""
        self._is_unfit = True
        if line:
            self._launcher.keep_last(line, is_final=True)
            self._launcher.stop()

    def _on_raised(self) -> None:
        self._has_raised = True  # if the exit code is not 0: before it joined, for example because an import failed

    def _rank_ended(self) -> None:
        exit_code = self._process.exit_code  # first, because the agent is about to collect it
        self._selector.unregister(self._process.exit_fd)
        self._end_at = time.monotonic() + VERDICT_S
        self._process.end_children()
        remove_segments(self._monitor.world)
        if self._rank_channel.is_open:
            self._read_rank()  # messages from before the exit
        if self._monitor.rank < 0:
            self._end_before_join(exit_code)
        elif not self._is_settled:
            self._monitor.update()  # what it did last, which may be newer than the last look
            self._send_beat()
            self._send("died", how=self._describe_end(exit_code))

    def _end_before_join(self, exit_code: int | None) -> None:
        """Say why the rank ended before it joined the others, once per node."""
        if self._is_done or self._is_unfit or exit_code == 0:
            return
        if exit_code in (-signal.SIGINT, -signal.SIGTERM):
            if self._local_rank == 0 and not self._launcher.has_early_death and self._is_stopped(exit_code):
                self._is_told = True
                how = "interrupted" if exit_code == -signal.SIGINT else "stopped by SIGTERM"
                self._say_last(f"oneworld: {how} {BEFORE_JOIN}", is_final=True)
        elif (self._has_raised or exit_code) and (count := self._launcher.count_early_death()):
            if count >= MAX_EARLY_DEATHS:
                self._say_last(f"oneworld: {count} starts in a row ended {BEFORE_JOIN}; torchrun is told to stop", True)
                self._launcher.stop()
            else:
                how = "its error is above" if self._has_raised else self._describe_end(exit_code)
                self._say_last(f"oneworld: a rank on {self._monitor.host} ended {BEFORE_JOIN}: {how}")

    def _is_stopped(self, exit_code: int) -> bool:
        """Return whether a signal ends torchrun too. It also sends SIGTERM to restart ranks, if those elsewhere end."""
        if exit_code == -signal.SIGINT:
            return not self._launcher.is_gone
        return self._launcher.wait_until_ending(VERDICT_S)

    def _describe_end(self, exit_code: int | None) -> str:
        return describe_end(exit_code, self._out_of_memory_kills.is_recent, self._launcher.is_gone)

    # The board

    def _send(self, kind: str, **values: Any) -> None:
        if self._board is not None:
            self._board.send(kind, **values)

    def _on_lost_board(self, text: str) -> None:
        if self._is_settled:
            return
        self._end, self._end_step = f"rank 0 {text}", self._monitor.beat.activity.step
        rank, host, stage = self._monitor.rank, self._monitor.host, self._monitor.beat.activity.stage
        line = f"oneworld: rank 0 {text} (seen by rank {rank} on {host}, stage {stage})"
        if self._local_rank == 0:  # one line per node, because no board prints one for all
            self._say_last(line)
        self._handle_board_message({"kind": "abort", "stop": False, "fatal": "", "is_told": False, "line": ""})
        self._teller.lose_board(EndOfWorld(self._end_step, line))

    def _handle_board_message(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "diagnose":
            self._monitor.start_diagnosis()
        elif kind in ("usage", "activities"):
            if not self._rank_channel.has_unsent:  # a rank that does not read must still be told to end
                self._rank_channel.send(kind, rows=message["rows"])
        elif kind == "deputies":
            self._teller.meet({rank: (host, port) for rank, host, port in message["rows"]})
        elif kind == "rewards":
            self._teller.rewards = message["first"], message["last"]
        elif kind == "wait":
            self._quiet_until = time.monotonic() + self._monitor.silence.floor_s
        elif kind == "abort" and not self._is_aborted:
            self._end, self._end_step = message.pop("end", self._end), message.pop("step", self._end_step)
            self._is_aborted = True
            self._abort(**message)

    def _abort(self, stop: bool, fatal: str, is_told: bool, line: str) -> None:
        """End the rank. `line` says why: the board prints it on its own node, and one watchdog on each other node."""
        self._is_final, self._is_told = stop, is_told
        is_first, has_board = self._local_rank == 0, self._server is not None
        if line and not has_board:
            line = f"oneworld: the ranks on {self._monitor.host} end: {line.removeprefix('oneworld: ')}"
        if line and is_first:
            self._launcher.keep_last(line, is_final=stop or is_told)
        if stop and is_first:
            self._launcher.stop()  # before it sees a dead worker and restarts it
        self._rank_channel.send("abort", stop=stop)
        self._kill_at = time.monotonic() + (0.0 if self._monitor.state().frozen else GRACE_S)
        if has_board:
            self._teller.end(EndOfWorld(self._end_step, line, is_final=stop, is_told=is_told))
        if is_first and self._monitor.folder is not None:
            self._write("history", self._note_end, self._monitor.folder, self._monitor.beat.activity.step, fatal)
        if line and is_first and not has_board:
            say(line)  # at the end, because the console may hang

    def _note_end(self, folder: Path, step: int, fatal: str) -> None:
        if self._lease is not None:
            self._lease.check()
            if self._lease.lost:
                return
        history = AttemptHistory(folder)
        if self._lease is not None and self._lease.renews:  # true of one watchdog per disk
            kind: Kind = "stop" if self._is_told else "fault"
            write_end_of_world(folder, self._monitor.world, kind, self._end_step, self._end)
        if fatal:
            history.write_fatal(fatal)
        if self._server is not None:
            history.note_end(step)

    # Called every TICK_S

    def _tick(self) -> None:
        now, is_ended = time.monotonic(), self._end_at is not None
        self._monitor.update()
        if now - self._sent_at >= BEAT_S and self._monitor.rank >= 0 and not is_ended:
            self._send_beat()
            self._write_status()
        if self._lease is not None and not is_ended and not self._is_aborted:
            self._keep_lease(self._lease, now)
        if self._board is not None and (self._server is not None or not is_ended):
            self._board.tick()
        if (state := self._monitor.finished_diagnosis()) is not None:
            self._send("diagnosis", state=asdict(state))
        if now >= self._kill_at and not is_ended:
            self._kill_at = math.inf
            self._process.kill()
        self._process.tick()
        if now >= self._quiet_until and not (self._is_settled or is_ended) and self._monitor.state().is_silent:
            self._report_silence()

    def _keep_lease(self, lease: LeaseKeeper, now: float) -> None:
        if lease.lost is not None and self._renewed_at < math.inf:
            self._renewed_at = math.inf  # report once
            state = self._monitor.state()
            cause: Cause = "lost" if lease.lost.is_restart else "fatal"
            place = state.rank, state.roles, state.host, state.stage, state.step
            self._send("report", report=asdict(Report(*place, str(lease.lost), "", cause)))
        elif now - self._renewed_at >= RENEW_S:
            self._renewed_at = now
            self._write("lease", lease.renew)

    def _report_silence(self) -> None:
        self._quiet_until = math.inf  # report once, until the board orders to wait longer
        if self._board is None:  # the rank has not joined yet
            silent_s = time.monotonic() - self._monitor.beat.at
            self._say_last(f"oneworld: a rank on {self._monitor.host} was silent for {silent_s:.0f} s before it joined")
            self._process.kill()
        else:
            self._send_beat()
            self._send("silent")

    def _say_last(self, line: str, is_final: bool = False) -> None:
        self._launcher.keep_last(line, is_final)
        say(line)

    def _send_beat(self) -> None:
        now, tokens, process = time.monotonic(), self._monitor.beat.tokens, self._process
        rate = (tokens - self._sent_tokens) / max(now - self._sent_at, 0.1)
        self._sent_at, self._sent_tokens = now, tokens
        self._out_of_memory_kills.look()
        self._about = {"pid": process.pid, "tokens_per_s": round(rate), HOST_MEMORY: process.memory_mb}
        self._about |= self._gpu.look()
        self._send("beat", state=asdict(self._monitor.state()), about=self._about)

    def _write_status(self) -> None:
        monitor = self._monitor
        if monitor.folder is None or (self._lease is not None and self._lease.lost):
            return
        stamp = {"world": monitor.world, "at": time.time(), "end": self._end}
        ends = {"ended": self._end_at is not None, "done": self._is_done}
        files = {f"rank_{monitor.rank}": asdict(monitor.state()) | self._about | stamp | ends}
        if self._server is not None:
            files["board"] = stamp | {"ranks": self._server.board.table()}
        self._write("status", write_status, monitor.folder / "status", files)

    def _join_writers(self) -> None:
        for writer in self._writers.values():
            writer.join(WAIT_S)

    def _write(self, name: str, work: Callable[..., None], *args: Any) -> None:
        """Write files in a thread, because the file system may hang. Skip this while the last such work runs."""
        if name not in self._writers or not self._writers[name].is_alive():
            self._writers[name] = threading.Thread(target=work, args=args, daemon=True)
            self._writers[name].start()


def write_status(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write a JSON file for each name, which tools/status.py shows. A file that cannot be written is skipped."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        for name, value in files.items():
            write_atomically(folder / f"{name}.json", json.dumps(value))


def say(text: str) -> None:
    """Print to stderr. Ignore a console that cannot be written to."""
    with suppress(OSError):
        os.write(2, (text + "\n").encode(errors="replace"))
