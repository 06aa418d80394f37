"""Scores may come late, out of order, or after the engine was rebuilt; each group is delivered once."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.rewards.failure import RewardFailure, quote
from rl.rollout.dispatch import NewTasks, Pull, Sampling, Task
from rl.rollout.fake_engine import FakeEngine
from rl.rollout.recovery import EngineHost
from rl.rollout.responses import Response, pack_group
from rl.rollout.service import CarriedGroup, GroupProgress, RolloutService, Scored, ScoredGroup
from rl.world.messages import Letter, Mailbox
from rl.world.orders import Order
from rl.world.service import serve
from rl.world.world import World
from tests.mails import Mark, connected_worlds, take

STOP = 0
NUM_SAMPLES = 3
FAILURE = RewardFailure("rule", "timeout", "it took too long", "rules.py:7")


class Rewards:
    """Stands in for the pool: keeps the calls, and sends the scores that a test tells it to."""

    def __init__(self, mail: Mailbox):
        self.calls: list[tuple[tuple[int, ...], str, str, dict[str, Any]]] = []
        self.is_collecting = False
        self._mail = mail

    @contextmanager
    def together(self) -> Iterator[None]:
        self.is_collecting = True
        yield
        self.is_collecting = False

    def submit(self, key: tuple[int, ...], prompt: str, response: str, row: dict[str, Any], answer_of: str) -> None:
        assert self.is_collecting, "the calls of an engine step are sent at once"
        self.calls.append((key, prompt, response, row))

    def say(self, key: tuple[int, ...], score: float, status: str = "ok") -> None:
        failure = None if status == "ok" else FAILURE
        result = {"status": status, "score": score, "parts": {"rule": score}, "answer": None, "failure": failure}
        self._mail.send(0, Scored(key, result))


class Tokenizer:
    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(str(token) for token in tokens if token != STOP or not skip_special_tokens)


class BrokenEngine(FakeEngine):
    def step(self) -> list:
        raise ZeroDivisionError("planted")


class Bench:
    """A service on rank 0; rank 1 is the leader and the owner of all groups."""

    def __init__(self, worlds: list[World]):
        self.world = worlds[0]
        self.mail, self.leader = (world.mail for world in worlds)
        self.rewards = Rewards(self.mail)
        self.engine = self.make_engine()
        self.engine.confirm(6)
        tokenizer: Any = Tokenizer()
        host = EngineHost(self.world, (0,), self.engine, lambda failed: self.make_engine())
        rewards: Any = self.rewards
        self.service = RolloutService(self.world, host, rewards, tokenizer, max_num_groups=4, run_seed=8, leader=1)

    def make_engine(self) -> FakeEngine:
        return FakeEngine(8, STOP)

    def start(self, *positions: int, is_followed: bool = False) -> None:
        prompts = [Prompt(p, 0, f"prompt {p}", f"{p}", [11], {"level": p}, f"a.jsonl, line {p + 1}") for p in positions]
        sampling = Sampling(NUM_SAMPLES, 1.0, 9)
        tasks = [Task(2, prompt.id, 1, prompt, sampling, 6, is_followed=is_followed) for prompt in prompts]
        self.service.handle(Letter(1, NewTasks(tasks)))

    def sample(self, steps: int = 100) -> None:
        while self.service.engine.num_unfinished and steps:
            self.service.work()
            steps -= 1

    def hear(self) -> None:
        """Handle all scores that were sent."""
        while (letter := self.mail.receive_within(0, Scored)) is not None:
            self.service.handle(letter)

    def delivered(self) -> list[Letter[ScoredGroup]]:
        self.mail.send(1, Mark())
        groups = []
        while isinstance((letter := take(self.leader, ScoredGroup, Mark)).message, ScoredGroup):
            groups.append(letter)
        return groups

    def pulls(self) -> list[tuple[float, int]]:
        """Return room and number of held groups of each pull."""
        self.mail.send(1, Mark())
        pulls = []
        while isinstance(message := take(self.leader, Pull, Mark).message, Pull):
            pulls.append((message.room, message.held))
        return pulls


def versions_of(letter: Letter[ScoredGroup]) -> set[int]:
    """Return the versions of all tokens; those of the prompt have -1."""
    return set(Batch.from_bytes(letter.payload).versions.tolist())


@pytest.fixture
def bench() -> Iterator[Bench]:
    with connected_worlds(2) as worlds:
        yield Bench(worlds)


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
    (letter,) = bench.delivered()
    assert (letter.message.position, versions_of(letter)) == (1, {-1, 6})
    assert Batch.from_bytes(letter.payload).rewards.tolist() == [10.0, 11.0, 12.0]
    wanted = [{"parts": {"rule": 10.0 + sample}, "status": "ok", "answer": None} for sample in range(3)]
    assert (letter.message.scores, letter.message.failures) == (wanted, [])
    bench.rewards.say((2, 0, 0, 0), 0.0, status="timeout")
    bench.rewards.say((2, 0, 1, 0), 1.0)
    bench.hear()
    (letter,) = bench.delivered()
    assert Batch.from_bytes(letter.payload).rewards.tolist() == [0.0, 1.0, 2.0]
    assert [score["status"] for score in letter.message.scores] == ["timeout", "ok", "ok"]
    (failure,) = letter.message.failures
    response = next(response for key, _, response, _ in bench.rewards.calls if key == (2, 0, 0, 0))
    assert failure == replace(FAILURE, sample=f"a.jsonl, line 1, prompt: 'prompt 0', response: '{response}'")
    bench.rewards.say((2, 0, 1, 0), 1.0)
    bench.hear()
    assert bench.delivered() == []


def test_a_slow_score_does_not_keep_the_engine_from_work(bench: Bench) -> None:
    """A group that waits for scores alone takes no room, and a rank with nothing else to do is not busy."""
    assert bench.service.awaited == f"work from rank {bench.leader.rank}"
    bench.start(0, 1)
    bench.pulls()
    bench.sample()
    assert bench.pulls()[-1] == (4, 0)
    assert not bench.service.busy
    assert bench.service.awaited == "the scores of its responses"
    bench.start(2)
    assert bench.service.busy
    assert bench.pulls()[-1] == (3, 1)


def test_a_group_of_an_evaluation_takes_the_room_of_its_samples(bench: Bench) -> None:
    """The engine has room for 4 groups of 3 samples. Each of these has one sample."""
    sampling = Sampling(1, 0.0, 9, room=1 / NUM_SAMPLES)
    tasks = [Task(2, p, 1, Prompt(p, 0, f"prompt {p}", "", [11]), sampling, 6) for p in range(6)]
    bench.service.handle(Letter(1, NewTasks(tasks)))
    assert bench.pulls()[-1] == (2, 6)


def test_a_carried_group_takes_only_the_room_of_its_unfinished_responses(bench: Bench) -> None:
    sampling = Sampling(NUM_SAMPLES, 1.0, 9, max_tokens_per_round=3)
    tasks = [Task(2, p, 1, Prompt(p, 0, "", "", [11]), sampling, 6, is_carried=True) for p in range(3)]
    bench.service.handle(Letter(1, NewTasks(tasks)))
    assert bench.pulls()[-1] == (1, 3), "what it continues is not known yet"
    ended, cut = Response([1], [-1.0], [5], is_ended=True), Response([1, 2, 3], [-1.0] * 3, [5] * 3)
    for position in range(3):
        payload = pack_group([11], position, [ended] * (NUM_SAMPLES - 1) + [cut]).to_bytes()
        bench.service.handle(Letter(1, CarriedGroup(2, position), payload))
    assert bench.service.engine.num_unfinished == 3
    assert bench.pulls() == [], "the leader is told once, before the next step"
    bench.service.work()
    assert bench.pulls()[0] == (3, 3), "one response of each group needs as much room as one group"


def test_the_last_score_wakes_a_rank_that_serves(bench: Bench) -> None:
    """It waits in the mailbox then, since its engine has nothing left to sample."""
    bench.start(0)
    submit = bench.rewards.submit

    def submit_and_say(key: tuple[int, ...], *call: Any) -> None:
        submit(key, *call)
        threading.Timer(0.05, bench.rewards.say, [key, 1.0]).start()

    bench.rewards.submit = submit_and_say  # type: ignore[method-assign]
    scored: list[Letter[Any]] = []
    handle = bench.service.handle
    bench.service.handle = lambda letter: scored.append(letter) or handle(letter)  # type: ignore[method-assign]
    serve(bench.world, [bench.service], until=lambda: len(scored) == NUM_SAMPLES)
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
    assert take(bench.leader, Order).message == Order("publish again")
    assert not bench.service.busy, "until the new engine has weights"
    assert bench.service.awaited == "the scores of its responses"
    for key in old:
        bench.rewards.say(key, 99.0)
    for sample in range(NUM_SAMPLES):
        bench.rewards.say((2, 0, sample, 0), float(sample))
    bench.hear()
    (letter,) = bench.delivered()
    assert (letter.message.position, versions_of(letter)) == (0, {-1, 6}), "what was whole is not sampled again"
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
    (letter,) = bench.delivered()
    assert Batch.from_bytes(letter.payload).rewards.tolist() == [0.0, 1.0, 2.0]
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


def test_messages_show_both_ends_of_a_long_prompt() -> None:
    assert quote("a\n" * 30) == repr("a\n" * 30)
    assert quote("a" * 40 + "b" * 40) == f"'{'a' * 30}' ... '{'b' * 30}'"


def test_the_leader_knows_how_far_the_groups_are_that_it_follows(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report holds for the lengths that the groups have in the end, and gets better with each step."""
    monkeypatch.setattr("rl.rollout.service.PROGRESS_INTERVAL_S", 0)
    bench.start(0, 1, is_followed=True)
    bench.start(5)
    bench.sample()
    ends: dict[int, int] = {}
    for key, _, response, _ in bench.rewards.calls:
        ends[key[1]] = max(ends.get(key[1], 0), len(response) + (len(response) < 9))  # with the stop token
    bench.mail.send(1, Mark())
    reports = []
    while isinstance(message := take(bench.leader, GroupProgress, Mark).message, GroupProgress):
        assert (message.batch, message.positions) == (2, [0, 1])
        assert all(length <= ends[p] for p, length in zip(message.positions, message.lengths, strict=True))
        reports.append(message.lengths)
    assert [min(lengths) for lengths in reports[:3]] == [2, 3, 4]
    assert reports[-1] == [ends[0], ends[1]], "both wait for their scores"


def test_reports_of_progress_are_rare(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one for each group that ends, and one now and then."""
    monkeypatch.setattr("rl.rollout.service.PROGRESS_INTERVAL_S", 1000)
    bench.service._reported_at = time.monotonic()
    bench.start(0, 1, is_followed=True)
    bench.sample()
    bench.mail.send(1, Mark())
    num_reports = 0
    while isinstance(take(bench.leader, GroupProgress, Mark).message, GroupProgress):
        num_reports += 1
    assert 1 <= num_reports <= 2
