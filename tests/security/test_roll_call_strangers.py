"""Strangers at the roll call change nothing. Somebody who knows the secret and sends nonsense is named, and no more."""

import json
import os
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from launch import roll_call
from launch.checks.sockets import listen
from launch.roll_call import NOT_READY, PURPOSE, READY, Node, RollCall, answer
from rl.common.framing import PREFIX
from rl.common.handshake import SECRET, Listener, Refusals, connect, derive_key
from tests.ports import free_port
from tests.security.raw import STRANGE, frame, json_frame, mutate

pytestmark = pytest.mark.timeout(60)
HOST = "127.0.0.1"
GIVEN = "the secret of this run, for tests"
DEEP = b"[" * 200_000
MAX_FILES = 256  # that the head may have open
TALK_S = 0.3


class Head:
    """launch/roll_call.py of the first of two nodes, in a process of its own."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.place = (HOST, free_port())
        self._folder, self._stack = folder, stack
        self.process = self.start("0")
        deadline = time.monotonic() + 20
        while True:  # until it listens
            with suppress(OSError), socket.create_connection(self.place):
                return
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def start(self, rank: str, secret: str = GIVEN) -> subprocess.Popen[bytes]:
        """Start the roll call of a node."""
        command = [sys.executable, roll_call.__file__, HOST, str(self.place[1]), "2", rank, "x", "1"]
        environment = os.environ | {"ONEWORLD_PREFLIGHT_WAIT_S": "20", SECRET: secret}

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))

        log = self._stack.enter_context((self._folder / rank).open("ab"))
        process = subprocess.Popen(command, env=environment, stderr=log, preexec_fn=limit)
        self._stack.callback(lambda: (process.kill(), process.wait()))
        return process

    def said(self, rank: str = "0") -> str:
        return (self._folder / rank).read_text()

    def wait_until_said(self, pattern: str, rank: str = "0") -> None:
        deadline = time.monotonic() + 18
        while not re.search(pattern, self.said(rank)):
            assert time.monotonic() < deadline, self.said(rank)
            time.sleep(0.02)

    def check(self) -> None:
        """The other node comes now: both are ready at once, and nothing has failed."""
        assert self.process.poll() is None, self.said()
        began, node = time.monotonic(), self.start("1")
        assert (self.process.wait(18), node.wait(18)) == (READY, READY), self.said()
        assert time.monotonic() - began < 18
        assert "Traceback" not in self.said() + self.said("1")


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    monkeypatch.setenv(SECRET, GIVEN)
    with ExitStack() as stack:
        yield Head(tmp_path, stack)


def talk(connection: socket.socket, data: bytes) -> None:
    """Send this, and read until the other side closes the connection, or falls silent."""
    with suppress(OSError):
        connection.sendall(data)
        connection.settimeout(TALK_S)
        while connection.recv(1 << 10):
            pass


HELLO = {"kind": "hello", "run": "x", "node": 1, "name": "b"}
STRANGERS = STRANGE | {
    "a node's number as text": json_frame(**HELLO | {"node": "1"}),
    "another node's place": json_frame(**HELLO | {"name": "stranger"}),
    "a deep hello": frame(b'{"kind": "hello", "run": "x", "name": "b", "node": ' + DEEP),
}


def test_what_strangers_send_has_no_effect(head: Head) -> None:
    with ExitStack() as stack:
        for data in STRANGERS.values():
            stranger = stack.enter_context(socket.create_connection(head.place))  # stays open meanwhile
            talk(stranger, data)
        head.check()


def test_hundreds_of_silent_connections_have_no_effect(head: Head) -> None:
    """There are more of them than files that the head may open."""
    with ExitStack() as stack:
        for _ in range(2 * MAX_FILES - 12):
            stack.enter_context(socket.create_connection(head.place))
        head.check()


@contextmanager
def streaming(place: tuple[str, int], data: bytes) -> Iterator[None]:
    """Send `data` again and again, over new connections when they are closed."""
    is_over = threading.Event()

    def stream() -> None:
        while not is_over.is_set():
            with suppress(OSError), socket.create_connection(place, timeout=1) as stranger:
                while not is_over.is_set():
                    stranger.sendall(data)

    threads = [threading.Thread(target=stream) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_endless_streams_have_no_effect(head: Head) -> None:
    with streaming(head.place, json_frame(kind="hello", run="y", node=1, name="z" * 1000) * 20):
        time.sleep(TALK_S)
        head.check()


def test_a_node_with_another_secret_is_named_on_both_sides_within_seconds(head: Head) -> None:
    node = head.start("1", secret="another secret, also long enough")
    head.wait_until_said(rf"oneworld: refused 1 connection from {HOST}: no proof that it knows the run's secret")
    head.wait_until_said(rf"oneworld: node 1 \(\S+\) .*{HOST}:\d+.*: set the same {SECRET} on every node", "1")
    assert head.process.poll() is None, "the head still waits for the right one"
    node.kill()
    node.wait()
    head.check()


# Somebody who knows the secret

MALFORMED = {
    "a number as text": (json_frame(**HELLO | {"node": "1"}), r"Expected `int \| null`, got `str` - at `\$.node`"),
    "a negative number": (json_frame(**HELLO | {"node": -1}), "Expected `int` >= 0"),
    "a fraction": (json_frame(**HELLO | {"node": 1.5}), r"Expected `int \| null`, got `float`"),
    "a list as name": (json_frame(**HELLO | {"name": [1]}), r"Expected `str`, got `array` - at `\$.name`"),
    "a long name": (json_frame(**HELLO | {"name": "b" * 1000}), "Expected `str` of length <= "),
    "no run": (json_frame(kind="hello", node=1, name="b"), "missing required field `run`"),
    "another kind": (json_frame(**HELLO | {"kind": "end"}), "Invalid value 'end'"),
    "a number alone": (frame(b"1"), "it sent no message"),
    "deep JSON": (frame(DEEP), "it sent no message"),
    "no frame": (b"GET / HTTP/1.1\r\n\r\n", "it sent no message"),
    "a frame beyond the limit": (frame(b" " * (2 << 20)), "it sent no message"),
}


def test_a_malformed_hello_is_an_error_that_names_its_sender(head: Head) -> None:
    for data, error in MALFORMED.values():
        with connect(head.place, derive_key(PURPOSE), 5) as peer:
            talk(peer, data)
            head.wait_until_said(rf"refused 1 connection from {HOST}: it knows the run's secret, but .*{error}")
    head.check()


def test_a_node_that_sends_nonsense_after_its_hello_is_named_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    caller, deadline = RollCall(server := listen(0), Node(0, "a"), "x", "3"), time.monotonic() + 10
    with connect((HOST, server.getsockname()[1]), derive_key(PURPOSE), 5) as peer:
        for data, num_present in ((json_frame(**HELLO), 2), (json_frame(kind="end", code=0), 1)):
            peer.sendall(data)
            while len(caller.present) != num_present:
                assert time.monotonic() < deadline
                caller.step(timeout_s=0.1)
    caller.close()
    assert capsys.readouterr().err.count("oneworld: node 1 (b) sent a message after its hello") == 1


NO_ORDERS = {
    "no code": (json_frame(kind="end", text=""), "missing required field `code`"),
    "a code as text": (json_frame(kind="end", text="", code="0"), "Expected `int`, got `str`"),
    "a kind that is a list": (json_frame(kind=[]), r"Expected `str`.* - at `\$.kind`"),
    "deep JSON": (frame(DEEP), "nested too deeply"),
    "no JSON": (frame(b"{"), "Expecting property name"),
}


@pytest.mark.parametrize(("data", "error"), NO_ORDERS.values(), ids=NO_ORDERS.keys())
def test_a_head_that_sends_nonsense_is_named(
    data: bytes, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roll_call, "FIRST_REPORT_S", 0.0)

    connections = []

    def send(connection: socket.socket, host: str) -> None:
        connections.append(connection)  # a connection that is closed would be reset, with the bytes that it carries
        connection.sendall(data)

    server = listen(0)
    listener = Listener(server, derive_key(PURPOSE), send, Refusals(print))
    try:
        place = server.getsockname()[:2]
        assert answer(HOST, place[1], 1, "x", Node(1, "b"), wait_s=0.2) == NOT_READY
    finally:
        listener.close()
    said = capsys.readouterr().err
    assert re.search(rf"node 1 \(b\) .*head at {HOST}:{place[1]}.*{error}", said), said


def is_welcome(data: bytes) -> bool:
    """Return whether these bytes are the hello of a node that the head waits for."""
    try:
        hello = json.loads(data[PREFIX.size :][: PREFIX.unpack(data[: PREFIX.size])[1]])
        return hello["kind"] == "hello" and hello["run"] == "x" and hello["node"] in (1, None)
    except (ValueError, KeyError, TypeError, struct.error):
        return False


def fuzz(place: tuple[str, int], key: bytes, valid: bytes, count: int, is_valid: Callable[[bytes], bool]) -> None:
    """Send `count` inputs: random bytes, and after a handshake a valid message with some bytes changed."""
    rng, num_sent = random.Random(25), 0
    while num_sent < count:
        data = mutate(rng, valid) if num_sent % 2 else rng.randbytes(rng.choice([1, 16, 64, 200]))
        if is_valid(data):
            continue
        num_sent += 1
        with suppress(OSError):
            how = connect(place, key, 5) if num_sent % 2 == 0 else socket.create_connection(place, 5)
            with how as stranger:
                stranger.sendall(data)


def test_thousands_of_random_inputs_have_no_effect(head: Head) -> None:
    fuzz(head.place, derive_key(PURPOSE), json_frame(**HELLO), 3000, is_welcome)
    head.check()
    assert len(head.said()) < 20_000, "refusals are counted, not repeated"
