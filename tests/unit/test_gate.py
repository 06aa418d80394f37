"""The gate: orders reach every actor in the same batch, before it goes, or they wait for the next."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from rl.mail import Mail, Message
from rl.rollout.gate import Gate, OrderService
from rl.serve import serve
from tests.mails import connected, take

ACTORS = (0, 2)  # the leader, and an actor on another node; rank 1 only samples


@pytest.fixture
def mails() -> Iterator[list[Mail]]:
    with connected(3) as made:
        yield made


def order(mails: list[Mail], text: str, rank: int = 1) -> None:
    """Returns when the gate has heard it."""
    mails[rank].send(0, "order", {"order": text})
    mails[rank].send(0, "mark")
    take(mails[0], "mark")


def collected(mails: list[Mail], batch: int, *ranks: int) -> None:
    for rank in ranks:
        mails[rank].send(0, "collected", {"batch": batch})
        mails[rank].send(0, "mark")
        take(mails[0], "mark")


def heard(mails: list[Mail], rank: int) -> list[str]:
    """What this rank was told so far, in order; the leader's mark comes behind it on the same connection."""
    texts = []
    mails[0].send(rank, "so far")
    while (message := take(mails[rank], "obey", "go", "so far")).kind != "so far":
        texts.append(message.meta["order"] if message.kind == "obey" else f"go {message.meta['batch']}")
    return texts


def everyone_heard(mails: list[Mail]) -> list[str]:
    texts = [heard(mails, rank) for rank in ACTORS]
    assert texts[0] == texts[1]
    assert heard(mails, 1) == []
    return texts[0]


def test_actors_go_when_all_have_collected(mails: list[Mail]) -> None:
    gate = Gate(mails[0], ACTORS)
    for batch in (1, 2, 5):
        gate.open(batch)
        collected(mails, batch, 2)
        assert everyone_heard(mails) == []
        collected(mails, batch, 0)
        assert everyone_heard(mails) == [f"go {batch}"]


def test_an_order_before_the_first_batch_waits_for_it(mails: list[Mail]) -> None:
    mails[1].send(0, "order", {"order": "early"})  # there is no gate yet
    gate = Gate(mails[0], ACTORS)
    order(mails, "save")
    assert everyone_heard(mails) == []
    gate.open(1)
    assert everyone_heard(mails) == ["early", "save"]
    gate.open(2)
    assert everyone_heard(mails) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_order_while_a_batch_is_collected_is_passed_on_at_once(mails: list[Mail], rank: int) -> None:
    gate = Gate(mails[0], ACTORS)
    gate.open(1)
    order(mails, "save", rank)
    assert everyone_heard(mails) == ["save"]
    collected(mails, 1, 0)
    order(mails, "stop", rank)
    assert everyone_heard(mails) == ["stop"]
    collected(mails, 1, 2)
    assert everyone_heard(mails) == ["go 1"]


def test_no_order_comes_after_go(mails: list[Mail]) -> None:
    gate = Gate(mails[0], ACTORS)
    gate.open(1)
    collected(mails, 1, 2, 0)
    order(mails, "save")
    order(mails, "stop")
    assert everyone_heard(mails) == ["go 1"]
    gate.open(2)
    assert everyone_heard(mails) == ["save", "stop"]
    collected(mails, 2, 0, 2)
    assert everyone_heard(mails) == ["go 2"]


def test_an_order_that_waits_is_given_once(mails: list[Mail]) -> None:
    gate = Gate(mails[0], ACTORS)
    for rank in (1, 2, 0, 1):  # as when every node's agent gets the same signal
        order(mails, "save", rank)
    gate.open(1)
    assert everyone_heard(mails) == ["save"]
    order(mails, "save")  # another one, later
    assert everyone_heard(mails) == ["save"]


def test_every_actor_obeys_before_it_goes_whenever_orders_come(mails: list[Mail]) -> None:
    """Two hundred orders against forty batches: each comes once, in the same batch on both actors."""
    gate = Gate(mails[0], ACTORS)
    done = threading.Event()

    def give_orders() -> None:
        for number in range(200):
            mails[1].send(0, "order", {"order": str(number)})
        done.set()

    obeyed: dict[int, list[list[str]]] = {rank: [] for rank in ACTORS}
    threading.Thread(target=give_orders).start()
    batch = 0
    while batch < 40 or not done.is_set():
        batch += 1
        gate.open(batch)
        for rank in reversed(ACTORS):
            mails[rank].send(0, "collected", {"batch": batch})
        for rank in ACTORS:
            obeyed[rank].append([])
            while (message := take(mails[rank], "obey", "go")).kind == "obey":
                obeyed[rank][-1].append(message.meta["order"])
            assert message.meta["batch"] == batch
    mails[1].send(0, "mark")
    take(mails[0], "mark")
    gate.open(batch + 1)
    last = everyone_heard(mails)
    assert obeyed[0] == obeyed[2]
    assert [text for texts in obeyed[0] for text in texts] + last == [str(number) for number in range(200)]


def test_a_batch_that_is_not_open_is_a_mistake(mails: list[Mail]) -> None:
    gate = Gate(mails[0], ACTORS)
    gate.open(2)
    mails[2].send(0, "collected", {"batch": 1})
    with pytest.raises(AssertionError, match="'batch': 1"):
        mails[0].receive("never", timeout_s=5)


def test_an_actor_that_serves_obeys_between_two_messages(mails: list[Mail]) -> None:
    obeyed: list[str] = []
    stages: list[str] = []

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        stages.append(name)
        with nullcontext():
            yield

    gate = Gate(mails[0], ACTORS)
    gate.open(1)
    order(mails, "save")
    order(mails, "stop")
    world = SimpleNamespace(mail=mails[2], stage=stage)
    serve(world, [OrderService(obeyed.append)], until=lambda: len(obeyed) == 2)
    assert (obeyed, stages) == (["save", "stop"], ["checkpoint", "checkpoint"])


def test_what_obeying_raises_ends_the_wait() -> None:
    def stop(text: str) -> None:
        raise RuntimeError(f"told to {text}")

    with pytest.raises(RuntimeError, match="told to stop"):
        OrderService(stop).handle(Message(0, "obey", {"order": "stop"}))
