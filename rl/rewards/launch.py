"""Start the reward server or the conversation server in a fresh interpreter.

So neither it nor its workers contain torch, CUDA or their threads. It does not inherit credentials, because it runs
users' code on text that a model wrote.
"""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rl.common.credentials import without_credentials

ROOT = Path(__file__).resolve().parent.parent.parent
END_S = 5.0  # maximum wait for the server to end
PROGRAM = "import sys; sys.path.insert(0, sys.argv[3]); import {module} as s; s.main(*map(int, sys.argv[1:3]))"


class ServerProcess(NamedTuple):
    """The process of a server, and the rank's end of the connection to it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def stop(self) -> None:
        """Close the connection, which ends the server, and wait for its process."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)


def launch(module: str = "rl.rewards.server") -> ServerProcess:
    """Start the server whose `main` is in this module."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", PROGRAM.format(module=module), str(theirs.fileno()), str(os.getpid()), str(ROOT)]
    with theirs:
        # Sets have the same order in all processes, and tokenizers have no threads, which a fork would lose.
        environment = without_credentials(os.environ) | {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    return ServerProcess(process, ours)
