"""Reports of runs: numbers, smoothing, thinning, escaping, differences of settings, errors, Markdown."""

import html
import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.common.events import Event
from rl.config.differences import find_differences
from rl.config.schema import ROOT
from rl.report.page import html as html_module
from rl.report.page.build import build_page, describe_state, format_seconds
from rl.report.page.charts import (
    choose_events,
    curve_chart,
    evaluation_chart,
    event_chart,
    length_chart,
    mean_shares,
    mean_stages,
    progress_chart,
    stage_chart,
)
from rl.report.page.markdown import to_markdown
from rl.report.page.parts import Chart, Page, ResponsesToPrompt, Section, Table
from rl.report.page.read import ReportError, RunData, read_runs
from rl.report.page.series import Curve, CurvePoint, RunningMean, StepSums, ThinnedPoints, thin
from rl.report.page.summary import RowSummary
from tests.report_runs import ATTACK, BEGAN, KILLED, estimate, make_rows, write_lines, write_run
from tools import report


def rows_of(chart: Chart | None) -> list[dict[str, Any]]:
    assert chart is not None
    rows: list[dict[str, Any]] = chart.spec["datasets"]["rows"]
    return rows


def section(page: Page, title: str) -> Section:
    (found,) = [section for section in page.sections if section.title == title]
    return found


def table(page: Page, title: str) -> dict[str, list[str]]:
    """Return the cells of the last table of a section, by the first cell of their rows."""
    last = [block for block in section(page, title).blocks if isinstance(block, Table)][-1]
    return {first: list(cells) for first, *cells in last.rows}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first")


@pytest.fixture
def no_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making the bundle of the libraries takes seconds; tests/e2e/test_report_in_browser.py uses it."""
    monkeypatch.setattr(html_module.vl_convert, "javascript_bundle", lambda: "var bundle = '</script>';")


# Numbers


def test_the_values_of_a_chart_are_those_of_the_file(run: Path) -> None:
    (data,) = read_runs([run])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward/mean", "policy/entropy", "eval/accuracy"):
        expected = {line["step"]: line[name] for line in lines if name in line}
        assert {row["step"]: row["value"] for row in rows_of(curve_chart(name, [data]))} == expected
    (first, last) = rows_of(evaluation_chart("eval/sums/avg@1", [data]))
    assert first == {"run": "first", "step": 0, "value": 0.25, "low": 0.125, "high": 0.375}
    assert (last["step"], last["value"]) == (8, 0.75)
    assert curve_chart("critic/loss", [data]) is None


def make_curve(points: list[tuple[int, float]], window: int = 0, block: int = 100) -> Curve:
    curve = Curve(window)
    for place in range(0, len(points), block):
        curve.add(*zip(*points[place : place + block]))
    return curve


def test_a_running_mean() -> None:
    assert RunningMean(1).add(np.array([1.0, 2.0, 6.0])).tolist() == [1.0, 2.0, 6.0]
    mean = RunningMean(3)
    assert mean.add(np.array([1.0, 2.0])).tolist() == [1.0, 1.5]
    assert mean.add(np.array([3.0, 6.0])).tolist() == [2.0, 11 / 3], "it goes on in the next block"
    short = make_curve([(step, float(step)) for step in range(19)])
    assert all(point.mean == point.value for point in short.points()), "19 values are too few for a mean of two"
    long = make_curve([(step, float(step)) for step in range(100)])
    assert long.points()[50] == CurvePoint(50, 50.0, 45.5), "the mean of the last ten: 41 to 50"
    assert make_curve([(0, 1.0), (1, 3.0)], window=2).points()[1].mean == 2.0
    longer = make_curve([(step, float(step)) for step in range(5000)])
    assert all(point.mean == point.step - 24.5 for point in longer.points() if point.step >= 50), "the last 50"


def test_a_huge_value_does_not_spoil_later_means() -> None:
    values = [1.0] * 2000
    values[700] = 1e30
    points = make_curve(list(enumerate(values)), window=10).points()
    assert {point.mean for point in points if not 700 <= point.step < 710} == {1.0}
    assert next(point.mean for point in points if point.step == 700) == pytest.approx(1e29)


def test_long_curves_keep_their_extremes_and_their_values() -> None:
    points = [(step, float(step % 7)) for step in range(5000)]
    points[1234], points[4321] = (1234, 99.0), (4321, -99.0)
    curve = make_curve(points)
    kept = curve.points()
    assert 250 < len(kept) <= 600
    assert [point.step for point in kept] == sorted({point.step for point in kept})
    assert (kept[0].step, kept[-1].step) == (0, 4999)
    assert {(point.step, point.value) for point in kept} <= {*points}
    assert {(1234, 99.0), (4321, -99.0)} <= {(point.step, point.value) for point in kept}
    fewer = curve.points(40)
    assert 20 <= len(fewer) <= 40
    assert (fewer[0].step, fewer[-1].step) == (0, 4999), "both ends stay"
    assert {(1234, 99.0), (4321, -99.0)} <= {(point.step, point.value) for point in fewer} <= {*points}
    assert (curve.num_values, curve.total) == (5000, sum(value for _, value in points))
    assert curve.first.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0] and curve.last.tolist() == [4.0, 5.0, 6.0, 0.0, 1.0]


def test_curves_are_exact_up_to_600_values() -> None:
    points = [(3 * step, (step * 7919 % 600) / 7) for step in range(600)]
    assert [(point.step, point.value) for point in make_curve(points).points()] == points
    assert len(make_curve([*points, (1800, 0.0)]).points()) < 600


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_intervals_do_not_depend_on_the_blocks_in_which_points_come(block: int) -> None:
    points = np.column_stack([np.arange(1000), np.arange(1000) * 7919 % 1000]).astype(float)
    thinned = ThinnedPoints(32)
    for place in range(0, len(points), block):
        thinned.add(points[place : place + block])
    # At most 8 intervals, so they have 128 points each.
    expected = []
    for part in np.split(points, range(128, 1000, 128)):
        rows = part.tolist()
        extremes = [rows[0], min(rows, key=lambda row: row[1]), max(rows, key=lambda row: row[1]), rows[-1]]
        expected += [row for row in rows if row in extremes]
    assert thinned.points().tolist() == expected
    assert thin(points, 32).tolist() == expected


def test_bars_of_a_long_run_have_equal_numbers_of_steps() -> None:
    bars = StepSums()
    for step in range(1, 201):
        bars.add(step, {"x": 1.0, "even": float(step % 2 == 0)})
    assert bars.num_steps == 4 and len(bars.bars) == 50
    assert [(bar.first, bar.last, bar.num_steps) for bar in bars.bars[:2]] == [(1, 4, 4), (5, 8, 4)]
    assert all(bar.sums == {"x": 4.0, "even": 2.0} for bar in bars.bars)


def test_stages_and_roles(run: Path) -> None:
    (data,) = read_runs([run])
    assert mean_stages(data.rows.stages.bars) == {"rollout": 2.0, "update": 1.0, "evaluate": 0.0, "other": 1.0}
    bars = rows_of(stage_chart(data, "stages"))
    assert [row["seconds"] for row in bars if row["step"] == 3] == [2.0, 1.0, 0.0, 1.0]
    assert mean_shares(data) == {"actor": {"busy": 0.25, "waits for rollout": 0.75}}
    rows = make_rows(8)
    rows[1]["time/step"] = 28.0  # as long as all others together
    rows[1] |= {"perf/busy/actor": 0.75, "perf/wait/actor/rollout": 0.25}
    write_lines(run / "metrics.jsonl", rows)
    assert mean_shares(*read_runs([run])) == {"actor": {"busy": 0.5, "waits for rollout": 0.5}}


def test_a_bar_of_a_long_run_is_a_mean_of_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "long", num_steps=120)
    rows = make_rows(120)
    rows[1]["time/rollout"] = 4.0
    write_lines(folder / "metrics.jsonl", rows)
    (data,) = read_runs([folder])
    chart = stage_chart(data, "stages")
    bars = rows_of(chart)
    assert chart is not None and chart.caption == "Each bar is the mean of up to 2 steps."
    assert len({row["step"] for row in bars}) == 60
    assert next(row for row in bars if row["stage"] == "rollout") == {
        "step": 1,
        "last": 2,
        "order": 0,
        "stage": "rollout",
        "seconds": 3.0,
    }
    first, second = rows_of(length_chart(data, "lengths"))[:2]
    assert first == {"step": 1, "low": 0, "high": 4, "count": 3, "share": 0.6}, "1 of step 1 and 2 of step 2"
    assert second == {"step": 1, "low": 4, "high": 8, "count": 2, "share": 0.4}


# Long runs


def write_long_run(folder: Path, num_steps: int) -> Path:
    """Write a run with an evaluation and a warning in every step."""
    write_run(folder)
    rows = [row | estimate(row["step"] / num_steps) for row in make_rows(num_steps)]
    rows[num_steps // 3]["reward/mean"] = 1e6
    write_lines(folder / "metrics.jsonl", rows)
    events = [Event(BEGAN + 4 * step, step, "warning", "the reward is flat " * 20) for step in range(num_steps)]
    write_lines(folder / "events.jsonl", [event._asdict() for event in events])
    return folder


def test_memory_does_not_grow_with_the_number_of_rows() -> None:
    """The rows are made while they are read, so that the peak is that of what is kept of them."""

    def peak(num_steps: int) -> int:
        rows = make_rows(1)
        tracemalloc.start()
        summary = RowSummary()
        for step in range(1, num_steps + 1):
            evaluated = estimate(1 / step) if step % 4 == 0 else {}
            summary.add(rows[1] | {"step": step, "at": BEGAN + step, "reward/mean": 1 / step} | evaluated)
        summary.flush()
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert summary.last_step == num_steps and len(summary.curves["reward/mean"].points()) <= 600
        return size

    peak(100)
    short, long = peak(3_000), peak(9_000)
    # Two metrics have a median, for which all values are kept: 8 bytes each, in an array that grows in large steps.
    assert long - short < 6_000 * 2 * 8 * 1.5


def test_the_page_of_a_long_run_is_small(tmp_path: Path, no_bundle: None) -> None:
    sizes = []
    for num_steps in (1_300, 5_200):
        runs = read_runs([write_long_run(tmp_path / str(num_steps), num_steps)])
        page = build_page(runs)
        sizes.append(len(html_module.to_html(page)))
        (reward,) = [chart for chart in page.charts if chart.title == "reward/mean"]
        assert (num_steps // 3, 1e6) in {(row["step"], row["value"]) for row in rows_of(reward)}, "a single peak"
        assert len(rows_of(event_chart(runs))) == 100 and len(rows_of(progress_chart(runs))) <= 700
        cells = table(page, "Evaluation")
        assert [*cells][:20] == [str(step) for step in range(20)] and len(cells) == 60
        assert [*cells][-1] == str(num_steps)
    assert sizes[1] < 1.1 * sizes[0] < 1_000_000


def test_many_curves_share_the_points_of_a_page(tmp_path: Path) -> None:
    summary = RowSummary()
    for row in make_rows(600)[1:]:
        summary.add(row | {f"other/{number}": row["step"] * 7 % 601 for number in range(40)})
    summary.flush()
    page = build_page([RunData(name, tmp_path, summary, [], None) for name in ("a", "b", "c", "d", "e", "f")])
    sizes = {chart.title: len(rows_of(chart)) for chart in page.charts if "/" in chart.title}
    assert 20_000 < sum(sizes.values()) <= 24_000 + 64_000
    assert sizes["other/0"] <= 6 * 64_000 // (6 * 47) < 6 * 250
    assert sizes["policy/entropy"] == 6 * 600, "curves that are shown at once have all points"


def test_drawn_events_are_chosen_evenly() -> None:
    events = [Event(float(number), number, "warning", str(number)) for number in range(1000)]
    events.append(Event(5.5, 5, "fault", "x"))
    chosen = choose_events(events)
    assert len(chosen) == 101 and sum(event.kind == "fault" for event in chosen) == 1
    assert [event.at for event in chosen] == sorted(event.at for event in chosen)
    assert (chosen[0].step, chosen[-1].step) == (0, 999)


def test_the_page_of_a_run(run: Path) -> None:
    page = build_page(read_runs([run]))
    titles = ["Summary", "Learning", "Evaluation", "Generation", "Time", "Events", "Samples", "Settings", "Environment"]
    assert [section.title for section in page.sections] == titles
    first, *charts, others = section(page, "Summary").blocks
    assert isinstance(first, Table) and isinstance(others, Table)
    assert [row[0] for row in first.rows] == ["state", "steps", "reward", "accuracy"]
    assert [chart.title for chart in charts if isinstance(chart, Chart)] == ["reward/mean", "sums/avg@1"]
    summary = dict([*first.rows, *others.rows])
    assert summary["state"] == "done" and summary["steps"] == "8 of 8" and summary["attempts"] == "2"
    assert summary["reward"].startswith("0.3 -> 0.6 ("), "the means of steps 1 to 5 and 4 to 8"
    assert summary["accuracy"] == "0.25 -> 0.75, best 0.75 (step 8)"
    assert (summary["took"], summary["tokens sampled"], summary["warnings"]) == ("37 s", "800", "1")
    assert table(page, "Evaluation") == {"0": ["0.25 (0.125 to 0.375)"], "8": ["0.75 (0.625 to 0.875)"]}
    assert table(page, "Time")["rollout"] == ["2 s (50%)"]
    assert list(table(page, "Events")) == ["0 s", "24 s", "26 s", "28 s", "37 s"]
    assert table(page, "Events")["24 s"] == ["6", "fault", f"{KILLED}: {ATTACK}"]
    assert table(page, "Settings")["train.num_steps"] == ["8", "100"]
    assert table(page, "Environment")["commit"] == ["abc123"]
    first = next(block for block in section(page, "Samples").blocks if isinstance(block, ResponsesToPrompt))
    assert (first.prompt, first.answer) == ("1+0=", ATTACK)
    assert [(sample.label, sample.facts) for sample in first.samples] == [
        ("step 0", "score 0, 3 tokens"),
        ("step 8", "score 1, 3 tokens"),
    ]


def test_every_metric_is_drawn_once(run: Path) -> None:
    page = build_page(read_runs([run]))
    (data,) = read_runs([run])
    titles = [chart.title for chart in page.charts]
    bands = ["eval/sums/avg@1", "eval/sums/avg@1_low", "eval/sums/avg@1_high"]  # one chart
    for name in data.metrics():
        assert titles.count(name) == (0 if name in bands else 1), name
    assert titles.count("sums/avg@1") == 1


def test_several_runs_are_overlaid(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "a" / "x", slope=0.1, lr=0.1, x={"a": 1, "b": True})]
    folders.append(write_run(tmp_path / "b" / "x", slope=0.2, lr=0.2))
    runs = read_runs(folders)
    assert [run.name for run in runs] == ["a/x", "b/x"], "two folders with the same name"
    rows = rows_of(curve_chart("reward/mean", runs))
    assert [(row["run"], row["value"]) for row in rows if row["step"] == 4] == [("a/x", 0.4), ("b/x", 0.8)]
    page = build_page(runs)
    assert table(page, "Settings") == {"actor.lr": ["0.1", "0.2"], "actor.x": ["a: 1, b: true", ""]}
    assert table(page, "Summary")["took"] == ["37 s", "37 s"]


def test_differences_of_settings() -> None:
    ours = {"train": {"num_steps": 8}, "placement": {"actor": "0"}, "run": {"dir": "a"}, "data": {"train": ("x",)}}
    theirs = {"train": {"num_steps": 8, "lr": 1}, "placement": {"actor": "1"}, "run": {"dir": "b"}}
    assert find_differences([ours, theirs | {"data": {"train": ["x"]}}]) == {
        "placement": [{"actor": "0"}, {"actor": "1"}],
        "train.lr": [None, 1],
    }


@pytest.mark.parametrize(
    ("last", "age_s", "state"),
    [
        ("end", 0.0, "done"),
        ("fault", 0.0, f"failed: {KILLED}: {ATTACK}"),
        ("resume", 60.0, "running when this report was written"),
        ("warning", 3600.0, "no end was recorded: it was killed, or its node was lost"),
    ],
)
def test_the_state_of_a_run(last: str, age_s: float, state: str, run: Path) -> None:
    (data,) = read_runs([run])
    number = next(index for index, event in enumerate(data.events) if event.kind == last)
    cut = RunData(data.name, data.folder, RowSummary(), data.events[: number + 1], None)
    assert describe_state(cut, now=max(event.at for event in cut.events) + age_s) == state


def test_seconds_are_said_in_words() -> None:
    assert [format_seconds(seconds) for seconds in (0, 12.4, 60, 200, 7500, 93_600)] == [
        *("0 s", "12 s", "1 min", "3 min 20 s", "2 h 5 min", "1 d 2 h"),
    ]


# Texts of others


def texts_of(packed: Any) -> list[str]:
    """Return the texts of events in the data of a chart, which are columns or rows."""
    if isinstance(packed, list):
        return [row["text"] for row in packed if "text" in row]
    return packed["lists"].get("text", [packed["same"].get("text", "")])


def test_no_text_becomes_markup(tmp_path: Path, no_bundle: None) -> None:
    """Responses, prompts, names of runs, settings and events are texts of others."""
    folder = write_run(tmp_path / "<b>x & y")
    text = html_module.to_html(build_page(read_runs([folder])))
    assert "<img" not in text and "<b>" not in text and "<!--" not in text
    scripts = re.findall(r"<script(.*?)>(.*?)</script", text, re.DOTALL)
    assert text.count("<script") == len(scripts) == text.count("</script>"), "every script has one end"
    specs = [json.loads(body) for attributes, body in scripts if "application/json" in attributes]
    assert len(specs) == len(build_page(read_runs([folder])).charts)
    assert f"{KILLED}: {ATTACK}" in {text for spec in specs for text in texts_of(spec["datasets"]["rows"])}
    assert html.escape(f"late {ATTACK}") in text and html.escape("Report of <b>x & y") in text


def test_only_the_scripts_of_the_page_may_run(run: Path, no_bundle: None) -> None:
    text = html_module.to_html(build_page(read_runs([run])))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].startswith("default-src 'none'; script-src 'sha256-")
    allowed = set(re.findall(r"'sha256-([^']*)'", policy[1]))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert {html_module._digest(script) for script in scripts} == allowed and len(scripts) == 2
    addresses = re.findall(r"https?://[^\"' ]*", text.replace(scripts[0], ""))
    assert {*addresses} <= {"https://vega.github.io/schema/vega-lite/v6.4.1.json"}, "names a format, and is not fetched"


def test_odd_characters_are_shown(no_bundle: None) -> None:
    page = Page("a\x00b\ud800c\u2028d", [Section("x", [Chart("y", {"datasets": {"rows": [{"x": "\ud800\u2028"}]}})])])
    text = html_module.to_html(page)
    assert "<h1>a\ufffdb?c\u2028d</h1>" in text
    text.encode()


# Markdown


def test_markdown_has_the_tables_and_a_picture_per_chart(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    report.main([str(run), "--format", "md", "--output", str(tmp_path / "out.md")])
    text = (tmp_path / "out.md").read_text()
    pictures = re.findall(r"^!\[.*\]\((out-\d\d-[a-z0-9_]+\.png)\)$", text, re.MULTILINE)
    assert len(pictures) == len({*pictures}) > 8
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len({(tmp_path / name).read_bytes() for name in pictures}) == len(pictures)
    assert "| 8 | 0.75 (0.625 to 0.875) |" in text
    assert "<script>" not in text.replace(f"```\nlate {ATTACK}", "").replace(f"```\nearly {ATTACK}", "")
    assert re.search(rf"^````*\n{re.escape('late ' + ATTACK)}\n````*$", text, re.MULTILINE)
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out.md'}: ")


def test_a_fence_is_longer_than_those_in_the_text() -> None:
    samples = ResponsesToPrompt("x", "```\n# no heading\n````", "", [])
    text, _ = to_markdown(Page("t", [Section("s", [samples])]), "out")
    assert "`````\n```\n# no heading\n````\n`````" in text


# Errors


def cut_off(folder: Path) -> list[Path]:
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"st\n{"step": 3}\n')
    return [folder]


def no_step(folder: Path) -> list[Path]:
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"reward/mean": 1}\n{"step": 3}\n')
    return [folder]


def goes_back(folder: Path) -> list[Path]:
    write_lines(folder / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in (1, 2, 3, 2)])
    return [folder]


def no_metrics(folder: Path) -> list[Path]:
    (folder / "metrics.jsonl").write_text('{"step": 1, "version": 2, "at": 5.0, "reward/mean": null}\n')
    return [folder]


def failed_at_the_start(folder: Path) -> list[Path]:
    (folder / "metrics.jsonl").write_text("")
    write_lines(folder / "events.jsonl", [Event(BEGAN, 0, "fault", "rank 1 has no memory", "world1")._asdict()])
    return [folder]


def refused_at_the_start(folder: Path) -> list[Path]:
    new = folder.with_name("new")
    (new / "status").mkdir(parents=True)
    (new / "FATAL").write_text("oneworld: actor.lr is too high\nmore")
    return [new]


def not_begun(folder: Path) -> list[Path]:
    new = folder.with_name("new")
    (new / "status").mkdir(parents=True)
    return [new]


def nothing_in_common(folder: Path) -> list[Path]:
    other = folder.with_name("other")
    other.mkdir()
    write_lines(other / "metrics.jsonl", [{"step": 1, "else/x": 1.0}])
    return [folder, other]


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda folder: [folder / "none"], "there is no folder .*none. Give the folder of a run, such as runs/demo"),
        (
            lambda folder: [folder / "eval"],
            "eval has no metrics.jsonl, so it is not the folder of a run. Give a",
        ),
        (lambda folder: [folder / "run.json"], "run.json is a file. Give the folder of a run, such as runs/demo"),
        (lambda folder: [folder.parent], "is a folder of runs. Give one or .*, such as .*/first. It has: first"),
        (
            failed_at_the_start,
            "since the run ended before its first step: rank 1 has no memory. Mend that",
        ),
        (refused_at_the_start, "since the run ended before its first step: actor.lr is too high. Mend that"),
        (not_begun, "new/metrics.jsonl has no metrics yet. Wait for the first step of the run"),
        (cut_off, "metrics.jsonl, line 2: this is not JSON: .*. Every line must be a JSON object .* Remove this line"),
        (no_step, "metrics.jsonl, line 2: this is not a row of metrics. Every line must be .* whole number `step`"),
        (goes_back, "metrics.jsonl, line 4: step 2 comes after step 3. .* steps must not decrease. Remove this line"),
        (no_metrics, "metrics.jsonl has no metrics yet. Wait for the first step"),
        (nothing_in_common, "the runs first, other have no metric in common, .* Give runs of training, or write a"),
        (lambda folder: [folder, folder], "got a run twice: .* Give every run once"),
    ],
)
def test_what_cannot_be_reported(break_it: Callable[[Path], list[Path]], words: str, run: Path) -> None:
    with pytest.raises(SystemExit, match=f"report: .*{words}"):
        report.main([str(folder) for folder in break_it(run)])
    assert not list(run.glob("report*"))


def test_a_line_that_is_being_written_is_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "rew')
    (data,) = read_runs([run])
    assert data.is_cut and data.rows.last_step == 8
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + "\n")
    with pytest.raises(ReportError, match="line 10"):
        read_runs([run])


def test_values_that_are_not_finite_are_left_out(run: Path) -> None:
    """Runs of older versions may have NaN; newer ones write null."""
    rows = make_rows(3)
    rows[1]["reward/mean"], rows[2]["reward/mean"] = float("nan"), None
    write_lines(run / "metrics.jsonl", rows)
    (data,) = read_runs([run])
    assert [point.step for point in data.rows.curves["reward/mean"].points()] == [3]


def test_an_evaluation_without_an_interval_is_shown(run: Path, tmp_path: Path) -> None:
    """Another run, or another step, has one."""
    other = write_run(tmp_path / "other")
    rows = make_rows(3)
    del rows[0]["eval/sums/avg@1_low"]
    rows[-1]["eval/sums/avg@1_high"] = None
    write_lines(other / "metrics.jsonl", rows)
    page = build_page(read_runs([run, other]))
    assert [cell for name, (cell,) in table(page, "Evaluation").items() if name.startswith("other")] == ["0.25", "0.75"]


def test_two_rows_of_a_step_are_one(run: Path) -> None:
    """A run in phases has a row of the evaluation, and one of the update."""
    write_lines(
        run / "metrics.jsonl", [{"step": 1, "at": BEGAN, "eval/accuracy": 1.0}, {"step": 1, "reward/mean": 2.0}]
    )
    (data,) = read_runs([run])
    curves = {name: [(point.step, point.value) for point in curve.points()] for name, curve in data.rows.curves.items()}
    assert curves == {"eval/accuracy": [(1, 1.0)], "reward/mean": [(1, 2.0)]} and data.began_at == BEGAN


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "missing/report.html",
            "cannot write .*missing.*: No such file or directory. Give a file in a folder that exists",
        ),
        ("eval", "--output: .*eval is a folder. Give the name of a file, such as .*eval/report.html"),
    ],
)
def test_an_output_that_cannot_be_written(name: str, words: str, run: Path, no_bundle: None) -> None:
    with pytest.raises(SystemExit, match=f"report: {words}"):
        report.main([str(run), "--output", str(run / name)])


def test_a_report_needs_no_torch() -> None:
    program = (
        "import sys; import tools.report; print(sorted({'torch', 'vllm', 'pandas', 'matplotlib'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
