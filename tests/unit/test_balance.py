"""Groups that change hands between actors, by real mailboxes; the collective before it is in tests/distributed."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rl.data.batch import Batch, batch_of_responses
from rl.rollout.balance import Balancer, MovedGroup
from rl.world.messages import Mailbox
from tests.mails import WAIT_S, Mark, connected, take

ACTORS = [1, 2, 4]  # owners 0, 1 and 2
OWNERS = [0, 1, 2, 0, 1, 2]
MOVED = [2, 1, 0, 0, 0, 0]  # owner 0 and 2 exchange, 1 gives one, 2 gives all but one


def group_of(position: int, mark: int) -> Batch:
    """Two rollouts of 2 and 1 + position tokens, all of them the mark."""
    num_tokens = 3 + position
    return batch_of_responses(
        tokens=torch.full((num_tokens,), mark),
        lengths=torch.tensor([2, 1 + position]),
        prompt_lengths=torch.tensor([1, 1]),
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.full((2,), position),
        truncated=torch.tensor([False, True]),
    )


def dealt(owner: int, mark: int) -> dict[int, Batch]:
    return {position: group_of(position, mark) for position, other in enumerate(OWNERS) if other == owner}


@pytest.fixture
def mails() -> Iterator[list[Mailbox]]:
    with connected(5) as made:
        yield [made[rank] for rank in ACTORS]


@pytest.fixture
def balancers(mails: list[Mailbox]) -> list[Balancer]:
    return [Balancer(mail, None, ACTORS, hidden_size=1) for mail in mails]


def assert_holds(groups: dict[int, Batch], positions: list[int], mark: int) -> None:
    assert sorted(groups) == positions
    for position in positions:
        assert groups[position].to_bytes() == group_of(position, mark).to_bytes()


def test_groups_go_to_their_new_owners(balancers: list[Balancer]) -> None:
    with ThreadPoolExecutor(3) as pool:
        for batch in (1, 2):
            calls = [pool.submit(balancers[o].exchange, dealt(o, batch), OWNERS, MOVED) for o in range(3)]
            for call, positions in zip(calls, ([2, 3, 4, 5], [1], [0]), strict=True):
                assert_holds(call.result(WAIT_S), positions, batch)


def test_nothing_is_sent_when_owners_stay(mails: list[Mailbox], balancers: list[Balancer]) -> None:
    for owner in range(3):
        assert_holds(balancers[owner].exchange(dealt(owner, 1), OWNERS, OWNERS), [owner, owner + 3], 1)
    for receiver in mails:
        for sender in mails:
            sender.send(receiver.rank, Mark())
        for _ in mails:
            assert take(receiver, MovedGroup, Mark).message == Mark()


def test_groups_of_the_next_exchange_wait_for_it(mails: list[Mailbox], balancers: list[Balancer]) -> None:
    """All of the second exchange is there before the first group of the first, and none in stream order."""
    for batch in (2, 1):
        for position in (5, 2, 4):
            message, payload = MovedGroup(batch, position), group_of(position, batch).to_bytes()
            mails[OWNERS[position]].send(ACTORS[0], message, payload=payload)
    for batch in (1, 2):
        assert_holds(balancers[0].exchange(dealt(0, batch), OWNERS, MOVED), [2, 3, 4, 5], batch)


def test_the_end_of_the_world_ends_the_wait(mails: list[Mailbox], balancers: list[Balancer]) -> None:
    timer = threading.Timer(0.05, mails[0].fail, [RuntimeError("rank 4 is gone")])
    timer.start()
    with pytest.raises(RuntimeError, match="rank 4 is gone"):
        balancers[0].exchange(dealt(0, 1), OWNERS, MOVED)


def test_one_actor_and_empty_batches_need_no_collective(mails: list[Mailbox], balancers: list[Balancer]) -> None:
    alone = Balancer(mails[0], None, [mails[0].rank], hidden_size=1)
    groups = {position: group_of(position, 1) for position in range(3)}
    assert_holds(alone.balance(groups, [0, 0, 0], [0, 0, 1]), [0, 1, 2], 1)
    assert balancers[1].balance({}, [], []) == {}
