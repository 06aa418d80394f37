"""How a process depends on its parent: end with it, or outlive it."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Have the kernel send signal `number` to this process when its parent ends. 0 turns this off."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def leave_rank() -> None:
    """Let a forked process live on when its rank is ended. It ignores the signals that are meant for the rank."""
    os.setsid()  # signals to the rank's process group do not arrive here any more
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
