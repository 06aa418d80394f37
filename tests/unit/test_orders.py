"""The gate: orders reach every actor in the same batch, before it goes, or they wait for the next."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rl.rollout.orders import Orders, OrderService
from rl.world.mail import Mail, Message
from rl.world.service import serve
from tests.mails import connected, take

ACTORS = (0, 2, 3)  # the leader, and the two ranks of an engine on another node; rank 1 only samples
HEADS = (0, 2)  # rank 2 leads the engine


@pytest.fixture
def mails() -> Iterator[list[Mail]]:
    with connected(4) as made:
        yield made


def order(mails: list[Mail], text: str, rank: int = 1) -> None:
    """Returns when the gate has heard it."""
    mails[rank].send(0, "order", {"order": text})
    mails[rank].send(0, "mark")
    take(mails[0], "mark")


def collected(mails: list[Mail], batch: int, *ranks: int) -> None:
    for rank in ranks:
        mails[rank].send(0, "collected", {"batch": batch, "scores": {}})
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
    """What the heads were told, both the same; others hear nothing from the gate."""
    texts = [heard(mails, rank) for rank in HEADS]
    assert texts[0] == texts[1]
    assert heard(mails, 1) == heard(mails, 3) == []
    return texts[0]


def test_actors_go_when_all_have_collected(mails: list[Mail]) -> None:
    gate = Orders(mails[0], len(ACTORS), HEADS)
    for batch in (1, 2, 5):
        gate.open()
        collected(mails, batch, 3, 2)
        assert everyone_heard(mails) == []
        collected(mails, batch, 0)
        assert everyone_heard(mails) == [f"go {batch}"]


def test_actors_may_have_collected_before_the_leader_begins(mails: list[Mail]) -> None:
    """Their groups can be there while the leader is still busy with what comes before."""
    gate = Orders(mails[0], len(ACTORS), HEADS)
    for batch in (1, 2):
        collected(mails, batch, 2, 3)
        order(mails, "save")
        assert everyone_heard(mails) == []
        gate.open()
        assert everyone_heard(mails) == ["save"]
        order(mails, "stop")
        assert everyone_heard(mails) == ["stop"]
        collected(mails, batch, 0)
        assert everyone_heard(mails) == [f"go {batch}"]


def test_actors_are_counted_by_batch(mails: list[Mail]) -> None:
    gate = Orders(mails[0], len(ACTORS), HEADS)
    gate.open()
    collected(mails, 1, 2)
    collected(mails, 2, 2, 3)
    assert everyone_heard(mails) == []
    collected(mails, 1, 3, 0)
    assert everyone_heard(mails) == ["go 1"]
    gate.open()
    order(mails, "save")
    assert everyone_heard(mails) == ["save"]
    collected(mails, 2, 0)
    assert everyone_heard(mails) == ["go 2"]


def test_an_order_before_the_first_batch_waits_for_it(mails: list[Mail]) -> None:
    mails[1].send(0, "order", {"order": "early"})  # there is no gate yet
    gate = Orders(mails[0], len(ACTORS), HEADS)
    order(mails, "save")
    assert everyone_heard(mails) == []
    gate.open()
    assert everyone_heard(mails) == ["early", "save"]
    collected(mails, 1, *ACTORS)
    assert everyone_heard(mails) == ["go 1"]
    gate.open()
    assert everyone_heard(mails) == []


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_an_order_while_a_batch_is_collected_is_passed_on_at_once(mails: list[Mail], rank: int) -> None:
    gate = Orders(mails[0], len(ACTORS), HEADS)
    gate.open()
    order(mails, "save", rank)
    assert everyone_heard(mails) == ["save"]
    collected(mails, 1, 0, 3)
    order(mails, "stop", rank)
    assert everyone_heard(mails) == ["stop"]
    collected(mails, 1, 2)
    assert everyone_heard(mails) == ["go 1"]


def test_no_order_comes_after_go(mails: list[Mail]) -> None:
    gate = Orders(mails[0], len(ACTORS), HEADS)
    gate.open()
    collected(mails, 1, 2, 0, 3)
    order(mails, "save")
    order(mails, "stop")
    assert everyone_heard(mails) == ["go 1"]
    gate.open()
    assert everyone_heard(mails) == ["save", "stop"]
    collected(mails, 2, 0, 2, 3)
    assert everyone_heard(mails) == ["go 2"]


def test_an_order_that_waits_is_given_once(mails: list[Mail]) -> None:
    gate = Orders(mails[0], len(ACTORS), HEADS)
    for rank in (1, 2, 0, 1):  # as when every node's agent gets the same signal
        order(mails, "save", rank)
    gate.open()
    assert everyone_heard(mails) == ["save"]
    order(mails, "save")  # another one, later
    assert everyone_heard(mails) == ["save"]


def test_every_actor_obeys_before_it_goes_whenever_orders_come(mails: list[Mail]) -> None:
    """Two hundred orders against forty batches: each comes once, in the same batch on both heads."""
    gate = Orders(mails[0], len(ACTORS), HEADS)
    done = threading.Event()

    def give_orders() -> None:
        for number in range(200):
            mails[1].send(0, "order", {"order": str(number)})
        done.set()

    obeyed: dict[int, list[list[str]]] = {rank: [] for rank in HEADS}
    threading.Thread(target=give_orders).start()
    batch = 0
    while batch < 40 or not done.is_set():
        batch += 1
        early, late = ((2, 3), (0,)) if batch % 2 else ((), (0, 3, 2))
        for rank in early:
            mails[rank].send(0, "collected", {"batch": batch, "scores": {}})
        gate.open()
        for rank in late:
            mails[rank].send(0, "collected", {"batch": batch, "scores": {}})
        for rank in HEADS:
            obeyed[rank].append([])
            while (message := take(mails[rank], "obey", "go")).kind == "obey":
                obeyed[rank][-1].append(message.meta["order"])
            assert message.meta["batch"] == batch
    mails[1].send(0, "mark")
    take(mails[0], "mark")
    gate.open()
    last = everyone_heard(mails)
    assert obeyed[0] == obeyed[2]
    assert [text for texts in obeyed[0] for text in texts] + last == [str(number) for number in range(200)]


def test_ranks_that_serve_obey_between_two_messages(mails: list[Mail]) -> None:
    """The follower hears of orders from its engine's lead alone."""
    stages: list[tuple[str, str]] = []

    @contextmanager
    def stage(name: str, item: str = "") -> Iterator[None]:
        stages.append((name, item))
        yield

    def orders_obeyed(rank: int, followers: tuple[int, ...]) -> list[str]:
        obeyed: list[str] = []
        world = SimpleNamespace(mail=mails[rank], stage=stage)
        serve(world, [OrderService(mails[rank], followers, obeyed.append)], until=lambda: len(obeyed) == 2)
        return obeyed

    gate = Orders(mails[0], len(ACTORS), HEADS)
    gate.open()
    order(mails, "save")
    order(mails, "stop")
    assert heard(mails, 3) == []
    assert orders_obeyed(2, (3,)) == ["save", "stop"]
    assert orders_obeyed(3, ()) == ["save", "stop"]
    assert stages == [("checkpoint", "obey")] * 4


def test_followers_are_told_before_their_lead_obeys(mails: list[Mail]) -> None:
    """Obeying is a collective that needs them, and may end with an exception."""
    told: list[str] = []

    def stop(text: str) -> None:
        told.extend(take(mails[rank], "obey").meta["order"] for rank in (3, 1))
        raise RuntimeError(f"told to {text}")

    with pytest.raises(RuntimeError, match="told to stop"):
        OrderService(mails[2], (3, 1), stop).handle(Message(0, "obey", {"order": "stop"}))
    assert told == ["stop", "stop"]


def test_orders_and_go_reach_a_follower_by_the_same_way_and_in_order(mails: list[Mail]) -> None:
    """A go that came from the gate itself could overtake an order that its lead has not passed on yet."""
    gate = Orders(mails[0], len(ACTORS), HEADS)
    gate.open()
    order(mails, "save")
    collected(mails, 1, *ACTORS)
    service = OrderService(mails[2], (3,), lambda text: None)
    service.handle(take(mails[2], "obey", "go"))
    service.pass_on(take(mails[2], "obey", "go"))
    assert [take(mails[3], "obey", "go").kind for _ in range(2)] == ["obey", "go"]


def test_scores_are_added_up_in_the_order_of_ranks(mails: list[Mail]) -> None:
    """Whoever comes first: the last bit of a sum depends on its order."""
    values = {0: 0.1, 2: 1e16, 3: -1e16}
    gate = Orders(mails[0], len(ACTORS), HEADS)
    for batch, order_of_arrival in ((1, (3, 2, 0)), (2, (2, 0, 3))):
        gate.open()
        for rank in order_of_arrival:
            scores = {"reward/rule": [values[rank], 1.0], "reward/errors": [1.0, 0.0]}
            mails[rank].send(0, "collected", {"batch": batch, "scores": scores})
            mails[rank].send(0, "mark")
            take(mails[0], "mark")
        for rank in HEADS:
            expected = {"reward/rule": [0.1 + 1e16 - 1e16, 3.0], "reward/errors": [3.0, 0.0]}
            assert take(mails[rank], "go").meta == {"batch": batch, "scores": expected}
