"""A worker process that runs the reward functions, one call at a time. The reward server may kill it at any moment."""

import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from rl.common.framing import READ_BYTES, FrameReader, pack
from rl.rewards.failure import CallTrace, RewardFailure, describe_error
from rl.rewards.isolation import count_pages, isolate
from rl.rewards.process_tree import children_of
from rl.rewards.sandbox import sandbox_processes

MAX_CALL_ID, MAX_CALL = 20, (1 << 32) - 1  # maximum bytes of a frame's id and body
MAX_CALLS = 2000  # calls after which the process is replaced, because functions may leave things behind
MAX_GROWTH = 256 << 20  # growth of resident memory, in bytes, after which the process is replaced
SLOW_S = 0.02  # after a call that takes longer, calls that wait behind it are given back, for other workers
MAX_SCORE = 1e30  # a weighted sum of larger scores may not fit float32
MAX_PARTS, MAX_NAME, MAX_ANSWER = 64, 100, 10_000  # parts per function; the others in characters


class ResultTypeError(TypeError):
    """A function returned a value that is no score, such as text."""


class RewardFunction(NamedTuple):
    name: str
    weight: float
    call: Callable[..., Any]
    options: dict[str, Any]


def run_worker(connection: socket.socket, functions: list[RewardFunction], server: int, trace: CallTrace) -> None:
    """Serve calls in the forked process, then exit the process. `server` is the process id of the reward server."""
    code = 1
    try:
        isolate(server)
        trace.record()
        _serve(connection, functions, trace)
        code = 0
    except OSError:
        pass  # the connection is gone: the server ended, or a function closed it
    finally:
        os._exit(code)


def _serve(connection: socket.socket, functions: list[RewardFunction], trace: CallTrace) -> None:
    begin, calls, is_last = count_pages(1), 0, False
    reader = FrameReader(connection, MAX_CALL_ID, MAX_CALL)
    connection.sendall(pack(b""))
    while not is_last:
        call_id, body = reader.wait_for_frame()
        began = time.monotonic()
        trace.reset()
        random.seed(zlib.crc32(body))  # so that functions that use random give the same score on every worker
        if (sympy := sys.modules.get("sympy.core.random")) is not None:
            sympy.seed(zlib.crc32(body))
        result = score(functions, **json.loads(body), begin=trace.begin)
        signal.setitimer(signal.ITIMER_REAL, 0)
        calls += 1
        grown = (count_pages(1) - begin) * resource.getpagesize()
        is_last = calls >= MAX_CALLS or grown > MAX_GROWTH or threading.active_count() > 1 or _has_children()
        answer = json.dumps(result | {"is_last": is_last}).encode()
        frames = pack(call_id, len(answer)) + answer
        if is_last or time.monotonic() - began > SLOW_S:
            frames += b"".join(pack(waiting) for waiting, _ in reader.frames())  # without a result: given back
        connection.sendall(frames)
    while connection.recv(READ_BYTES):  # calls that came later: the server gives them to another worker
        pass


def _has_children() -> bool:
    """Return whether this process has living children, besides its sandbox. Reap the dead ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    kept = sandbox_processes()
    return not kept or not kept.issuperset(children_of(os.getpid()))


def score(
    functions: list[RewardFunction],
    prompt: str,
    response: str,
    row: dict[str, Any],
    answer_of: str = "",
    begin: Callable[[int], None] = lambda index: None,
) -> dict[str, Any]:
    """Return the weighted sum and the parts of all functions. If one function fails, the whole call fails.

    `begin` gets the index of each function before it is called.
    """
    total, parts, answer = 0.0, {}, None
    for index, function in enumerate(functions):
        begin(index)
        try:
            value, own = read_value(function.call(prompt, response, row, **function.options))
            if function.name == answer_of and (extract := getattr(function.call, "answer", None)) is not None:
                answer = extract(response)
                if not isinstance(answer, str | None):
                    raise TypeError(f"its attribute answer returned {type(answer).__name__}; return text or None")
        except BaseException as error:  # SystemExit too
            return failed("error", functions, describe_error(function.name, function.call, error))
        total += function.weight * value
        parts[function.name] = value
        parts |= {f"{function.name}/{part}": number for part, number in own.items()}
    answer = answer[:MAX_ANSWER] if answer is not None else None
    return {"status": "ok", "score": total, "parts": parts, "answer": answer, "failure": None}


def failed(status: str, functions: list[RewardFunction], failure: RewardFailure) -> dict[str, Any]:
    """Return the result of a failed call."""
    parts = dict.fromkeys((function.name for function in functions), 0.0)
    return {"status": status, "score": 0.0, "parts": parts, "answer": None, "failure": asdict(failure)}


def read_value(value: Any) -> tuple[float, dict[str, float]]:
    """Return the score and the parts in a function's result. Raise unless it is a number or a dict of numbers."""
    if not isinstance(value, dict):
        return _number(value, "the score"), {}
    if not 0 < len(value) <= MAX_PARTS:
        raise ValueError(f"got {len(value)} parts; return a dict of 1 to {MAX_PARTS} parts, or a number")
    parts = {}
    for name, part in value.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise TypeError(f"got a part named {repr(name)[:MAX_NAME]}; a name is text of 1 to {MAX_NAME} characters")
        parts[name] = _number(part, f"part {name!r}")
    total = parts.pop("score", None)
    return (sum(parts.values()) if total is None else total), parts


def _number(value: Any, what: str) -> float:
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, bool | int | float):
        # A function without a `return` for some responses gives None.
        kind = TypeError if value is None else ResultTypeError
        raise kind(f"{what} is a {type(value).__name__}; return a number, or a dict from names to numbers")
    number = float(value)
    if not abs(number) <= MAX_SCORE:
        raise ValueError(f"{what} is {number}; return a number from -{MAX_SCORE:g} to {MAX_SCORE:g}")
    return number
