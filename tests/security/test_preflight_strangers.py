"""Strangers at the sockets of preflight change nothing. A rank that sends nonsense is named."""

import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch.checks import bandwidth, rpc
from launch.checks.answers import Answers
from launch.checks.bandwidth import find_unreachable, measure_rate
from launch.checks.facts import ANSWER_TYPES
from launch.checks.rpc import Coordinator, NoAnswer, Responder, connect
from launch.checks.sockets import listen
from rl.common import handshake
from rl.common.framing import PREFIX
from rl.common.handshake import SECRET, derive_key
from rl.config.load import load_config
from tests.launcher import ROOT, activated_environment
from tests.security.raw import STRANGE, frame, json_frame, mutate

pytestmark = pytest.mark.timeout(60)
HOST = "127.0.0.1"
DEEP = b"[" * 200_000
TALK_S = 0.2
HELLO = {"kind": "hello", "rank": 1, "host": "b", "prints": True}
STRANGERS = STRANGE | {
    "another rank's place": json_frame(**HELLO),
    "a rank as text": json_frame(**HELLO | {"rank": "1"}),
    "a deep hello": frame(b'{"kind": "hello", "host": "b", "prints": true, "rank": ' + DEEP),
}


@pytest.fixture(autouse=True)
def keep_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a test share its process."""
    monkeypatch.setenv(SECRET, "the secret of this run, for tests")
    monkeypatch.setattr(rpc, "end_process", lambda code, text, all_alive: None)


class World:
    """A coordinator of two ranks. They come when the test says so, and double what they are given."""

    def __init__(self) -> None:
        self.server = listen(0)
        self.place = (HOST, self.server.getsockname()[1])
        self.coordinator = Coordinator(self.server, 2)

    def check(self, attack: Callable[[], None] = lambda: None) -> None:
        """Both ranks come after an attack, and answer at once."""
        waiter = ThreadPoolExecutor(1).submit(self.coordinator.wait_for_ranks, 40)
        attack()
        began, handlers = time.monotonic(), {"double": lambda number: 2 * number}
        connections = [connect(*self.place, 20) for _ in range(2)]
        responders = [Responder(rank, connection) for rank, connection in enumerate(connections)]
        threads = [threading.Thread(target=responder.serve, args=[handlers]) for responder in responders]
        for thread in threads:
            thread.start()
        try:
            waiter.result(timeout=20)
            assert self.coordinator.ask("double", {0: {"number": 2}, 1: {"number": 3}}, 20) == {0: 4, 1: 6}
            assert time.monotonic() - began < 20
        finally:
            for connection, thread in zip(connections, threads, strict=True):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                thread.join()  # before `keep_process` ends
                connection.close()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.server.close()


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS.keys())
def test_what_a_stranger_sends_to_rank_0_has_no_effect(world: World, data: bytes) -> None:
    with socket.create_connection(world.place) as stranger:  # stays open meanwhile
        with suppress(OSError):
            stranger.sendall(data)
        world.check()


def test_silent_connections_have_no_effect(world: World) -> None:
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(world.place))
        world.check()


def test_a_rank_with_another_secret_is_told_within_seconds(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rpc, "UNTRUSTED_S", 0.5)
    with monkeypatch.context() as other:
        other.setenv(SECRET, "another secret, also long enough")
        with pytest.raises(NoAnswer, match=rf"cannot reach rank 0 at {HOST}:\d+: .*: set the same {SECRET} on every"):
            connect(*world.place, 60)
    assert f"refused 1 connection from {HOST}: no proof that it knows the run's secret" in capfd.readouterr().err
    world.check()


# The sockets of all ranks, which measure the network


@pytest.fixture
def answers() -> Answers:
    return Answers(0, 0, load_config, print)


def test_the_bandwidth_sink_serves_only_those_who_know_the_secret(answers: Answers) -> None:
    place, num_threads = (HOST, answers.describe()["sink"]), threading.active_count()
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(place)) for _ in range(100)]
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(struct.pack("d", 30.0))
        assert measure_rate(*place, 0.1) > 10e6
        assert threading.active_count() < num_threads + 10, "strangers take no threads"
    with socket.create_connection(place, timeout=5) as stranger, suppress(ConnectionError):
        stranger.sendall(struct.pack("d", 0.01) + bytes(100))
        received = b""
        while part := stranger.recv(1 << 10):
            received += part
        assert len(received) == handshake.NONCE, "no rate"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e9])
def test_a_transfer_of_an_impossible_length_is_not_begun(answers: Answers, seconds: float) -> None:
    place = (HOST, answers.describe()["sink"])
    with handshake.connect(place, derive_key(bandwidth.PURPOSE), 5) as peer, suppress(ConnectionError):
        peer.sendall(struct.pack("d", seconds))
        peer.settimeout(5)
        assert peer.recv(8) == b""


def test_a_held_port_is_reached_though_strangers_connect_to_it(answers: Answers) -> None:
    """There are more of them than the kernel keeps for a socket that accepts none."""
    with listen(0) as server:
        port = server.getsockname()[1]
    assert answers.hold_port(port) == ""
    with ExitStack() as stack:
        for _ in range(400):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex((HOST, port))
        assert find_unreachable({"head": (HOST, port)}) == {}


# Somebody who knows the secret

FACTS = {"host": "b", "config_error": "", "gpu": {}, "sink": 1}
MALFORMED: dict[str, tuple[bytes, str]] = {
    "no number": (json_frame(kind="answer", value=1), "missing required field `number`"),
    "another kind": (json_frame(kind="welcome", host="b"), "Invalid value 'welcome'"),
    "a text that is none": (json_frame(kind="failed", number=1, text=[]), "Expected `str`, got `array`"),
    "another type": (json_frame(kind="answer", number=1, value=7), "Expected `object`, got `int`"),
    "a missing fact": (json_frame(kind="answer", number=1, value={"host": "b"}), "missing required field"),
    "a wrong fact": (json_frame(kind="answer", number=1, value=FACTS | {"sink": "1"}), r"`str` - at `\$.sink`"),
}


@pytest.mark.parametrize(("data", "error"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_answer_is_an_error_that_names_its_rank(data: bytes, error: str) -> None:
    with listen(0) as server:
        coordinator = Coordinator(server, 1, ANSWER_TYPES)
        with connect(HOST, server.getsockname()[1], 5) as rank:
            rank.sendall(json_frame(**HELLO | {"rank": 0}))
            coordinator.wait_for_ranks(5)
            rank.sendall(data)
            with pytest.raises(
                NoAnswer, match=rf"rank 0 on b sent an answer that cannot be read \(describe\): .*{error}"
            ):
                coordinator.ask("describe", {0: {}}, 5)


@pytest.mark.parametrize("data", [frame(b"{"), frame(DEEP), frame(b"1"), b"no frame" * 10])
def test_a_rank_that_sends_no_messages_counts_as_ended(data: bytes) -> None:
    with listen(0) as server:
        coordinator = Coordinator(server, 1)
        with connect(HOST, server.getsockname()[1], 5) as rank:
            rank.sendall(json_frame(**HELLO | {"rank": 0}))
            coordinator.wait_for_ranks(5)
            rank.sendall(data)
            with pytest.raises(NoAnswer, match=r"rank 0 on b ended \(describe\)"):
                coordinator.ask("describe", {0: {}}, 5)


@pytest.mark.parametrize(
    "data", [frame(DEEP), json_frame(kind="ask"), json_frame(kind="end", code="0"), json_frame(kind=1), frame(b"[]")]
)
def test_a_rank_0_that_sends_nonsense_is_reported(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(rpc, "end_process", lambda *values: ended.append(values))
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        Responder(1, here).serve({})
    ((code, text, _),) = ended
    assert code == 1 and f"rank 1 on {socket.gethostname()} has lost rank 0 on ?" in text


def is_hello(data: bytes) -> bool:
    """Return whether these bytes are a hello of a rank in the world."""
    try:
        hello = json.loads(data[PREFIX.size :][: PREFIX.unpack(data[: PREFIX.size])[1]])
        return hello["kind"] == "hello" and hello["rank"] in (0, 1)
    except (ValueError, KeyError, TypeError, struct.error):
        return False


def fuzz(place: tuple[str, int], purpose: str, count: int) -> None:
    """Send random bytes, and after a handshake valid messages with some bytes changed."""
    rng, num_sent = random.Random(25), 0
    valid = [json_frame(**HELLO), json_frame(kind="answer", number=1, value=FACTS), struct.pack("d", 0.01) + bytes(99)]
    while num_sent < count:
        data = mutate(rng, rng.choice(valid)) if num_sent % 2 else rng.randbytes(rng.choice([1, 16, 64, 200]))
        if is_hello(data):
            continue
        num_sent += 1
        with suppress(OSError):
            is_raw = num_sent % 2
            how = socket.create_connection(place, 5) if is_raw else handshake.connect(place, derive_key(purpose), 5)
            with how as stranger:
                stranger.sendall(data)


def test_thousands_of_random_inputs_have_no_effect(world: World, answers: Answers) -> None:
    sink = (HOST, answers.describe()["sink"])
    fuzz(sink, bandwidth.PURPOSE, 1000)
    world.check(lambda: fuzz(world.place, rpc.PURPOSE, 2000))
    assert measure_rate(*sink, 0.1) > 10e6


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_preflight_passes_while_its_sockets_get_random_inputs(tmp_path: Path) -> None:
    """Two ranks run launch/preflight.py. Every port that they listen on is attacked from their start to their end."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    world = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "launch/preflight.py", "rollout.engine=fake", f"run.dir={tmp_path}"]
    ranks = []
    for rank in "01":
        environment = activated_environment(**world, RANK=rank, LOCAL_RANK=rank)
        log = (tmp_path / rank).open("wb")
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    attacked, deadline = set(), time.monotonic() + 100
    try:
        while any(rank.poll() is None for rank in ranks):
            assert time.monotonic() < deadline
            for rank in ranks:
                with suppress(psutil.Error):
                    listening = [
                        each for each in psutil.Process(rank.pid).net_connections("tcp") if each.status == "LISTEN"
                    ]
                    for each in listening:
                        attacked.add(each.laddr.port)
                        purpose = rpc.PURPOSE if each.laddr.port == port else bandwidth.PURPOSE
                        fuzz((HOST, each.laddr.port), purpose, 20)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [(tmp_path / rank).read_text() for rank in "01"]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "preflight: ready, 1 node, 2 ranks" in said[0] and "Traceback" not in "".join(said)
    assert port in attacked and len(attacked) >= 3, "rank 0, and the sinks of both"
