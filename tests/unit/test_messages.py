"""Mailboxes that talk over real sockets, all in this process."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import rl.run.build
import rl.run.dry_run  # noqa: F401  these import all messages
from rl.config.schema import ROOT
from rl.watch.heart import HEART
from rl.world.messages import Contact, Letter, Mailbox, Message, PeerLost
from tests.mails import HOST, KEY, Mark, listening, take

WAIT_S = 10.0  # for what must happen; what must not is waited for less long
Connect = Callable[[int], list[Mailbox]]


@dataclass(frozen=True)
class Note(Message):
    number: int = 0


@dataclass(frozen=True)
class Other(Message):
    number: int = 0


@dataclass(frozen=True)
class Rich(Message):
    names: list[str]
    share: float
    nothing: None
    nested: list[Note]
    by_number: dict[int, float]
    key: tuple[int, ...]


@dataclass(frozen=True)
class Free(Message):
    data: dict[str, Any]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[Mailbox] = []

    def connect(count: int) -> list[Mailbox]:
        mails = [Mailbox(rank, HOST, KEY) for rank in range(count)]
        for mail in mails:
            mail.learn({other.rank: other.contact for other in mails})
        made.extend(mails)
        return mails

    yield connect
    for mail in made:
        mail.close()


def lost_by(mail: Mailbox) -> tuple[list[int], threading.Event]:
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

    def send_all(mail: Mailbox) -> None:
        for number in range(300):
            mail.send(0, Note(number), payload=bytes([number % 256]) * (number % 7))

    threads = [threading.Thread(target=send_all, args=(mail,)) for mail in others]
    for thread in threads:
        thread.start()
    got: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(600):
        letter = take(hub, Note)
        number = letter.message.number
        assert bytes(letter.payload) == bytes([number % 256]) * (number % 7)
        got[letter.source].append(number)
    assert got == {1: list(range(300)), 2: list(range(300))}


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_a_payload_of_megabytes_arrives_intact(connect: Connect, wrap: Callable) -> None:
    sender, receiver = connect(2)
    payload = os.urandom(6_000_001)
    sender.send(1, Note(3), payload=wrap(payload))
    sender.send(1, Note())
    first, second = take(receiver, Note), take(receiver, Note)
    assert (first.source, first.message) == (0, Note(3))
    assert bytes(first.payload) == payload
    assert (second.message, bytes(second.payload)) == (Note(), b"")


def test_fields_keep_their_types(connect: Connect) -> None:
    sender, receiver = connect(2)
    rich = Rich(["ä", "b"], float("inf"), None, [Note(1), Note(2)], {3: 0.1}, (4, 5))
    sender.send(1, rich)
    assert take(receiver, Rich).message == rich


@pytest.mark.parametrize("value", [10**30, "half a pair: \ud83d", {"deep": [float("nan"), -(10**40)]}], ids=repr)
def test_data_of_users_arrives_though_msgpack_cannot_hold_it(connect: Connect, value: Any) -> None:
    sender, receiver = connect(2)
    sender.send(1, Free({"row": value}), payload=b"xyz")
    letter = take(receiver, Free)
    assert repr(letter.message) == repr(Free({"row": value})) and bytes(letter.payload) == b"xyz"


def test_a_message_with_wrong_fields_is_an_error_that_names_its_sender(connect: Connect) -> None:
    @dataclass(frozen=True)
    class Note(Message):
        number: str

    sender, receiver = connect(2)
    sender.send(1, Note("three"))
    with pytest.raises(ValueError, match="rank 0 sent a Note that cannot be read: Expected `int`, got `str`"):
        take(receiver, globals()["Note"])


def test_a_rank_can_write_to_itself(connect: Connect) -> None:
    (mail,) = connect(1)
    mail.send(0, Note(1), payload=bytearray(b"xyz"))
    assert take(mail, Note) == Letter(0, Note(1), b"xyz")


def test_a_handler_runs_while_the_main_thread_is_busy(connect: Connect) -> None:
    asked, answering = connect(2)
    handled_in: list[str] = []

    def answer(letter: Letter[Note]) -> None:
        handled_in.append(threading.current_thread().name)
        answering.send(letter.source, Other(2 * letter.message.number))

    answering.on(Note, answer)
    asked.send(1, Note(21))
    deadline = time.monotonic() + WAIT_S
    while not handled_in and time.monotonic() < deadline:
        sum(range(1000))  # never calls receive on the answering side
    assert handled_in == ["mail"]
    assert take(asked, Other).message == Other(42)
    assert answering.receive_within(0, Note) is None


def test_receive_takes_the_oldest_of_its_kinds_and_leaves_the_others(connect: Connect) -> None:
    sender, receiver = connect(2)
    for message in (Note(1), Other(2), Note(3), Mark()):
        sender.send(1, message)
    take(receiver, Mark)
    assert take(receiver, Other, Mark).message == Other(2)
    assert receiver.receive_within(0, Other, Mark) is None
    assert [take(receiver, Other, Note).message.number for _ in range(2)] == [1, 3]


def test_the_next_message_is_taken_only_if_it_is_of_the_same_kind(connect: Connect) -> None:
    """Otherwise a rank would add requests to its engine before steps that come earlier."""
    (mail,) = connect(1)
    for message in (Other(), Note(1), Note(2), Mark(), Note(3)):
        mail.send(0, message)
    names = {"Note", "Mark"}  # others are left where they are
    found = [mail.receive_next(Note, names) for _ in range(3)]
    assert [letter and letter.message for letter in found] == [Note(1), Note(2), None]
    assert mail.receive_within(0, Note, Mark) is not None
    letter = mail.receive_next(Note, names)
    assert letter is not None and letter.message == Note(3)
    assert mail.receive_next(Note, names) is None
    mail.fail(ValueError("lost"))
    with pytest.raises(ValueError, match="lost"):
        mail.receive_next(Note, names)


@pytest.mark.parametrize("timeout_s", [0.0, 0.2])
def test_receive_gives_none_after_its_timeout(connect: Connect, timeout_s: float) -> None:
    (mail,) = connect(1)
    mail.send(0, Other())
    started = time.monotonic()
    assert mail.receive_within(timeout_s, Note) is None
    assert timeout_s <= time.monotonic() - started < timeout_s + WAIT_S


def test_a_waiting_receive_is_woken(connect: Connect) -> None:
    sender, receiver = connect(2)
    threading.Timer(0.2, lambda: sender.send(1, Note())).start()
    assert receiver.receive(Note) == Letter(0, Note(), b"")


def test_fail_reaches_a_waiting_receive_and_the_first_error_stays(connect: Connect) -> None:
    (mail,) = connect(1)
    threading.Timer(0.1, lambda: mail.fail(RuntimeError("first"))).start()
    with pytest.raises(RuntimeError, match="first"):
        mail.receive(Note)
    mail.fail(RuntimeError("second"))
    for wait in (lambda: mail.receive_within(0, Note), mail.check):
        with pytest.raises(RuntimeError, match="first"):
            wait()


@pytest.mark.parametrize("writer", [0, 1])
def test_a_closed_peer_is_reported(connect: Connect, writer: int) -> None:
    """To the one that it wrote to, and with a process that ends also to the one that wrote to it."""
    mails = connect(2)
    staying, leaving = mails
    ranks, reported = lost_by(staying)
    if writer == 1:
        leaving.send(0, Note())
        take(staying, Note)
        leaving.close()
    else:
        with listening() as (address, accepted):
            staying.learn({1: Contact(*address, "")})
            staying.send(1, Note())
            accepted.get().close()
    assert reported.wait(WAIT_S)
    assert set(ranks) == {1}


def test_sending_to_a_peer_that_never_listened_raises(connect: Connect) -> None:
    mail, gone = connect(2)
    gone.close()
    with pytest.raises(PeerLost, match=r"could not send 'Note' to rank 1 at 127\.0\.0\.1:\d+"):
        mail.send(1, Note())


def test_sending_to_a_peer_that_left_raises_every_time(connect: Connect) -> None:
    (mail,) = connect(1)
    _, reported = lost_by(mail)
    with listening() as (address, accepted):
        mail.learn({1: Contact(*address, "")})
        mail.send(1, Note())
        accepted.get().close()
        assert reported.wait(WAIT_S)
        for _ in range(2):
            with pytest.raises(PeerLost, match="'Note' to rank 1"):
                mail.send(1, Note())


def test_a_closing_mailbox_reports_nobody(connect: Connect) -> None:
    first, second = connect(2)
    ranks, _ = lost_by(first)
    first.send(1, Note())
    second.send(0, Note())
    take(first, Note)
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

    def fail(letter: Letter[Note]) -> None:
        raise error

    receiver.on(Note, fail)
    sender.send(1, Note())
    with pytest.raises(type(error), match="boom"):
        receiver.receive_within(WAIT_S, Other)
    assert ranks == []  # the sender did nothing wrong


def test_handlers_still_run_after_one_failed(connect: Connect) -> None:
    sender, receiver = connect(2)
    handled = threading.Event()
    receiver.on(Note, lambda letter: 1 / 0)
    receiver.on(Other, lambda letter: handled.set())
    sender.send(1, Note())
    sender.send(1, Other())
    assert handled.wait(WAIT_S)


def test_a_handler_also_gets_what_came_before_it(connect: Connect) -> None:
    """An engine may ask for work before the leader has built its dispatcher."""
    mail, sender = connect(2)
    sender.send(0, Other())
    sender.send(0, Note(1))
    sender.send(0, Mark())
    take(mail, Mark)
    handled: list[int] = []
    mail.on(Note, lambda letter: handled.append(letter.message.number))
    assert handled == [1]
    assert mail.receive_within(0, Note) is None
    take(mail, Other)


def test_a_rank_that_does_not_read_is_waited_for(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the watchdog blames that rank, not the sender."""
    waits: list[str] = []
    monkeypatch.setattr(HEART, "wait", waits.append)
    sender, frozen = connect(2)
    blocked, released = threading.Event(), threading.Event()

    def handle(letter: Letter[Note]) -> None:
        blocked.set()
        released.wait(WAIT_S)

    frozen.on(Note, handle)
    sender.send(1, Note())
    assert blocked.wait(WAIT_S)
    threading.Timer(0.3, released.set).start()
    sender.send(1, Other(), payload=bytes(32 << 20))
    assert waits == ["rank 1 to accept a connection", "", "rank 1 to read a message", ""]
    assert len(take(frozen, Other).payload) == 32 << 20


def test_reports_say_in_words_what_a_rank_waits_for() -> None:
    """A wait for one kind shows what the kind says. A rank that serves waits for several; its services say for what."""
    awaited = set()
    for path in (ROOT / "rl").rglob("*.py"):
        awaited |= set(re.findall(r"\.receive(?:_within)?\((?:.*, )?([A-Z]\w+)\)", path.read_text()))
    known = {kind.__name__: kind.awaited for kind in Message.__subclasses__()}
    assert len(awaited) > 10
    assert [name for name in sorted(awaited) if not known[name]] == []
