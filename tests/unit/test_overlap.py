"""When actors train on parts of a batch that is still being sampled, and how scores of several requests are told apart.

The forward passes are stand-ins. tests/e2e/test_overlap.py compares whole runs.
"""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch

from rl.algo.choose import own_advantage
from rl.config.schema import AlgoConfig
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.learner.overlap import Readiness, why_overlap_waits
from rl.learner.scoring import PartScores, RemoteScorer, ScoreBatch
from rl.placement.roles import plan
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import NewTasks, Pull, Sampling
from rl.rollout.orders import BatchComplete, Collected, Execute, OrderGate
from rl.rollout.overlap import OverlapGate, OverlapService, PartsReady, TrainPart
from rl.world.messages import Mailbox, Message
from rl.world.orders import Order
from tests.launcher import until
from tests.mails import Mark, connected, connected_worlds, take
from tests.unit.test_batch import make_batch
from tests.unit.test_collect import deliver

pytestmark = pytest.mark.timeout(60)
ACTORS = (0, 1)


@pytest.fixture
def mails() -> Iterator[list[Mailbox]]:
    with connected(3) as made:
        yield made


def report(mails: list[Mailbox], rank: int, num_parts: int, is_done: bool = False, batch: int = 1) -> None:
    """Send what an actor has, and wait until the gate knows it."""
    mails[rank].send(0, PartsReady(batch, num_parts, is_done))
    mails[rank].send(0, Mark())
    take(mails[0], Mark)


def told(mails: list[Mailbox]) -> list[int | str]:
    """Return the parts that both actors were told to train on so far, and other messages, in order."""
    found: list[list[int | str]] = []
    for rank in ACTORS:
        found.append([])
        mails[0].send(rank, Mark())
        while not isinstance(message := take(mails[rank], TrainPart, Execute, BatchComplete, Mark).message, Mark):
            found[-1].append(message.number if isinstance(message, TrainPart) else type(message).__name__)
    assert found[0] == found[1]
    return found[0]


def make_gate(mails: list[Mailbox]) -> OrderGate:
    orders = OrderGate(mails[0], len(ACTORS), ACTORS)
    OverlapGate(mails[0], len(ACTORS), orders)
    orders.open()
    return orders


def test_a_part_begins_when_every_actor_has_it(mails: list[Mailbox]) -> None:
    make_gate(mails)
    report(mails, 0, 3)
    assert told(mails) == []
    report(mails, 1, 0)
    assert told(mails) == []
    report(mails, 1, 1)
    assert told(mails) == [0]
    report(mails, 1, 4)
    assert told(mails) == [1, 2]


def test_an_actor_without_further_groups_takes_part_with_nothing(mails: list[Mailbox]) -> None:
    make_gate(mails)
    report(mails, 1, 1, is_done=True)
    report(mails, 0, 2)
    assert told(mails) == [0, 1]
    report(mails, 0, 4, is_done=True)
    assert told(mails) == [2], "the last part is left for the update"


@pytest.mark.parametrize(("ours", "theirs", "early"), [(1, 1, []), (0, 1, []), (2, 1, [0]), (3, 3, [0, 1])])
def test_the_last_part_is_left_for_the_update(mails: list[Mailbox], ours: int, theirs: int, early: list[int]) -> None:
    make_gate(mails)
    report(mails, 0, ours, is_done=True)
    report(mails, 1, theirs, is_done=True)
    assert told(mails) == early


def test_a_batch_begins_with_its_first_part(mails: list[Mailbox]) -> None:
    make_gate(mails)
    for batch in (2, 5):
        report(mails, 0, 2, is_done=True, batch=batch)
        assert told(mails) == []
        report(mails, 1, 0, batch=batch)
        assert told(mails) == []
        report(mails, 1, 1, batch=batch)
        assert told(mails) == [0]
        report(mails, 1, 2, is_done=True, batch=batch)
        assert told(mails) == []


def test_all_actors_receive_parts_and_orders_in_the_same_order(
    mails: list[Mailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are announced by the leader's main thread too, and orders by its I/O thread. Both are collectives."""
    send, source = mails[0].send, random.Random(0)

    def send_slowly(rank: int, message: Message, payload: bytes = b"") -> None:
        time.sleep(source.random() / 1000)
        send(rank, message, payload)

    monkeypatch.setattr(mails[0], "send", send_slowly)
    orders = make_gate(mails)
    num_parts = 100

    def give_orders() -> None:
        for _ in range(100):
            mails[2].send(0, Order("save"))

    def report_all(rank: int) -> None:
        for number in range(num_parts):
            mails[rank].send(0, PartsReady(1, number + 1, number + 1 == num_parts))
        mails[rank].send(0, Collected(1, {}))

    threads = [threading.Thread(target=give_orders), *(threading.Thread(target=report_all, args=[r]) for r in ACTORS)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int | str]] = {rank: [] for rank in ACTORS}
    for rank in ACTORS:
        while "BatchComplete" not in seen[rank]:
            message = take(mails[rank], TrainPart, Execute, BatchComplete).message
            seen[rank].append(message.number if isinstance(message, TrainPart) else type(message).__name__)
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1]
    assert [entry for entry in seen[0] if isinstance(entry, int)] == list(range(num_parts - 1))
    assert "Execute" in seen[0]
    orders.open()


class Update:
    """Stands in for an OverlappedUpdate: each group is a part of its own."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.num_trained = 0
        self._positions: list[int] = []
        self._arrived: set[int] = set()

    def open(self, version: int) -> None:
        self.events.append(("version", version))

    def expect(self, positions: list[int]) -> None:
        self._positions = positions

    def add(self, position: int, group: Batch) -> None:
        self._arrived.add(position)
        self.events.append(("group", position))

    @property
    def readiness(self) -> Readiness:
        first = next((n for n, p in enumerate(self._positions) if p not in self._arrived), len(self._positions))
        is_done = bool(self._positions) and first == len(self._positions)
        return Readiness(first if is_done else max(0, first - 1), is_done)

    def train_next(self) -> None:
        time.sleep(0.05)
        self.events.append(("train", self.num_trained))
        self.num_trained += 1


def test_an_actor_trains_while_it_waits_for_groups() -> None:
    """The engine sends its last groups only when the actor has trained on the first one. A save comes in between."""
    prompts = [Prompt(place, 0, "p", "a", [place]) for place in range(4)]
    update: Any = Update()
    balancer: Any = None
    with connected_worlds(2) as worlds:
        actor, engine = worlds[0], worlds[1].mail
        service = OverlapService(actor.mail, 0, update)
        placement, done = plan({"actor": "0", "rollout": "1"}, 1, 2), list[str]()

        def execute(action: str) -> None:
            update.events.append(action)
            done.append(action)

        rollouts = Rollouts(actor, placement, 1, None, execute, balancer, overlap=service)

        def sample() -> None:
            engine.send(0, Pull(4, 0))
            tasks = take(engine, NewTasks).message.tasks
            for task in (tasks[2], tasks[0], tasks[1]):
                deliver(engine, task)
            until(lambda: update.num_trained == 2, "two parts are trained on")
            engine.send(0, Order("save"))
            until(lambda: done, "the order is executed")
            deliver(engine, tasks[3])

        thread = threading.Thread(target=sample)
        thread.start()
        gathered = rollouts.gather(rollouts.start(prompts, Sampling(1, 1.0, 4), version=3))
        thread.join()
        assert sorted(gathered.groups) == [0, 1, 2, 3]
        (batch_time,) = rollouts.take_times()
        assert batch_time.trained_s >= 3 * 0.05, "it did not wait for sampling in that time"
        assert update.events == [
            *(("version", 3), ("group", 2), ("group", 0), ("group", 1)),
            *(("train", 0), ("train", 1), "save", ("group", 3), ("train", 2)),
        ]
        kept = {position: gathered.groups[position] for position in (1, 3)}
        batch = rollouts.settle(kept, [0, 0])  # without a balancer
        assert batch.group_ids.tolist() == [1, 3]


def test_groups_of_an_evaluation_are_ignored() -> None:
    update: Any = Update()
    with connected(1) as mails:
        service = OverlapService(mails[0], 0, update)
        service.open(2, version=1)
        service.add(1, 0, make_batch())
        service.expect(3, [0])
        assert update.events == [("version", 1)]


def test_scores_of_several_requests_are_told_apart(mails: list[Mailbox]) -> None:
    """Two inference ranks answer three requests in any order."""
    scorer = RemoteScorer(mails[0], [1, 2], ["ref_logprobs"])
    batches = [make_batch().replace(rewards=make_batch().rewards + number) for number in range(3)]
    pending = [scorer.start(batch, version=4) for batch in batches]
    answers = []
    for number, batch in enumerate(batches):
        letter = take(mails[1], ScoreBatch)
        assert (letter.message.version, letter.message.request) == (4, number + 1)
        sequences = list(range(batch.num_sequences))
        for rank, part in ((1, sequences[::2]), (2, sequences[1::2])):
            scores = {"ref_logprobs": batch.select(part).tokens.float() + 100 * number}
            answers.append((rank, PartScores(letter.message.request, part), safetensors.torch.save(scores)))
    random.Random(1).shuffle(answers)
    for rank, message, payload in answers:
        mails[rank].send(0, message, payload=payload)
    for number in (1, 0):
        found = scorer.finish([pending[number]], version=4)
        assert found.ref_logprobs is not None
        assert torch.equal(found.ref_logprobs, batches[number].tokens.float() + 100 * number)
        assert torch.equal(found.rewards, batches[number].rewards)
    scorer.wait()
    assert mails[0].receive_within(0, PartScores) is None
    assert scorer.finish([pending[2]], version=4).num_sequences == batches[2].num_sequences
    assert scorer.finish([], version=4).ref_logprobs is not None, "an empty part has the same fields"


def test_nothing_is_asked_for_an_empty_batch(mails: list[Mailbox]) -> None:
    scorer = RemoteScorer(mails[0], [1, 2], ["ref_logprobs"])
    scorer.finish([scorer.start(Batch.concat([]), 1)], 1)
    scorer.wait()
    assert mails[1].receive_within(0, ScoreBatch) is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, ""),
        ({"advantage": "dr_grpo", "kl_coef": 0.1, "kl_place": "reward"}, ""),
        ({"advantage": "rloo", "old_logprobs": "always"}, ""),
        ({"advantage": "reinforce_pp"}, "because algo.advantage=reinforce_pp standardizes the advantages over it"),
        ({"advantage": "reinforce_pp_baseline"}, "algo.advantage=reinforce_pp_baseline standardizes"),
        ({"advantage": "gae"}, "algo.advantage=gae standardizes"),
        ({"num_mini_batches": 2, "num_epochs": 3}, "because its 6 optimizer steps (algo.num_mini_batches x"),
    ],
)
def test_what_an_update_waits_for(settings: dict[str, Any], reason: str) -> None:
    found = why_overlap_waits(AlgoConfig(**settings), None)
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize("is_standardized", [False, True])
def test_an_own_advantage_may_need_the_whole_batch(is_standardized: bool, tmp_path: Any) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def mine(rewards):\n    return rewards\nmine.standardize = {is_standardized}\n")
    algo = AlgoConfig(advantage=f"{file}:mine")
    assert bool(why_overlap_waits(algo, own_advantage(algo))) == is_standardized
