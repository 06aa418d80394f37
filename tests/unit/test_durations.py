"""Seconds of parts of the work: the start of a process, compilations, and how benchmarks/start.py adds them up."""

import os
import time
from typing import Any

import pytest

from benchmarks.work import start_figures
from rl.watch import compilation
from rl.watch.durations import DURATIONS, Durations
from rl.world import world


@pytest.fixture(autouse=True)
def _nothing_before() -> None:
    DURATIONS.take()


def test_seconds_add_up_until_they_are_taken() -> None:
    durations = Durations()
    durations.add("load", 1.0)
    durations.add("load", 2.0)
    with pytest.raises(ZeroDivisionError), durations.measure("failed"):
        raise ZeroDivisionError
    taken = durations.take()
    assert taken.keys() == {"load", "failed"} and taken["load"] == 3.0 and 0 <= taken["failed"] < 1
    assert durations.take() == {}


def test_a_compilation_inside_of_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 17.0])
    monkeypatch.setattr(compilation.time, "perf_counter", lambda: next(now))
    compilation._end()  # registered while it ran
    for call in (compilation._begin, compilation._begin, compilation._end, compilation._end):
        call()
    assert DURATIONS.take() == {"compile": 7.0}


@pytest.mark.parametrize("restarts", ["0", "1", None])
def test_the_start_of_this_process_counts(restarts: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    with open("/proc/uptime") as uptime, open("/proc/self/stat") as stat:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        age_s = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    world.count_start(time.time())
    taken = DURATIONS.take()
    assert taken.keys() == ({"imports", "torchrun"} if restarts == "0" else {"imports"})
    assert taken["imports"] == pytest.approx(age_s, abs=1.5)


def test_the_parts_of_a_start_add_up() -> None:
    start = {"imports": 5.0, "torchrun": 2.0, "build engine": 9.0, "build engine/import": 4.0, "compile": 1.5}
    step = {"rollout": 1.0, "update": 2.0, "step": 3.25, "compile": 0.5, "checkpoint": 0.0}
    rows: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 1.0}, {"step": 1, "at": 120.0}]
    for row, seconds in zip(rows, (start, step), strict=True):
        row |= {f"time/{name}": value for name, value in seconds.items()}
    figures = start_figures(rows, started=100.0)
    assert figures["parts"] == {
        **{"imports": 5.0, "torchrun": 2.0, "build engine": 5.0, "build engine/import": 4.0},
        **{"first rollout": 1.0, "first update": 2.0, "other": 1.0},
    }
    assert figures["seconds"] == 20.0 == sum(figures["parts"].values()) and figures["compile"] == 2.0
