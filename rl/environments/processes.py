"""The processes that run the user's code: started on demand, limited, killed and replaced. Runs in the conversation
server's event loop.

A process for code that is not asynchronous runs one call at a time and may hold many instances. One process runs all
asynchronous code. If a process ends, the call that is to blame gets an outcome, and all other calls in it raise
`ProcessLostError`, so that workers.py repeats them in another process.
"""

import asyncio
import gc
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rl.common.framing import Channel
from rl.common.waiting import wait_until_readable
from rl.environments.async_worker import StepMarker, WorkerContext, describe_timeout, run_async_worker
from rl.environments.find import LoadedEnvironment
from rl.environments.interface import Outcome
from rl.environments.protocol import encode
from rl.environments.worker import (
    ANSWER,
    CALL,
    CANCEL,
    GENERATE,
    HEAD,
    PING,
    READY,
    CallAnswer,
    CallRequest,
    decode_answer,
    run_worker,
)
from rl.rewards.failure import TRACE_SIGNAL, CallTrace, find_place
from rl.rewards.process_tree import adopt_orphans, children_of, descendants_of, end_tree, name_signal
from rl.rewards.server import (
    COUNT_S,
    EXIT_CODE_S,
    FORK_AGAIN_S,
    MAX_FAILED_FORKS,
    MAX_FAILED_STARTS,
    MAX_PROCESSES,
    START_S,
    SWEEP_S,
    TRACE_S,
)

MAX_WORKERS = 64  # processes for code that is not asynchronous, if environment.num_workers = 0
MAX_FRAME = 32 << 20  # bytes of a frame from a worker
MAX_ALL_PROCESSES = 1024  # below a worker, however many instances it has


class ProcessLostError(Exception):
    """The process of a call has ended, and the call is not known to be the reason."""

    def __init__(self, is_suspect: bool = False):
        """`is_suspect`: the call may be the reason, like others that were under way."""
        super().__init__("the process of this call has ended")
        self.is_suspect = is_suspect


class PendingCall:
    """A call that waits for a process or is under way."""

    def __init__(self, number: int, request: CallRequest, future: asyncio.Future[Outcome]):
        self.number, self.request, self.future = number, request, future
        self.began_at = 0.0

    def resolve(self, outcome: Outcome) -> None:
        if not self.future.done():  # the caller may have been cancelled
            self.future.set_result(outcome)

    def lose(self, is_suspect: bool) -> None:
        if not self.future.done():
            self.future.set_exception(ProcessLostError(is_suspect))


class WorkerProcess:
    def __init__(self, pid: int, connection: socket.socket, context: WorkerContext, is_async: bool):
        self.pid, self.exit_fd, self.is_async = pid, os.pidfd_open(pid), is_async
        self.trace, self.marker = context.trace, context.marker
        self.channel = Channel(connection, HEAD.size, MAX_FRAME)
        self.is_alive, self.is_ready = True, False
        self.is_writing = False  # the connection is full
        self.is_retired = False  # it gets no more instances, and ends when it has none
        self.instances: set[str] = set()  # names of conversations
        self.calls: dict[int, PendingCall] = {}  # under way
        self.queue: deque[PendingCall] = deque()
        self.timer: asyncio.TimerHandle | None = None  # of its start, or of its only call
        self.is_overdue = False  # it was told to write its stack, and will be killed
        self.blamed = 0  # number of the call that blocks the event loop in it
        self.step, self.quiet_since, self.is_pinged = 0, 0.0, False  # of the event loop in it

    @property
    def is_busy(self) -> bool:
        return bool(self.calls or self.queue)


class ProcessPool:
    """Start processes and make calls in them."""

    def __init__(self, environment: LoadedEnvironment, timeout_s: float, num_workers: int, kept_fds: set[int]):
        """`kept_fds` are the open files that the user's code may use. Others are closed in the processes."""
        self._environment, self._timeout_s, self._kept_fds = environment, timeout_s, kept_fds
        self._max_workers = num_workers or MAX_WORKERS
        self._loop = asyncio.get_running_loop()
        self.chat: Any = None
        self.tokenizer: Any = None
        self.on_generate: Callable[[WorkerProcess, PendingCall, bytes], None] | None = None
        self._processes: list[WorkerProcess] = []
        self._waiting: deque[PendingCall] = deque()  # calls that need no instance and wait for any process
        self._num_calls = self._num_failed_starts = self._num_failed_forks = 0
        self._failure: BaseException | None = None  # why no more calls can be made
        self._check_timer: asyncio.TimerHandle | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._is_frozen = self._is_closed = False
        adopt_orphans()
        self._others = set(children_of(os.getpid()))

    # Calls

    def choose(self, is_async: bool) -> WorkerProcess:
        """Return the process for a new instance: one without instances, or a new one, or the one with the fewest."""
        alike = [process for process in self._processes if process.is_async == is_async]
        best = min(alike, key=lambda each: (each.is_retired, len(each.instances), each.is_busy), default=None)
        is_good = best is not None and not best.is_retired and (is_async or not (best.instances or best.is_busy))
        if not is_good and (is_async or len(alike) < self._max_workers or best is None):
            best = self._start(is_async) or best
        if best is None:
            raise ProcessLostError  # no process could be forked now
        return best

    def start_alone(self, is_async: bool) -> WorkerProcess:
        """Start a process for one instance or call only."""
        process = self._start(is_async)
        if process is None:
            raise ProcessLostError
        process.is_retired = True
        return process

    async def call(self, request: CallRequest, process: WorkerProcess | None, is_async: bool = False) -> Outcome:
        """Make a call in a process, or without one in any that is idle. Raise ProcessLostError if the process ends for
        another reason than this call."""
        call = self.submit(request, process, is_async)
        try:
            return await call.future
        except asyncio.CancelledError:
            self.cancel(call)
            raise

    def submit(self, request: CallRequest, process: WorkerProcess | None, is_async: bool = False) -> PendingCall:
        self._raise_failure()
        self._num_calls += 1
        call = PendingCall(self._num_calls, request, self._loop.create_future())
        if process is None and is_async:
            process = self.choose(is_async)
        if process is None:
            self._waiting.append(call)
            self._assign_waiting()
        elif not process.is_alive:
            call.lose(is_suspect=False)
        else:
            process.queue.append(call)
            self._assign(process)
        return call

    def cancel(self, call: PendingCall) -> None:
        """End a call that nobody waits for any more. A call that is not asynchronous ends at its time limit at the
        latest; it ends now if no instance lives in its process."""
        for process in self._processes:
            if call.number in process.calls:
                if process.is_async:
                    del process.calls[call.number]
                    self._send(process, CANCEL, call.number)
                    self._end_if_done(process)
                elif not process.instances:
                    self.remove(process)
                return

    def release(self, process: WorkerProcess, request: CallRequest) -> None:
        """Close the instance of a conversation, which the request names."""
        process.instances.discard(request.conversation)
        if process.is_alive and self._failure is None:
            call = self.submit(request, process)
            call.future.add_done_callback(_ignore)
            self._assign_waiting()

    def _assign_waiting(self) -> None:
        """Give calls that need no instance to idle processes, those without instances first. Start more if needed."""
        if not self._waiting or self._is_closed:
            return
        while self._waiting and (process := self._find_idle()) is not None:
            process.queue.append(self._waiting.popleft())
            self._assign(process)
        if not self._waiting:
            return
        num = sum(not process.is_async for process in self._processes)
        num_starting = sum(not process.is_async and not process.is_ready for process in self._processes)
        while num_starting < len(self._waiting) and num < self._max_workers:
            if self._start(is_async=False) is None:
                break
            num, num_starting = num + 1, num_starting + 1

    def _find_idle(self) -> WorkerProcess | None:
        """Return an idle process, with as few instances as possible."""
        best, least = None, (0, False)
        for process in self._processes:
            if process.is_async or not process.is_ready or process.calls or process.queue:
                continue
            load = (len(process.instances), process.is_retired)
            if load == (0, False):
                return process
            if best is None or load < least:
                best, least = process, load
        return best

    def _assign(self, process: WorkerProcess) -> None:
        while process.queue and process.is_ready and (process.is_async or not process.calls):
            call = process.queue.popleft()
            if call.future.done():  # its caller was cancelled
                continue
            call.began_at = self._loop.time()
            if not process.calls:
                process.quiet_since = call.began_at
            process.calls[call.number] = call
            if not process.is_async:
                process.trace.reset()
                process.timer = self._loop.call_later(self._timeout_s, self._expire, process)
            self._send(process, CALL, call.number, encode(call.request))
        if self._check_timer is None and process.calls:
            self._check_timer = self._loop.call_later(self._check_s, self._check)

    # Processes

    def _start(self, is_async: bool) -> WorkerProcess | None:
        """Fork a process. Return None if the machine is short of memory or process ids, and try again later."""
        self._raise_failure()
        if not self._is_frozen:
            self._is_frozen = True
            gc.collect()
            gc.freeze()
        ours, theirs = socket.socketpair()
        context = WorkerContext(os.getpid(), CallTrace(), StepMarker(), self._timeout_s, self.chat, self.tokenizer)
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            context.trace.close()
            self._num_failed_forks += 1
            if self._num_failed_forks > MAX_FAILED_FORKS:
                self._fail_all(error)
            else:
                self._loop.call_later(FORK_AGAIN_S, self._assign_waiting)
            return None
        if not pid:
            try:
                signal.set_wakeup_fd(-1)
                _close_files({theirs.fileno(), context.trace.fd, *self._kept_fds})
                if is_async:
                    run_async_worker(theirs, self._environment, context)
                else:
                    run_worker(theirs, self._environment, context.server, context.trace)
            finally:
                os._exit(1)
        theirs.close()
        self._num_failed_forks = 0
        process = WorkerProcess(pid, ours, context, is_async)
        self._processes.append(process)
        self._loop.add_reader(ours, self._read, process)
        self._loop.add_reader(process.exit_fd, self._read, process, True)
        process.timer = self._loop.call_later(START_S, self._expire, process)
        return process

    def _send(self, process: WorkerProcess, kind: bytes, number: int, body: bytes = b"") -> None:
        """Send a frame. Those for asynchronous code are sent together, in the next turn of the event loop."""
        had_unsent = process.channel.has_unsent
        process.channel.queue_frame(HEAD.pack(kind, number), body)
        if not process.is_async:
            self._flush(process)
        elif not had_unsent:
            self._loop.call_soon(self._flush, process)

    def send_generated(self, process: WorkerProcess, number: int, body: bytes) -> None:
        if process.is_alive:
            self._send(process, GENERATE, number, body)

    def _flush(self, process: WorkerProcess) -> None:
        if not process.is_alive:
            return
        process.channel.flush()
        if process.channel.has_unsent:
            process.is_writing = True
            self._loop.add_writer(process.channel.connection, self._flush, process)
        elif process.is_writing:
            process.is_writing = False
            self._loop.remove_writer(process.channel.connection)

    def _read(self, process: WorkerProcess, has_ended: bool = False) -> None:
        if not process.is_alive:
            return
        for head, body in process.channel.receive_frames():
            if not self._take(process, bytes(head), body):
                self._end(process, "crash", "its process sent an invalid result")
            if not process.is_alive:
                return
        if has_ended or not process.channel.is_open:
            wait_until_readable([process.exit_fd], EXIT_CODE_S)
            self._end(process, "crash", "its process closed its connection or sent too large a result")

    def _take(self, process: WorkerProcess, head: bytes, body: bytearray) -> bool:
        """Return whether a frame is valid."""
        if len(head) != HEAD.size:
            return False
        kind, number = HEAD.unpack(head)
        if kind == READY and not process.is_ready:
            process.is_ready, self._num_failed_starts = True, 0
            self._stop_timer(process)
            self._assign(process)
            self._assign_waiting()
        elif kind == PING:
            process.is_pinged, process.quiet_since = False, self._loop.time()
        elif kind == ANSWER:
            return self._take_answer(process, number, body)
        elif kind == GENERATE and self.on_generate is not None:
            call = process.calls.get(number)
            try:
                if call is not None:  # it may have been cancelled
                    self.on_generate(process, call, bytes(body))
            except ValueError:
                return False
        else:
            return False
        return True

    def _take_answer(self, process: WorkerProcess, number: int, body: bytearray) -> bool:
        call = process.calls.get(number)
        if call is None:
            return process.is_async  # it was cancelled
        answer = decode_answer(call.request.kind, body)
        if answer is None:
            return False
        del process.calls[number]
        if not process.is_async:
            self._stop_timer(process)
            process.is_overdue = False
        process.is_retired = process.is_retired or answer.is_worn
        if answer.is_out_of_memory and len(process.instances) + len(process.calls) > 1:
            process.is_retired = True
            call.lose(is_suspect=True)  # others may have filled the memory: it is repeated in a process of its own
        else:
            call.resolve(_to_outcome(answer))
        self._end_if_done(process)
        if process.is_alive:
            self._assign(process)
        self._assign_waiting()
        return True

    def _end_if_done(self, process: WorkerProcess) -> None:
        if process.is_retired and not (process.instances or process.calls or process.queue):
            self.remove(process)

    def _stop_timer(self, process: WorkerProcess) -> None:
        if process.timer is not None:
            process.timer.cancel()
            process.timer = None

    # Limits

    @property
    def _check_s(self) -> float:
        return min(COUNT_S, self._timeout_s / 4)

    def _check(self) -> None:
        """Look at all processes with calls: do they start too many processes, and do event loops go on?"""
        self._check_timer = None
        now = self._loop.time()
        for process in list(self._processes):
            if not process.calls or process.is_overdue:
                continue
            oldest = next(iter(process.calls.values()))
            if process.is_async:
                self._check_loop(process, now)
            if now - oldest.began_at < self._check_s / 2:
                continue
            most = MAX_PROCESSES * max(1, len(process.instances) + len(process.calls) - 1)
            if len(descendants_of(process.pid)) > (most := min(most, MAX_ALL_PROCESSES)):
                self._end(process, "crash", f"it had more than {most} processes", is_attributable=not process.is_async)
        if any(process.calls for process in self._processes):
            self._check_timer = self._loop.call_later(self._check_s, self._check)

    def _check_loop(self, process: WorkerProcess, now: float) -> None:
        step, _ = process.marker.read()
        if step != process.step:
            process.step, process.quiet_since = step, now
        if not process.is_pinged:
            process.is_pinged = True
            self._send(process, PING, 0)
        elif now - process.quiet_since >= self._timeout_s:
            self._expire(process)

    def _expire(self, process: WorkerProcess) -> None:
        """Let a process that has reached a time limit write its stack, then end it."""
        if not process.is_alive:
            return
        if process.is_ready and not process.is_overdue:
            process.is_overdue, process.blamed = True, process.marker.read()[1]
            with suppress(ProcessLookupError):
                os.kill(process.pid, TRACE_SIGNAL)
            process.timer = self._loop.call_later(TRACE_S, self._expire, process)
        else:
            self._end(process, "timeout", "")

    def _end(self, process: WorkerProcess, status: str, text: str, is_attributable: bool = True) -> None:
        """Remove a process. The call that is to blame gets an outcome, and the others are lost."""
        if process.is_overdue:  # however it ends: the code may have reset the signal that makes it write its stack
            blocked = "; it kept all asynchronous code waiting, so let it await what takes long"
            status, text = "timeout", describe_timeout(self._timeout_s) + (blocked if process.is_async else "")
        _, frames = process.trace.read()
        blamed = process.blamed or process.marker.read()[1] if process.is_async and is_attributable else 0
        calls, was_ready = dict(process.calls), process.is_ready
        code = self.remove(process)
        if code is not None and status == "crash":
            text = f"its process ended with exit code {os.WEXITSTATUS(code)}"
            if os.WIFSIGNALED(code):
                text = f"its process was ended by {name_signal(os.WTERMSIG(code))}"
        culprit = calls.get(blamed)
        if culprit is None and len(calls) == 1:
            (culprit,) = calls.values()
        for call in calls.values():
            if call is culprit:
                function = self._environment.function_of(call.request.kind, call.request.name)
                call.resolve(
                    Outcome(
                        "timeout" if status == "timeout" else "crash", None, text, place=find_place(function, frames)
                    )
                )
            else:
                call.lose(is_suspect=culprit is None and not blamed)
        if not was_ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                self._fail_all(RuntimeError(f"{MAX_FAILED_STARTS} workers in a row ended before they were ready"))

    def remove(self, process: WorkerProcess) -> int | None:
        """End a process and all below it. Its calls stay without an outcome; those that wait for it are lost. Return
        its exit status if it had already ended."""
        if not process.is_alive:
            return None
        process.is_alive = process.is_ready = False
        self._processes.remove(process)
        self._stop_timer(process)
        self._loop.remove_reader(process.channel.connection)
        self._loop.remove_writer(process.channel.connection)
        self._loop.remove_reader(process.exit_fd)
        pid, code = os.waitpid(process.pid, os.WNOHANG)
        if not pid:
            end_tree(process.pid)
        process.channel.close()
        process.trace.close()
        process.marker.close()
        os.close(process.exit_fd)
        process.calls.clear()
        for call in process.queue:
            call.lose(is_suspect=False)
        process.queue.clear()
        self._sweep()
        self._loop.call_soon(self._assign_waiting)  # there is room for another process
        return code if pid else None

    def _sweep(self) -> None:
        """End processes that removed ones left behind. They are children of this process now."""
        orphans = set(children_of(os.getpid())) - {process.pid for process in self._processes} - self._others
        for orphan in orphans:
            with suppress(ChildProcessError):
                if not os.waitpid(orphan, os.WNOHANG)[0]:
                    end_tree(orphan)
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        self._sweep_timer = self._loop.call_later(SWEEP_S, self._sweep) if orphans and not self._is_closed else None
        self._has_orphans = bool(orphans)

    def _fail_all(self, error: BaseException) -> None:
        """Let every call raise, because no process can be started."""
        self._failure = error
        waiting = [*self._waiting, *(call for process in self._processes for call in process.queue)]
        self._waiting.clear()
        for call in waiting:
            if not call.future.done():
                call.future.set_exception(RuntimeError(str(error)))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(str(self._failure))

    def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for timer in (self._check_timer, self._sweep_timer):
            if timer is not None:
                timer.cancel()
        for process in list(self._processes):
            self.remove(process)
        self._sweep()
        while self._has_orphans:
            time.sleep(SWEEP_S)
            self._sweep()


def _to_outcome(answer: CallAnswer) -> Outcome:
    return Outcome(answer.status, answer.value, answer.text, answer.is_done, answer.place)  # type: ignore[arg-type]


def _ignore(future: asyncio.Future[Outcome]) -> None:
    """Take the exception of a call that nobody waits for."""
    if not future.cancelled():
        future.exception()


def _close_files(kept: set[int]) -> None:
    """Close the connections of the server and of other processes, which this process has inherited."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with suppress(OSError):  # the listing's own
                os.close(int(name))
