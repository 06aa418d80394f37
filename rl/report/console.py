"""Print long texts on a terminal or into a pipe."""

import os
import sys


def print_or_exit(text: str | bytes) -> None:
    """Print a text or raw bytes. If the reader of the pipe has ended, as `head` does, exit with status 0."""
    try:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
            print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout again at exit
        sys.exit(0)
