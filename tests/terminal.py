"""A terminal for tests: a program as a person at a keyboard sees it."""

import os
import sys
from pathlib import Path

import pexpect

from tests.launcher import ROOT

CTRL_C, CTRL_D = "\x03", "\x04"


def terminal(command: list[str], timeout_s: float = 30, **extra: str) -> pexpect.spawn:
    """Wide enough that no line is broken, without colours."""
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
    """tools/NAME in a terminal."""
    words = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    return terminal(words, timeout_s, **extra)


def leave(child: pexpect.spawn) -> int:
    """The exit status of a program that has ended or is about to."""
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus is None, f"ended by signal {child.signalstatus}"
    return child.exitstatus
