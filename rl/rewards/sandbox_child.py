"""The processes of a sandbox, in which the code reward runs programs. rl/rewards/sandbox.py starts this script.

    worker ── starter: makes the namespaces ── init: process 1 of them, serves one program after the other
                                                └─ tester: runs the tests, which the program never sees
                                                    └─ program: process 1 of its own namespace

The namespaces hold no network, no home folder and no /proc: only the libraries of Python and of the system,
read-only, and a new /tmp for each program. Tester and program have no capabilities, and a system call filter keeps them
from starting processes and from opening sockets.

The program answers calls of its functions over a pair of sockets. It is forked before the tests are read, so their
expected values are nowhere in its memory. Answers are plain values or opaque handles, and the tester compares them.
After each program, init kills everything but itself.

This file imports only the standard library, because it runs in an interpreter without packages.
"""

import ast
import builtins
import ctypes
import errno
import functools
import gc
import itertools
import json
import math
import os
import random
import resource
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

USER = 65534  # id of user and group in the sandbox
JOB = struct.Struct("<Qdd")  # memory in bytes, CPU seconds of the program, seconds until everything is killed
COUNT = struct.Struct("<i")  # number of tests, or BAD_TESTS
BAD_TESTS = -1
UNSHARED, MAPPED, READY, DONE, FAILED = b"u", b"m", b"r", b"d", b"!"
CONFINED = "confined"
PRELOADED = ["bisect", "collections", "copy", "datetime", "heapq", "operator", "re", "statistics", "string"]
MAX_MESSAGE = 8 << 20  # bytes of a call or an answer
MAX_ITEMS = 100_000  # of an iterator that a program returns
MAX_FILES, MAX_FILE = 64, 16 << 20
TMP = "size=16m,nr_inodes=1024,mode=1777"
TESTER_MEMORY, TESTER_CPU_S = 1 << 30, 3600.0  # init kills it long before
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_THREAD = 0x20000000, 0x40000000, 0x10000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 4096, 16384, 1 << 18, 1 << 21
KEPT_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048  # of a mount, with the same numbers in statvfs; a remount must repeat them
ST_RELATIME = 4096
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 4, 38, 22
LIBC = ctypes.CDLL(None, use_errno=True)


class Machine(NamedTuple):
    """Numbers of a processor architecture in Linux."""

    audit: int  # name of the architecture for filters
    pivot_root: int
    capset: int
    clone: int
    column: int  # of REFUSED


# System calls that are refused, with their numbers on x86_64 and aarch64. 0: there is none.
REFUSED = {
    # Processes and their memory.
    "fork": (57, 0), "vfork": (58, 0), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    # Namespaces and mounts.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "move_mount": (429, 429), "open_tree": (428, 428), "mount_setattr": (442, 442),
    # Communication.
    "socket": (41, 198), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "msgget": (68, 186), "semget": (64, 190), "shmget": (29, 194), "mq_open": (240, 180),
    # What programs never need, and attacks on kernels do.
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "personality": (135, 92), "seccomp": (317, 277), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "quotactl": (179, 60), "syslog": (103, 116), "acct": (163, 89),
}  # fmt: skip
MACHINES = {
    "x86_64": Machine(0xC000003E, pivot_root=155, capset=126, clone=56, column=0),
    "aarch64": Machine(0xC00000B7, pivot_root=41, capset=91, clone=220, column=1),
}
CLONE3 = 435
X32 = 0x40000000  # bit in the numbers of x86's other interface


class SetupError(Exception):
    """A step of the setup failed."""


def check(result: int, step: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise SetupError(f"{step}: {os.strerror(number)} ({errno.errorcode.get(number, number)})")
    return result


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind, options)]
    result = LIBC.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    check(result, f"mount {target}")


def machine() -> Machine:
    name = os.uname().machine
    if name not in MACHINES or sys.maxsize < 1 << 32:
        raise SetupError(f"the processor is {name}, but the filter of system calls knows {' and '.join(MACHINES)} only")
    return MACHINES[name]


# Start


def main(control: int) -> NoReturn:
    """Make the namespaces, and fork init. Errors go to the worker as text."""
    connection = socket.socket(fileno=control)
    try:
        start(connection)
    except (SetupError, OSError) as error:
        connection.sendall(FAILED + str(error).encode())
    finally:
        os._exit(1)


def start(connection: socket.socket) -> None:
    """Make the namespaces. Fork init, which serves the worker, and wait for its end."""
    machine()
    kinds = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    check(LIBC.unshare(kinds), "unshare")
    # Root gives up its id below. From then on, a folder above Python's may be closed to this process.
    sources = [(path, os.open(path, os.O_PATH)) for path in visible_paths()]
    connection.sendall(UNSHARED)
    if connection.recv(1) != MAPPED:  # the worker has written the ids, which needs its permissions
        os._exit(1)
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    pid = os.fork()
    if pid:
        connection.close()
        os.waitpid(pid, 0)
        os._exit(0)
    os.setsid()
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    build_root(sources)
    for name in PRELOADED:
        __import__(name)
    filter_program(machine())
    os.environ.clear()
    sys.set_int_max_str_digits(0)
    gc.collect()
    gc.freeze()
    connection.sendall(READY)
    serve(connection)


def visible_paths() -> list[str]:
    """Return what a program can see of the file system: Python's and the system's libraries, and devices."""
    folders = [path for path in (f"{sys.base_prefix}/lib", *sys.path) if os.path.exists(path)]
    libraries = [path for path in LIBRARIES if os.path.exists(path) and not os.path.islink(path)]
    whole = [*libraries, *folders]
    inside = [path for path in whole if not any(path.startswith(f"{other}/") for other in whole)]
    return [*dict.fromkeys(inside), *(path for path in DEVICES if os.path.exists(path))]


def build_root(sources: list[tuple[str, int]]) -> None:
    """Replace the root of the file system with one that holds the sources, read-only, and an empty /tmp."""
    links = {path: os.readlink(path) for path in LIBRARIES if os.path.islink(path)}
    base = "/tmp"
    mount("", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, fd in sources:
        target = base + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(f"/proc/self/fd/{fd}", target, "", MS_BIND | MS_REC)
        if path not in DEVICES:
            found = os.statvfs(target).f_flag
            kept = found & KEPT_FLAGS | (MS_RELATIME if found & ST_RELATIME else 0)
            mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)
        os.close(fd)
    for path, link in links.items():
        target = base + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            os.symlink(link, target)
    os.makedirs(f"{base}/tmp", exist_ok=True)
    os.chdir(base)
    check(LIBC.syscall(machine().pivot_root, b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")
    mount("", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    nowhere = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)


# Init


def serve(control: socket.socket) -> NoReturn:
    """Run one job after the other, until the worker closes the connection. This process never reads a job."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, JOB.size, 1)
        if not message:
            os._exit(0)
        limits = JOB.unpack(message)
        pid = os.fork()
        if not pid:
            try:
                control.close()
                run_job(fds[0], *limits[:2])
            finally:
                os._exit(1)
        os.close(fds[0])
        exited = os.pidfd_open(pid)
        with selectors.DefaultSelector() as selector:
            selector.register(exited, selectors.EVENT_READ)
            selector.register(control, selectors.EVENT_READ)
            selector.select(limits[2])
        os.close(exited)
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all but this process
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        control.sendall(DONE)


def confine(memory: int, cpu_s: float) -> None:
    """Give up everything that a test or a program does not need. Nothing can be regained."""
    os.setsid()  # a signal to the process group reaches processes of other namespaces
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    seconds = max(1, math.ceil(cpu_s))
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: MAX_FILE,
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_CORE: 1,  # with 0, the kernel still starts the machine's crash reporter
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for limit, most in limits.items():
        highest = resource.getrlimit(limit)[1]
        most = most if highest == resource.RLIM_INFINITY else min(most, highest)
        resource.setrlimit(limit, (most, most))
    header, nothing = struct.pack("<Ii", 0x20080522, 0), bytes(24)
    check(LIBC.syscall(machine().capset, header, nothing), "capset")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    filter_calls(machine())


def filter_calls(about: Machine) -> None:
    """Install the filter of system calls."""
    code = filter_program(about)
    kept = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(kept))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


@functools.cache
def filter_program(about: Machine) -> bytes:
    """Return the filter as a program for the kernel's packet filter."""
    load, equal, at_least, test, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    # (operation, value, steps to skip if true, steps to skip if false)
    steps = [(load, 4, 0, 0), (equal, about.audit, 1, 0), (give, refuse, 0, 0), (load, 0, 0, 0)]
    steps += [(at_least, X32, 0, 1), (give, refuse, 0, 0)]
    for number in filter(None, (numbers[about.column] for numbers in REFUSED.values())):
        steps += [(equal, number, 0, 1), (give, refuse, 0, 0)]
    steps += [(equal, CLONE3, 0, 1), (give, unknown, 0, 0)]  # then libc calls clone, whose flags can be read
    steps += [(equal, about.clone, 0, 3), (load, 16, 0, 0), (test, CLONE_THREAD, 1, 0), (give, refuse, 0, 0)]
    steps += [(give, allow, 0, 0)]
    return b"".join(struct.pack("<HBBI", kind, yes, no, value) for kind, value, yes, no in steps)


def run_job(job: int, memory: int, cpu_s: float) -> NoReturn:
    """Fork the program, and then be the tester."""
    check(LIBC.unshare(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, TMP)
    os.chdir("/tmp")
    ours, theirs = socket.socketpair()
    if not os.fork():
        try:
            ours.close()
            fd = os.dup2(theirs.detach(), 3) if theirs.fileno() != 3 else theirs.detach()
            os.closerange(fd + 1, 1 << 20)
            confine(memory, cpu_s)
            Program(ValueChannel(socket.socket(fileno=fd))).serve()
        finally:
            os._exit(1)
    theirs.close()
    confine(TESTER_MEMORY, TESTER_CPU_S)
    run_tests(socket.socket(fileno=job), ValueChannel(ours))
    os._exit(0)


# Values


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


if __name__ == "__main__":
    main(int(sys.argv[1]))
