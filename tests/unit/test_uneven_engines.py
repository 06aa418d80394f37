"""Rounds on engines of different speeds: the real dispatcher, and engines in simulated time."""

import heapq
import random
from typing import Any, NamedTuple

import pytest

from rl.data.prompts import Prompt
from rl.rollout.dispatch import MAX_IDLE, Dispatcher, NewTasks, Pull, Sampling, Task
from rl.rollout.meter import EngineMeter, EngineStep
from rl.rollout.shares import divide, share_by_speed
from rl.rollout.speeds import EngineSpeeds
from rl.world.messages import Letter

NUM_SAMPLES, SLOTS = 8, 8  # responses of a group, groups of an engine at once
FULL_STEP_S, SEQUENCE_PART = 0.02, 0.56  # of a decode step with all sequences; see benchmarks/uneven.py
SAMPLING = Sampling(NUM_SAMPLES, 1.0, 128)


class FakeMail:
    """Deliver pulls to the dispatcher, and keep what it sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[Task]]] = []

    def on(self, kind: type[Pull], handler: Any) -> None:
        self.pull = handler

    def send(self, rank: int, message: NewTasks) -> None:
        self.sent.append((rank, message.tasks))


class Round(NamedTuple):
    seconds: float
    num_groups: dict[int, int]  # by engine


def lengths_of(task: Task) -> list[int]:
    source = random.Random(task.position)
    return [min(128, max(1, round(21 * source.lognormvariate(0, 1)))) for _ in range(NUM_SAMPLES)]


class Cluster:
    def __init__(self, speeds: list[float], stated: dict[int, float] | None = None):
        self.speeds, self._mail = dict(enumerate(speeds)), FakeMail()
        self.dispatcher = Dispatcher(self._mail, [*self.speeds], stated)  # type: ignore[arg-type]
        self._meters = {engine: EngineMeter() for engine in self.speeds}
        self._running: dict[int, list[list[int]]] = {engine: [] for engine in self.speeds}  # lengths left, by group
        self._new: dict[int, list[list[int]]] = {engine: [] for engine in self.speeds}  # they join the next step
        self._step_ends: list[tuple[float, int]] = []  # of the engines that are in a step; a heap
        for engine in self.speeds:
            self._pull(engine)

    def _pull(self, engine: int) -> None:
        held = len(self._running[engine]) + len(self._new[engine])
        self._mail.pull(Letter(engine, Pull(SLOTS - held, held, self._meters[engine].take_times())))

    def sample(self, num_groups: int) -> Round:
        """Run a round, and return when its last response ended."""
        counts, now = dict.fromkeys(self.speeds, 0), 0.0
        self.dispatcher.open([Task(1, p, 0, Prompt(p, 0, "", "", [1]), SAMPLING, 1) for p in range(num_groups)])
        while True:
            while self._mail.sent:
                engine, tasks = self._mail.sent.pop(0)
                counts[engine] += len(tasks)
                self._new[engine] += [lengths_of(task) for task in tasks]
                if not self._running[engine]:
                    self._begin_step(engine, now)
                self._pull(engine)
            if not self._step_ends:
                assert sum(counts.values()) == num_groups, "nothing is left behind"
                return Round(now, counts)
            now, engine = heapq.heappop(self._step_ends)
            self._end_step(engine, now)

    def _begin_step(self, engine: int, now: float) -> None:
        self._running[engine] += self._new[engine]
        self._new[engine] = []
        if num_sequences := sum(map(len, self._running[engine])):
            share = num_sequences / (SLOTS * NUM_SAMPLES)
            seconds = FULL_STEP_S * (1 - SEQUENCE_PART + SEQUENCE_PART * share) / self.speeds[engine]
            self._meters[engine].add(EngineStep(num_sequences, seconds, seconds, is_decode=True))
            heapq.heappush(self._step_ends, (now + seconds, engine))

    def _end_step(self, engine: int, now: float) -> None:
        before = self._running[engine]
        left = [[length - 1 for length in lengths if length > 1] for lengths in before]
        self._running[engine] = [lengths for lengths in left if lengths]
        if len(self._running[engine]) < len(before):
            self._pull(engine)
        self._begin_step(engine, now)


def run(speeds: list[float], num_groups: int, stated: dict[int, float] | None = None) -> Round:
    """Return the last of several rounds, when the speeds are known."""
    cluster = Cluster(speeds, stated)
    return [cluster.sample(num_groups) for _ in range(4)][-1]


class EqualSpeeds(EngineSpeeds):
    """Take all engines for equally fast: an engine holds at most an even share at a time."""

    def measure(self) -> dict[int, float]:
        return dict.fromkeys(super().measure(), 1.0)


@pytest.mark.parametrize("num_groups", [3, 16, 32, 128])
def test_equal_engines_are_served_as_if_nothing_were_measured(num_groups: int) -> None:
    cluster, unmeasured = Cluster([0.7] * 4), Cluster([0.7] * 4)
    unmeasured.dispatcher.measured = EqualSpeeds(range(4))
    for _ in range(4):
        assert cluster.sample(num_groups) == unmeasured.sample(num_groups)


@pytest.mark.parametrize("num_groups", [16, 64, 128, 256])
@pytest.mark.parametrize("speed", [0.25, 0.5])
def test_a_slow_engine_hardly_delays_a_round(speed: float, num_groups: int) -> None:
    """The engines sample 32 groups at once. Engines of equal speed, with as much speed in all, are the ideal."""
    uneven = [1.0, 1.0, 1.0, speed]
    ideal = run([sum(uneven) / 4] * 4, num_groups)
    assert run(uneven, num_groups).seconds < 1.1 * ideal.seconds


@pytest.mark.parametrize("num_groups", [16, 32, 48, 64, 96])
@pytest.mark.parametrize("speed", [0.25, 0.5, 0.67, 0.75, 0.85])
def test_measured_speeds_never_cost_time(speed: float, num_groups: int) -> None:
    """Compared with even shares. A long response may fall on any engine, so the times vary a little."""
    uneven = [1.0, 1.0, 1.0, speed]
    cluster = Cluster(uneven)
    cluster.dispatcher.measured = EqualSpeeds(range(4))
    even = cluster.sample(num_groups)
    assert run(uneven, num_groups).seconds < 1.02 * even.seconds
    if speed < 0.6 and num_groups < 48:
        assert run(uneven, num_groups).seconds < 0.75 * even.seconds


def test_an_engine_that_was_left_out_is_tried_again() -> None:
    """At a quarter of the speed it gets nothing of a small round. It recovers, and has its even share in the end."""
    cluster = Cluster([1.0, 1.0, 1.0, 0.25])
    assert [cluster.sample(16).num_groups[3] for _ in range(4)] == [4, 0, 0, 0]
    cluster.speeds[3] = 1.0
    later = [cluster.sample(16).num_groups[3] for _ in range(80)]
    assert later.index(1) == MAX_IDLE - 3
    assert later[-1] == 4


def test_stated_shares_hold_for_engines_of_any_speed() -> None:
    assert run([1.0, 1.0, 0.2], 40, {0: 0.5, 1: 0.25, 2: 0.25}).num_groups == {0: 20, 1: 10, 2: 10}


@pytest.mark.parametrize(
    ("count", "shares", "expected"),
    [
        (4, [0.5, 0.25, 0.25], [2, 1, 1]),
        (10, [2 / 3, 1 / 3], [7, 3]),
        (1, [0.25] * 4, [1, 0, 0, 0]),
        (7, [0.5, 0.5], [4, 3]),
        (0, [0.5, 0.5], [0, 0]),
    ],
)
def test_divide(count: int, shares: list[float], expected: list[int]) -> None:
    assert [*divide(count, dict(enumerate(shares))).values()] == expected


@pytest.mark.parametrize(
    ("count", "speeds", "overhead", "expected"),
    [
        (7, [1.0, 1.0], 0.0, [4, 4]),  # rounded up, so that any engine may take the last one
        (7, [1.0, 1.0], 5.0, [4, 4]),
        (9, [1.0, 0.5], 0.0, [6, 3]),
        (9, [1.0, 0.5], 3.0, [7, 2]),  # (7 + 3) / 1 = (2 + 3) / 0.5
        (9, [1.0, 0.5], 9.0, [9, 0]),  # 9 / 0.5 = 18 without a group, and (9 + 9) / 1 for the other with all of them
    ],
)
def test_shares_by_speed(count: int, speeds: list[float], overhead: float, expected: list[int]) -> None:
    assert [*share_by_speed(count, dict(enumerate(speeds)), overhead).values()] == expected
