"""What happens inside of a sandbox: a program answers calls of its functions, and a tester runs the tests, or passes on
what the program has printed.

Both are processes of their own, connected by a pair of sockets. Arguments and answers are plain values or opaque
handles. So the tester, and not the program, decides what equals an expected value.
"""

import ast
import builtins
import io
import itertools
import json
import random
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

COUNT = struct.Struct("<i")  # number of tests, or BAD_TESTS
BAD_TESTS = -1
CONFINED = "confined"
MAX_MESSAGE = 8 << 20  # bytes of a call or an answer
MAX_ITEMS = 100_000  # of an iterator that a program returns
CUT = "\n[the rest of the output is left out]"


class ProgramEnded(BaseException):
    """The program's process has ended, or sent what cannot be read. No test may catch this by `except Exception`."""


class ValueChannel:
    """Sends and receives JSON with a length before it."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE:
            raise ValueError(f"the value has {len(body)} bytes as JSON; at most {MAX_MESSAGE} are sent")
        self._connection.sendall(len(body).to_bytes(4, "little") + body)

    def receive(self) -> Any:
        size = int.from_bytes(self._read(4), "little")
        if size > MAX_MESSAGE:
            raise EOFError("the message is too long")
        return json.loads(self._read(size))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._connection.recv(size - len(data))
            if not piece:
                raise EOFError("the connection was closed")
            data += piece
        return bytes(data)


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Return a value as JSON. `keep` encodes what is not plain data. Subclasses become their plain types."""
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float, str):
        if isinstance(value, plain):
            return value if type(value) is plain else plain(value)
    if isinstance(value, dict):
        return ["dict", [[encode(name, keep), encode(entry, keep)] for name, entry in value.items()]]
    for container in (list, tuple, set, frozenset):
        if isinstance(value, container):
            return [container.__name__, [encode(entry, keep) for entry in value]]
    if isinstance(value, bytes | bytearray):
        return [type(value).__name__ if type(value) in (bytes, bytearray) else "bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    if isinstance(value, Decimal | Fraction):
        return [type(value).__name__, str(value)]
    if isinstance(value, Iterator):
        entries = list(itertools.islice(value, MAX_ITEMS + 1))
        if len(entries) > MAX_ITEMS:
            raise ValueError(f"the iterator has more than {MAX_ITEMS} items")
        return ["iterator", [encode(entry, keep) for entry in entries]]
    return keep(value)


def decode(value: Any, find: Callable[[int], Any]) -> Any:
    """Return the value in JSON, made of plain types and of what `find` returns for a handle."""
    if not isinstance(value, list):
        return value
    name, content = value
    if name == "dict":
        return {decode(key, find): decode(entry, find) for key, entry in content}
    if name in ("list", "tuple", "set", "frozenset", "iterator"):
        entries = [decode(entry, find) for entry in content]
        return entries if name == "list" else MAKERS[name](entries)
    return find(content) if name == "handle" else MAKERS[name](content)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "iterator": iter,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*parts),
    "Decimal": Decimal,
    "Fraction": Fraction,
}


# The program's process


class Program:
    """Runs the program, and answers calls of its functions."""

    def __init__(self, channel: ValueChannel):
        self._channel = channel
        self._names: dict[str, Any] = {"__name__": "program"}
        self._kept: list[Any] = []  # values that the tester has handles of

    def serve(self) -> NoReturn:
        """Say that the walls stand, and answer the tester. The first request runs the program."""
        self._channel.send(CONFINED)
        while True:
            action, *arguments = self._channel.receive()
            try:
                answer = ["ok", encode(getattr(self, action)(*arguments), self._keep)]
            except BaseException as error:  # SystemExit too
                answer = ["error", type(error).__name__]
            try:
                self._channel.send(answer)
            except ValueError as error:
                self._channel.send(["error", type(error).__name__])

    def load(self, starter: str, program: str, wanted: list[str]) -> list[str]:
        """Run the program. Return which of the wanted names it defines."""
        random.seed(0)
        if starter:
            exec(compile(starter, "starter", "exec"), self._names)
        exec(compile(program, "program", "exec"), self._names)
        return [name for name in wanted if name in self._names]

    def print(self, program: str, max_chars: int) -> str:
        """Run the program. Return what it prints, and the error that ends it."""
        random.seed(0)
        output = Beginning(max_chars)
        with redirect_stdout(output), redirect_stderr(output):
            try:
                exec(compile(program, "program", "exec"), self._names | {"__name__": "__main__"})
            except SystemExit:
                pass
            except BaseException as error:
                lines = traceback.format_exception(error.with_traceback(_in_program(error)))
                output.write("".join(lines))
        return output.getvalue()

    def find(self, name: str) -> Any:
        return self._names[name]

    def call(self, handle: int, arguments: Any, options: Any) -> Any:
        found = self._kept.__getitem__
        return self._kept[handle](*decode(arguments, found), **decode(options, found))

    def get(self, handle: int, name: str) -> Any:
        return getattr(self._kept[handle], name)

    def set(self, handle: int, name: str, value: Any) -> None:
        setattr(self._kept[handle], name, decode(value, self._kept.__getitem__))

    def _keep(self, value: Any) -> Any:
        self._kept.append(value)
        return ["handle", len(self._kept) - 1]


class Beginning(io.StringIO):
    """A text of which only the beginning is kept."""

    def __init__(self, max_chars: int):
        super().__init__()
        self._num_left = max_chars  # -1: the end was left out

    def write(self, text: str) -> int:
        if len(text) <= self._num_left:
            super().write(text)
        elif self._num_left >= 0:
            super().write(text[: self._num_left] + CUT)
        self._num_left = max(-1, self._num_left - len(text))
        return len(text)


def _in_program(error: BaseException) -> Any:
    """Return the traceback without the frame of this file."""
    return error.__traceback__.tb_next if error.__traceback__ else None


# The tester's process


class Handle:
    """A function, class or object in the program's process. It is equal to nothing but itself."""

    __slots__ = ("_id", "_side")

    def __init__(self, side: "ProgramSide", number: int):
        object.__setattr__(self, "_side", side)
        object.__setattr__(self, "_id", number)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._side.ask("call", self._id, arguments, options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._side.ask("get", self._id, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._side.ask("set", self._id, name, self._side.encode(value))


class ProgramSide:
    """The tester's connection to the program."""

    def __init__(self, channel: ValueChannel):
        self._channel = channel

    def ask(self, action: str, *arguments: Any) -> Any:
        if action == "call":
            arguments = (arguments[0], self.encode(arguments[1]), self.encode(arguments[2]))
        try:
            self._channel.send([action, *arguments])
            status, value = self._channel.receive()
            if status == "ok":
                return decode(value, lambda number: Handle(self, int(number)))
        except (OSError, EOFError, ValueError, TypeError, KeyError, RecursionError, ArithmeticError):
            raise ProgramEnded from None
        raise error_named(value)

    def encode(self, value: Any) -> Any:
        def keep(other: Any) -> Any:
            if isinstance(other, Handle):
                return ["handle", other._id]
            raise TypeError(f"a test passed a {type(other).__name__}, which cannot be sent to a program")

        return encode(value, keep)


def error_named(name: Any) -> Exception:
    """Return the exception of a program in the tester. One that ends iterations early could make a test pass."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    is_safe = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration)
    is_safe = is_safe and kind not in (StopAsyncIteration, UnicodeDecodeError, UnicodeEncodeError)
    return kind("the program raised it") if is_safe and kind is not None else RuntimeError(f"the program raised {name}")


def run_tests(job: socket.socket, channel: ValueChannel) -> None:
    """Read the job, run its tests, and send the worker one byte for each of them. Send nothing if the setup failed."""
    if channel.receive() != CONFINED:
        return
    with job.makefile("rb") as file:
        task = json.load(file)
    if "max_chars" in task:
        job.sendall(COUNT.pack(0))
        with suppress(ProgramEnded):
            printed = ProgramSide(channel).ask("print", task["program"], task["max_chars"])
            job.sendall(b"\0" + str(printed).encode(errors="replace"))
        return
    try:
        tests = split_tests(task["tests"])
        codes = [compile(test, "test", "exec") for test in tests]
        setup = ast.parse(task["setup"])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        job.sendall(COUNT.pack(BAD_TESTS) + str(error).encode())
        return
    job.sendall(COUNT.pack(len(tests)))
    side, names, entry = ProgramSide(channel), dict[str, Any](), task["entry_point"]
    names["__name__"] = "tests"
    wanted = sorted(free_names(setup, *tests) | {entry} - {""})
    try:
        starter, program = join_program(task["starter"], task["program"])
        defined = side.ask("load", starter, program, encode(wanted, str)[1])
        if task["starter"]:
            exec(compile(task["starter"], "starter", "exec"), names)
        for name in wanted:
            if name in sys.stdlib_module_names:
                names.setdefault(name, __import__(name))
            elif name in defined and (name == entry or name not in names):
                names[name] = side.ask("find", name)
        if entry:
            names["candidate"] = names[entry]
        exec(compile(setup, "setup", "exec"), names)
    except (Exception, ProgramEnded):
        job.sendall(bytes(len(tests)))
        return
    for code in codes:
        try:
            exec(code, names)
            is_passed = True
        except BaseException:
            is_passed = False
        job.sendall(bytes([is_passed]))


def join_program(starter: str, program: str) -> tuple[str, str]:
    """Return what is run before the program, and the program, which may be only the rest of the starter."""
    if starter and program[:1].isspace():
        with suppress(SyntaxError, ValueError):
            compile(program, "program", "exec")
            return starter, program
        return "", starter.rstrip("\n") + "\n" + program
    return starter, program


def split_tests(sources: list[str]) -> list[ast.Module]:
    """Return the tests. A function `check(candidate)`, as HumanEval has, becomes one test for each assertion."""
    tests = []
    for source in sources:
        tree = ast.parse(source)
        checks = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
        if not checks:
            tests.append(tree)
            continue
        body = checks[-1].body
        others = [node for node in tree.body if node is not checks[-1] and not _calls_check(node)]
        is_test = [any(isinstance(inner, ast.Assert) for inner in ast.walk(node)) for node in body]
        call = ast.parse("check(candidate)").body
        for part in [number for number, is_one in enumerate(is_test) if is_one] or [len(body)]:
            kept = [node for number, node in enumerate(body) if number == part or not is_test[number]]
            own = ast.copy_location(ast.FunctionDef(**dict(ast.iter_fields(checks[-1])) | {"body": kept}), checks[-1])
            tests.append(ast.Module([*others, own, *call], []))
    return tests


def _calls_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"


def free_names(*trees: ast.Module) -> set[str]:
    """Return the names that the sources use but do not define, without builtins."""
    used, bound = set[str](), {"candidate", "check", *dir(builtins)}
    for node in {id(node): node for tree in trees for node in tree.body}.values():  # tests share most of their nodes
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                (used if isinstance(inner.ctx, ast.Load) else bound).add(inner.id)
            elif isinstance(inner, ast.FunctionDef | ast.ClassDef):
                bound.add(inner.name)
            elif isinstance(inner, ast.arg):
                bound.add(inner.arg)
            elif isinstance(inner, ast.Import | ast.ImportFrom):
                bound.update((alias.asname or alias.name).split(".")[0] for alias in inner.names)
    return used - bound
