"""TensorBoard in Chromium, of a real run that was killed and resumed: charts, texts and tabs hold what it wrote."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.report.layout import BANDS, tag_of
from rl.report.rows import read_metrics
from tests.browser.board_pages import KILLED, NUM_STEPS, SAVED, SIZE, BoardPages, Line, make_run, serve, take_pictures
from tests.browser.chromium import needs_chromium, open_page
from tests.launcher import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_chromium]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board") / "runs" / "sums"
    output = make_run(folder)
    repeated = KILLED // SAVED * SAVED + 1
    assert f"step {repeated}/{NUM_STEPS}" in output, "the second start resumes from the last checkpoint"
    return folder


@pytest.fixture
def pages(run: Path) -> Iterator[BoardPages]:
    with serve(run) as address, open_page(*SIZE) as (page, errors):
        yield BoardPages(page, address)
        assert not errors


def is_drawn(line: Line, points: list[tuple[int, float]]) -> bool:
    """Return whether a line has one corner per point, from left to right, at heights that are linear in the values."""
    if len(line) != len(points) or not all(left < right for (left, _), (right, _) in itertools.pairwise(line)):
        return False
    low, high = (choose(value for _, value in points) for choose in (min, max))
    bottom, top = max(y for _, y in line), min(y for _, y in line)
    expected = [bottom + (value - low) / (high - low) * (top - bottom) for _, value in points]
    return [y for _, y in line] == pytest.approx(expected, abs=0.5)  # pixels


def test_the_first_page_shows_every_metric_of_the_run_in_one_curve(run: Path, pages: BoardPages) -> None:
    charts, rows = pages.open_charts(), read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(NUM_STEPS + 1)]
    assert [category["title"] for category in pages.layout["category"]] == [
        *("learning", "learning: evaluations, with intervals of 95 %", "generation", "system"),
        "system: memory and GPUs",
    ]
    tags = {tag_of(name): name for row in rows for name in row}
    drawn = {tag: points for tag, points in pages.points.items() if not tag.startswith(BANDS)}
    assert len(drawn) > 30
    for tag, points in drawn.items():
        name = tags[tag]
        assert points == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows if name in row], tag
    (reward,) = charts["reward: mean"]
    assert is_drawn(reward, pages.points["reward/mean"])
    assert not is_drawn(reward, [*pages.points["reward/mean"][:-1], (NUM_STEPS, 0.0)])
    assert len(charts["reward by function and part"]) == 2
    assert len(charts["eval: avg@4"]) == 2  # the estimate and its band
    for tag in ("eval/eval/pass@2", "eval/eval/pass@4"):
        assert any(is_drawn(line, pages.points[tag]) for line in charts["eval: all pass rates"]), tag


def test_the_other_tabs_have_samples_settings_and_lengths(pages: BoardPages) -> None:
    pages.open_tab("text", "reference answer", "settings that differ from the defaults")
    assert pages.count_texts("prompt") >= 4
    pages.open_tab("hparams", "sums", "actor.lr", "algo.advantage")
    pages.open_tab("histograms", "rollout/lengths")
    pages.open_tab("timeseries", "eval/accuracy")


def test_the_pictures_of_the_documentation_are_small(pages: BoardPages, tmp_path: Path) -> None:
    take_pictures(pages, tmp_path)
    assert [*sorted(file.name for file in (ROOT / "docs").glob("tensorboard_*.png"))] == [
        *sorted(file.name for file in tmp_path.iterdir()),
    ]
    assert all(10_000 < file.stat().st_size < 200_000 for file in tmp_path.iterdir())
