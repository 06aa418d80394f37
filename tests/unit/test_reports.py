"""Tests of rl/watch/reports.py: reports, and what one attempt of a launch leaves for the next."""

import time
from pathlib import Path

import pytest

from rl.config.schema import ConfigError
from rl.watch.reports import NOT_SAVED, AttemptHistory, Report
from rl.world.restarts import Restarts


def report(cause: str = "error", error: str = "MemoryError: 3 GiB", step: int = 4, stage: str = "update") -> Report:
    return Report(1, "actor", "node1", stage, step, error, "Traceback ...", cause)


def test_reports_are_ordered_by_how_well_they_explain_an_end() -> None:
    causes = ["connection", "terminated", "lost", "error", "fatal", "interrupt"]
    assert sorted((report(cause) for cause in causes), key=lambda r: r.order) == [report(c) for c in reversed(causes)]


def test_text_names_rank_role_host_stage_and_step() -> None:
    head, trace = report().text().split("\n")
    assert head == "oneworld: rank 1 (actor) on node1, stage update, step 4: MemoryError: 3 GiB"
    assert trace == "Traceback ..."
    assert report("fatal", "placement: wrong").text() == "oneworld: placement: wrong"
    assert report("interrupt", "").text() == f"oneworld: interrupted at step 4, stage update: {NOT_SAVED}"
    assert report("interrupt", "saved").text() == "oneworld: interrupted at step 4, stage update: saved"


def test_the_same_error_at_the_same_step_is_repeated_whatever_its_details(tmp_path: Path) -> None:
    assert not AttemptHistory(tmp_path).is_repeated(report())
    assert AttemptHistory(tmp_path).is_repeated(report(error="MemoryError: 5 GiB"))


@pytest.mark.parametrize("other", [report(step=5), report(stage="sync"), report(error="ValueError: 3 GiB")])
def test_another_error_is_not_repeated(other: Report, tmp_path: Path) -> None:
    assert not AttemptHistory(tmp_path).is_repeated(report())
    assert not AttemptHistory(tmp_path).is_repeated(other)


def test_a_lost_rank_is_never_a_repetition(tmp_path: Path) -> None:
    assert [AttemptHistory(tmp_path).is_repeated(report("lost")) for _ in range(2)] == [False, False]


def test_connection_errors_without_a_lost_rank_may_be_repeated(tmp_path: Path) -> None:
    assert [AttemptHistory(tmp_path).is_repeated(report("connection")) for _ in range(2)] == [False, True]


def test_files_of_an_earlier_launch_are_removed(tmp_path: Path) -> None:
    history = AttemptHistory(tmp_path)
    history.is_repeated(report())
    history.write_fatal("reason")
    assert (tmp_path / "FATAL").read_text() == "reason\n"
    history.forget_before(time.time() - 60)
    assert (tmp_path / "FATAL").exists()
    history.forget_before(time.time() + 60)
    assert list(tmp_path.iterdir()) == []


def test_attempts_count_until_one_gets_further(tmp_path: Path) -> None:
    """Attempts that resume at step 20 and die at step 25, again and again, make no progress."""
    history = AttemptHistory(tmp_path)
    assert history.count_attempt() == (1, 0)
    history.forget_attempts()
    history.note_end(25)
    assert history.count_attempt() == (1, 25)
    history.note_end(23)
    assert history.count_attempt() == (2, 25)
    history.forget_attempts()
    assert history.count_attempt() == (1, 0)


def test_attempts_are_counted_where_nodes_share_the_folder(tmp_path: Path) -> None:
    """Rank 2 is the first rank of another node. It only serves, so it is a step ahead of rank 0."""

    def run(max_attempts: int) -> None:
        zero, two = Restarts(0, 0), Restarts(2, 0)
        for restarts in (zero, two):
            restarts.open_history(tmp_path)
            restarts.back_off(max_attempts)
        for step in range(20, 24):
            two.reach(step + 1)
            zero.reach(step)
        AttemptHistory(tmp_path).note_end(23)

    for _ in range(3):  # the first gets further
        run(max_attempts=2)
    with pytest.raises(ConfigError, match="2 attempts in a row got no further"):
        run(max_attempts=2)


def test_a_folder_that_cannot_be_written_is_reported_and_does_not_raise(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    history = AttemptHistory(tmp_path / "run")
    assert not history.is_repeated(report())
    history.write_fatal("reason")
    assert capfd.readouterr().err.count("oneworld: cannot ") == 2
