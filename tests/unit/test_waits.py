"""What bounds a step: the shares of its time in which actors, engines, or both wait."""

import pytest

from rl.rollout.dispatch import BatchTime
from rl.run.reporter import measure_waits

WAITS = ("perf/waits_for_sampling", "perf/waits_for_training", "perf/waits_for_publishing")


def seconds(step: float, rollout: float, sync: float) -> dict[str, float]:
    return {"time/step": step, "time/rollout": rollout, "time/sync": sync}


@pytest.mark.parametrize(
    ("times", "rounds", "expected"),
    [
        # They take turns: 6 s of sampling, 3 s of training, 1 s of sync.
        (seconds(10, 6, 1), [BatchTime(6, 1, 0)], (0.6, 0.3, 0.1)),
        # The same, but scoring takes 4 s of the 6 s.
        (seconds(10, 6, 1), [BatchTime(2, 1, 0)], (0.6, 0.3, 0.1)),
        # One round ahead. The engines sample for 8 s. The update takes 3 s of them, and the actors wait for the rest.
        (seconds(9, 5, 1), [BatchTime(8, 1, 0)], (5 / 9, 0.0, 1 / 9)),
        # The same, but the update takes the 8 s, and the engines are done after 3 s.
        (seconds(9, 0, 1), [BatchTime(3, 1, 0)], (0.0, 5 / 9, 1 / 9)),
        # Two rounds, and an update without a round.
        (seconds(10, 7, 1), [BatchTime(3, 1, 0), BatchTime(4, 1, 0)], (0.7, 0.2, 0.1)),
        (seconds(4, 0, 1), [], (0.0, 0.75, 0.25)),
        # Overlap: in 6 s of sampling, the actors have trained for 4 s.
        (seconds(8, 6, 1), [BatchTime(6, 1, 0, trained_s=4)], (0.25, 0.125, 0.125)),
        # A clock that was read a moment later.
        (seconds(8, 6, 1), [BatchTime(7.5, 1, 0, trained_s=6.1)], (0.0, 0.0, 0.125)),
    ],
)
def test_who_waits_for_whom(
    times: dict[str, float], rounds: list[BatchTime], expected: tuple[float, float, float]
) -> None:
    waits = measure_waits(times, rounds)
    assert [waits[name] for name in WAITS] == pytest.approx(expected)
    assert not {"perf/slowest_engine", "perf/slowest_engine_s"} & waits.keys()


def test_the_round_that_lost_most_names_its_engine() -> None:
    rounds = [BatchTime(3, 4, 0.5), BatchTime(3, 2, 1.5, speed=0.5), BatchTime(3, 7, 0.0)]
    waits = measure_waits(seconds(10, 9, 1), rounds)
    names = ("perf/slowest_engine", "perf/slowest_engine_s", "perf/slowest_engine_speed")
    assert [waits[name] for name in names] == [2, 1.5, 0.5]
