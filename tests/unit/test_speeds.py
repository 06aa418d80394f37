"""Measured speeds of engines: what is compared, what counts as equal, and what noise does not change."""

import random

import pytest

from rl.rollout.speeds import MIN_STEPS, EngineSpeeds

FIXED_S, PER_SEQUENCE_S = 0.008, 0.0002


def step_s(size: int, speed: float = 1.0) -> float:
    return (FIXED_S + size * PER_SEQUENCE_S) / speed


def report(speeds: EngineSpeeds, engine: int, sizes: list[int], speed: float = 1.0, count: int = 50) -> None:
    speeds.add(engine, [(size, count, count * step_s(size, speed)) for size in sizes])


def test_equal_engines_with_different_numbers_of_sequences_are_equal() -> None:
    """The third has a quarter of the sequences, so it decodes far fewer tokens per second."""
    speeds = EngineSpeeds([0, 1, 2])
    report(speeds, 0, [64, 32, 16])
    report(speeds, 1, [64, 32, 16])
    report(speeds, 2, [16])
    assert speeds.measure() == {0: 1.0, 1: 1.0, 2: 1.0}


@pytest.mark.parametrize("sizes", [[64], [16], [32, 16], [8]])
def test_a_slow_engine_is_found_whatever_its_share_is(sizes: list[int]) -> None:
    speeds = EngineSpeeds([0, 1, 2, 3])
    for engine in (0, 1, 2):
        report(speeds, engine, [64, 32, 16, 8])
    report(speeds, 3, sizes, speed=0.5)
    assert speeds.measure() == {0: 1.0, 1: 1.0, 2: 1.0, 3: pytest.approx(0.5)}


def test_a_size_that_only_slow_engines_have_misleads_nobody() -> None:
    speeds = EngineSpeeds([0, 1, 2, 3])
    for engine in (0, 1):
        report(speeds, engine, [64, 32])
    for engine, speed in ((2, 0.5), (3, 0.25)):
        report(speeds, engine, [32, 8], speed)
    assert speeds.measure() == {0: 1.0, 1: 1.0, 2: pytest.approx(0.5, rel=0.01), 3: pytest.approx(0.25, rel=0.01)}


def test_without_a_common_size_nothing_is_known() -> None:
    speeds = EngineSpeeds([0, 1])
    report(speeds, 0, [64])
    report(speeds, 1, [8])
    assert speeds.measure() == {0: 1.0, 1: 1.0}


def test_noise_moves_nothing() -> None:
    """Times that vary by 5 % leave all speeds at exactly 1."""
    source = random.Random(0)
    speeds = EngineSpeeds(range(8))
    for _ in range(20):
        for engine in range(8):
            report(speeds, engine, [64, 32, 16], speed=source.uniform(0.95, 1.05))
        assert set(speeds.measure().values()) == {1.0}


def test_few_steps_are_kept_until_they_are_enough() -> None:
    speeds = EngineSpeeds([0, 1])
    for _ in range(2):
        assert speeds.measure() == {0: 1.0, 1: 1.0}
        report(speeds, 0, [16], count=MIN_STEPS // 2)
        report(speeds, 1, [16], speed=0.5, count=MIN_STEPS // 2)
    assert speeds.measure() == {0: 1.0, 1: pytest.approx(0.5)}


def test_an_engine_that_recovers_is_equal_again() -> None:
    speeds = EngineSpeeds([0, 1, 2])
    found = []
    for speed in (0.5, 0.5, *[1.0] * 5):
        for engine in (0, 1):
            report(speeds, engine, [16])
        report(speeds, 2, [16], speed)
        found.append(speeds.measure()[2])
    assert found[:2] == [pytest.approx(0.5)] * 2
    assert found == sorted(found) and found[-1] == 1.0
