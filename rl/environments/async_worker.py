"""The process that runs the user's asynchronous code: tools, environments and rollout functions, thousands at once.

All calls share one event loop. A call that takes too long is cancelled. A call that blocks the loop cannot be
cancelled: then the server kills this process. It reads from shared memory which call's code was running, since every
step of a task is marked there, and repeats the other calls in another process.
"""

import asyncio
import contextvars
import inspect
import mmap
import os
import resource
import socket
import struct
import time
from collections.abc import Coroutine, Generator, Sequence
from functools import partial
from typing import Any

import msgspec

from rl.common.framing import Channel
from rl.environments.find import LoadedEnvironment
from rl.environments.interface import Generated, RolloutTask
from rl.environments.protocol import encode
from rl.environments.worker import (
    ANSWER,
    CALL,
    CANCEL,
    GENERATE,
    HEAD,
    MAX_REQUEST,
    PING,
    READY,
    CallAnswer,
    Caller,
    CallRequest,
    Prepared,
    decode_request,
    read_reward,
)
from rl.rewards.failure import CallTrace
from rl.rewards.isolation import count_pages, isolate
from rl.rewards.worker import MAX_GROWTH

LONG_STEP_S = 0.02  # a step of a task that is longer than this counts as blocking the others
MEASURE_CALLS = 100  # between two measurements of memory
NUMBER = struct.Struct("!Q")  # before the body of a generate request: its number in this process

_call: contextvars.ContextVar["_AsyncCall | None"] = contextvars.ContextVar("call", default=None)


class StepMarker:
    """Shared memory that says which call's code is running now. The server makes it; the worker inherits it."""

    FIELDS = struct.Struct("QQ")  # number of steps so far; number of the call, 0: none

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self.FIELDS.size)
        self._step = 0

    def begin(self, call: int) -> None:
        self._step += 1
        self.FIELDS.pack_into(self._memory, 0, self._step, call)

    def end(self) -> None:
        self.FIELDS.pack_into(self._memory, 0, self._step, 0)

    def read(self) -> tuple[int, int]:
        """Return the number of steps so far, and the number of the call whose step it is; 0: none."""
        step, call = self.FIELDS.unpack_from(self._memory)
        return step, call

    def close(self) -> None:
        self._memory.close()


class WorkerContext(msgspec.Struct, frozen=True):
    """What a worker needs besides the user's code."""

    server: int  # process id
    trace: CallTrace
    marker: StepMarker
    timeout_s: float
    chat: Any = None  # the ChatFormat
    tokenizer: Any = None


class _AsyncCall:
    """A call that is under way."""

    def __init__(self, number: int, request: CallRequest, blocked_s: float):
        self.number, self.request = number, request
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_answered = False
        self.own_blocked_s = 0.0  # time of its own long steps
        self.blocked_before_s, self.extended_s = blocked_s, 0.0


class _MarkedSteps(Coroutine[Any, Any, Any]):
    """A coroutine whose every step is marked in shared memory."""

    def __init__(self, inner: Coroutine[Any, Any, Any], call: _AsyncCall, worker: "AsyncWorker"):
        self._inner, self._owner, self._worker = inner, call, worker
        self.__name__ = getattr(inner, "__name__", "call")
        self.__qualname__ = getattr(inner, "__qualname__", "call")

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def _step(self, step: Any, *values: Any) -> Any:
        began = time.monotonic()
        self._worker.marker.begin(self._owner.number)
        try:
            return step(*values)
        except (SystemExit, KeyboardInterrupt) as error:  # would end the loop
            raise RuntimeError(f"a task raised {type(error).__name__}") from error
        finally:
            self._worker.marker.end()
            if (took := time.monotonic() - began) > LONG_STEP_S:
                self._worker.blocked_s += took
                self._owner.own_blocked_s += took


class AsyncWorker:
    def __init__(self, connection: socket.socket, environment: LoadedEnvironment, context: WorkerContext):
        self._environment, self._context, self._caller = environment, context, Caller(environment)
        self.marker = context.marker
        self.blocked_s = 0.0  # time in which a long step kept all other calls waiting
        self._channel = Channel(connection, HEAD.size, MAX_REQUEST)
        self._calls: dict[int, _AsyncCall] = {}
        self._generating: dict[int, asyncio.Future[Generated]] = {}
        self._num_generated = self._num_answers = 0
        self._begin, self._is_worn = count_pages(1), False

    async def serve(self) -> None:
        """Serve calls until the server is gone."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._make_task)
        self._over = self._loop.create_future()
        self._loop.add_reader(self._channel.connection, self._read)
        self._send(READY, 0)
        await self._over

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, context: Any = None) -> asyncio.Task[Any]:
        """A task that a call starts belongs to that call."""
        call = context[_call] if context is not None and _call in context else _call.get()
        return asyncio.Task(coro if call is None else _MarkedSteps(coro, call, self), loop=loop, context=context)

    def _read(self) -> None:
        for head, body in self._channel.receive_frames():
            kind, number = HEAD.unpack(head)
            if kind == CALL:
                self._start(number, decode_request(body))
            elif kind == CANCEL:
                self._cancel(number)
            elif kind == PING:
                self._send(PING, 0)
            else:
                self._take_generated(number, body)
        if not self._channel.is_open and not self._over.done():
            self._over.set_result(None)

    def _send(self, kind: bytes, number: int, body: bytes = b"") -> None:
        self._channel.send_frame(HEAD.pack(kind, number), body)
        if self._channel.has_unsent:
            self._loop.add_writer(self._channel.connection, self._flush)

    def _flush(self) -> None:
        self._channel.flush()
        if not self._channel.has_unsent:
            self._loop.remove_writer(self._channel.connection)

    # Calls

    def _start(self, number: int, request: CallRequest) -> None:
        call = self._calls[number] = _AsyncCall(number, request, self.blocked_s)
        context = contextvars.copy_context()
        context.run(_call.set, call)
        call.task = self._loop.create_task(self._run(call), context=context)
        if request.kind != "rollout":  # which environment.max_seconds limits
            call.timer = self._loop.call_later(self._context.timeout_s, self._expire, call)

    async def _run(self, call: _AsyncCall) -> None:
        request = call.request
        try:
            run, read = self._prepare_rollout(call) if request.kind == "rollout" else self._caller.prepare(request)
            value = run()
            if inspect.isawaitable(value):
                value = await value
            answer = self._caller.succeed(request, read(value))
        except BaseException as error:  # CancelledError too: a call may cancel itself
            answer = self._caller.describe(request, error)
        self._answer(call, answer)

    def _answer(self, call: _AsyncCall, answer: CallAnswer) -> None:
        if call.is_answered:
            return
        call.is_answered = True
        del self._calls[call.number]
        if call.timer is not None:
            call.timer.cancel()
        self._num_answers += 1
        if self._num_answers % MEASURE_CALLS == 0:
            self._is_worn = (count_pages(1) - self._begin) * resource.getpagesize() > MAX_GROWTH
        self._send(ANSWER, call.number, encode(msgspec.structs.replace(answer, is_worn=self._is_worn)))

    def _expire(self, call: _AsyncCall) -> None:
        """End a call that takes too long. The time in which others blocked the loop does not count."""
        extended_s = self.blocked_s - call.blocked_before_s - call.own_blocked_s
        if extended_s > call.extended_s:
            call.timer = self._loop.call_later(extended_s - call.extended_s, self._expire, call)
            call.extended_s = extended_s
            return
        self._answer(call, CallAnswer("timeout", text=describe_timeout(self._context.timeout_s)))
        assert call.task is not None
        call.task.cancel()

    def _cancel(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None and call.task is not None:
            call.is_answered = True
            if call.timer is not None:
                call.timer.cancel()
            call.task.cancel()

    # Rollout functions

    def _prepare_rollout(self, call: _AsyncCall) -> Prepared:
        assert self._environment.rollout is not None
        task = RolloutTask(**call.request.value, chat=self._context.chat, tokenizer=self._context.tokenizer)
        generate = partial(self._generate, call)
        return Prepared(partial(self._environment.rollout, task, generate, **self._environment.options), read_reward)

    async def _generate(self, call: _AsyncCall, ids: Sequence[int], **sampling: Any) -> Generated:
        """Sample a continuation of `ids` on the engine."""
        try:
            plain = msgspec.convert(ids.tolist() if hasattr(ids, "tolist") else list(ids), list[int])
            body = msgspec.msgpack.encode((plain, dict(sorted(sampling.items()))))
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"generate: {error}; call generate(ids, **sampling), where ids is a list of integers and sampling has "
                "plain values"
            ) from None
        if call.is_answered:
            raise RuntimeError("generate was called after the rollout function had ended; await all that it starts")
        self._num_generated += 1
        number = self._num_generated
        future = self._generating[number] = self._loop.create_future()
        self._send(GENERATE, call.number, NUMBER.pack(number) + body)
        try:
            return await future
        finally:  # the function may be cancelled
            self._generating.pop(number, None)

    def _take_generated(self, number: int, body: bytes | bytearray) -> None:
        future = self._generating.get(number)
        tokens, finish = msgspec.msgpack.decode(body, type=tuple[list[int], str])
        if future is not None and not future.done():  # else it was cancelled
            future.set_result(Generated(tokens, "stop" if finish == "stop" else "length"))


def describe_timeout(timeout_s: float) -> str:
    return f"it took longer than environment.timeout_s = {timeout_s:g} s"


def run_async_worker(connection: socket.socket, environment: LoadedEnvironment, context: WorkerContext) -> None:
    """Serve calls in the forked process, then exit the process."""
    code = 1
    try:
        isolate(context.server)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each call may have a connection
        context.trace.record()
        asyncio.run(AsyncWorker(connection, environment, context).serve())
        code = 0
    finally:
        os._exit(code)
