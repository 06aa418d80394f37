"""rl/signals.py in this process: no signal is swallowed while handlers are set; and the signal of a parent's end."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from rl.config import ROOT
from rl.mail import Mail
from rl.signals import Signals

pytestmark = pytest.mark.timeout(10)


class Watched:
    """The part of Mail that is asked for."""

    def watch(self, source: socket.socket, read: Callable[[socket.socket], None]) -> None:
        self.source = source


def test_a_signal_that_comes_right_after_its_handler_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, set_handler = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), signal.signal
    before = {number: signal.getsignal(number) for number in numbers}
    mail = Watched()

    def set_and_send(number: int, handler: Any) -> Any:
        replaced = set_handler(number, handler)
        os.kill(os.getpid(), number)
        return replaced

    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", set_and_send)
            Signals(cast(Mail, mail), lambda cause, text: None, lambda: None).listen()
    finally:
        os.close(signal.set_wakeup_fd(-1))
        for number, handler in before.items():
            set_handler(number, handler)
    mail.source.settimeout(1.0)
    with mail.source:
        assert [*mail.source.recv(64)] == [*numbers]


CHILD = """
import time
from rl.watch.parent import die_with_parent
die_with_parent(15)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_process_ends_with_the_one_that_started_it() -> None:
    """The parent is killed; the pipe that only its child still holds ends with the child."""
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.read() == ""
