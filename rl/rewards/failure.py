"""Why a call of the reward functions failed: which function, with what, and at which line of its code.

A worker describes an exception itself. If a call hangs or its process crashes, the worker cannot answer. Then the
server reads which function was called, and its Python stack, from a file in memory that faulthandler writes.
"""

import faulthandler
import inspect
import io
import os
import re
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import CodeType
from typing import Any

MAX_TEXT = 500  # characters
MAX_QUOTED = 60  # characters of a prompt or response in a message
MAX_TRACE = 1 << 16  # bytes
INDEX_BYTES = 4  # at the start of the file: the index of the function that was called last
FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)  # as faulthandler writes it, innermost first
TRACE_SIGNAL = signal.SIGUSR1  # makes a worker write its stack
PACKAGES = ("/site-packages/", "/dist-packages/")
OWN_FOLDER = str(Path(__file__).parent)
MACHINERY = [f"{OWN_FOLDER}/{name}.py" for name in ("failure", "worker", "server")]  # calls the functions

ENVIRONMENT = "environment"  # instead of a reward function: the tools or the environment of a conversation
Frame = tuple[str, int]  # file and line


@dataclass(frozen=True)
class RewardFailure:
    """A failed call. All fields are texts of one line."""

    function: str
    error: str  # type of the exception, or `timeout` or `crash`
    text: str  # what happened
    place: str  # file:line in the code of the function; empty if unknown
    sample: str = ""  # file and line of the prompt, and the texts of prompt and response

    @property
    def kind(self) -> tuple[str, str, str]:
        """Failures of the same kind share one message. A timeout has no line, because a function may hang anywhere."""
        return self.function, self.error, "" if self.error == "timeout" else self.place

    @property
    def remedy(self) -> str:
        """Return what the user can change, as an imperative clause."""
        if self.function == ENVIRONMENT:
            return "correct the environment, or raise the limit that it reached"
        if self.error == "timeout":
            return "make the function faster, or raise reward.timeout_s"
        return "correct the function, or the columns of the data that it reads"

    def __str__(self) -> str:
        place, sample = self.place and f" at {self.place}", self.sample and f" ({self.sample})"
        what = "the environment" if self.function == ENVIRONMENT else f"the reward function {self.function}"
        return f"{what} failed{place}: {self.text}{sample}"


def read_failure(values: Any) -> RewardFailure | None:
    """Return a failure that another process sent, or None if it is invalid. Long texts are cut."""
    names = [entry.name for entry in fields(RewardFailure)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        return None
    if not all(isinstance(value, str) for value in values.values()):
        return None
    return RewardFailure(**{name: one_line(value, 2 * MAX_TEXT) for name, value in values.items()})


def describe_error(name: str, call: Callable[..., Any], error: BaseException) -> RewardFailure:
    """Describe an exception of a reward function, in the process that called it."""
    kind, trace, frames = type(error).__name__, error.__traceback__, list[Frame]()
    try:
        text = f"{kind}: {error}"
    except Exception:  # raised by the exception's own __str__
        text = kind
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return RewardFailure(name, one_line(kind), one_line(text), find_place(call, reversed(frames)))


def find_place(call: Callable[..., Any], frames: Iterable[Frame]) -> str:
    """Return file:line of the innermost frame in the user's code: the folder of the function's file, without packages.
    If there is none, return where the function begins. `frames` are the innermost first.
    """
    code = _code_of(call)
    if code is None:
        return next((f"{file}:{line}" for file, line in frames if file not in MACHINERY), "")
    folder = os.path.dirname(code.co_filename) + "/"
    for file, line in frames:
        inside = file.removeprefix(folder)
        if inside != file and file not in MACHINERY and not any(name in f"/{inside}" for name in PACKAGES):
            return f"{file}:{line}"
    return f"{code.co_filename}:{code.co_firstlineno}"


def _code_of(call: Callable[..., Any]) -> CodeType | None:
    """Return the code of a function, a method or an object with `__call__`; None if it is not Python."""
    with suppress(ValueError):  # a cycle of wrappers
        call = inspect.unwrap(call)
    call = getattr(call, "func", call)  # functools.partial
    code = getattr(call, "__code__", None) or getattr(type(call).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def one_line(text: str, most: int = MAX_TEXT) -> str:
    """Return a text without line ends and control characters, and at most this long."""
    shown = " ".join(text[: 2 * most].split())
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in shown)
    return shown if len(shown) <= most else shown[: most - 3] + "..."


def quote(text: str) -> str:
    """Return the beginning and the end of a text in quotes. The beginning of a chat is often the same in all rows."""
    half = MAX_QUOTED // 2
    return repr(text) if len(text) <= MAX_QUOTED else f"{text[:half]!r} ... {text[-half:]!r}"


class CallTrace:
    """A file in memory with the stack of a worker. The server makes it; the worker inherits it and writes."""

    def __init__(self) -> None:
        self._file = io.FileIO(os.memfd_create("reward call"), "r+")
        self._file.seek(INDEX_BYTES)

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def reset(self) -> None:
        """Forget the last call. A child process of an earlier call may have crashed and written its stack."""
        with suppress(OSError):  # a function may have closed the file
            os.ftruncate(self.fd, 0)

    def record(self) -> None:
        """Write the stack of this process to the file if it crashes, or if it gets the signal TRACE_SIGNAL."""
        faulthandler.enable(self.fd, all_threads=False)
        faulthandler.register(TRACE_SIGNAL, self.fd, all_threads=False)

    def begin(self, index: int) -> None:
        """Note which function is called now."""
        with suppress(OSError):  # a function may have closed the file
            os.pwrite(self.fd, index.to_bytes(INDEX_BYTES, "little"), 0)

    def read(self) -> tuple[int, list[Frame]]:
        """Return the index of the function that was called last, and the newest stack, innermost frame first."""
        index = int.from_bytes(os.pread(self.fd, INDEX_BYTES, 0), "little")
        start = max(INDEX_BYTES, os.fstat(self.fd).st_size - MAX_TRACE)
        text = os.pread(self.fd, MAX_TRACE, start).decode(errors="replace")
        newest = text[max(0, text.rfind("(most recent call first)")) :]
        return index, [(file, int(line)) for file, line in FRAME.findall(newest)]

    def close(self) -> None:
        self._file.close()
