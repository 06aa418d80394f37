"""Signals in this process: none is lost while handlers are set, and a save that takes too long is not awaited."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any, cast

import pytest

import rl.world.signals
from rl.config.schema import ROOT
from rl.world.faults import FaultReporter
from rl.world.messages import Mailbox, Message
from rl.world.orders import Order
from rl.world.signals import Signals

pytestmark = pytest.mark.timeout(10)
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Watched:
    """The part of Mailbox that signals use; nobody executes what is sent."""

    def __init__(self) -> None:
        self.sent: Queue[tuple[int, Message]] = Queue()

    def watch(self, source: socket.socket, read: Callable[[socket.socket], None]) -> None:
        self.source, self.read = source, read

    def send(self, rank: int, message: Message) -> None:
        self.sent.put((rank, message))


class Endings:
    """The part of FaultReporter that signals use."""

    def __init__(self) -> None:
        self.causes: Queue[tuple[str, str]] = Queue()

    def end_world(self, cause: str, text: str) -> None:
        self.causes.put((cause, text))

    def is_over(self) -> bool:
        return False

    def announce_interrupt(self) -> None:
        pass


@pytest.fixture
def mail() -> Iterator[Watched]:
    """The handlers of this process are its own again afterwards."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    mail = Watched()
    yield mail
    os.close(signal.set_wakeup_fd(-1))
    mail.source.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_that_comes_right_after_its_handler_is_heard(mail: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    set_handler = signal.signal

    def set_and_send(number: int, handler: Any) -> Any:
        replaced = set_handler(number, handler)
        os.kill(os.getpid(), number)
        return replaced

    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", set_and_send)
        Signals(cast(Mailbox, mail), cast(FaultReporter, Endings())).listen()
    mail.source.settimeout(1.0)
    assert [*mail.source.recv(64)] == [*NUMBERS]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_not_saved_in_time_is_not_waited_for(
    number: signal.Signals, mail: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rl.world.signals.STOP_S == 25.0, "torchrun kills after 30 s"
    monkeypatch.setattr(rl.world.signals, "STOP_S", 0.2)
    endings = Endings()
    signals = Signals(cast(Mailbox, mail), cast(FaultReporter, endings))
    signals.send_orders_to(3)
    signals.listen()
    os.kill(os.getpid(), number)
    mail.read(mail.source)
    assert mail.sent.get(timeout=5.0) == (3, Order("stop"))
    assert endings.causes.empty(), "it has time to save"
    late = f"told to end by {number.name}, and the checkpoint was not committed within 0.2 s"
    assert endings.causes.get(timeout=5.0) == ("terminated", late)


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
