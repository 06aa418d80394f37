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
from rl.learner.overlap import why_overlap_waits
from rl.learner.scoring import PartScores, RemoteScorer, ScoreBatch
from rl.placement.roles import plan
from rl.rollout.balance import Balancer
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import NewTasks, Pull, Sampling
from rl.rollout.orders import BatchComplete, Collected, Execute, OrderGate
from rl.rollout.overlap import GroupWhole, OverlapGate, OverlapService, TrainPart
from rl.rollout.service import GroupProgress
from rl.world.messages import Mailbox, Message
from rl.world.orders import Order
from tests.launcher import until
from tests.mails import Mark, connected, connected_worlds, take
from tests.unit.test_batch import make_batch
from tests.unit.test_collect import deliver

pytestmark = pytest.mark.timeout(60)
ACTORS, ENGINE = (0, 1), 2


@pytest.fixture
def mails() -> Iterator[list[Mailbox]]:
    with connected(3) as made:
        yield made


def report(mails: list[Mailbox], position: int, length: int, batch: int = 1) -> None:
    """Report a group with a response of this length, and wait until the gate knows it. Groups are dealt in turn."""
    tell(mails, position % 2, GroupWhole(batch, position, length, cost=length))


def follow(mails: list[Mailbox], *lengths: int, batch: int = 1) -> None:
    """Report how far all groups are, as an engine would do for its own."""
    tell(mails, ENGINE, GroupProgress(batch, list(range(len(lengths))), list(lengths)))


def tell(mails: list[Mailbox], rank: int, message: Message) -> None:
    mails[rank].send(0, message)
    mails[rank].send(0, Mark())
    take(mails[0], Mark)


def told(mails: list[Mailbox]) -> list[TrainPart | str]:
    """Return the parts that both actors were told to train on so far, and other messages, in order."""
    found: list[list[TrainPart | str]] = []
    for rank in ACTORS:
        found.append([])
        mails[0].send(rank, Mark())
        while not isinstance(message := take(mails[rank], TrainPart, Execute, BatchComplete, Mark).message, Mark):
            found[-1].append(message if isinstance(message, TrainPart) else type(message).__name__)
    assert found[0] == found[1]
    return found[0]


def make_gate(mails: list[Mailbox]) -> tuple[OrderGate, OverlapGate]:
    orders = OrderGate(mails[0], len(ACTORS), ACTORS)
    gate = OverlapGate(mails[0], len(ACTORS), orders)
    orders.open()
    return orders, gate


def test_a_part_begins_when_its_groups_are_there_and_no_other_can_precede_them(mails: list[Mailbox]) -> None:
    _, gate = make_gate(mails)
    gate.open(1, [0, 1] * 4, max_length=40, num_at_once=9)
    report(mails, 4, 10)
    report(mails, 6, 12)
    assert told(mails) == []
    follow(mails, *[12] * 8)
    assert told(mails) == []
    follow(mails, *[13] * 8)
    assert told(mails) == [TrainPart(1, [4, 6], owners=[0, 0], new_owners=[1, 0], is_early=True)]


def test_parts_that_the_last_group_completes_are_not_early(mails: list[Mailbox]) -> None:
    _, gate = make_gate(mails)
    gate.open(1, [0, 1] * 3, max_length=40, num_at_once=9)
    for position in (5, 4, 3, 2, 1):
        report(mails, position, 10 + position)
    assert told(mails) == []
    report(mails, 0, 10)
    parts = told(mails)
    assert parts == [TrainPart(1, [0, 1], [0, 1], [0, 1], False), TrainPart(1, [2, 3], [0, 1], [0, 1], False)]
    follow(mails, *[30] * 6)
    assert told(mails) == [], "the last part is left for the update"


def test_reports_of_another_batch_are_ignored(mails: list[Mailbox]) -> None:
    """An engine may tell of the last batch, or of an evaluation, while the next one is open."""
    _, gate = make_gate(mails)
    gate.open(1, [0, 1] * 2, max_length=40, num_at_once=9)
    gate.open(2, [0, 1] * 2, max_length=40, num_at_once=9)
    report(mails, 0, 3, batch=2)
    report(mails, 1, 3, batch=2)
    follow(mails, *[30] * 4, batch=1)
    assert told(mails) == []
    follow(mails, *[30] * 4, batch=2)
    assert [part.batch for part in told(mails) if isinstance(part, TrainPart)] == [2]


def test_all_actors_receive_parts_and_orders_in_the_same_order(
    mails: list[Mailbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are announced by the leader's main thread too, and orders by its I/O thread. Both are collectives."""
    send, source = mails[0].send, random.Random(0)

    def send_slowly(rank: int, message: Message, payload: bytes = b"") -> None:
        time.sleep(source.random() / 1000)
        send(rank, message, payload)

    monkeypatch.setattr(mails[0], "send", send_slowly)
    orders, gate = make_gate(mails)
    num_groups = 40
    gate.open(1, [0, 1] * (num_groups // 2), max_length=1000, num_at_once=50)

    def give_orders() -> None:
        for _ in range(100):
            mails[2].send(0, Order("save"))

    def report_all(rank: int) -> None:
        for position in range(rank, num_groups, 2):
            lengths = [position + 2] * num_groups
            mails[rank].send(0, GroupProgress(1, list(range(num_groups)), lengths))
            mails[rank].send(0, GroupWhole(1, position, position, cost=1.0))
        mails[rank].send(0, Collected(1, {}))

    threads = [threading.Thread(target=give_orders), *(threading.Thread(target=report_all, args=[r]) for r in ACTORS)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[Any]] = {rank: [] for rank in ACTORS}
    for rank in ACTORS:
        while "BatchComplete" not in seen[rank]:
            message = take(mails[rank], TrainPart, Execute, BatchComplete).message
            seen[rank].append(message.positions if isinstance(message, TrainPart) else type(message).__name__)
    for thread in threads:
        thread.join()
    assert seen[0] == seen[1]
    parts = [entry for entry in seen[0] if isinstance(entry, list)]
    assert [len(part) for part in parts] == [10, 8, 6, 4, 3, 3, 2, 2]
    assert "Execute" in seen[0]
    orders.open()


class Update:
    """Stands in for an OverlappedUpdate."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._groups: dict[int, Batch] = {}

    def open(self, version: int) -> None:
        self.events.append(("version", version))

    def add(self, position: int, group: Batch) -> None:
        self._groups[position] = group
        self.events.append(("group", position))

    def take(self, positions: list[int]) -> dict[int, Batch]:
        return {place: self._groups.pop(position) for place, position in enumerate(positions)}

    def train(self, groups: list[Batch], is_early: bool) -> None:
        time.sleep(0.05)
        self.events.append(("train", [int(group.group_ids[0]) for group in groups], is_early))

    def add_last(self, groups: list[Batch]) -> Batch:
        return Batch.concat(groups)

    @property
    def num_trained(self) -> int:
        return sum(event[0] == "train" for event in self.events)


def test_an_actor_trains_while_it_waits_for_groups() -> None:
    """The engine sends its last group only when the actor has trained on the first ones. A save comes in between."""
    prompts = [Prompt(place, 0, "p", "a", [place]) for place in range(4)]
    update: Any = Update()
    pg: Any = None
    with connected_worlds(2) as worlds:
        actor, engine = worlds[0], worlds[1].mail
        balancer = Balancer(actor.mail, pg, [0], hidden_size=1)
        service = OverlapService(actor.mail, 0, balancer, update, num_at_once=9)
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
            engine.send(0, GroupProgress(tasks[0].batch, [3], [2]))
            until(lambda: update.num_trained == 3, "three parts are trained on")
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
            *(("train", [0], True), ("train", [1], True), ("train", [2], True), "save", ("group", 3)),
        ]
        batch = rollouts.settle(gathered.groups, gathered.owners)
        assert batch.group_ids.tolist() == [3], "the last part"


def test_groups_of_an_evaluation_are_ignored() -> None:
    update: Any = Update()
    with connected(1) as mails:
        balancer: Any = None
        service = OverlapService(mails[0], 0, balancer, update, num_at_once=9)
        service.open(2, version=1)
        service.add(1, 0, make_batch())
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
        found = scorer.finish(scorer.take(pending[number]), version=4)
        assert found.ref_logprobs is not None
        assert torch.equal(found.ref_logprobs, batches[number].tokens.float() + 100 * number)
        assert torch.equal(found.rewards, batches[number].rewards)
    scorer.wait()
    assert mails[0].receive_within(0, PartScores) is None
    assert scorer.take(pending[2]).num_sequences == batches[2].num_sequences
    assert scorer.finish(Batch.concat([]), version=4).ref_logprobs is not None, "an empty part has the same fields"


def test_nothing_is_asked_for_an_empty_batch(mails: list[Mailbox]) -> None:
    scorer = RemoteScorer(mails[0], [1, 2], ["ref_logprobs"])
    scorer.finish(scorer.take(scorer.start(Batch.concat([]), 1)), 1)
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
