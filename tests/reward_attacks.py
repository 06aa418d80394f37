"""Reward functions that hang, crash, flood, leak or forge, as the response says; programs that do the same to the
reward function `code`; and helpers that watch a pool."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rl.common.framing import pack

MARK = "ONEWORLD_REWARD_TEST"
SPEC = f"{Path(__file__).resolve()}:attack"


def good(prompt: str, response: str, row: dict[str, Any]) -> dict[str, float]:
    return {"score": float(len(response)), "row": float(row["answer"])}


def bad(prompt: str, response: str, row: dict[str, Any]) -> float:
    return float(response == row["answer"])


def attack(prompt: str, response: str, row: dict[str, Any]) -> Any:
    action = getattr(sys.modules[__name__], response, None)
    return action() if action is not None else float(response)


def loops() -> None:
    while True:
        pass


def sleeps() -> None:
    time.sleep(1000)


def loops_in_c() -> None:
    """Loop in C code, where Python's signal handlers never run."""
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def ignores_signals() -> None:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    loops()


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exits() -> None:
    os._exit(3)


def exits_well() -> None:
    os._exit(0)


def raises_exit() -> None:
    sys.exit(0)


def segfaults() -> None:
    ctypes.string_at(0)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ends_by_a_signal_without_a_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 6)


def raises() -> None:
    raise RuntimeError("x" * 50_000_000)


def raises_what_cannot_be_shown() -> None:
    class Strange(Exception):
        def __str__(self) -> str:
            raise ValueError

    raise Strange


def recurses() -> None:
    recurses()


def fills_memory() -> None:
    kept = []
    while True:
        kept.append(bytes(256 << 20))


def prints() -> float:
    for _ in range(200):
        print("x" * (1 << 20))
        print("y" * (1 << 20), file=sys.stderr)
    return 1.0


def returns_much() -> str:
    return "x" * 50_000_000


def returns_nothing() -> None:
    return None


def closes_everything() -> float:
    os.closerange(0, 4096)
    return 1.0


def lines_of_this_process() -> list[int]:
    """Return the sockets of this process, one of which leads to the server."""
    links = {int(fd.name): os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    return [fd for fd, target in links.items() if target.startswith("socket:")]


def writes_without_end() -> None:
    while True:
        for fd in lines_of_this_process():
            os.write(fd, pack(b"") * 4096)


def writes_nonsense() -> float:
    for fd in lines_of_this_process():
        os.write(fd, pack(b"", 8) + b"nonsense")
    return 1.0


def writes_no_frame() -> float:
    for fd in lines_of_this_process():
        os.write(fd, b"\0" * 100)
    return 1.0


def writes_half_a_frame() -> None:
    for fd in lines_of_this_process():
        os.write(fd, pack(b"", 8)[:3])
    loops()


def _leave(count: int) -> None:
    for _ in range(count):
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)


def leaves_children() -> float:
    """Leave children in sessions of their own, without a parent, that ignore signals."""
    _leave(30)
    return 1.0


def leaves_children_and_crashes() -> None:
    _leave(30)
    os._exit(1)


def leaves_children_and_hangs() -> None:
    _leave(30)
    loops()


def bombs() -> None:
    """Double the number of processes nine times, which is enough for the limit and harmless for the machine."""
    for _ in range(9):
        os.fork()
        time.sleep(0.05)
    time.sleep(1000)


def runs_a_program() -> float:
    return float(subprocess.run(["cat"], input=b"0.5", stdout=subprocess.PIPE, check=True).stdout)


def leaves_a_thread_that_exits() -> float:
    threading.Thread(target=lambda: (time.sleep(0.2), os._exit(9)), daemon=True).start()
    return 1.0


def leaves_an_alarm() -> float:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


def writes_a_file() -> float:
    with open(os.devnull, "wb") as file:
        file.write(b"x")
    return float(resource.getrlimit(resource.RLIMIT_CORE)[0] == 0)


# Programs for the reward function `code`. Their task is `add(a, b)`, and none of them may pass its tests.
SUM = "def add(a, b):\n    return a + b\n"
SUM_TEST = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(9, -4) == 5\n"
SUM_ROW = {"entry_point": "add", "test": SUM_TEST}


def programs(text: str) -> dict[str, str]:
    """Return programs by name. Each begins after a line `== NAME`."""
    parts = text.split("\n== ")[1:]
    return {name: program for name, _, program in (part.partition("\n") for part in parts)}


# These pretend to be right.
FORGERIES = programs(r"""
== exits with 0
import os
os._exit(0)
== raises SystemExit
raise SystemExit(0)
== exits in a call
import sys
def add(a, b):
    sys.exit(0)
== exits at once in a call
import os
def add(a, b):
    os._exit(0)
== replaces sys.exit
import sys
sys.exit = exit = quit = lambda *_: None
def add(a, b):
    sys.exit(0)
== prints results
print('1 1 1 passed ok')
def add(a, b):
    print([True, True])
== is equal to everything
class Any:
    def __eq__(self, other):
        return True
def add(a, b):
    return Any()
== is an int that equals everything
class Any(int):
    def __eq__(self, other):
        return True
    __hash__ = int.__hash__
def add(a, b):
    return Any(0)
== is a list whose items are equal
class Any(list):
    def __eq__(self, other):
        return True
def add(a, b):
    return Any([1])
== replaces builtins
import builtins
builtins.AssertionError = builtins.Exception = None
builtins.exec = builtins.compile = lambda *_: None
def add(a, b):
    return None
== defines check
def check(candidate):
    pass
candidate = check
def add(a, b):
    return None
== searches frames
import gc, re, sys
def texts(value, depth=0):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth < 4:
        for entry in list(value.values()):
            yield from texts(entry, depth + 1)
    elif isinstance(value, (list, tuple)) and depth < 4:
        for entry in list(value):
            yield from texts(entry, depth + 1)
def add(a, b):
    frame, found = sys._getframe(), []
    while frame:
        found += texts(dict(frame.f_locals))
        found += texts(dict(frame.f_globals))
        frame = frame.f_back
    for value in gc.get_objects():
        found += texts(value)
    needle = "assert " + "candidate(%s, %s) == " % (a, b)
    for text in found:
        if needle in text:
            return int(re.match(r"-?\d+", text.split(needle)[1])[0])
== searches memory
import ctypes, sys
def add(a, b):
    needle = ("candidate(%s, %s)" % (a, b)).encode() + b" == "
    libc = ctypes.CDLL(None)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.sbrk.restype = ctypes.c_void_p
    for heap in (libc.sbrk(0), id(object())):  # of large and of small objects
        for start in range((heap & ~0xFFF) - (32 << 20), heap + (32 << 20), 4096):
            if libc.mincore(start, 4096, ctypes.create_string_buffer(1)) == 0:
                page = ctypes.string_at(start, 4096)
                at = page.find(needle)
                if at >= 0 and page[at + len(needle):][:1].isdigit():
                    return int(page[at + len(needle):][:1])
== writes to every file
import os
def add(a, b):
    for fd in range(64):
        try:
            os.write(fd, bytes([1]) * 100)
        except OSError:
            pass
== answers before it is asked
import os
for fd in range(3, 64):
    try:
        for _ in range(9):
            os.write(fd, b'\x09\0\0\0["ok", 1]')
    except OSError:
        pass
== sends nonsense
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'\xff' * 1000)
    except OSError:
        pass
== nests its answer
def add(a, b):
    value = []
    for _ in range(100000):
        value = [value]
    return value
== recurses
def add(a, b):
    return add(a, b)
== raises what cannot be shown
class Strange(Exception):
    def __str__(self):
        raise ValueError
def add(a, b):
    raise Strange
== replaces the class of its error
class Passed(AssertionError):
    pass
def add(a, b):
    raise Passed
""")

# These try to get out, or to do harm. Where it is said, `add` is right only if the attempt succeeds.
HOSTILE = """
import ctypes, os, signal, socket, subprocess, sys, time
LIBC = ctypes.CDLL(None, use_errno=True)
def called(result):
    if result < 0:
        raise OSError(ctypes.get_errno())
def add(a, b):
    attempt()
    return a + b
def attempt():
"""
ESCAPES = {
    "forks": "if os.fork() == 0: os._exit(0)",
    "starts a program": "subprocess.run([sys.executable, '-c', ''], check=True)",
    "becomes a program": "os.execv('/bin/sh', ['sh', '-c', 'exit 0'])",
    "opens a socket": "socket.socket()",
    "opens a UNIX socket": "socket.socket(socket.AF_UNIX)",
    "resolves a name": "socket.getaddrinfo('localhost.localdomain', 80)",
    "writes to the root": "open('/file', 'w').close()",
    "writes to a library": "open(os.__file__, 'a').close()",
    "writes to /usr": "open('/usr/lib/file', 'w').close()",
    "writes to shared memory": "open('/dev/shm/file', 'w').close()",
    "makes memory that is a file": "os.memfd_create('x')",
    "reads the password file": "open('/etc/passwd').close()",
    "follows a link": "os.symlink('/etc/passwd', 'link'); open('link').close()",
    "leaves by ..": "open('../../../../../../etc/passwd').close()",
    "reads the checkout": "open(CHECKOUT).close()",
    "lists a home": "assert set(os.listdir(HOME)) - SEEN",
    "reads processes": "os.listdir('/proc/1')",
    "reads the environment": "assert os.environ or os.environb",
    "sees other processes": "os.kill(OUTSIDE, 0)",
    "kills other processes": "os.kill(OUTSIDE, 9)",
    "kills its process group": "os.killpg(os.getpgid(0), 0) if os.getpgid(0) != 1 else 1 / 0",
    "traces a process": "called(LIBC.ptrace(16, 2, 0, 0))",
    "makes a namespace": "called(LIBC.unshare(0x10000000))",
    "mounts": "called(LIBC.mount(b'x', b'/tmp', b'tmpfs', 0, None))",
    "changes its root": "os.chroot('/tmp')",
    "becomes root": "os.setuid(0)",
    "raises its limits": "__import__('resource').setrlimit(__import__('resource').RLIMIT_AS, (1 << 40, 1 << 40))",
    "adds a key": "called(LIBC.syscall(KEYCTL, 0, -3, 0, 0, 0))",
    "makes a device": "os.mknod('disk', 0o600 | 0o060000, os.makedev(8, 0)); open('disk').close()",
    "fills the disk": "[open(str(number), 'wb').write(bytes(15 << 20)) for number in range(9)]",
    "writes a large file": "open('x', 'wb').write(bytes(17 << 20))",
    "makes many files": "[open(str(number), 'w').close() for number in range(5000)]",
    "opens many files": "[os.open('/dev/null', os.O_RDONLY) for _ in range(200)]",
    "fills memory": "bytearray(4 << 30)",
    "fills memory slowly": "kept = [bytearray(16 << 20) for _ in range(256)]",
}
BOMBS = programs(r"""
== forks without end
while True:
    try:
        __import__('os').fork()
    except OSError:
        pass
== starts threads without end
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(99,)).start()
== loops
while True:
    pass
== sleeps
import time
time.sleep(1000)
== stops itself
import os
os.kill(os.getpid(), 19)
import time
time.sleep(1000)
== prints without end
while True:
    print('x' * 100000)
== writes to its streams
import os
while True:
    os.write(1, bytes(1 << 20)), os.write(2, bytes(1 << 20))
== loops in a call
def add(a, b):
    while True:
        pass
== returns much
def add(a, b):
    return 'x' * (100 << 20)
== returns without end
import itertools
def add(a, b):
    return itertools.count()
== has a huge number
def add(a, b):
    return 9 ** (9 ** 9)
== loops in C
import re
re.match(r'(a+)+$', 'a' * 64 + 'b')
== ignores signals
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True:
    pass
== segfaults
import ctypes
ctypes.string_at(0)
== kills its group
import os
os.kill(0, 9)
== kills all
import os
os.kill(-1, 9)
== kills itself
import os
os.kill(os.getpid(), 9)
== closes everything
import os
os.closerange(0, 4096)
== is not Python
def add(a, b) return a + b
""")
BOMBS["nests too deeply"] = "x = " + "(" * 100000


def escape(attempt: str, outside: int, seen: list[str]) -> str:
    """Return a program that is right only if the attempt succeeds. `outside` is the id of a process, and `seen` are the
    folders in the home that the program may see, because Python is in them."""
    keyctl = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
    values = {"CHECKOUT": __file__, "HOME": str(Path.home()), "OUTSIDE": outside, "SEEN": set(seen), "KEYCTL": keyctl}
    lines = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return lines + HOSTILE + f"    {attempt}\n"


class Results:
    """Results of a pool by key, and the reason why no more come."""

    def __init__(self) -> None:
        self.by_key: dict[Any, dict[str, Any]] = {}
        self.order: list[Any] = []
        self.failure: BaseException | None = None
        self._changed = threading.Condition()

    def deliver(self, key: Any, result: dict[str, Any]) -> None:
        with self._changed:
            assert key not in self.by_key, f"{key} came twice"
            self.by_key[key] = result
            self.order.append(key)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def wait(self, count: int, timeout_s: float = 60.0) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: len(self.by_key) >= count or self.failure, timeout_s)
            assert done, f"{len(self.by_key)} of {count} results after {timeout_s} s"
            if self.failure is not None:
                raise self.failure

    def wait_failure(self, timeout_s: float = 20.0) -> BaseException:
        with self._changed:
            assert self._changed.wait_for(lambda: self.failure, timeout_s)
        assert self.failure is not None
        return self.failure


@contextmanager
def marked() -> Iterator[str]:
    """Mark the processes that are started meanwhile, and all below them."""
    mark = os.environ[MARK] = f"{os.getpid()}-{time.monotonic_ns()}"
    try:
        yield mark
    finally:
        del os.environ[MARK]


def members(mark: str) -> list[psutil.Process]:
    """Return the living processes with this mark. This process has none, because it set its environment later."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_for_none(mark: str, timeout_s: float = 20.0) -> list[psutil.Process]:
    """Wait until no process has the mark, and return those that are left after this time."""
    deadline = time.monotonic() + timeout_s
    while (left := members(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def main() -> None:
    """Own a pool whose calls hang, and print its processes when there are NUM_PROCESSES of them:
    `reward_attacks.py ATTACK COUNT NUM_PROCESSES`."""
    from rl.config.schema import RewardConfig
    from rl.rewards.launch import launch
    from rl.rewards.pool import RewardPool

    results = Results()
    pool = RewardPool(launch(), RewardConfig(function=SPEC, timeout_s=1000), 2, results.deliver, results.fail)
    pool.wait_ready()
    for number in range(int(sys.argv[2])):
        pool.submit(number, "", sys.argv[1], {})
    while len(found := members(os.environ[MARK])) < int(sys.argv[3]):
        time.sleep(0.02)
    print(json.dumps([process.pid for process in found]), flush=True)
    time.sleep(1000)


if __name__ == "__main__":
    main()
