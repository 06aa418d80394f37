"""Orders reach every actor in the same batch, before it goes on, or they wait for the next batch."""

import threading
import time
from collections.abc import Iterator
from typing import get_args

import pytest

from rl.rollout.orders import BatchComplete, Collected, Execute, OrderGate, OrderService
from rl.watch.heart import HEART
from rl.world.messages import Letter, Mailbox
from rl.world.orders import Action, Order
from rl.world.service import serve
from tests.mails import Mark, connected, connected_worlds, take

ACTORS = (0, 2, 3)  # the leader, and the two ranks of an engine on another node; rank 1 only samples
HEADS = (0, 2)  # rank 2 leads the engine


@pytest.fixture
def mails() -> Iterator[list[Mailbox]]:
    with connected(4) as made:
        yield made


def order(mails: list[Mailbox], action: Action, rank: int = 1) -> None:
    """Send an order, and wait until the gate has it."""
    mails[rank].send(0, Order(action))
    mails[rank].send(0, Mark())
    take(mails[0], Mark)


def collected(mails: list[Mailbox], batch: int, *ranks: int) -> None:
    for rank in ranks:
        mails[rank].send(0, Collected(batch, {}))
        mails[rank].send(0, Mark())
        take(mails[0], Mark)


def heard(mails: list[Mailbox], rank: int) -> list[str]:
    """Return what this rank was told so far, in order; the leader's mark comes behind it on the same connection."""
    texts = []
    mails[0].send(rank, Mark())
    while not isinstance(message := take(mails[rank], Execute, BatchComplete, Mark).message, Mark):
        texts.append(message.action if isinstance(message, Execute) else f"go {message.batch}")
    return texts


def everyone_heard(mails: list[Mailbox]) -> list[str]:
    """Return what the heads were told, both the same; the others hear nothing from the gate."""
    texts = [heard(mails, rank) for rank in HEADS]
    assert texts[0] == texts[1]
    assert heard(mails, 1) == heard(mails, 3) == []
    return texts[0]


def test_actors_go_when_all_have_collected(mails: list[Mailbox]) -> None:
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
    for batch in (1, 2, 5):
        gate.open()
        collected(mails, batch, 3, 2)
        assert everyone_heard(mails) == []
        collected(mails, batch, 0)
        assert everyone_heard(mails) == [f"go {batch}"]


def test_actors_may_have_collected_before_the_leader_begins(mails: list[Mailbox]) -> None:
    """Their groups can be there while the leader is still busy with what comes before."""
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
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


def test_actors_are_counted_by_batch(mails: list[Mailbox]) -> None:
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
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


def test_an_order_before_the_first_batch_waits_for_it(mails: list[Mailbox]) -> None:
    mails[1].send(0, Order("stop"))  # there is no gate yet
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
    order(mails, "save")
    assert everyone_heard(mails) == []
    gate.open()
    assert everyone_heard(mails) == ["stop", "save"]
    collected(mails, 1, *ACTORS)
    assert everyone_heard(mails) == ["go 1"]
    gate.open()
    assert everyone_heard(mails) == []


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_an_order_while_a_batch_is_collected_is_passed_on_at_once(mails: list[Mailbox], rank: int) -> None:
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
    gate.open()
    order(mails, "save", rank)
    assert everyone_heard(mails) == ["save"]
    collected(mails, 1, 0, 3)
    order(mails, "stop", rank)
    assert everyone_heard(mails) == ["stop"]
    collected(mails, 1, 2)
    assert everyone_heard(mails) == ["go 1"]


def test_no_order_comes_after_go(mails: list[Mailbox]) -> None:
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
    gate.open()
    collected(mails, 1, 2, 0, 3)
    order(mails, "save")
    order(mails, "stop")
    assert everyone_heard(mails) == ["go 1"]
    gate.open()
    assert everyone_heard(mails) == ["save", "stop"]
    collected(mails, 2, 0, 2, 3)
    assert everyone_heard(mails) == ["go 2"]


def test_an_order_that_waits_is_given_once(mails: list[Mailbox]) -> None:
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
    for rank in (1, 2, 0, 1):  # as when every node's agent gets the same signal
        order(mails, "save", rank)
    gate.open()
    assert everyone_heard(mails) == ["save"]
    order(mails, "save")  # another one, later
    assert everyone_heard(mails) == ["save"]


def test_every_actor_executes_each_order_once_whenever_orders_come(mails: list[Mailbox]) -> None:
    """Two hundred orders against at least forty batches: each comes once, in the same batch on both heads."""
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
    actions = [get_args(Action)[number % 3] for number in range(200)]
    executed: dict[int, list[list[str]]] = {rank: [] for rank in HEADS}
    done = threading.Event()

    def give_orders() -> None:
        for number, action in enumerate(actions):
            while sum(batch.count(action) for batch in list(executed[0])) < number // 3:
                time.sleep(0.0001)  # an order that still waits is not given twice
            mails[1].send(0, Order(action))
        done.set()

    threading.Thread(target=give_orders).start()
    batch = 0
    while batch < 40 or not done.is_set():
        batch += 1
        early, late = ((2, 3), (0,)) if batch % 2 else ((), (0, 3, 2))
        for rank in early:
            mails[rank].send(0, Collected(batch, {}))
        gate.open()
        for rank in late:
            mails[rank].send(0, Collected(batch, {}))
        for rank in HEADS:
            executed[rank].append([])
            while isinstance(message := take(mails[rank], Execute, BatchComplete).message, Execute):
                executed[rank][-1].append(message.action)
            assert message.batch == batch
    mails[1].send(0, Mark())
    take(mails[0], Mark)
    gate.open()
    last = everyone_heard(mails)
    assert executed[0] == executed[2]
    assert sorted([action for actions in executed[0] for action in actions] + last) == sorted(actions)


def test_ranks_that_serve_execute_orders_between_two_messages() -> None:
    """A follower hears of orders from its engine's lead alone."""
    with connected_worlds(4) as worlds:
        mails = [world.mail for world in worlds]

        def executed_by(rank: int, followers: tuple[int, ...]) -> list[tuple[str, str]]:
            executed: list[tuple[str, str]] = []

            def execute(action: Action) -> None:
                beat = HEART.read()
                assert beat is not None
                executed.append((action, beat.activity.stage))

            service = OrderService(mails[rank], followers, execute)
            serve(worlds[rank], [service], until=lambda: len(executed) == 2)
            return executed

        gate = OrderGate(mails[0], len(ACTORS), HEADS)
        gate.open()
        order(mails, "save")
        order(mails, "stop")
        assert heard(mails, 3) == []
        expected = [("save", "checkpoint"), ("stop", "checkpoint")]
        assert executed_by(2, (3,)) == expected
        assert executed_by(3, ()) == expected


def test_followers_are_told_before_their_lead_executes_an_order(mails: list[Mailbox]) -> None:
    """An order is a collective that needs them, and may end with an exception."""
    told: list[str] = []

    def stop(action: Action) -> None:
        told.extend(take(mails[rank], Execute).message.action for rank in (3, 1))
        raise RuntimeError(f"told to {action}")

    with pytest.raises(RuntimeError, match="told to stop"):
        OrderService(mails[2], (3, 1), stop).handle(Letter(0, Execute("stop")))
    assert told == ["stop", "stop"]


def test_orders_and_the_end_of_a_batch_reach_a_follower_in_order(mails: list[Mailbox]) -> None:
    """If the gate itself told a follower, that could overtake an order that its lead has not passed on yet."""
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
    gate.open()
    order(mails, "save")
    collected(mails, 1, *ACTORS)
    service = OrderService(mails[2], (3,), lambda action: None)
    for _ in range(2):
        service.handle(take(mails[2], Execute, BatchComplete))
    passed_on = [take(mails[3], Execute, BatchComplete).message for _ in range(2)]
    assert passed_on == [Execute("save"), BatchComplete(1, {})]


def test_scores_are_added_up_in_the_order_of_ranks(mails: list[Mailbox]) -> None:
    """Whoever comes first: the last bit of a sum depends on its order."""
    values = {0: 0.1, 2: 1e16, 3: -1e16}
    gate = OrderGate(mails[0], len(ACTORS), HEADS)
    for batch, order_of_arrival in ((1, (3, 2, 0)), (2, (2, 0, 3))):
        gate.open()
        for rank in order_of_arrival:
            totals = {"reward/rule": [values[rank], 1.0], "reward/errors": [1.0, 0.0]}
            mails[rank].send(0, Collected(batch, totals))
            mails[rank].send(0, Mark())
            take(mails[0], Mark)
        for rank in HEADS:
            expected = {"reward/rule": [0.1 + 1e16 - 1e16, 3.0], "reward/errors": [3.0, 0.0]}
            assert take(mails[rank], BatchComplete).message == BatchComplete(batch, expected)
