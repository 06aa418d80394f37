"""A process that runs the user's tools and environments, one call at a time. The server may kill it at any moment.

`Caller` and the functions that read results are also used by the process for asynchronous code (async_worker.py).
"""

import importlib
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from rl.common.credentials import hide_credentials
from rl.common.framing import FrameReader, pack
from rl.environments.find import LoadedEnvironment
from rl.environments.protocol import JSON_BEGINS, encode, make_decoder
from rl.environments.tools import BadArgumentsError
from rl.rewards.failure import CallTrace, describe_error
from rl.rewards.isolation import count_pages, isolate
from rl.rewards.process_tree import descendants_of, end_tree
from rl.rewards.sandbox import sandbox_processes
from rl.rewards.worker import MAX_CALLS, MAX_GROWTH, read_value

HEAD = struct.Struct("!cQ")  # of a frame: what it is, and the number of the call
READY, CALL, ANSWER, CANCEL, PING, GENERATE = b"r", b"c", b"a", b"x", b"p", b"g"
MAX_REQUEST = (1 << 32) - 1  # bytes
MAX_RESULT = 1 << 20  # bytes of what a tool returns, as text
NUM_SEARCHES = 20  # for processes that the user's code has left
UNREADABLE = (ValueError, TypeError, RecursionError, msgspec.MsgspecError)  # errors of decoding
REAP_S = 0.001  # pause between two searches for the exit of a process that was killed


class CallRequest(msgspec.Struct, frozen=True, array_like=True):
    """A call of the user's code."""

    kind: str  # reset, tool, step, reward, close or rollout
    conversation: str
    seed: int  # of the conversation
    number: int  # of the call in its conversation
    name: str = ""  # of the tool
    value: Any = None  # row, arguments, message or task
    is_plain: bool = False  # it needs no instance


class CallAnswer(msgspec.Struct, frozen=True, array_like=True):
    """How a call ended, as the worker sees it."""

    status: Literal["ok", "error", "timeout", "bad_arguments"]
    value: Any = None
    text: str = ""
    place: str = ""
    is_done: bool = False
    is_out_of_memory: bool = False
    is_worn: bool = False  # the process has grown or made many calls, and should be replaced


class WrongResultError(TypeError):
    """The user's code returned something that cannot be used."""


class Prepared(NamedTuple):
    run: Callable[[], Any]  # its result may be awaitable
    read: Callable[[Any], Any]  # the result as plain data


class Caller:
    """The instances of this process, and the calls on them."""

    def __init__(self, environment: LoadedEnvironment):
        self._environment = environment
        self.instances: dict[str, Any] = {}  # by conversation

    def prepare(self, request: CallRequest) -> Prepared:
        """Raise BadArgumentsError if the arguments do not fit the tool."""
        kind, environment = request.kind, self._environment
        if kind == "tool":
            tool = environment.tools[request.name]
            arguments = tool.read_arguments(request.value)
            call = getattr(self.instances[request.conversation], tool.name) if tool.is_method else tool.call
            return Prepared(partial(call, **arguments), partial(read_text, tool.name))
        if kind == "reset":
            return Prepared(partial(self._reset, request), read_messages)
        if kind == "close":
            return Prepared(partial(self._close, request), lambda value: None)
        method = getattr(self.instances[request.conversation], kind)
        if kind == "step":
            return Prepared(partial(method, request.value), read_step)
        return Prepared(method, read_reward)

    def succeed(self, request: CallRequest, value: Any) -> CallAnswer:
        """Return the answer to a call that returned `value`. An environment whose attribute `done` is true ends the
        conversation."""
        done = getattr(self.instances.get(request.conversation), "done", False) if request.kind == "tool" else False
        return CallAnswer("ok", value, is_done=not request.is_plain and _is_bool(done) and bool(done))

    def describe(self, request: CallRequest, error: BaseException) -> CallAnswer:
        """Return the answer to a call that raised `error`."""
        if isinstance(error, BadArgumentsError):
            return CallAnswer("bad_arguments", text=hide_credentials(str(error)))
        failure = describe_error(request.name, self._environment.function_of(request.kind, request.name), error)
        text = failure.text.removeprefix(f"{WrongResultError.__name__}: ")
        return CallAnswer(
            "error", None, hide_credentials(text), failure.place, is_out_of_memory=isinstance(error, MemoryError)
        )

    def _reset(self, request: CallRequest) -> Any:
        assert self._environment.class_ is not None
        instance = self._environment.class_(**self._environment.options)
        self.instances[request.conversation] = instance
        return instance.reset(request.value) if "reset" in self._environment.methods else None

    def _close(self, request: CallRequest) -> Any:
        instance = self.instances.pop(request.conversation, None)
        return instance.close() if instance is not None and "close" in self._environment.methods else None


# Results


def read_text(name: str, value: Any) -> str:
    """Return what a tool returned as the text of an observation: text as it is, other values as JSON (None is null).
    Raise WrongResultError for values that JSON does not know, and for more than MAX_RESULT bytes."""
    text = value if isinstance(value, str) else _dump(f"{name} returned", value)
    return _limited(f"{name} returned", text)


def read_messages(value: Any) -> Any:
    """Return the result of `reset`, which may be None, a text or a list of messages."""
    if value is None or isinstance(value, str):
        return None if value is None else _limited("reset returned", value)
    is_valid = isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and "content" in each for each in value
    )
    if not is_valid:
        shown = "a list of something else" if isinstance(value, list) else f"a {type(value).__name__}"
        raise WrongResultError(
            f"reset returned {shown}; return None, a text, or a list of messages, each a dict with role and content"
        )
    return json.loads(_limited("reset returned", _dump("reset returned", value)))


def read_step(value: Any) -> list[Any]:
    """Return [observation, is_done]. An observation of None is an empty text."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not _is_bool(value[1]):
        raise WrongResultError(
            f"step returned a {type(value).__name__}; return a pair (observation, done), where done is True or False"
        )
    observation, is_done = value
    return ["" if observation is None else read_text("step", observation), bool(is_done)]


def read_reward(value: Any) -> float | dict[str, float]:
    """Return a number, or a dict of numbers in which `score` is the sum if the user gave none."""
    try:
        score, parts = read_value(value)
    except (TypeError, ValueError) as error:
        raise WrongResultError(f"the reward: {error}") from None
    return {"score": score, **parts} if isinstance(value, dict) else score


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")  # numpy's


def _dump(what: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_to_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongResultError(
            f"{what} a {type(value).__name__} that is no JSON ({error}); return text, numbers, lists, dicts or None"
        ) from None


def _to_plain(value: Any) -> Any:
    if hasattr(value, "item") and not getattr(value, "shape", None):  # a scalar of numpy or torch
        return value.item()
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _limited(what: str, text: str) -> str:
    if len(text) > MAX_RESULT or len(text.encode(errors="replace")) > MAX_RESULT:
        raise WrongResultError(f"{what} {len(text)} characters; return less than {MAX_RESULT} bytes of text")
    return text


# Frames

decode_request = make_decoder(CallRequest)
_decode_answer = make_decoder(CallAnswer)


def decode_answer(kind: str, body: bytes | bytearray) -> CallAnswer | None:
    """Return a worker's answer to a call of this kind, or None if it is invalid."""
    try:
        answer = _decode_answer(body)
        if body[:1] in JSON_BEGINS:  # then it may have half characters
            answer = CallAnswer(*_whole(msgspec.structs.astuple(answer)))
        if answer.status == "ok" and not _is_valid(kind, answer.value):
            return None
    except UNREADABLE:
        return None
    return answer


def _whole(value: Any) -> Any:
    """Return plain data with `?` for half characters, which neither a tokenizer nor a message to the lead can have."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_whole(key): _whole(inner) for key, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list | tuple) else value


def _is_valid(kind: str, value: Any) -> bool:
    match kind:
        case "tool":
            return isinstance(value, str)
        case "step":
            return isinstance(value, list) and [type(each) for each in value] == [str, bool]
        case "reset" if isinstance(value, list):
            json.dumps(value)  # raises TypeError if it is no plain data
            return True
        case "reset":
            return value is None or isinstance(value, str)
        case "reward" | "rollout":
            parts = value if isinstance(value, dict) else {"score": value}
            return all(isinstance(name, str) and isinstance(number, float) for name, number in parts.items())
    return value is None


# The process for code that is not asynchronous


def run_worker(connection: socket.socket, environment: LoadedEnvironment, server: int, trace: CallTrace) -> None:
    """Serve calls in the forked process, then exit the process. `server` is the process id of the server."""
    code = 1
    try:
        isolate(server)
        trace.record()
        _serve(connection, Caller(environment))
        code = 0
    except OSError:
        pass  # the connection is gone: the server ended, or the user's code closed it
    finally:
        os._exit(code)


def _serve(connection: socket.socket, caller: Caller) -> None:
    begin, num_calls, children = count_pages(1), 0, _Children()
    reader = FrameReader(connection, HEAD.size, MAX_REQUEST)
    connection.sendall(pack(HEAD.pack(READY, 0)))
    while True:
        head, body = reader.wait_for_frame()
        request = decode_request(body)
        seed_random(request)
        answer = _call(caller, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        children.check(request)
        num_calls += 1
        is_large = (count_pages(1) - begin) * resource.getpagesize() > MAX_GROWTH
        has_threads = not caller.instances and threading.active_count() > 1
        answer = msgspec.structs.replace(answer, is_worn=num_calls >= MAX_CALLS or is_large or has_threads)
        body = encode(answer)  # type: ignore[assignment]
        number = HEAD.unpack(head)[1]
        connection.sendall(pack(HEAD.pack(ANSWER, number), len(body)) + body)


def _call(caller: Caller, request: CallRequest) -> CallAnswer:
    try:
        run, read = caller.prepare(request)
        return caller.succeed(request, read(run()))
    except BaseException as error:  # SystemExit too
        return caller.describe(request, error)


def seed_random(request: CallRequest) -> None:
    """Make random numbers depend on the conversation and the number of the call, not on the process."""
    seed = zlib.crc32(f"{request.seed}/{request.number}".encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(seed)  # numpy itself imports it only when it is used


class _Children:
    """The processes that the user's code has started. A tool may leave none behind. Those that an instance has started
    live as long as the instance."""

    def __init__(self) -> None:
        self._owned: dict[str, set[int]] = {}  # by conversation

    def check(self, request: CallRequest) -> None:
        """End the processes that should not live on after this call."""
        if not _has_children():
            self._owned.clear()
            return
        living = _list_below()
        if request.kind != "close" and not request.is_plain:
            self._owned[request.conversation] = self._owned.get(request.conversation, set()) & living | self._new(
                living
            )
            return
        if request.kind == "close":
            self._owned.pop(request.conversation, None)
        for _ in range(NUM_SEARCHES):  # some may just be starting others
            if not (new := self._new(living)):
                break
            _end(new)
            living = _list_below()

    def _new(self, living: set[int]) -> set[int]:
        sandboxes = sandbox_processes()
        inside = {process for sandbox in sandboxes for process in descendants_of(sandbox)}
        return living - sandboxes - inside - set().union(*self._owned.values())


def _list_below() -> set[int]:
    """Return all processes below this one: those further down may become its children later."""
    found = set(descendants_of(os.getpid()))
    for _ in range(NUM_SEARCHES):
        if (again := set(descendants_of(os.getpid()))) == found:
            break
        found = again
    return found


def _has_children() -> bool:
    """Leave the exit status of dead children to the user's code."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _end(processes: set[int]) -> None:
    for process in processes:
        end_tree(process)
    for process in processes:
        with suppress(ChildProcessError):
            for _ in range(NUM_SEARCHES):
                if os.waitpid(process, os.WNOHANG)[0]:
                    break
                time.sleep(REAP_S)
