"""Exit codes of a rank, and the function that ends its process."""

import os
import sys
from contextlib import suppress

EXIT_CLEAN, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED = 0, 1, 130, 143


def exit_now(code: int) -> None:
    """End the process without waiting for threads, collectives or destructors that may be stuck."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk may be full
            stream.flush()
    os._exit(code)
