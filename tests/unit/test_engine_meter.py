"""The meter of an engine: each step is counted once, and every reader gets its part. Worked out by hand."""

from typing import Any

import pytest

from rl.rollout.dispatch import Pull
from rl.rollout.engine import Completion
from rl.rollout.meter import EngineMeter, EngineStep
from rl.rollout.use import EngineUse
from tests.mails import Mark, connected_worlds, take
from tests.unit.test_reward_service import NUM_SAMPLES
from tests.unit.test_reward_service import Bench as ServiceBench

MAX_TOKENS = 9  # of a response in the bench of test_reward_service.py


class TimedEngine:
    """An engine whose steps take as long as a test says."""

    num_unfinished, kv_use, kv_bytes = 0, 0.5, 80


class Bench:
    def __init__(self) -> None:
        self.now, self.engine = 100.0, TimedEngine()
        self.meter = EngineMeter(lambda: self.now)

    def step(self, seconds: float, num_before: int, num_prompt_tokens: int = 0, *, num_after: int | None = None) -> Any:
        """Make a step with `num_before` sequences. Each one that ends has 3 tokens."""
        self.engine.num_unfinished = num_before
        num_ended = num_before - (num_before if num_after is None else num_after)

        def run() -> list[Completion]:
            self.now += seconds
            self.engine.num_unfinished -= num_ended
            return [Completion(f"{number}", [1, 2, 3], [0.0] * 3, is_cut=False) for number in range(num_ended)]

        engine: Any = self.engine
        return self.meter.measure(run, engine, num_prompt_tokens)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_each_step_is_counted_for_every_reader(bench: Bench) -> None:
    bench.step(2.0, 4, num_prompt_tokens=100)
    bench.now += 0.5  # what is done with responses
    bench.step(1.0, 4)  # it waits for the prompts of the step before
    bench.now += 0.25
    assert len(bench.step(1.0, 4, num_after=2)) == 2
    bench.now += 0.75
    bench.step(0.5, 2, num_after=0)
    assert bench.meter.take_costs() == {
        "prefill": [2, 8, 2.0 + 1.5, 100],
        "decode": [2, 4 + 2, 16 + 4, 1.25 + 1.25, 4 * 1.25 + 2 * 1.25],
    }
    assert bench.meter.take_times() == [(8, 2, 1.5)]
    assert bench.meter.take_use() == EngineUse(12, 4.5, 2.25, 0.5, 80)
    assert (bench.meter.take_costs(), bench.meter.take_times(), bench.meter.take_use()) == ({}, [], EngineUse())


def test_a_reader_does_not_take_the_part_of_another(bench: Bench) -> None:
    """The times are taken with each pull, the costs once per step of training."""
    bench.step(1.0, 4, num_prompt_tokens=10)
    bench.step(1.0, 4)
    for seconds in (1.0, 2.0):
        bench.step(seconds, 4)
        assert bench.meter.take_times() == [(8, 1, seconds)]
    assert bench.meter.take_costs()["decode"] == [2, 8, 32, 3.0, 12.0]


@pytest.mark.parametrize("num_after", [0, 1])
def test_a_pause_counts_only_while_responses_wait(bench: Bench, num_after: int) -> None:
    bench.step(1.0, 1, num_after=num_after)
    bench.now += 60.0
    bench.step(1.0, 1)
    seconds = 1.0 + 1.0 + (60.0 if num_after else 0.0)
    costs = bench.meter.take_costs()
    assert costs["prefill"][2] + costs["decode"][3] == seconds
    assert bench.meter.take_use().seconds == 2.0


def test_a_step_that_fails_is_not_counted(bench: Bench) -> None:
    """Nor is the time in which the engine is built again."""
    bench.step(1.0, 4, num_prompt_tokens=10)

    def fail() -> list[Completion]:
        bench.now += 5.0
        raise ZeroDivisionError

    engine: Any = bench.engine
    with pytest.raises(ZeroDivisionError):
        bench.meter.measure(fail, engine, 0)
    bench.now += 60.0
    bench.step(1.0, 4, num_prompt_tokens=10)
    assert bench.meter.take_costs() == {"prefill": [2, 8, 2.0, 20]}
    assert bench.meter.take_use().seconds == 2.0


def test_a_step_that_compiles_counts_as_a_few_steps() -> None:
    meter = EngineMeter()
    for seconds in (0.01, 0.01, 9.0, 0.01):
        meter.add(EngineStep(12, seconds, seconds, is_decode=True))
    meter.add(EngineStep(3, 0.005, 0.005, is_decode=True))
    assert meter.take_times() == [(16, 4, pytest.approx(0.07)), (8, 1, pytest.approx(0.005))]


@pytest.mark.parametrize(
    ("kv_uses", "expected"),
    [
        ((0.5, 0.75), (0.5 + 2.25, 0.75)),
        ((None, None), (0.0, -1.0)),
    ],
)
def test_the_use_of_the_kv_cache_is_weighted_by_seconds(
    kv_uses: tuple[float | None, float | None], expected: tuple[float, float]
) -> None:
    """Two steps of 1 s and 3 s."""
    meter = EngineMeter()
    for seconds, kv_use in zip((1.0, 3.0), kv_uses):
        meter.add(EngineStep(4, seconds, seconds, is_decode=False, num_tokens=6, kv_use=kv_use))
    assert meter.take_use() == EngineUse(12, 4.0, *expected)


def test_a_service_reports_every_step_of_its_engine() -> None:
    """The fake engine gets three prompts of one token, and adds a token to each response per step."""
    with connected_worlds(2) as worlds:
        service = ServiceBench(worlds)
        service.start(5)
        num_steps = 0
        while service.engine.num_unfinished:
            service.service.work()
            num_steps += 1
        costs = worlds[0].accounts.take_engine_costs()
        assert costs["prefill"][0] + costs.get("decode", [0])[0] == num_steps
        assert costs["prefill"][3] == NUM_SAMPLES
        service.mail.send(1, Mark())
        pulls = []
        while isinstance(message := take(service.leader, Pull, Mark).message, Pull):
            pulls.append(message)
        responses = [response for _, _, response, _ in service.rewards.calls]
        num_stops = len(responses) - sum(len(response) == MAX_TOKENS for response in responses)
        assert sum(pull.use.num_tokens for pull in pulls) == sum(map(len, responses)) + num_stops
        assert sum(count for pull in pulls for _, count, _ in pull.step_times) == costs.get("decode", [0])[0]
