"""Mailboxes that talk over real sockets, all in this process."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from rl.world.mail import MAGIC, PREFIX, Mail, Message, PeerLost

HOST = "127.0.0.1"
WAIT_S = 10.0  # for what must happen; what must not is waited for less long
Connect = Callable[[int], list[Mail]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[Mail] = []

    def connect(count: int) -> list[Mail]:
        mails = [Mail(rank, HOST, "token") for rank in range(count)]
        for mail in mails:
            mail.learn({other.rank: other.address for other in mails})
        made.extend(mails)
        return mails

    yield connect
    for mail in made:
        mail.close()


def take(mail: Mail, *kinds: str) -> Message:
    message = mail.receive(*kinds, timeout_s=WAIT_S)
    assert message is not None, f"no {kinds} within {WAIT_S} s"
    return message


def lost_by(mail: Mail) -> tuple[list[int], threading.Event]:
    """The ranks that this mailbox reports as lost, and whether it has reported one."""
    ranks: list[int] = []
    reported = threading.Event()

    def on_lost(rank: int) -> None:
        ranks.append(rank)
        reported.set()

    mail.on_lost(on_lost)
    return ranks, reported


def test_order_is_kept_per_pair(connect: Connect) -> None:
    hub, *others = connect(3)

    def send_all(mail: Mail) -> None:
        for number in range(300):
            mail.send(0, "count", {"number": number}, bytes([number % 256]) * (number % 7))

    threads = [threading.Thread(target=send_all, args=(mail,)) for mail in others]
    for thread in threads:
        thread.start()
    got: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(600):
        message = take(hub, "count")
        number = message.meta["number"]
        assert bytes(message.payload) == bytes([number % 256]) * (number % 7)
        got[message.source].append(number)
    assert got == {1: list(range(300)), 2: list(range(300))}


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_a_payload_of_megabytes_arrives_intact(connect: Connect, wrap: Callable) -> None:
    sender, receiver = connect(2)
    payload = os.urandom(6_000_001)
    meta = {"batch": 3, "names": ["ä", "b"], "share": 0.5, "none": None}
    sender.send(1, "group", meta, wrap(payload))
    sender.send(1, "group")
    first, second = take(receiver, "group"), take(receiver, "group")
    assert (first.source, first.kind, first.meta) == (0, "group", meta)
    assert bytes(first.payload) == payload
    assert (second.meta, bytes(second.payload)) == ({}, b"")


def test_a_rank_can_write_to_itself(connect: Connect) -> None:
    (mail,) = connect(1)
    mail.send(0, "note", {"a": 1}, bytearray(b"xyz"))
    assert take(mail, "note") == Message(0, "note", {"a": 1}, b"xyz")


def test_a_handler_runs_while_the_main_thread_is_busy(connect: Connect) -> None:
    asked, answering = connect(2)
    handled_in: list[str] = []

    def answer(message: Message) -> None:
        handled_in.append(threading.current_thread().name)
        answering.send(message.source, "answer", {"twice": 2 * message.meta["number"]})

    answering.on("ask", answer)
    asked.send(1, "ask", {"number": 21})
    deadline = time.monotonic() + WAIT_S
    while not handled_in and time.monotonic() < deadline:
        sum(range(1000))  # never calls receive on the answering side
    assert handled_in == ["mail"]
    assert take(asked, "answer").meta == {"twice": 42}
    assert answering.receive("ask", timeout_s=0) is None


def test_receive_takes_the_oldest_of_its_kinds_and_leaves_the_others(connect: Connect) -> None:
    sender, receiver = connect(2)
    for kind, number in [("a", 1), ("b", 2), ("a", 3), ("c", 4)]:
        sender.send(1, kind, {"number": number})
    assert take(receiver, "c").meta["number"] == 4
    assert take(receiver, "b", "c").meta["number"] == 2
    assert receiver.receive("b", "c", timeout_s=0) is None
    assert [take(receiver, "b", "a").meta["number"] for _ in range(2)] == [1, 3]


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
def test_receive_gives_none_after_its_timeout(connect: Connect, timeout_s: float) -> None:
    (mail,) = connect(1)
    mail.send(0, "other")
    started = time.monotonic()
    assert mail.receive("note", timeout_s=timeout_s) is None
    assert timeout_s <= time.monotonic() - started < timeout_s + 2


def test_a_waiting_receive_is_woken(connect: Connect) -> None:
    sender, receiver = connect(2)
    threading.Timer(0.2, lambda: sender.send(1, "late")).start()
    assert receiver.receive("late") == Message(0, "late", {}, b"")


def test_fail_reaches_a_waiting_receive_and_the_first_error_stays(connect: Connect) -> None:
    (mail,) = connect(1)
    threading.Timer(0.1, lambda: mail.fail(RuntimeError("first"))).start()
    with pytest.raises(RuntimeError, match="first"):
        mail.receive("never")
    mail.fail(RuntimeError("second"))
    with pytest.raises(RuntimeError, match="first"):
        mail.receive("never", timeout_s=0)


def test_a_wrong_token_is_dropped_with_its_messages(connect: Connect) -> None:
    mail, friend = connect(2)
    stranger = Mail(1, HOST, "another token")
    stranger.learn({0: mail.address})
    _, dropped = lost_by(stranger)
    ranks, _ = lost_by(mail)
    with contextlib.suppress(PeerLost):  # it may be dropped before it has said all
        stranger.send(0, "note", {"from": "stranger"})
    assert dropped.wait(WAIT_S)
    friend.send(0, "note", {"from": "friend"})
    assert take(mail, "note").meta == {"from": "friend"}
    assert mail.receive("note", timeout_s=0.1) is None
    assert ranks == []  # the stranger called itself rank 1, which is not lost
    stranger.close()


def frame(header: object, payload: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return PREFIX.pack(MAGIC, len(text), len(payload)) + text + payload


HELLO = frame(["hello", {"token": "token", "rank": 1}])
NOTE = frame(["note", {}])
GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "another magic": b"1wle" + HELLO[4:] + NOTE,
    "too long a header": PREFIX.pack(MAGIC, 1 << 31, 0),
    "an empty header": PREFIX.pack(MAGIC, 0, 0),
    "a payload before the token": PREFIX.pack(MAGIC, 10, 1 << 40),
    "not JSON": frame(b"\xff\xfe{]"),
    "JSON that is no pair": frame(5),
    "three values": frame(["hello", {}, 3]),
    "no hello": NOTE,
    "a hello without a token": frame(["hello", {}]) + NOTE,
    "a hello that is no mapping": frame(["hello", 5]) + NOTE,
    "a hello with a wrong token": frame(["hello", {"token": "x", "rank": 1}]) + NOTE,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_dropped_and_harms_nobody(connect: Connect, garbage: bytes) -> None:
    mail, friend = connect(2)
    with socket.create_connection(mail.address, timeout=2) as stranger:
        stranger.sendall(garbage)
        try:
            assert stranger.recv(1) == b"", "nobody answers a stranger"
        except ConnectionResetError:
            pass  # closed with unread bytes
        except TimeoutError:
            pytest.fail("the connection was not dropped")
    friend.send(0, "note", {"from": "friend"})
    assert take(mail, "note").meta == {"from": "friend"}
    assert mail.receive("note", timeout_s=0) is None


def test_a_stranger_that_says_nothing_holds_nobody_up(connect: Connect) -> None:
    mail, friend = connect(2)
    with socket.create_connection(mail.address) as silent, socket.create_connection(mail.address) as slow:
        slow.sendall(HELLO[:9])
        friend.send(0, "note")
        assert take(mail, "note").source == 1
        assert silent.fileno() > 0


@pytest.mark.parametrize("writer", [0, 1])
def test_a_closed_peer_is_reported(connect: Connect, writer: int) -> None:
    """To the one that it wrote to, and with a process that ends also to the one that wrote to it."""
    mails = connect(2)
    staying, leaving = mails
    ranks, reported = lost_by(staying)
    if writer == 1:
        leaving.send(0, "note")
        take(staying, "note")
        leaving.close()
    else:
        with socket.create_server((HOST, 0)) as server:
            staying.learn({1: server.getsockname()})
            staying.send(1, "note")
            server.accept()[0].close()
    assert reported.wait(WAIT_S)
    assert set(ranks) == {1}


def test_sending_to_a_peer_that_never_listened_raises(connect: Connect) -> None:
    mail, gone = connect(2)
    gone.close()
    with pytest.raises(PeerLost, match=r"could not send 'note' to rank 1 at \('127\.0\.0\.1', \d+\)"):
        mail.send(1, "note")


def test_sending_to_a_peer_that_left_raises_every_time(connect: Connect) -> None:
    (mail,) = connect(1)
    _, reported = lost_by(mail)
    with socket.create_server((HOST, 0)) as server:
        mail.learn({1: server.getsockname()})
        mail.send(1, "note")
        server.accept()[0].close()
        assert reported.wait(WAIT_S)
        for _ in range(2):
            with pytest.raises(PeerLost, match="'note' to rank 1"):
                mail.send(1, "note")


def test_a_closing_mailbox_reports_nobody(connect: Connect) -> None:
    first, second = connect(2)
    ranks, _ = lost_by(first)
    first.send(1, "note")
    second.send(0, "note")
    take(first, "note")
    first.close()
    second.close()
    time.sleep(0.2)
    assert ranks == []


@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), ValueError("boom"), PeerLost("boom")], ids=lambda e: type(e).__name__
)
def test_a_handlers_exception_surfaces_in_receive(connect: Connect, error: Exception) -> None:
    sender, receiver = connect(2)
    ranks, _ = lost_by(receiver)

    def fail(message: Message) -> None:
        raise error

    receiver.on("bad", fail)
    sender.send(1, "bad")
    with pytest.raises(type(error), match="boom"):
        receiver.receive("never", timeout_s=2)
    assert ranks == []  # the sender did nothing wrong


def test_handlers_still_run_after_one_failed(connect: Connect) -> None:
    sender, receiver = connect(2)
    handled = threading.Event()
    receiver.on("bad", lambda message: 1 / 0)
    receiver.on("good", lambda message: handled.set())
    sender.send(1, "bad")
    sender.send(1, "good")
    assert handled.wait(WAIT_S)


def test_a_handler_also_gets_what_came_before_it(connect: Connect) -> None:
    """An engine may ask for work before the leader has built its dispatcher."""
    mail, sender = connect(2)
    sender.send(0, "other")
    sender.send(0, "early", {"number": 1})
    sender.send(0, "mark")
    take(mail, "mark")
    handled: list[int] = []
    mail.on("early", lambda message: handled.append(message.meta["number"]))
    assert handled == [1]
    assert mail.receive("early", timeout_s=0) is None
    take(mail, "other")
