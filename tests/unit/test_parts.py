"""Parts of a batch that is still being sampled: they depend on lengths alone."""

import random

import pytest

from rl.rollout.parts import Parts


def take_all(parts: Parts) -> list[list[int]]:
    taken = []
    while (part := parts.take_next()) is not None:
        taken.append(part)
    return taken


def parts_of(lengths: list[int], num_actors: int, max_length: int = 1000, num_at_once: int = 99) -> list[list[int]]:
    """Return the parts of a batch that is whole, without the last one."""
    parts = Parts(len(lengths), num_actors, max_length, num_at_once)
    for position, length in enumerate(lengths):
        parts.add(position, length)
    return take_all(parts)


@pytest.mark.parametrize(
    ("num_groups", "num_actors", "sizes"),
    [
        (16, 2, [4, 3, 3, 2, 2]),
        (64, 4, [16, 12, 9, 7, 5, 4, 4]),
        (8, 1, [2, 2, 1, 1, 1]),
        (4, 4, []),
        (7, 4, []),
        (8, 4, [4]),
        (2, 3, []),
        (0, 2, []),
    ],
)
def test_a_part_is_a_quarter_of_what_is_left(num_groups: int, num_actors: int, sizes: list[int]) -> None:
    assert [len(part) for part in parts_of(list(range(num_groups)), num_actors)] == sizes


def test_groups_with_short_responses_come_first() -> None:
    assert parts_of([7, 3, 9, 3, 5, 8, 1, 6], 1) == [[6, 1], [3, 4], [7], [0], [5]]


def test_groups_with_a_response_of_the_maximum_length_are_in_the_last_part() -> None:
    assert parts_of([9, 1, 9, 2, 3, 9, 4, 5], 1, max_length=9) == [[1, 3], [4, 6], [7]]
    assert parts_of([9, 1, 9, 9, 9, 9, 9, 9], 1, max_length=9) == [], "the first part has two groups"


def test_windows_of_the_stream_stay_in_order() -> None:
    """Engines begin the groups of the second window when those of the first end."""
    lengths = [7, 3, 9, 4, 5, 8, 1, 9]
    assert parts_of(lengths, 1, max_length=9, num_at_once=4) == [[1, 3], [0, 2], [6], [4], [5]]


def test_a_part_does_not_wait_for_a_later_window() -> None:
    parts = Parts(8, 2, max_length=50, num_at_once=4)
    parts.add(1, 20)
    parts.add(2, 30)
    parts.follow([0, 3], [31, 31])
    assert parts.take_next() == [1, 2]


def test_a_part_waits_for_a_group_that_may_precede_it() -> None:
    parts = Parts(8, 2, max_length=50, num_at_once=8)
    parts.add(3, 10)
    assert parts.take_next() is None
    parts.add(5, 12)
    assert parts.take_next() is None, "no engine has told how far the others are"
    parts.follow([0, 1, 2, 4, 6], [20] * 5)
    assert parts.take_next() is None, "nobody samples group 7 yet"
    parts.follow([7], [12])
    assert parts.take_next() is None, "group 7 may be as long as group 5"
    parts.follow([7], [13])
    assert parts.take_next() == [3, 5]
    assert parts.take_next() is None


def test_a_report_that_comes_late_changes_nothing() -> None:
    parts = Parts(4, 1, max_length=50, num_at_once=8)
    parts.follow([0, 1, 2], [9, 9, 9])
    parts.add(3, 8)
    parts.follow([0, 3], [4, 4])
    assert parts.take_next() == [3]


def test_time_changes_no_part() -> None:
    """Engines of different speeds begin their groups at any time, and tell now and then how far they are."""
    source = random.Random(0)
    for _ in range(200):
        num_groups, num_actors, max_length = source.randint(1, 40), source.randint(1, 4), 30
        lengths = [min(max_length, round(source.lognormvariate(2.5, 0.8)) + 1) for _ in range(num_groups)]
        num_at_once = source.choice([99, 8])
        begins, speeds = [source.choice([0, 0, 10]) for _ in lengths], [source.choice([1, 2]) for _ in lengths]
        parts, taken = Parts(num_groups, num_actors, max_length, num_at_once), list[list[int]]()
        unfinished, now = set(range(num_groups)), 0
        while unfinished:
            now += 1
            for position in source.sample(sorted(unfinished), len(unfinished)):
                sampled = max(0, now - begins[position]) * speeds[position]
                if sampled >= lengths[position]:
                    unfinished.discard(position)
                    parts.add(position, lengths[position])
                elif sampled and source.random() < 0.5:
                    parts.follow([position], [sampled + 1])
                taken += take_all(parts)
        assert parts.is_whole
        assert taken == parts_of(lengths, num_actors, max_length, num_at_once)
