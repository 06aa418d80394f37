"""Scores come when they come: late, out of order, after the engine was built anew; each group is delivered once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.rollout.dispatch import Sampling, Task
from rl.rollout.fake_engine import FakeEngine
from rl.rollout.service import RolloutService
from rl.world.mail import Mail, Message
from rl.world.service import Service
from tests.mails import connected, take

STOP = 0
NUM_SAMPLES = 3


class Rewards:
    """In place of the pool: keeps the calls, and says what it is told to, when it is told to."""

    def __init__(self, mail: Mail):
        self.calls: list[tuple[tuple[int, ...], str, str, dict[str, Any]]] = []
        self._mail = mail

    def submit(self, key: tuple[int, ...], prompt: str, response: str, row: dict[str, Any], answer_of: str) -> None:
        self.calls.append((key, prompt, response, row))

    def say(self, key: tuple[int, ...], score: float, status: str = "ok") -> None:
        result = {"status": status, "score": score, "parts": {"rule": score}, "answer": None, "text": ""}
        self._mail.send(0, "scored", {"key": key, "result": result})


class Tokenizer:
    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(str(token) for token in tokens if token != STOP or not skip_special_tokens)


class BrokenEngine(FakeEngine):
    def step(self) -> list:
        raise ZeroDivisionError("planted")


class Bench:
    """A service on a mailbox of its own; rank 1 is the leader and the owner of all groups."""

    def __init__(self, mails: list[Mail], max_num_groups: int = 4):
        self.mail, self.leader = mails
        self.rewards = Rewards(self.mail)
        self.engine = self.make_engine()
        self.engine.confirm(6)
        stage = contextmanager(lambda name, item="": iter([None]))
        self.world: Any = SimpleNamespace(mail=self.mail, stage=stage, step=1)
        tokenizer: Any = Tokenizer()
        self.service = RolloutService(
            self.world, self.engine, (0,), 1, max_num_groups, 0, self.rewards, tokenizer, lambda old: self.make_engine()
        )

    def make_engine(self) -> FakeEngine:
        return FakeEngine(8, STOP)

    def start(self, *positions: int) -> None:
        tasks = [
            Task(2, p, 1, Prompt(p, 0, f"prompt {p}", f"{p}", [11], {"level": p}), Sampling(NUM_SAMPLES, 1.0, 9), 6)
            for p in positions
        ]
        self.service.handle(Message(1, "work", {"tasks": [asdict(task) for task in tasks]}))

    def sample(self, steps: int = 100) -> None:
        while self.service.engine.num_unfinished and steps:
            self.service.work()
            steps -= 1

    def hear(self) -> None:
        """All scores that have been said."""
        while (message := self.mail.receive("scored", timeout_s=0)) is not None:
            self.service.handle(message)

    def delivered(self) -> list[Message]:
        self.mail.send(1, "mark")
        groups = []
        while (message := take(self.leader, "group", "mark")).kind == "group":
            groups.append(message)
        return groups

    def pulls(self) -> list[dict[str, Any]]:
        self.mail.send(1, "mark")
        pulls = []
        while (message := take(self.leader, "pull", "mark")).kind == "pull":
            pulls.append(message.meta)
        return pulls


@pytest.fixture
def bench() -> Iterator[Bench]:
    with connected(2) as mails:
        yield Bench(mails)


def test_scoring_starts_as_each_response_ends(bench: Bench) -> None:
    bench.start(5)
    while not bench.rewards.calls:
        bench.service.work()
    assert bench.engine.num_unfinished > 0
    key, prompt, response, row = bench.rewards.calls[0]
    assert (key[:2], key[3]) == ((2, 5), 0)
    assert (prompt, row) == ("prompt 5", {"level": 5, "answer": "5"})
    assert response.isdigit() and "0" not in response
    bench.sample()
    assert sorted(key for key, *_ in bench.rewards.calls) == [(2, 5, sample, 0) for sample in range(NUM_SAMPLES)]
    assert bench.delivered() == []


def test_a_group_is_delivered_once_when_its_last_score_has_come(bench: Bench) -> None:
    bench.start(0, 1)
    bench.sample()
    for sample, position in ((2, 1), (0, 1), (2, 0), (1, 1)):
        bench.rewards.say((2, position, sample, 0), 10.0 * position + sample)
    bench.hear()
    (message,) = bench.delivered()
    assert (message.meta["position"], message.meta["version"]) == (1, 6)
    assert Batch.from_bytes(message.payload).rewards.tolist() == [10.0, 11.0, 12.0]
    wanted = [{"parts": {"rule": 10.0 + sample}, "status": "ok", "answer": None} for sample in range(3)]
    assert message.meta["scores"] == wanted
    bench.rewards.say((2, 0, 0, 0), 0.0, status="timeout")
    bench.rewards.say((2, 0, 1, 0), 1.0)
    bench.hear()
    (message,) = bench.delivered()
    assert Batch.from_bytes(message.payload).rewards.tolist() == [0.0, 1.0, 2.0]
    assert [score["status"] for score in message.meta["scores"]] == ["timeout", "ok", "ok"]
    bench.rewards.say((2, 0, 1, 0), 1.0)
    bench.hear()
    assert bench.delivered() == []


def test_a_slow_score_does_not_keep_the_engine_from_work(bench: Bench) -> None:
    """A group that waits for scores alone takes no room, and a rank with nothing else to do is not busy."""
    bench.start(0, 1)
    bench.pulls()
    bench.sample()
    assert bench.pulls()[-1] == {"room": 4, "held": 0, "batch": None}
    assert not bench.service.busy
    bench.start(2)
    assert bench.service.busy
    assert bench.pulls()[-1] == {"room": 3, "held": 1, "batch": None}


def test_a_batch_ends_when_every_group_is_scored(bench: Bench) -> None:
    """Inside serve, which waits in the mailbox and is woken by the last score."""
    bench.start(0)
    bench.mail.send(0, "drained", {"batch": 2})
    submit = bench.rewards.submit

    def submit_and_say(key: tuple[int, ...], *call: Any) -> None:
        submit(key, *call)
        bench.rewards.say(key, 1.0)

    bench.rewards.submit = submit_and_say  # type: ignore[method-assign]
    bench.service.serve_batch(2, Service())
    assert len(bench.delivered()) == 1


def test_scores_of_an_engine_that_failed_are_worth_nothing(bench: Bench) -> None:
    bench.start(0)
    bench.sample()  # whole: it only waits for scores
    bench.start(1)
    while not [key for key, *_ in bench.rewards.calls if key[1] == 1]:
        bench.service.work()
    old = [key for key, *_ in bench.rewards.calls if key[1] == 1]
    bench.service.engine.__class__ = BrokenEngine
    bench.service.work()
    assert take(bench.leader, "order").meta == {"order": "publish again"}
    assert not bench.service.busy, "until the new engine has weights"
    for key in old:
        bench.rewards.say(key, 99.0)
    for sample in range(NUM_SAMPLES):
        bench.rewards.say((2, 0, sample, 0), float(sample))
    bench.hear()
    (message,) = bench.delivered()
    assert (message.meta["position"], message.meta["version"]) == (0, 6), "what was whole is not sampled again"
    bench.service.engine.confirm(6)
    assert bench.service.busy
    bench.service.work()
    bench.sample()
    new = [key for key, *_ in bench.rewards.calls if key[1] == 1 and key[3] == 1]
    assert sorted(new) == [(2, 1, sample, 1) for sample in range(NUM_SAMPLES)]
    for key in new:
        bench.rewards.say(key, float(key[2]))
    bench.rewards.say(old[0], 99.0)
    bench.hear()
    (message,) = bench.delivered()
    assert Batch.from_bytes(message.payload).rewards.tolist() == [0.0, 1.0, 2.0]
    assert not bench.service.busy


def test_work_that_comes_while_there_is_no_engine_is_begun_with_the_rest(bench: Bench) -> None:
    bench.start(0)
    bench.service.engine.__class__ = BrokenEngine
    bench.service.work()
    bench.start(1)
    assert not bench.service.busy
    bench.service.engine.confirm(6)
    bench.service.work()
    assert bench.service.engine.num_unfinished == 2 * NUM_SAMPLES
    bench.sample()
    assert len(bench.rewards.calls) == 2 * NUM_SAMPLES
    assert not bench.service.busy
