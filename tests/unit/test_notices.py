"""Warnings are shown once and counted (rl/common/notices.py)."""

from rl.common import notices
from rl.common.notices import Notice, Notices


def test_repetitions_are_printed_at_powers_of_ten_and_at_the_end() -> None:
    said: list[str] = []
    warnings = Notices(said.append)
    for number in range(1, 124):
        warnings.warn("the disk is slow")
        if number == 1:
            assert said == ["oneworld: the disk is slow"], "at once"
    warnings.warn("the entropy is low")
    assert said[1:] == [
        "oneworld: 10 times: the disk is slow",
        "oneworld: 100 times: the disk is slow",
        "oneworld: the entropy is low",
    ]
    warnings.summarize()
    warnings.summarize()
    assert said[4:] == ["oneworld: 123 times: the disk is slow"], "once, and nothing about a warning without repetition"


def test_warnings_of_a_kind_count_together_and_the_newest_text_is_shown() -> None:
    said: list[str] = []
    warnings = Notices(said.append)
    assert warnings.last is None
    for entropy in (3, 2, 1):
        warnings.warn(f"entropy {entropy}", kind="entropy")
    assert warnings.last == Notice("entropy 1", 3)
    warnings.warn("other")
    assert warnings.last == Notice("other", 1)
    warnings.warn("entropy 0", kind="entropy")
    assert warnings.last == Notice("entropy 0", 4), "the one that was given last"
    assert said == ["oneworld: entropy 3", "oneworld: other"]


def test_a_view_shows_counts_instead_of_lines() -> None:
    said: list[str] = []
    warnings = Notices(said.append)
    warnings.is_in_view = True
    for _ in range(100):
        warnings.warn("slow")
    assert said == ["oneworld: slow"]
    warnings.is_in_view = False
    warnings.summarize()
    assert said == ["oneworld: slow", "oneworld: 100 times: slow"]


def test_the_memory_of_warnings_is_bounded() -> None:
    said: list[str] = []
    warnings = Notices(said.append)
    for number in range(notices.MAX_KINDS):
        warnings.warn(f"text {number}")
    warnings.warn("text 0")  # now the newest
    warnings.warn("one more")  # text 1 is forgotten
    warnings.warn("text 0")
    assert warnings.last == Notice("text 0", 3)
    warnings.warn("text 1")
    assert said[-1] == "oneworld: text 1", "shown again, as if it were new"
