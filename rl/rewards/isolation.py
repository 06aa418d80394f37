"""The walls around a process that runs users' code, except its time limit, which the process above it enforces."""

import gc
import os
import resource
import signal

from rl.rewards.process_tree import adopt_orphans
from rl.watch.parent import die_with_parent

MAX_MEMORY = 2 << 30  # bytes of memory that the process may map beyond what it inherits from the server
MAX_FILE = 1 << 30  # maximum size in bytes of a file that a function writes


def isolate(server: int) -> None:
    """Separate this process from the rank's signals and streams, and limit its memory and files. `server` is the id of
    the process that forked it, with which it ends."""
    os.setsid()
    die_with_parent(signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    max_memory = count_pages(0) * resource.getpagesize() + MAX_MEMORY
    for limit, most in ((resource.RLIMIT_AS, max_memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, MAX_FILE)):
        highest = resource.getrlimit(limit)[1]
        most = most if highest == resource.RLIM_INFINITY else min(most, highest)
        resource.setrlimit(limit, (most, most))
    gc.enable()


def count_pages(field: int) -> int:
    """Return the number of memory pages of this process: mapped (field 0) or resident (field 1)."""
    file = os.open("/proc/self/statm", os.O_RDONLY)  # cheaper than `open`: this is called after every call
    try:
        return int(os.read(file, 100).split()[field])
    finally:
        os.close(file)
