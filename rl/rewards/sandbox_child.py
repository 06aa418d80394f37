"""The walls of a sandbox, in which the code reward runs programs. rl/rewards/sandbox.py starts `main` in a process.

    worker ── starter: makes the namespaces ── init: process 1 of them, serves one program after the other
                                                └─ tester: runs the tests, which the program never sees
                                                    └─ program: process 1 of its own namespace

The namespaces hold no network, no home folder and no /proc: only the libraries of Python and of the system,
read-only, and a new /tmp for each program. Tester and program have no capabilities, and a system call filter keeps them
from starting processes and from opening sockets.

The program is forked before the tests are read, so their expected values are nowhere in its memory. After each program,
init kills everything but itself. rl/rewards/sandbox_tests.py says what tester and program do.

Both files import only the standard library, because they run in an interpreter without packages.
"""

import ctypes
import errno
import functools
import gc
import math
import os
import resource
import selectors
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import NamedTuple, NoReturn

from rl.rewards.sandbox_tests import Program, ValueChannel, run_tests

USER = 65534  # id of user and group in the sandbox
JOB = struct.Struct("<Qdd")  # memory in bytes, CPU seconds of the program, seconds until everything is killed
UNSHARED, MAPPED, READY, DONE, FAILED = b"u", b"m", b"r", b"d", b"!"
PRELOADED = ["bisect", "collections", "copy", "datetime", "heapq", "operator", "re", "statistics", "string"]
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
