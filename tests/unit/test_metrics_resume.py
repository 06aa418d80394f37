"""metrics.jsonl of a run that resumes, and of one that starts over."""

import json
import os
import re
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl.config.load import load_config
from rl.report.health import Health
from rl.report.metrics_writer import MetricsWriter
from rl.report.rows import RowFile
from rl.run.record import describe_repetition

BEGAN = time.time()


def rows(path: Path) -> list[dict[str, float]]:
    """Return the rows of a file without their times, which must lie between the start of this test and now."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    times = [row.pop("at") for row in rows if "at" in row]
    assert times == sorted(times) and all(BEGAN - 1 < at <= time.time() + 1 for at in times)
    return rows


def write(folder: Path, steps: range, begin: int, reward: float, engine: str = "fake") -> None:
    writer = MetricsWriter(folder, 10, begin)
    for step in steps:
        writer.write(step, step + 1, {"reward/mean": reward + step, "time/step": 0.5})
    writer.close(engine)


def test_a_resumed_run_keeps_the_rows_up_to_its_step(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write(tmp_path, range(1, 8), 0, 0.0)
    assert re.search(r": reward 3.00 -> 5.00 in 7 steps, \d+ s, engine fake\n$", capsys.readouterr().out)
    write(tmp_path, range(5, 8), 4, 100.0)
    expected = [{"step": step, "version": step + 1, "reward/mean": float(step)} for step in (1, 2, 3, 4)]
    expected += [{"step": step, "version": step + 1, "reward/mean": 100.0 + step} for step in (5, 6, 7)]
    assert rows(tmp_path / "metrics.jsonl") == [row | {"time/step": 0.5} for row in expected]
    assert sorted(path.name for path in tmp_path.glob("metrics*")) == ["metrics.jsonl"]
    # The first 5 are 1, 2, 3, 4 and 105: 23; the last 5 are 3, 4, 105, 106 and 107: 65.
    summary = capsys.readouterr().out.splitlines()[-1]
    assert summary.startswith(f"{tmp_path.name}: reward 23.00 -> 65.00 in 7 steps, the last 3 of them in ")
    assert summary.endswith(" s after a resume, engine fake")
    write(tmp_path, range(8, 8), 7, 0.0)
    assert "in 7 steps, none of them after the resume, engine" in capsys.readouterr().out


def test_lines_that_a_kill_cut_off_are_dropped(tmp_path: Path) -> None:
    lines = ['{"step": 1, "version": 2}', '{"step": 2, "ver', "", '{"step": 3, "version": 4}', '{"step": 4']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    write(tmp_path, range(4, 5), 3, 0.0)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 3, 4]


def test_earlier_nan_and_infinity_stay(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss/policy": NaN, "policy/ratio_max": Infinity}\n')
    MetricsWriter(tmp_path, 10, 1).close("fake")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss/policy": NaN, "policy/ratio_max": Infinity}\n'


def test_a_resumed_run_ends_well_after_a_step_without_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A reward that is not finite is null in the file."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": null}\n{"step": 2, "reward/mean": 0.5}\n')
    MetricsWriter(tmp_path, 2, 2).close("fake")
    assert "reward 0.50 -> 0.50 in 1 step" in capsys.readouterr().out


def test_a_fork_has_no_rows_before_its_own(tmp_path: Path) -> None:
    write(tmp_path, range(5, 7), 4, 0.0)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [5, 6]


def test_a_run_that_starts_over_sets_the_old_rows_aside(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), 0, 0.0)
    old = (tmp_path / "metrics.jsonl").read_text()
    writer = MetricsWriter(tmp_path, 10)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    writer.write(1, 2, {"reward/mean": 7.0})
    writer.close("fake")
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "version": 2, "reward/mean": 7.0}]
    (aside,) = tmp_path.glob("metrics.*-*.jsonl")
    assert aside.read_text() == old
    assert len(old.splitlines()) == 3


def test_lines_of_evaluations_are_set_aside_with_them(tmp_path: Path) -> None:
    """JsonChannel of two runs with one name are not mixed. A resumed run appends to its own."""
    (tmp_path / "eval.jsonl").write_text("old\n")
    MetricsWriter(tmp_path, 10, 3).close("fake")
    assert (tmp_path / "eval.jsonl").read_text() == "old\n"
    MetricsWriter(tmp_path, 10).close("fake")
    assert not (tmp_path / "eval.jsonl").exists()
    (aside,) = tmp_path.glob("eval.*-*.jsonl")
    assert aside.read_text() == "old\n"


def test_lines_are_json_even_if_a_value_is_not_finite(tmp_path: Path) -> None:
    """A skipped step may have an infinite loss, which JSON cannot express."""
    writer = MetricsWriter(tmp_path, 1)
    writer.write(1, 2, {"reward/mean": 1.0, "loss/policy": float("inf"), "loss/kl": float("nan")})
    writer.close("fake")
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {"step": 1, "version": 2, "at": row["at"], "reward/mean": 1.0, "loss/policy": None, "loss/kl": None}


@pytest.mark.parametrize(
    ("step", "num_steps", "steps"),
    [
        (4, 10, "steps 5 to 7 are done again, because the last checkpoint is that of step 4"),
        (6, 10, "step 7 is done again, because the last checkpoint is that of step 6"),
        (4, 5, "step 5 is done again, because the last checkpoint is that of step 4"),
        (7, 10, ""),
        (0, 10, "steps 1 to 7 are done again, because no checkpoint was saved"),
    ],
)
def test_steps_that_are_done_again_are_named(step: int, num_steps: int, steps: str, tmp_path: Path) -> None:
    write(tmp_path, range(1, 8), 0, 0.0)
    config = SimpleNamespace(train=SimpleNamespace(num_steps=num_steps))
    run: Any = SimpleNamespace(folder=tmp_path, config=config)
    assert describe_repetition(run, step) == steps
    os.utime(tmp_path / "metrics.jsonl", (0, 0))
    assert bool(describe_repetition(run, step)) == (bool(steps) and step > 0), "a new run that replaces an older one"


def peak_of_a_resume(folder: Path, num_rows: int) -> int:
    """Return the most bytes that a resume after `num_rows` rows of 50 metrics holds, until the health rules are built.
    The file is longer than that."""
    metrics = {f"perf/metric_{number}": number + 0.123456789 for number in range(49)}
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_rows + 101):
            file.write(json.dumps({"step": step, "version": step, "reward/mean": 0.5 + step / 1e6, **metrics}) + "\n")
    tracemalloc.start()
    try:
        rows = RowFile(folder, num_rows, continues=False)
        Health(load_config()).restore(rows.read_kept())
        assert [row["step"] for row in rows.read_kept()] == [*range(1, num_rows + 1)]
        assert len(rows.rewards) == num_rows and metrics.keys() < rows.names
        rows.close()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_resume_does_not_hold_the_rows_of_earlier_starts(tmp_path: Path) -> None:
    """The file has about 1.4 kB per row. A parsed row takes several times as much."""
    few, many = peak_of_a_resume(tmp_path / "few", 200), peak_of_a_resume(tmp_path / "many", 1000)
    size = (tmp_path / "many" / "metrics.jsonl").stat().st_size
    assert size > 1_000_000 and many - few < 0.2 * size, (few, many, size)
