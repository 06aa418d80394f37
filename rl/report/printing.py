"""Print on a terminal or into a pipe whose reader may end early, as `head -1` does."""

import os
import sys


def print_or_exit(text: str | bytes) -> None:
    """Print a text or raw bytes. If the reader of the pipe has ended, exit with status 0."""
    if not _print(text):
        sys.exit(0)


def print_and_go_on(text: str) -> None:
    """Print a line about work that goes on. If the reader of the pipe has ended, print no more."""
    _print(text)


def _print(text: str | bytes) -> bool:
    """Print, and return whether there is a reader."""
    try:
        if isinstance(text, bytes):
            sys.stdout.buffer.write(text)
        else:
            print(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout again at exit
        return False
    return True
