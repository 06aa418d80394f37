"""The groups that actors hold between rounds: what a checkpoint stores of them, and what a resumed run accepts."""

import pytest

from rl.config.schema import ConfigError
from rl.data.batch import Batch
from rl.rollout.collect import Gathered
from rl.rollout.held import HeldGroups
from rl.rollout.responses import Response, pack_group
from rl.rollout.schedule import ScheduleState

OK = {"parts": {"rule": 1.0}, "status": "ok", "answer": None}
STATE = ScheduleState(num_started=4, carried=[1, 3], queue=[0, 2])


def group(*lengths: int, is_ended: bool) -> Batch:
    rest = (b"" if is_ended else b"noise", is_ended)
    return pack_group([7], 0, [Response([1] * length, [-1.0] * length, [3] * length, *rest) for length in lengths])


def held_by(actor: int, num_actors: int = 2) -> HeldGroups:
    """Groups 0 and 2 are finished, 1 and 3 are carried. They belong to the actors in turn."""
    owners = {number: number % num_actors for number in range(4)}
    own = [number for number, owner in owners.items() if owner == actor]
    return HeldGroups(
        owners,
        {number: group(2, 3, is_ended=number % 2 == 0) for number in own},
        {number: [OK, None] if number % 2 else [OK, OK] for number in own},
    )


def files_of(num_actors: int) -> list[bytes]:
    return [held_by(actor, num_actors).to_bytes() for actor in range(num_actors)]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (2, 2), (2, 1), (3, 2), (4, 3)])
def test_any_number_of_actors_takes_over_every_group_once(before: int, after: int) -> None:
    owners, files = held_by(0, before).owners, files_of(before)
    taken = []
    for actor in range(after):
        held = HeldGroups.from_files(owners, files[actor::after], after)
        held.check(STATE, actor)
        assert {number for number, owner in held.owners.items() if owner == actor} == held.groups.keys()
        taken += sorted(held.groups)
        for number, results in held.results.items():
            assert results == ([OK, None] if number % 2 else [OK, OK])
    assert sorted(taken) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "state",
    [
        ScheduleState(num_started=4, carried=[1, 3], queue=[0]),
        ScheduleState(num_started=4, carried=[1], queue=[0, 2]),
        ScheduleState(num_started=5, carried=[1, 3, 4], queue=[0, 2]),
        ScheduleState(num_started=4, carried=[0, 2], queue=[1, 3]),
    ],
    ids=["an unknown finished group", "an unknown carried group", "a missing group", "finished ones are carried"],
)
def test_groups_of_another_schedule_are_refused(state: ScheduleState) -> None:
    held = HeldGroups.from_files(held_by(0, 1).owners, files_of(1), 1)
    with pytest.raises(ValueError, match=r"do not fit together|differ on which groups are finished"):
        held.check(state, 0)


def test_a_missing_file_is_noticed() -> None:
    held = HeldGroups.from_files(held_by(0).owners, files_of(2)[:1], 1)
    with pytest.raises(ValueError, match="do not fit together"):
        held.check(STATE, 0)


def test_a_response_that_is_too_long_for_new_settings_is_refused() -> None:
    held = held_by(1)
    held.check_lengths(max_new_tokens=4)
    with pytest.raises(
        ConfigError, match=r"rollout.max_new_tokens: got 3, .* has 3 tokens already; set it to at least 4"
    ):
        held.check_lengths(max_new_tokens=3)
    held_by(0).check_lengths(max_new_tokens=1)  # finished ones may be longer


def test_results_of_several_rounds_are_kept() -> None:
    held = HeldGroups()
    held.add([5], Gathered({0: group(2, 3, is_ended=False)}, [0], {0: [OK, None]}, 0, 0))
    assert held.to_continue([5]).owners == [0] and held.to_continue([5]).groups[0].ended is not None
    late = {"parts": {"rule": 0.0}, "status": "timeout", "answer": None}
    held.add([5], Gathered({0: group(2, 4, is_ended=True)}, [0], {0: [None, late]}, 0, 0))
    assert held.results == {5: [OK, late]}
    held.drop_others({4})
    assert held == HeldGroups()
