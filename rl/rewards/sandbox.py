"""Run a program in a sandbox, against tests or for its output. This is the worker's side. The other one is in
rl/rewards/sandbox_child.py.

A worker keeps one sandbox, because starting it takes longer than running a program in it. `check_sandbox` proves before
a run that this machine can make one, and that its walls hold.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rl.rewards.sandbox_child import DONE, FAILED, JOB, MAPPED, READY, UNSHARED, USER
from rl.rewards.sandbox_tests import BAD_TESTS, COUNT

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[2]); import rl.rewards.sandbox_child as child; del sys.path[0]; "
    "child.main(int(sys.argv[1]))"
)
START_S = 30.0
GRACE_S = 1.0  # after the time limit of a job; then the sandbox counts as broken
FLAGS = ("-s", "-S", "-P", "-B")  # no packages, and nothing from the working directory
# Settings of a kernel that forbid namespaces to ordinary users, and the value that allows them.
SETTINGS = {
    "kernel/unprivileged_userns_clone": (lambda value: value == 0, "1"),
    "kernel/apparmor_restrict_unprivileged_userns": (lambda value: value > 0, "0"),
    "user/max_user_namespaces": (lambda value: value == 0, "10000"),
}
# Every line of the probe tries to leave the sandbox. It returns what it could do.
PROBE = """
import ctypes, os, socket, sys
def attempts():
    yield "start a process", lambda: os.waitpid(os.fork() or os._exit(0), 0)
    yield "run a command", lambda: os.execv(sys.executable, [sys.executable, "-c", ""])
    yield "open a socket", lambda: socket.socket()
    yield "write to the file system", lambda: open("/escape", "w")
    yield "write to a library", lambda: open(os.__file__, "a")
    yield "see processes", lambda: os.listdir("/proc")
    yield "make a namespace", lambda: 1 / (ctypes.CDLL(None).unshare(0x10000000) + 1)
    yield "mount", lambda: 1 / (ctypes.CDLL(None).mount(b"x", b"/tmp", b"tmpfs", 0, None) + 1)
def escapes(*outside):
    found = ["see outside"] if os.environ or any(map(os.path.exists, outside)) else []
    for name, attempt in attempts():
        try:
            attempt()
            found.append(name)
        except (OSError, ZeroDivisionError):
            pass
    with open("/tmp/file", "w") as file:
        file.write("a program may write here")
    return found
"""


class MachineError(ValueError):
    """This machine cannot isolate programs. The message says what to change."""


class SandboxError(RuntimeError):
    """The sandbox could not be started, or it broke. Its programs are not to blame."""


@dataclass(frozen=True)
class CodeTask:
    """A program, and the tests that it never sees."""

    program: str
    tests: list[str]  # each is Python code that raises if the test fails
    setup: str = ""  # code before the tests
    starter: str = ""  # code before the program, whose definitions the tests use too
    entry_point: str = ""  # the function that the tests know as `candidate`


@dataclass(frozen=True)
class Limits:
    cpu_s: float = 2.0  # CPU time of the program
    memory: int = field(default=512 << 20)  # bytes that the program may map

    @property
    def wall_s(self) -> float:
        """Return the time limit of program and tests together. On a loaded machine, a program gets a part of a core."""
        return 3 * self.cpu_s


class Sandbox:
    """Processes without network, files and rights of this user. They run one program after the other."""

    def __init__(self) -> None:
        """Start the processes. Raise SandboxError if this machine does not allow it."""
        self._control, theirs = socket.socketpair()
        command = [sys.executable, *FLAGS, "-c", PROGRAM, str(theirs.fileno()), str(ROOT)]
        environment = {"PYTHONHASHSEED": "0"}  # so that a program gives the same result every time
        nothing = subprocess.DEVNULL
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        self.owner, self.pid = os.getpid(), self._process.pid
        try:
            self._control.settimeout(START_S)
            self._expect(UNSHARED)
            self._map_ids()
            self._control.sendall(MAPPED)
            self._expect(READY)
        except OSError as error:
            self.close()
            raise SandboxError(str(error) or "it did not start") from None
        except SandboxError:
            self.close()
            raise

    def run(self, task: CodeTask, limits: Limits) -> list[bool]:
        """Return for each test whether the program passes it. Raise ValueError if there are none, or not in Python."""
        count, marks = self._run_job(asdict(task), limits)
        if count == BAD_TESTS:
            raise ValueError(f"its tests are not Python: {marks.decode(errors='replace')}")
        if count == 0:
            raise ValueError("it has no tests")
        return [mark == 1 for mark in marks] + [False] * (count - len(marks))

    def print(self, program: str, limits: Limits, max_chars: int) -> str | None:
        """Run a program without tests. Return the beginning of its output, or None if it was killed."""
        _, output = self._run_job({"program": program, "max_chars": max_chars}, limits)
        return output[1:].decode(errors="replace") if output else None

    def _run_job(self, job: dict[str, Any], limits: Limits) -> tuple[int, bytes]:
        """Return the number at the beginning of the result, and the rest of it."""
        deadline = time.monotonic() + limits.wall_s + GRACE_S
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._control.settimeout(limits.wall_s + GRACE_S)
                bounds = JOB.pack(limits.memory, limits.cpu_s, limits.wall_s)
                socket.send_fds(self._control, [bounds], [theirs.fileno()])
            with ours:
                ours.settimeout(limits.wall_s + GRACE_S)
                result = _exchange(ours, json.dumps(job).encode(), deadline)
            self._expect(DONE)
        except OSError as error:
            self.close()
            raise SandboxError(f"the sandbox broke: {error or 'it did not answer'}") from None
        if len(result) < COUNT.size:
            self.close()
            raise SandboxError("the sandbox could not start a program; other programs may have used up the machine")
        return COUNT.unpack_from(result)[0], result[COUNT.size :]

    def close(self) -> None:
        """End all processes."""
        self._control.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # the kernel then kills init, and with it all others
        self._process.wait()

    def _expect(self, wanted: bytes) -> None:
        answer = self._control.recv(4096)
        if answer.startswith(FAILED):
            raise SandboxError(answer[1:].decode(errors="replace"))
        if answer != wanted:
            raise SandboxError("its first process has ended")

    def _map_ids(self) -> None:
        """Give the sandbox one user and one group: nobody's if this process may choose, else its own."""
        folder, own = Path(f"/proc/{self.pid}"), {"gid_map": os.getegid(), "uid_map": os.geteuid()}
        (folder / "setgroups").write_text("deny")
        for name, own_id in own.items():
            try:
                (folder / name).write_text(f"{USER} {USER} 1")
            except OSError:  # only root may choose
                (folder / name).write_text(f"{USER} {own_id} 1")


def _exchange(connection: socket.socket, data: bytes, deadline: float) -> bytes:
    """Send the job, and return all that comes back. If the tester is killed meanwhile, return what it has sent."""
    result = bytearray()
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(1 << 16):
            result += piece
            connection.settimeout(max(0.01, deadline - time.monotonic()))
    return bytes(result)


T = TypeVar("T")
_current: Sandbox | None = None


def run_in_sandbox(task: CodeTask, limits: Limits) -> list[bool]:
    """Run a task in the sandbox of this process, which the first call starts."""
    return _with_sandbox(lambda sandbox: sandbox.run(task, limits))


def print_in_sandbox(program: str, limits: Limits, max_chars: int) -> str | None:
    """Run a program in the sandbox of this process. Return the beginning of its output, or None if it was killed."""
    return _with_sandbox(lambda sandbox: sandbox.print(program, limits, max_chars))


def _with_sandbox(use: Callable[[Sandbox], T]) -> T:
    global _current
    if _current is None or _current.owner != os.getpid():
        _current = Sandbox()
    try:
        return use(_current)
    except SandboxError:
        _current = None  # the next call starts another one
        raise


def sandbox_processes() -> set[int]:
    """Return the child of this process that belongs to its sandbox, if it has one."""
    return {_current.pid} if _current is not None and _current.owner == os.getpid() else set()


def check_sandbox(limits: Limits) -> None:
    """Raise MachineError if this machine cannot make a sandbox, or if a program can leave it."""
    try:
        sandbox = Sandbox()
    except SandboxError as error:
        raise MachineError(f"this machine does not allow to isolate programs: {error}. {_remedy()}") from None
    try:
        calls = f"escapes({__file__!r}, '/etc/passwd', '/proc/1')"
        if sandbox.run(CodeTask(PROBE, [f"assert {calls} == []"]), limits) != [True]:
            names = [line.split('"')[1] for line in PROBE.splitlines() if "yield" in line]
            tests = [f"assert {name!r} not in {calls}" for name in ("see outside", *names)]
            results = sandbox.run(CodeTask(PROBE, tests), limits)
            escapes = [name for name, is_passed in zip(("see outside", *names), results) if not is_passed]
            can = f"a program can {' and '.join(escapes)}" if escapes else f"a simple program fails under {limits}"
            raise MachineError(f"the walls around programs do not work here: {can}. {_remedy()}")
    except SandboxError as error:
        raise MachineError(f"this machine does not allow to isolate programs: {error}. {_remedy()}") from None
    finally:
        sandbox.close()


def _remedy() -> str:
    """Return what to change, with the settings of this kernel that forbid namespaces."""
    wrong = []
    for name, (forbids, value) in SETTINGS.items():
        with suppress(OSError, ValueError):
            if forbids(int(Path("/proc/sys", name).read_text())):
                wrong.append(f"sysctl {name.replace('/', '.')}={value}")
    if wrong:
        return f"As root, run: {', '.join(wrong)}. Or choose another reward function"
    return (
        "It needs Linux with user namespaces and seccomp. In a container, allow the calls unshare and mount (docker "
        "run --security-opt seccomp=unconfined --security-opt apparmor=unconfined). Or choose another reward function"
    )
