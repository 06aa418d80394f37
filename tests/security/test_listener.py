"""The thread that answers strangers survives a console that is gone, and leaves file descriptors to its process."""

import io
import socket
import subprocess
import sys

import pytest

from rl.common.handshake import NONCE, PROOF, connect
from rl.config.schema import ROOT
from rl.world.messages import Mailbox
from tests.mails import HOST, KEY, WAIT_S
from tests.security.raw import send_and_leave

pytestmark = pytest.mark.timeout(60)


class GoneConsole(io.StringIO):
    """The stderr of `train.py 2>&1 | head` after head has ended, or one that was closed."""

    def __init__(self, error: Exception):
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file.")])
def test_a_stranger_does_not_end_a_listener_whose_console_is_gone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", GoneConsole(error))
    mail = Mailbox(0, HOST, KEY)
    try:
        send_and_leave((HOST, mail.contact.port), b"x" * (NONCE + PROOF))
        connect((HOST, mail.contact.port), KEY, WAIT_S).close()
    finally:
        mail.close()


FEW_FILES = f"""
import os, resource, socket, sys
from rl.common.handshake import Listener, Refusals
resource.setrlimit(resource.RLIMIT_NOFILE, (160, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
server = socket.create_server(("{HOST}", 0), backlog=1024)
Listener(server, {KEY!r}, lambda connection, host: connection.close(), Refusals(lambda text: None))
print(server.getsockname()[1], flush=True)
for line in sys.stdin:
    print(os.path.basename(open(os.devnull).name), flush=True)
"""


def test_strangers_leave_file_descriptors_to_a_process_that_may_open_few() -> None:
    """A launcher has the limit of its shell, often 1024. Strangers with several addresses could use up all of them."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    strangers = []
    with subprocess.Popen([sys.executable, "-c", FEW_FILES], **pipes) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            address = (HOST, int(process.stdout.readline()))
            for number in range(400):
                source = (f"127.0.0.{2 + number % 4}", 0)
                strangers.append(socket.create_connection(address, timeout=WAIT_S, source_address=source))
            connect(address, KEY, WAIT_S).close()
            process.stdin.write("open a file\n")
            process.stdin.flush()
            assert process.stdout.readline() == "null\n"
        finally:
            process.kill()
            for stranger in strangers:
                stranger.close()
