"""Sizes, ranks and counts in messages."""

import pytest

from rl.common.text import count_of, format_bytes, format_ranges, format_ranks, parse_bytes


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("600", 600), ("2kb", 2000)])
def test_a_size_is_parsed(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["5 apples", "0GB", "-1", "inf", ""])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size is a number and a unit, such as 5GB"):
        parse_bytes(text)


def test_a_size_is_written_with_a_unit() -> None:
    assert [format_bytes(size) for size in (0, 999, 1500, 5 * 10**9)] == ["0 B", "999 B", "1.50 kB", "5.00 GB"]


def test_ranks_are_written_as_ranges() -> None:
    assert format_ranks([5, 0, 1, 2]) == "ranks 0-2,5"
    assert format_ranks([4]) == "rank 4"
    assert format_ranges({7, 8, 3}) == "3,7-8"


def test_a_counted_noun_has_its_plural() -> None:
    assert [count_of(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
