"""Reports in Chromium, on a phone and on a desktop, light and dark: a real run with a restart, and hostile texts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.chromium import needs_chromium
from tests.browser.report_pages import DRAW_ALL, make_run, open_report, take_picture, write_report
from tests.report_runs import ATTACK, write_run

pytestmark = [pytest.mark.slow, needs_chromium, pytest.mark.timeout(900)]
SIZES = {"phone": (375, 800), "desktop": (1280, 900)}
NUM_STEPS, INTERVAL = 8, 4
# The data that each chart has drawn, and the number of visible shapes in its picture.
READ_CHARTS = """() => [...document.querySelectorAll(".chart")].map((chart) => ({
  title: chart.parentElement.querySelector("h3").textContent,
  state: chart.dataset.state,
  rows: window.reportViews[chart.id].data("rows").map((row) => ({...row})),
  marks: [...chart.querySelectorAll("[class*=role-mark] path, [class*=role-mark] line")].filter(
    (mark) => mark.getAttribute("opacity") !== "0" && mark.getBoundingClientRect().width > 0).length,
  width: chart.querySelector("svg").getBoundingClientRect().width,
  room: chart.getBoundingClientRect().width,
}))"""


# What a reader sees of a chart without scrolling: the share of its height that is on the screen.
READ_SHOWN = """(title) => {
  const heads = [...document.querySelectorAll("figure h3")];
  const place = heads.find((head) => head.textContent === title).parentElement.getBoundingClientRect();
  return Math.max(0, Math.min(place.bottom, window.innerHeight) - Math.max(place.top, 0)) / place.height;
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, NUM_STEPS, INTERVAL, "train.num_prompts_per_step=8")
    write_report(str(folder))
    return folder / "report.html"


@contextmanager
def look(file: Path, size: str, scheme: str, picture: Path | None = None) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Yield the page with all charts drawn, and what they have drawn. Then check errors, requests and the width."""
    with open_report(file, *SIZES[size], scheme) as (page, errors, requests):
        page.evaluate(DRAW_ALL, True)
        yield page, page.evaluate(READ_CHARTS)
        scroll_width, width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert scroll_width <= width == SIZES[size][0], "the page is wider than the screen"
        if picture is not None:
            page.screenshot(path=picture, full_page=True)
        assert errors == []
        assert requests == [file.as_uri()], "the page is the only thing that is loaded"


def check_charts(charts: list[dict[str, Any]]) -> None:
    assert len(charts) > 10
    for chart in charts:
        assert chart["state"] == "drawn" and chart["rows"], chart["title"]
        assert chart["marks"] > 0, f"{chart['title']} is empty"
        assert 0.8 * chart["room"] < chart["width"] <= chart["room"] + 1, f"{chart['title']} does not fit its place"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_a_real_run(size: str, scheme: str, report: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (report.parent / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(NUM_STEPS + 1)], "the restart has left one row per step"
    with look(report, size, scheme, tmp_path / "page.png") as (page, charts):
        check_charts(charts)
        drawn = {chart["title"]: chart["rows"] for chart in charts}
        scalars = {name for line in lines for name, value in line.items() if isinstance(value, float) and "/" in name}
        bands = {name for name in scalars if f"{name}_low" in scalars or name.endswith(("_low", "_high"))}
        assert len(scalars - bands) > 20
        for name in scalars - bands:
            expected = {line["step"]: line[name] for line in lines if line.get(name) is not None}
            assert {row["step"]: row["value"] for row in drawn[name]} == expected, name
        (measured,) = [name for name in bands if f"{name}_low" in scalars]
        expected_bands = [
            (line["step"], line[measured], line[f"{measured}_low"], line[f"{measured}_high"])
            for line in lines
            if measured in line
        ]
        shown = [(row["step"], row["value"], row["low"], row["high"]) for row in drawn[measured.removeprefix("eval/")]]
        assert shown == expected_bands and len(shown) == 3
        kinds = [row["kind"] for row in drawn["Events by time"]]
        assert kinds[0] == "start" and kinds[-1] == "end"
        assert (kinds.count("fault"), kinds.count("resume"), kinds.count("evaluation")) == (1, 1, 3)
        assert kinds.count("checkpoint") == 2
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(21, 24, 29)")
        text = page.inner_text("body")
        assert "attempt 2 continues after step 4; before it: rank " in text
        assert f"{NUM_STEPS} of {NUM_STEPS}" in text and "was killed by signal 9" in text


@pytest.mark.parametrize("size", SIZES)
def test_a_reader_sees_at_once_whether_the_run_learns(size: str, report: Path, tmp_path: Path) -> None:
    with open_report(report, *SIZES[size], "light") as (page, _, _):
        page.wait_for_function("document.querySelector('.chart').dataset.state === 'drawn'")
        page.screenshot(path=tmp_path / "first.png")
        assert page.evaluate(READ_SHOWN, "reward/mean") > 0.7
        assert size == "phone" or page.evaluate(READ_SHOWN, "eval/avg@1") == 1.0


def test_the_picture_of_the_documentation(report: Path, tmp_path: Path) -> None:
    take_picture(report, tmp_path / "report.png")
    assert 20_000 < (tmp_path / "report.png").stat().st_size < 200_000


def test_several_runs_with_hostile_texts(tmp_path: Path) -> None:
    """Nothing in a response, a name or a setting runs as a script, or is left out of the page."""
    folders = [write_run(tmp_path / name, num_steps=30, slope=slope) for name, slope in (("<b>x", 0.1), ("y", 0.2))]
    write_report(*map(str, folders), "--output", "out.html", cwd=tmp_path)
    with look(tmp_path / "out.html", "phone", "light") as (page, charts):
        check_charts(charts)
        assert page.evaluate("window.attacked") is None
        text = page.inner_text("body")
        assert f"late {ATTACK}" in text and "<b>x" in text
        (reward,) = [chart for chart in charts if chart["title"] == "reward/mean"]
        assert {row["run"] for row in reward["rows"]} == {"<b>x", "y"}
