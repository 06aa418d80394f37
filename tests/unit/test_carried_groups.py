"""A service continues carried groups: it fetches them from their owner, and returns them finished or carried again."""

from collections.abc import Iterator
from typing import Any

import pytest

from rl.data.batch import Batch
from rl.data.prompts import Prompt, sample_seed
from rl.rollout.dispatch import NewTasks, Pull, Sampling, Task
from rl.rollout.engine import Request
from rl.rollout.fake_engine import FakeEngine
from rl.rollout.followers import AddRequests, StepEngine
from rl.rollout.recovery import EngineHost
from rl.rollout.responses import Response, pack_group
from rl.rollout.service import CarriedGroup, FetchGroup, RolloutService, ScoredGroup
from rl.world.messages import Letter
from rl.world.orders import Order
from rl.world.world import World
from tests.mails import Mark, connected_worlds, take
from tests.unit.test_engine_failures import HARMLESS, fail
from tests.unit.test_reward_service import NUM_SAMPLES, STOP, Bench

pytestmark = pytest.mark.timeout(30)
MAX_NEW_TOKENS = 9
PROMPT = Prompt(0, 0, "prompt 0", "0", [11])
RUN_SEED = 8  # of the bench


class RoundBench(Bench):
    """A service whose rounds have a limit. The owner of its only group is rank 1, in this test."""

    def __init__(self, worlds: list[World], limit: int):
        super().__init__(worlds)
        self.limit, self.batch = limit, 0

    def start_round(self, carried: bytes = b"", version: int = 6) -> None:
        """Give the group to the service. It fetches what is carried."""
        self.batch += 1
        sampling = Sampling(NUM_SAMPLES, 1.0, MAX_NEW_TOKENS, max_tokens_per_round=self.limit)
        task = Task(self.batch, 0, 1, PROMPT, sampling, version, is_carried=bool(carried))
        self.service.handle(Letter(1, NewTasks([task])))
        if carried:
            assert take(self.leader, FetchGroup).message == FetchGroup(self.batch, 0)
            assert not self.service.busy

    def give(self, carried: bytes) -> None:
        self.service.handle(Letter(1, CarriedGroup(self.batch, 0), carried))

    def end_round(self) -> Letter[ScoredGroup]:
        """Sample the round, and score what has ended with its number of digits."""
        num_calls = len(self.rewards.calls)
        self.sample()
        for key, _, response, _ in self.rewards.calls[num_calls:]:
            self.rewards.say(key, float(len(response)))
        self.hear()
        (letter,) = self.delivered()
        assert (letter.message.batch, letter.message.position) == (self.batch, 0)
        return letter


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    with connected_worlds(2) as worlds:
        yield worlds


def expected() -> list[list[int]]:
    """Return the responses that an engine without a limit samples."""
    engine = FakeEngine(8, STOP)
    engine.confirm(1)
    seeds = [sample_seed(RUN_SEED, 0, 0, sample) for sample in range(NUM_SAMPLES)]
    sampling = Sampling(1, 1.0, MAX_NEW_TOKENS)
    engine.add([Request(str(number), [11], sampling, MAX_NEW_TOKENS, seed) for number, seed in enumerate(seeds)])
    found: dict[str, list[int]] = {}
    while engine.num_unfinished:
        found |= {done.id: done.tokens for done in engine.step()}
    return [found[str(number)] for number in range(NUM_SAMPLES)]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 8])
def test_a_group_over_several_rounds_equals_one_without_a_limit(worlds: list[World], limit: int) -> None:
    """Every response is scored once, in the round in which it ends, and its reward stays with it."""
    bench, wanted, payload, scored = RoundBench(worlds, limit), expected(), b"", list[int]()
    num_rounds = -(-max(map(len, wanted)) // limit)
    for number in range(num_rounds):
        version = 6 + number
        bench.service.engine.confirm(version)
        bench.start_round(payload, version)
        if payload:
            bench.give(payload)
        letter = bench.end_round()
        payload, group = bytes(letter.payload), Batch.from_bytes(letter.payload)
        scored += [sample for sample, score in enumerate(letter.message.scores) if score is not None]
        tokens = [group.tokens[first:end].tolist() for first, end in group.response_spans()]
        assert tokens == [whole[: (number + 1) * limit] for whole in wanted]
        assert (group.ended is None) == (number == num_rounds - 1)
    assert sorted(scored) == list(range(NUM_SAMPLES))
    assert group.rewards.tolist() == [float(len([token for token in whole if token != STOP])) for whole in wanted]
    assert group.truncated.tolist() == [STOP not in whole for whole in wanted]
    versions = [group.versions[first:end].tolist() for first, end in group.response_spans()]
    assert versions == [[6 + place // limit for place in range(len(whole))] for whole in wanted]


def test_a_rebuilt_engine_continues_from_the_start_of_the_round(worlds: list[World]) -> None:
    bench = RoundBench(worlds, 3)
    bench.start_round()
    first = bytes(bench.end_round().payload)
    bench.service.engine.confirm(7)
    bench.start_round(first, 7)
    bench.give(first)
    bench.service.work()
    fail(bench.service, HARMLESS[0])
    bench.service.work()
    assert take(bench.leader, Order).message == Order("publish again")
    assert not bench.service.busy
    bench.service.engine.confirm(7)
    assert bench.service.busy
    bench.service.work()
    letter = bench.end_round()
    group = Batch.from_bytes(letter.payload)
    assert [group.tokens[a:b].tolist() for a, b in group.response_spans()] == [whole[:6] for whole in expected()]


def test_a_group_that_arrives_after_the_engine_has_failed_waits_for_weights(worlds: list[World]) -> None:
    bench = RoundBench(worlds, 3)
    bench.start_round()
    first = bytes(bench.end_round().payload)
    bench.service.engine.confirm(7)
    bench.start_round(first, 7)
    fail(bench.service, HARMLESS[0])
    bench.service.work()
    bench.give(first)
    assert not bench.service.busy
    bench.service.engine.confirm(7)
    bench.service.work()
    group = Batch.from_bytes(bench.end_round().payload)
    assert [group.tokens[a:b].tolist() for a, b in group.response_spans()] == [whole[:6] for whole in expected()]


def test_followers_get_the_requests_of_the_lead(worlds: list[World]) -> None:
    """A follower has no groups. What a carried response continues from comes with the request."""
    tokenizer: Any = None
    engine = FakeEngine(8, STOP)
    engine.confirm(6)
    host = EngineHost(worlds[0], (1, 0), engine, lambda failed: failed)
    service = RolloutService(worlds[0], host, None, tokenizer, 4, 0, leader=1)
    request = Request("1/0/0", [11, 5], Sampling(1, 1.0, 9, max_tokens_per_round=1), 1, 3, b"\0state")
    service.handle(Letter(1, AddRequests([request])))
    assert engine.num_unfinished == 1
    service.handle(Letter(1, StepEngine()))
    assert engine.num_unfinished == 0


def test_room_is_counted_in_responses_that_still_run(worlds: list[World]) -> None:
    """A service that samples 4 groups at a time continues 4 groups. In each, 1 of 3 responses has not ended."""
    bench = RoundBench(worlds, 3)
    sampling = Sampling(NUM_SAMPLES, 1.0, MAX_NEW_TOKENS, max_tokens_per_round=3)
    ended = [Response([1], [-0.5], [5], is_ended=True)] * (NUM_SAMPLES - 1)
    carried = pack_group(PROMPT.tokens, 0, [*ended, Response([2], [-0.5], [5], b"x")]).to_bytes()
    tasks = [Task(1, position, 1, PROMPT, sampling, 6, is_carried=True) for position in range(4)]
    bench.service.handle(Letter(1, NewTasks(tasks)))
    for position in range(4):
        bench.service.handle(Letter(1, CarriedGroup(1, position), carried))
    assert bench.service.engine.num_unfinished == 4  # the engine has room for 4 * 3 responses
    bench.service.work()
    bench.mail.send(1, Mark())
    rooms = []
    while isinstance((letter := take(bench.leader, Pull, Mark)).message, Pull):
        rooms.append(letter.message.room)
    assert rooms[-1] >= 2
