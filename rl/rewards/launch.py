"""Starts the server of the reward functions: a fresh interpreter, so that nothing of torch, CUDA or their threads is in
it, or in anything that it forks."""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
END_S = 5.0
PROGRAM = "import sys; sys.path.insert(0, sys.argv[3]); import rl.rewards.server as s; s.main(*map(int, sys.argv[1:3]))"


@dataclass(frozen=True)
class Launched:
    process: subprocess.Popen[bytes]
    line: socket.socket

    def dismiss(self) -> None:
        """It ends when its line does."""
        self.line.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)


def launch() -> Launched:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(os.getpid()), str(ROOT)]
    with theirs:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    return Launched(process, ours)
