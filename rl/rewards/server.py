"""The reward server: passes calls to workers, enforces the time limit of a call, and leaves no process behind.

The server imports the functions once and then forks workers. It kills a worker and all processes below it if a call
takes too long, or if the worker dies, sends an invalid result or has too many processes. It then reports the call as
failed and forks another worker. The server ends when its rank ends.

While calls are quick, a worker gets several at once. It runs them one after the other, and sends each result before it
begins the next call. So a failure still costs one call: those behind it go to another worker.
"""

import gc
import json
import math
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import Any

from rl.common.framing import Buffer, Channel
from rl.common.waiting import wait_until_readable
from rl.rewards.failure import TRACE_SIGNAL, CallTrace, RewardFailure, find_place, read_failure
from rl.rewards.process_tree import adopt_orphans, children_of, descendants_of, end_tree, name_signal
from rl.rewards.worker import MAX_CALL, MAX_CALL_ID, RewardFunction, failed, run_worker
from rl.watch.parent import die_with_parent

MAX_RESULT = 1 << 18  # bytes
MAX_PROCESSES = 64  # below a worker
MAX_AT_ONCE = 32  # calls that a worker gets at once
QUICK_S = 0.005  # mean duration up to which it gets more than one
NAP_S = 0.001  # while a worker has more than one
NEWEST_SHARE = 0.1  # of the newest duration in this mean
COUNT_S = 0.1  # between two counts of these processes
START_S = 30.0  # time limit of a worker's start
TRACE_S = 0.25  # time that a call gets after its time limit to write its stack: busy cores may keep it waiting
MAX_FAILED_STARTS = 5  # consecutive workers that end before they are ready
FORK_AGAIN_S = 0.2  # pause after a failed fork, when memory or process ids are short
MAX_FAILED_FORKS = 100  # in a row
SWEEP_S = 0.01  # between two searches for processes to end
EXIT_CODE_S = 0.1  # maximum wait for the exit code of a process that has closed its connection
END_S = 5  # time limit for ending all processes below the server


class _Worker:
    def __init__(self, pid: int, connection: socket.socket, trace: CallTrace):
        self.pid, self.exit_fd, self.trace = pid, os.pidfd_open(pid), trace
        self.channel = Channel(connection, MAX_CALL_ID, MAX_RESULT)
        self.has_started = False
        self.calls: deque[tuple[bytes, Buffer]] = deque()  # it runs the first, and the others wait for it
        self.given_back: list[tuple[bytes, Buffer]] = []  # those that it will not run, until others get them
        self.began_at = time.monotonic()
        self.deadline = self.began_at + START_S  # of its start, then of the first call
        self.is_overdue = False  # the call has reached its time limit, and was told to write its stack


class Server:
    def __init__(self, connection: socket.socket, rank: int):
        """Serve the rank at the other end of `connection`. `rank` is its process id."""
        self._rank, self._rank_fd = Channel(connection, MAX_CALL_ID, MAX_CALL), os.pidfd_open(rank)
        self._is_over = os.getppid() != rank
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._read_rank)
        self._selector.register(self._rank_fd, selectors.EVENT_READ, self._end)
        self._functions: list[RewardFunction] = []
        self._timeout_s, self._num_workers = math.inf, 0
        self._workers: list[_Worker] = []
        self._idle: deque[_Worker] = deque()
        self._calls: deque[tuple[bytes, Buffer]] = deque()  # calls that wait for a worker
        self._mean_s = math.inf  # duration of the last calls
        self._num_failed_starts = self._num_failed_forks = 0
        self._fork_at = self._count_at = 0.0
        self._has_orphans = False

    def run(self) -> None:
        """Serve the rank until it ends or closes the connection."""
        while not self._is_over:
            self._start_workers()
            self._assign_calls()
            if any(len(worker.calls) > 1 for worker in self._workers):
                time.sleep(NAP_S)  # so that several results are read at once, at the cost of one
            for key, _ in self._selector.select(self._seconds_to_wait()):
                key.data()
            self._check_limits()
            self._flush(self._rank)

    def end_all(self) -> None:
        """End every process below this one."""
        self._workers.clear()
        self._has_orphans = True
        while self._has_orphans:
            self._end_orphans()
            time.sleep(SWEEP_S)

    # The rank

    def _read_rank(self) -> None:
        for call_id, body in self._rank.receive_frames():
            if call_id:
                self._calls.append((bytes(call_id), body))
            else:
                self._load(**json.loads(body))
        if not self._rank.is_open:
            self._end()

    def _end(self) -> None:
        self._is_over = True

    def _load(
        self, rules: list[dict[str, Any]], timeout_s: float, num_workers: int, credentials: dict[str, str]
    ) -> None:
        """Import the reward functions. Send the rank an error message, which is empty if all is well."""
        die_with_parent(signal.SIGKILL)  # an import may hang, and there are no workers to clean up yet
        os.environ.update(credentials)
        try:
            from rl.rewards.find import load

            self._functions = [load(rule) for rule in rules]
            answer = {"error": ""}
        except ValueError as error:
            answer = {"error": str(error) or "no reason given"}
        ignore_signals()  # an import may have changed them
        die_with_parent(0)
        self._timeout_s, self._num_workers = timeout_s, num_workers * bool(self._functions)
        gc.collect()
        gc.freeze()
        self._send_to_rank(b"", answer)

    def _send_to_rank(self, call_id: bytes, answer: dict[str, Any]) -> None:
        """Send an answer, at the end of this round together with all others."""
        self._rank.queue_frame(call_id, json.dumps(answer).encode())

    def _flush(self, channel: Channel) -> None:
        """Send what the peer accepts now. While there is more, wait until the connection is writable."""
        channel.flush()
        if channel.is_open:
            key = self._selector.get_key(channel.connection)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_unsent else 0)
            if key.events != events:
                self._selector.modify(channel.connection, events, key.data)

    # Workers

    def _start_workers(self) -> None:
        while len(self._workers) < self._num_workers and time.monotonic() >= self._fork_at:
            try:
                self._fork()
                self._num_failed_forks = 0
            except OSError:
                self._num_failed_forks += 1
                if self._num_failed_forks > MAX_FAILED_FORKS:
                    raise
                self._fork_at = time.monotonic() + FORK_AGAIN_S

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        trace, server, pid = CallTrace(), os.getpid(), os.fork()
        if not pid:
            try:
                ours.close()
                for key in self._selector.get_map().values():  # those of the rank and of all workers
                    os.close(key.fd)
                for other in self._workers:
                    other.trace.close()
                self._selector.close()
                run_worker(theirs, self._functions, server, trace)
            finally:
                os._exit(1)
        theirs.close()
        worker = _Worker(pid, ours, trace)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._read_worker(worker))
        self._selector.register(worker.exit_fd, selectors.EVENT_READ, lambda: self._read_worker(worker, has_ended=True))

    def _assign_calls(self) -> None:
        """Give calls to idle workers, and while calls are quick also to those that will soon be idle."""
        if not self._calls:
            return
        is_quick, slow_since = self._mean_s <= QUICK_S, time.monotonic() - QUICK_S
        busy = [worker for worker in self._workers if worker.calls] if is_quick else []
        others = [each for each in busy if len(each.calls) <= MAX_AT_ONCE // 2 and each.began_at >= slow_since]
        free = [*self._idle, *others]
        for number, worker in enumerate(free):
            share = -(-len(self._calls) // (len(free) - number))
            for _ in range(min(MAX_AT_ONCE - len(worker.calls) if is_quick else 1, share)):
                worker.calls.append(self._calls.popleft())
                worker.channel.queue_frame(*worker.calls[-1])
            if worker in self._idle and worker.calls:
                self._idle.remove(worker)
                worker.trace.reset()
                self._begin_call(worker)
            self._flush(worker.channel)

    def _begin_call(self, worker: _Worker) -> None:
        """Note that a worker runs the first of its calls from now on."""
        worker.began_at, worker.is_overdue = time.monotonic(), False
        worker.deadline = worker.began_at + self._timeout_s

    def _read_worker(self, worker: _Worker, has_ended: bool = False) -> None:
        if worker not in self._workers:  # an earlier event of the same round removed it
            return
        for call_id, body in worker.channel.receive_frames():
            is_start = not worker.has_started
            result = {"is_last": False} if is_start or not body else read_result(body)
            if call_id != (b"" if is_start else worker.calls[0][0] if worker.calls else None) or result is None:
                self._fail(worker, "crash", "its process sent an invalid result")
                return
            is_last = result.pop("is_last")
            worker.has_started, self._num_failed_starts = True, 0
            if not is_start:
                call = worker.calls.popleft()
                if body:
                    self._send_to_rank(bytes(call_id), result)
                    self._measure_call(worker)
                    self._begin_call(worker)
                else:
                    worker.given_back.append(call)
            if is_last:
                self._remove(worker)
                return
        self._flush(worker.channel)
        if has_ended or not worker.channel.is_open:
            wait_until_readable([worker.exit_fd], EXIT_CODE_S)
            self._fail(worker, "crash", "its process ended, closed its connection or sent too large a result")
            return
        self._calls.extendleft(reversed(worker.given_back))
        worker.given_back.clear()
        if worker.has_started and not worker.calls and worker not in self._idle:
            worker.deadline = math.inf
            self._idle.append(worker)

    def _measure_call(self, worker: _Worker) -> None:
        took_s = time.monotonic() - worker.began_at
        is_first = self._mean_s == math.inf
        self._mean_s = took_s if is_first else self._mean_s + NEWEST_SHARE * (took_s - self._mean_s)

    def _fail(self, worker: _Worker, status: str, text: str) -> None:
        """Remove a worker and report its call as failed."""
        if worker.is_overdue:  # however it ends: a function may have reset the signal that makes it write its stack
            status, text = "timeout", f"it took longer than reward.timeout_s = {self._timeout_s:g} s"
        index, frames = worker.trace.read()
        failed_call = worker.calls.popleft()[0] if worker.calls else None
        if failed_call is not None:  # after a timeout, workers get one call at a time until calls are quick again
            self._measure_call(worker)
        code = self._remove(worker)
        if code is not None and os.WIFSIGNALED(code) and status == "crash":
            text += f"; it was ended by {name_signal(os.WTERMSIG(code))}"
        if failed_call is not None:
            function = self._functions[min(index, len(self._functions) - 1)]
            failure = RewardFailure(function.name, status, text, find_place(function.call, frames))
            self._send_to_rank(failed_call, failed(status, self._functions, failure))
        elif not worker.has_started:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                raise RuntimeError(f"{MAX_FAILED_STARTS} workers in a row ended before they were ready")

    def _remove(self, worker: _Worker) -> int | None:
        """End a worker and all processes below it. Return its exit status if it had already ended. Calls that it has
        not run go to others, in their order."""
        self._workers.remove(worker)
        self._calls.extendleft(reversed([*worker.given_back, *worker.calls]))
        if worker in self._idle:
            self._idle.remove(worker)
        self._selector.unregister(worker.channel.connection)
        self._selector.unregister(worker.exit_fd)
        worker.channel.close()
        worker.trace.close()
        os.close(worker.exit_fd)
        pid, code = os.waitpid(worker.pid, os.WNOHANG)
        if not pid:
            end_tree(worker.pid)
        self._has_orphans = True
        return code if pid else None

    # Limits

    def _seconds_to_wait(self) -> float | None:
        if len(self._idle) == self._num_workers and not self._has_orphans:
            return None
        deadline = min((worker.deadline for worker in self._workers), default=math.inf)
        return max(0.0, min(deadline - time.monotonic(), SWEEP_S if self._has_orphans else COUNT_S))

    def _check_limits(self) -> None:
        now = time.monotonic()
        is_count_due = now >= self._count_at
        for worker in list(self._workers):
            if now >= worker.deadline and worker.calls and not worker.is_overdue:
                worker.is_overdue, worker.deadline = True, now + TRACE_S
                os.kill(worker.pid, TRACE_SIGNAL)
            elif now >= worker.deadline:
                self._fail(worker, "timeout", "")
            elif is_count_due and worker.calls and len(descendants_of(worker.pid)) > MAX_PROCESSES:
                self._fail(worker, "crash", f"it had more than {MAX_PROCESSES} processes")
        if is_count_due:
            self._count_at = now + COUNT_S
        if self._has_orphans:
            self._end_orphans()

    def _end_orphans(self) -> None:
        """End processes that removed workers left behind. They are children of this process now."""
        orphans = set(children_of(os.getpid())) - {worker.pid for worker in self._workers}
        for orphan in orphans:
            with suppress(ChildProcessError):
                if not os.waitpid(orphan, os.WNOHANG)[0]:
                    end_tree(orphan)
        self._has_orphans = bool(orphans)


def read_result(body: bytes | bytearray) -> dict[str, Any] | None:
    """Return the result in a worker's answer, or None if it is invalid."""
    try:
        result = json.loads(body)
        numbers = [result["score"], *result["parts"].values()]
        is_valid = (
            result["status"] in ("ok", "error")
            and all(type(number) is float and math.isfinite(number) for number in numbers)
            and isinstance(result["answer"], str | None)
            and (result["failure"] is None) == (result["status"] == "ok")
            and (result["failure"] is None or read_failure(result["failure"]) is not None)
            and isinstance(result["is_last"], bool)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return result if is_valid else None


def ignore_signals() -> None:
    """Ignore signals that are meant for the rank. The rank may run on, and this process ends with it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def main(fd: int, rank: int) -> None:
    """Run the server on an inherited socket for the process `rank`."""
    ignore_signals()
    os.setsid()  # a signal to the rank's process group must not end this process, which cleans up
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
            print(f"oneworld: the reward server failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(END_S)
        server.end_all()
        os._exit(code)
