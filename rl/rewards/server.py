"""Hands calls to workers and takes their results, enforces the wall, and leaves no process behind.

It waits for the functions, imports them once, and forks workers that have them. A worker whose call outlasts the wall,
that dies, that answers nonsense or has too many processes is killed with all that it started, and another takes its
place; the call's result is then a failure. It ends when its rank does.
"""

import gc
import json
import math
import os
import select
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import Any

from rl.net.framing import Buffer, Channel
from rl.rewards import worker
from rl.rewards.tree import adopt_orphans, children_of, descendants_of, end_tree
from rl.watch.parent import die_with_parent

MAX_RESULT = 1 << 18  # bytes
MAX_PROCESSES = 64  # below a worker
LOOK_S = 0.1  # how often they are counted, of calls that last
START_S = 30.0  # for a worker to begin
MAX_STILLBORN = 5  # workers in a row that end before they begin
FORK_AGAIN_S = 0.2  # where memory or process numbers are short
MAX_FORK_FAILURES = 100
SWEEP_S = 0.01
LAST_MOMENT_S = 0.1  # from a dying process's line, which closes first, to its exit code
END_S = 5  # for the end of all processes below


class _Worker:
    def __init__(self, pid: int, connection: socket.socket):
        self.pid, self.exit_fd = pid, os.pidfd_open(pid)
        self.channel = Channel(connection, worker.MAX_CALL_ID, MAX_RESULT)
        self.call_id: bytes | None = None  # of the call that it runs
        self.began_at = time.monotonic()
        self.has_begun = False

    def close(self) -> None:
        self.channel.close()
        os.close(self.exit_fd)


class Server:
    def __init__(self, line: socket.socket, rank: int):
        """`rank` is the process that asked for it."""
        self._line, self._rank_fd = Channel(line, worker.MAX_CALL_ID, worker.MAX_CALL), os.pidfd_open(rank)
        self._is_over = os.getppid() != rank
        self._selector = selectors.DefaultSelector()
        self._selector.register(line, selectors.EVENT_READ, self._read_rank)
        self._selector.register(self._rank_fd, selectors.EVENT_READ, self._end)
        self._functions: list[worker.Function] = []
        self._timeout_s, self._num_workers = math.inf, 0
        self._workers: list[_Worker] = []
        self._idle: deque[_Worker] = deque()
        self._waiting: deque[tuple[bytes, Buffer]] = deque()
        self._num_stillborn = self._num_fork_failures = 0
        self._fork_at = self._look_at = 0.0
        self._has_orphans = False

    def run(self) -> None:
        while not self._is_over:
            self._fill_up()
            self._hand_out()
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self._tick()

    def end_all(self) -> None:
        """Everything below this process is over when it returns."""
        self._workers.clear()
        while children := children_of(os.getpid()):
            for child in children:
                end_tree(child)
            self._reap()
            time.sleep(SWEEP_S)

    # The rank

    def _read_rank(self) -> None:
        for call_id, body in self._line.receive_frames():
            if call_id:
                self._waiting.append((bytes(call_id), body))
            else:
                self._begin(**json.loads(body))
        self._line.flush()
        self._watch_for_room(self._line, self._read_rank)
        if not self._line.is_open:
            self._end()

    def _end(self) -> None:
        self._is_over = True

    def _begin(self, rules: list[dict[str, Any]], timeout_s: float, num_workers: int) -> None:
        die_with_parent(signal.SIGKILL)  # there is nothing below it yet, and an import may hang
        try:
            from rl.rewards.find import load

            self._functions = [load(rule) for rule in rules]
            answer = {"error": ""}
        except ValueError as error:
            answer = {"error": str(error) or "no reason given"}
        ignore_signals()  # which an import may have changed
        die_with_parent(0)
        self._timeout_s, self._num_workers = timeout_s, num_workers * bool(self._functions)
        gc.collect()
        gc.freeze()
        self._tell_rank(b"", answer)

    def _tell_rank(self, call_id: bytes, answer: dict[str, Any]) -> None:
        self._line.send_frame(call_id, json.dumps(answer).encode())
        self._watch_for_room(self._line, self._read_rank)

    # Workers

    def _fill_up(self) -> None:
        while len(self._workers) < self._num_workers and time.monotonic() >= self._fork_at:
            try:
                self._fork()
                self._num_fork_failures = 0
            except OSError:
                self._num_fork_failures += 1
                if self._num_fork_failures > MAX_FORK_FAILURES:
                    raise
                self._fork_at = time.monotonic() + FORK_AGAIN_S

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        server, pid = os.getpid(), os.fork()
        if not pid:
            try:
                ours.close()
                self._selector.close()
                self._line.close()
                os.close(self._rank_fd)
                for other in self._workers:
                    other.close()
                worker.run(theirs, self._functions, server)
            finally:
                os._exit(1)
        theirs.close()
        made = _Worker(pid, ours)
        self._workers.append(made)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read_worker(made))
        self._selector.register(made.exit_fd, selectors.EVENT_READ, lambda: self._worker_died(made))

    def _hand_out(self) -> None:
        while self._waiting and self._idle:
            made = self._idle.popleft()
            made.call_id, body = self._waiting.popleft()
            made.began_at = time.monotonic()
            made.channel.send_frame(made.call_id, body)
            self._watch_for_room(made.channel, lambda made=made: self._read_worker(made))  # type: ignore[misc]

    def _read_worker(self, made: _Worker) -> None:
        if made not in self._workers:  # ended by what came before in the same moment
            return
        frames = made.channel.receive_frames()
        made.channel.flush()
        for call_id, body in frames:
            if not made.has_begun and not call_id:
                made.has_begun, self._num_stillborn = True, 0
                self._idle.append(made)
                continue
            result = read_result(body) if call_id == made.call_id else None
            if result is None:
                self._lose(made, "crash", "its process answered nonsense")
                return
            is_last = result.pop("is_last")
            self._tell_rank(bytes(call_id), result)
            made.call_id = None
            if is_last:
                self._drop(made)
                return
            self._idle.append(made)
        self._watch_for_room(made.channel, lambda: self._read_worker(made))
        if not made.channel.is_open:
            select.select([made.exit_fd], [], [], LAST_MOMENT_S)
            self._lose(made, "crash", "its process ended, closed its line or answered with too much")

    def _worker_died(self, made: _Worker) -> None:
        self._read_worker(made)  # its last words
        if made in self._workers:
            self._lose(made, "crash", "its process ended")

    def _lose(self, made: _Worker, status: str, text: str) -> None:
        call_id = made.call_id
        code = self._drop(made)
        if call_id is not None:
            if code is not None and os.WIFSIGNALED(code):
                text += f" by {signal.Signals(os.WTERMSIG(code)).name}"
            self._tell_rank(call_id, worker.failed(status, [function.name for function in self._functions], text))
        elif not made.has_begun:
            self._num_stillborn += 1
            if self._num_stillborn >= MAX_STILLBORN:
                raise RuntimeError(f"{MAX_STILLBORN} workers in a row ended before they began")

    def _drop(self, made: _Worker) -> int | None:
        """With all that it started; returns how it had ended, if it had."""
        self._workers.remove(made)
        if made in self._idle:
            self._idle.remove(made)
        self._selector.unregister(made.channel.connection)
        self._selector.unregister(made.exit_fd)
        made.close()
        pid, code = os.waitpid(made.pid, os.WNOHANG)
        if not pid:
            end_tree(made.pid)
        self._has_orphans = True
        return code if pid else None

    # Every moment

    def _patience(self) -> float | None:
        now = time.monotonic()
        times = [self._fork_at] if len(self._workers) < self._num_workers else []
        times += [now + SWEEP_S] if self._has_orphans else []
        for made in self._workers:
            if made.call_id is not None:
                times += [made.began_at + self._timeout_s, max(now, self._look_at) + LOOK_S]
            elif not made.has_begun:
                times.append(made.began_at + START_S)
        return max(0.0, min(times) - now) if times else None

    def _tick(self) -> None:
        now = time.monotonic()
        is_look = now >= self._look_at + LOOK_S
        for made in list(self._workers):
            took_s = now - made.began_at
            if made.call_id is None:
                if not made.has_begun and took_s > START_S:
                    self._lose(made, "crash", "")
            elif took_s >= self._timeout_s:
                self._lose(made, "timeout", f"it took longer than reward.timeout_s = {self._timeout_s:g} s")
            elif is_look and took_s >= LOOK_S and len(descendants_of(made.pid)) > MAX_PROCESSES:
                self._lose(made, "crash", f"it had more than {MAX_PROCESSES} processes")
        if is_look:
            self._look_at = now
        if self._has_orphans:
            self._sweep()

    def _sweep(self) -> None:
        """What a worker has left is a child of this process now."""
        self._reap()
        orphans = set(children_of(os.getpid())) - {made.pid for made in self._workers}
        for orphan in orphans:
            end_tree(orphan)
        self._has_orphans = bool(orphans)

    def _reap(self) -> None:
        """Workers are waited for where they are dropped."""
        known = {made.pid for made in self._workers}
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in known:
                    return  # its descriptor says so too
                os.waitpid(ended.si_pid, 0)

    def _watch_for_room(self, channel: Channel, handler: Any) -> None:
        """Whoever has not taken all that was sent to it yet."""
        if channel.is_open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
            if self._selector.get_key(channel.connection).events != events:
                self._selector.modify(channel.connection, events, handler)


def read_result(body: bytes | bytearray) -> dict[str, Any] | None:
    """None for anything but what a worker says by itself."""
    try:
        result = json.loads(body)
        numbers = [result["score"], *result["parts"].values()]
        is_right = (
            result["status"] in ("ok", "error")
            and all(type(number) is float and math.isfinite(number) for number in numbers)
            and isinstance(result["answer"], str | None)
            and isinstance(result["text"], str)
            and isinstance(result["is_last"], bool)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return result if is_right else None


def ignore_signals() -> None:
    """What is meant for the rank, which may go on for a while: its end is what ends this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def main(fd: int, rank: int) -> None:
    ignore_signals()
    os.setsid()  # what kills the rank's group must leave somebody to sweep
    adopt_orphans()
    try:
        server = Server(socket.socket(fileno=fd), rank)
    except ProcessLookupError:  # the rank has ended
        return
    code = 0
    try:
        server.run()
    except BaseException:
        code = 1
        with suppress(OSError):
            sys.stderr.write(f"oneworld: the reward server failed:\n{traceback.format_exc()}")
            sys.stderr.flush()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(END_S)
        server.end_all()
        os._exit(code)
