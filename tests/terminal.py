"""A terminal for tests: programs as a user at a keyboard sees them."""

import os
import sys
from pathlib import Path

import pexpect

from tests.launcher import ROOT

CTRL_C, CTRL_D = "\x03", "\x04"


def terminal(command: list[str], timeout_s: float = 30, **extra: str) -> pexpect.spawn:
    """Start a command in a terminal that is wide enough for every line and has no colours."""
    environment = os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": "1"} | extra
    return pexpect.spawn(
        command[0],
        command[1:],
        timeout=timeout_s,
        cwd=str(ROOT),
        env=environment,
        encoding="utf-8",
        codec_errors="replace",
        dimensions=(50, 400),
        echo=False,
    )


def tool(name: str, *arguments: str | Path, timeout_s: float = 30, **extra: str) -> pexpect.spawn:
    """Start tools/NAME in a terminal."""
    words = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return terminal(words, timeout_s, **extra)


def leave(child: pexpect.spawn) -> int:
    """Wait for the program to end, and return its exit status."""
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus is None, f"ended by signal {child.signalstatus}"
    return child.exitstatus
