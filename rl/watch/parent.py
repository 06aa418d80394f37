"""The kernel ends a process with the one that started it, however that ends. Imports next to nothing."""

import ctypes

PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """By this signal; 0: no longer."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
