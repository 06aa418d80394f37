"""Bytes of somebody who does not know the secret have no effect on the sockets of ranks and of the board."""

import hashlib
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import pytest

from rl.common import handshake
from rl.common.handshake import NONCE, PROOF, Untrusted, connect
from rl.common.json_channel import JsonChannel
from rl.watch.board import Board
from rl.watch.board_link import BoardServer
from rl.world.messages import Contact, Mailbox, Message
from tests.mails import HOST, KEY, WAIT_S, connected, take
from tests.security.raw import STRANGE, frame, json_frame, mutate, send_and_leave
from tests.unit.test_board import report, state

pytestmark = pytest.mark.timeout(60)


@dataclass(frozen=True)
class Ping(Message):
    number: int


class Target(NamedTuple):
    """A listening socket, a check that its owner still works, and what it printed."""

    address: tuple[str, int]
    check: Callable[[], None]
    said: Callable[[], str]


@contextmanager
def mailbox(capsys: pytest.CaptureFixture[str]) -> Iterator[Target]:
    with connected(2) as (mail, friend):
        lost: list[int] = []
        mail.on_lost(lost.append)
        numbers = iter(range(1 << 30))

        def check() -> None:
            ping = Ping(next(numbers))
            friend.send(0, ping)
            assert take(mail, Ping).message == ping
            mail.check()
            assert not lost

        check()
        yield Target((mail.contact.host, mail.contact.port), check, lambda: capsys.readouterr().err)


class RunningBoard:
    """A board of three ranks in a thread, as in the watchdog of rank 0. Rank 1 has joined it."""

    def __init__(self) -> None:
        self.selector, self.said, self.is_over = selectors.DefaultSelector(), list[str](), False
        self.failure: BaseException | None = None
        self.server = BoardServer(HOST, KEY, 3, self.selector, lambda message: None, self.said.append)
        self.address = (HOST, self.server.port)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.friend = self.join(1)
        self.wait_for(lambda: 1 in self.board.entries)

    @property
    def board(self) -> Board:
        return self.server.board

    def join(self, rank: int) -> JsonChannel:
        channel = JsonChannel(connect(self.address, KEY, WAIT_S))
        channel.send("hello", rank=rank)
        channel.send("beat", state=asdict(state(rank)), about={})
        return channel

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_so():
            assert self.failure is None and time.monotonic() < deadline
            time.sleep(0.01)

    def check(self) -> None:
        """Check that a heartbeat of rank 1 arrives soon, and that nobody counts as lost."""
        heard_at = time.monotonic()
        self.friend.send("beat", state=asdict(state(1)), about={})
        self.wait_for(lambda: 1 in self.board.entries and self.board.entries[1].heard_at >= heard_at)
        assert set(self.board.entries) == {1}
        assert not self.board.entries[1].is_gone and self.board.verdict is None

    def _run(self) -> None:
        try:
            while not self.is_over:
                for key, _ in self.selector.select(0.05):
                    key.data()
        except BaseException as error:
            self.failure = error


@contextmanager
def running_board(capsys: pytest.CaptureFixture[str]) -> Iterator[Target]:
    board = RunningBoard()
    try:
        board.check()
        yield Target(board.address, board.check, lambda: "\n".join(board.said))
    finally:
        board.is_over = True
        board.thread.join()


@pytest.fixture(params=[mailbox, running_board])
def target(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Target]:
    with request.param(capsys) as target:
        yield target


@pytest.mark.parametrize("data", STRANGE.values(), ids=STRANGE.keys())
def test_bytes_of_a_stranger_have_no_effect(target: Target, data: bytes) -> None:
    for _ in range(3):
        send_and_leave(target.address, data)
    target.check()


def test_strangers_are_reported_but_rarely(target: Target) -> None:
    for _ in range(30):
        send_and_leave(target.address, b"x" * (NONCE + PROOF))
    target.check()
    remedy = "if it is a node of this run, set the same ONEWORLD_SECRET there"
    why = f"no proof that it knows the run's secret; {remedy}"
    counts = ("1 connection", "10 connections")
    assert target.said().strip().splitlines() == [f"oneworld: refused {n} from {HOST}: {why}" for n in counts]


def test_a_stranger_who_streams_bytes_delays_nobody(target: Target) -> None:
    is_over = threading.Event()

    def stream() -> None:
        while not is_over.is_set():
            with suppress(OSError), socket.create_connection(target.address, timeout=1) as stranger:
                while True:
                    stranger.sendall(bytes(1 << 20))

    threads = [threading.Thread(target=stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            began = time.monotonic()
            target.check()
            assert time.monotonic() - began < WAIT_S
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_silent_connections_do_not_keep_others_out_and_are_closed(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [socket.create_connection(target.address) for _ in range(300)]
    connect(target.address, KEY, WAIT_S).close()
    target.check()
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.2)
    late = socket.create_connection(target.address, timeout=WAIT_S)
    while late.recv(64):  # the nonce, and then the end
        pass
    for connection in [*silent, late]:
        connection.close()


def test_a_recorded_proof_is_worth_nothing_later(target: Target) -> None:
    with socket.create_connection(target.address) as friend:
        nonce = friend.recv(NONCE, socket.MSG_WAITALL)
        answer = bytes(NONCE)
        proof = answer + handshake._proof(KEY, b"client", nonce + answer)
        friend.sendall(proof)
        assert len(friend.recv(PROOF, socket.MSG_WAITALL)) == PROOF, "the first time it is accepted"
    with socket.create_connection(target.address) as stranger:
        stranger.recv(NONCE, socket.MSG_WAITALL)
        stranger.sendall(proof)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    target.check()


def test_a_client_speaks_to_nobody_who_does_not_know_the_secret() -> None:
    """Not to one that says yes to everything, or sends its proof back."""
    for reply in (lambda data: bytes(PROOF), lambda data: data[NONCE:]):
        with socket.create_server((HOST, 0)) as server:

            def serve(server: socket.socket = server, reply: Callable[[bytes], bytes] = reply) -> None:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(bytes(NONCE))
                    connection.sendall(reply(connection.recv(NONCE + PROOF, socket.MSG_WAITALL)))
                    assert connection.recv(1) == b"", "nothing follows"

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(Untrusted, match="set the same ONEWORLD_SECRET on every node"):
                connect(server.getsockname(), KEY, WAIT_S)
            thread.join()


def test_two_secrets_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handshake.SECRET, "first")
    first = handshake.derive_key("mail", "world")
    monkeypatch.setenv(handshake.SECRET, "second")
    second = handshake.derive_key("mail", "world")
    keys = {first, second, handshake.derive_key("mail", "other world"), handshake.derive_key("board", "world")}
    assert len(keys) == 4
    mails = [Mailbox(0, HOST, first), Mailbox(1, HOST, second)]
    for mail in mails:
        mail.learn({each.rank: each.contact for each in mails})
    with pytest.raises(ConnectionError, match="set the same ONEWORLD_SECRET on every node"):
        mails[1].send(0, Ping(1))
    for mail in mails:
        mail.close()


# Somebody who knows the secret

PASSWORD = "the password of rank 2"
HELLO = frame(["Hello", {"rank": 2, "password": PASSWORD}])
PING = frame(["Ping", {"number": 7}])


@contextmanager
def mailbox_of_three() -> Iterator[tuple[Mailbox, Mailbox]]:
    """Yield ranks 0 and 1. The tests themselves are rank 2."""
    mails = [Mailbox(rank, HOST, KEY) for rank in range(2)]
    third = Contact(HOST, 1, hashlib.sha256(PASSWORD.encode()).hexdigest())
    for mail in mails:
        mail.learn({0: mails[0].contact, 1: mails[1].contact, 2: third})
    try:
        yield mails[0], mails[1]
    finally:
        for mail in mails:
            mail.close()


FORGED = {
    "no hello": PING,
    "another password": frame(["Hello", {"rank": 1, "password": PASSWORD}]) + PING,
    "a rank that is not there": frame(["Hello", {"rank": 9, "password": PASSWORD}]) + PING,
    "a negative rank": frame(["Hello", {"rank": -1, "password": PASSWORD}]) + PING,
    "a rank that is no number": frame(["Hello", {"rank": "2", "password": PASSWORD}]) + PING,
    "a deep hello": frame(b"\x92\xa5Hello" + b"\x91" * 1000 + b"\x90") + PING,
    "a large hello": frame(["Hello", {"rank": 2, "password": PASSWORD * 1000}]) + PING,
}


@pytest.mark.parametrize("data", FORGED.values(), ids=FORGED.keys())
def test_nobody_speaks_for_another_rank(data: bytes) -> None:
    with mailbox_of_three() as (mail, friend):
        lost: list[int] = []
        mail.on_lost(lost.append)
        with connect((mail.contact.host, mail.contact.port), KEY, WAIT_S) as forger, suppress(ConnectionResetError):
            forger.sendall(data)
            forger.settimeout(WAIT_S)
            assert forger.recv(1) == b""
        friend.send(0, Ping(1))
        assert take(mail, Ping).source == 1
        assert mail.receive_within(0, Ping) is None and not lost


MALFORMED = {
    "no msgpack": (frame(b"\xc1\xfe{]"), "rank 2 sent bytes that are no message"),
    "no pair": (frame(5), "rank 2 sent bytes that are no message"),
    "another magic": (b"1wle" + PING[4:], "rank 2 sent bytes that are no message"),
    "an unknown kind": (frame(["Pong", {"number": 1}]), "rank 2 sent bytes that are no message: unknown kind 'Pong'"),
    "a field of another type": (frame(["Ping", {"number": "7"}]), "rank 2 sent a Ping that cannot be read"),
    "a missing field": (frame(["Ping", {}]), "rank 2 sent a Ping that cannot be read"),
    "a deep head": (frame(b"\x91" * 200_000 + b"\x90"), "rank 2 sent bytes that are no message"),
    "deep JSON in a field": (frame(["Ping", b"[" * 200_000]), "rank 2 sent a Ping that cannot be read"),
    "too long a head": (PING[:4] + b"\xff" * 12, "rank 2 sent bytes that are no message"),
}


@pytest.mark.parametrize(("data", "error"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_message_is_an_error_that_names_its_sender(data: bytes, error: str) -> None:
    with mailbox_of_three() as (mail, friend), connect((HOST, mail.contact.port), KEY, WAIT_S) as rank:
        rank.sendall(HELLO + data)
        with pytest.raises(ValueError, match=error):
            mail.receive_within(WAIT_S, Ping)
        handled = threading.Event()
        mail.on(Ping, lambda letter: handled.set())
        friend.send(0, Ping(1))
        assert handled.wait(WAIT_S), "the thread that reads messages still runs"


def test_an_announced_length_takes_no_memory() -> None:
    with mailbox_of_three() as (mail, friend), connect((HOST, mail.contact.port), KEY, WAIT_S) as rank:
        announced = frame(["Ping", {"number": 7}])
        rank.sendall(HELLO + announced[:8] + (1 << 39).to_bytes(8, "big") + announced[16:] + bytes(1 << 17))
        friend.send(0, Ping(1))
        assert take(mail, Ping).source == 1
        mail.check()


def test_a_payload_larger_than_its_first_memory_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.common.framing.GROWTH", 1 << 17)
    payload = random.Random(3).randbytes(5_000_001)
    with connected(2) as (mail, friend):
        friend.send(0, Ping(1), payload=payload)
        assert bytes(take(mail, Ping).payload) == payload


BEAT = json_frame(kind="beat", state=asdict(state(2)), about={})
WATCHDOG_HELLO = json_frame(kind="hello", rank=2)
BAD_BEATS = {
    "a deep message": frame(b"[" * 200_000),
    "no JSON": frame(b"{"),
    "no kind": json_frame(state=asdict(state(2))),
    "no state": json_frame(kind="beat", about={}),
    "a state with a wrong type": json_frame(kind="beat", state=asdict(state(2)) | {"silent_s": "long"}, about={}),
    "a state with an unknown field": json_frame(kind="beat", state=[1], about={}),
    "a state of another rank": json_frame(kind="beat", state=asdict(state(1)), about={}),
    "a report with an unknown cause": json_frame(kind="report", report=report(2, "fatal", "x") | {"cause": "magic"}),
    "a report of another rank": json_frame(kind="report", report=report(1, "fatal", "x")),
    "an interrupt of another rank": json_frame(kind="interrupting", report=report(1, "interrupt", "x")),
    "a report that is none": json_frame(kind="report", report=7),
}


@pytest.mark.parametrize("data", BAD_BEATS.values(), ids=BAD_BEATS.keys())
def test_a_malformed_message_of_a_watchdog_counts_as_the_loss_of_its_rank(data: bytes) -> None:
    board = RunningBoard()
    try:
        with connect(board.address, KEY, WAIT_S) as watchdog:
            watchdog.sendall(WATCHDOG_HELLO + BEAT)
            board.wait_for(lambda: 2 in board.board.entries)
            watchdog.sendall(data)
            board.wait_for(lambda: board.board.entries[2].is_gone)
        board.friend.send("done")
        board.wait_for(lambda: 1 in board.board.entries and board.board.entries[1].is_done)
    finally:
        board.is_over = True
        board.thread.join()


TAKEN = {
    "a rank that is there": json_frame(kind="hello", rank=1) + json_frame(kind="died"),
    "rank 0": json_frame(kind="hello", rank=0) + json_frame(kind="died"),
    "a rank that is not in the world": json_frame(kind="hello", rank=3) + BEAT,
    "a rank that is no number": json_frame(kind="hello", rank="2") + BEAT,
    "no hello": BEAT,
}


@pytest.mark.parametrize("data", TAKEN.values(), ids=TAKEN.keys())
def test_nobody_takes_the_place_of_a_watchdog(data: bytes) -> None:
    board = RunningBoard()
    try:
        board.check()
        with connect(board.address, KEY, WAIT_S) as forger, suppress(ConnectionResetError):
            forger.sendall(data)
            forger.settimeout(WAIT_S)
            while forger.recv(1 << 10):
                pass
        board.check()
    finally:
        board.is_over = True
        board.thread.join()


def test_hundreds_of_random_inputs_have_no_effect(target: Target) -> None:
    """Half of them after a handshake, as valid messages with some bytes changed. tests/security/test_fuzz.py does this
    to a whole run."""
    rng = random.Random(25)
    beat = json_frame(kind="hello", rank=1) + BEAT
    valid = [frame(["Hello", {"rank": 1, "password": "x" * 32}]) + PING, beat]
    for number in range(600):
        data = mutate(rng, rng.choice(valid)) if number % 2 else rng.randbytes(rng.choice([1, 16, 64, 200]))
        with suppress(OSError):
            how = connect(target.address, KEY, WAIT_S) if number % 2 else socket.create_connection(target.address)
            with how as stranger:
                stranger.sendall(data)
    target.check()
