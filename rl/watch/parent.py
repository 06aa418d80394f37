"""Let the kernel end a process together with its parent. Imports next to nothing."""

import ctypes

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent ends, however it ends. 0 turns it off."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
