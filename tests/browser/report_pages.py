"""A run with a restart, and its report in Chromium.

python -m tests.browser.report_pages docs       takes the picture of docs/report.md
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rl.report.rows import last_step
from tests.browser.chromium import open_page
from tests.launcher import ROOT, command_of, finish, start, until

RUN_S = 400
# Bring each chart to the screen until all are drawn. With `opened`, also those that are shown on demand.
DRAW_ALL = """async (opened) => {
  document.querySelectorAll("details").forEach((element) => { element.open = opened; });
  for (const chart of document.querySelectorAll(opened ? ".chart" : "section > .charts .chart")) {
    chart.scrollIntoView();
    while (!["drawn", "failed"].includes(chart.dataset.state)) await new Promise((done) => setTimeout(done, 20));
  }
  window.scrollTo(0, 0);
}"""
PICTURE_SIZE = (1000, 1000)


def make_run(folder: Path, num_steps: int, interval: int, *settings: str) -> None:
    """Train on real vLLM, and kill a rank after the first checkpoint. torchrun restarts the world. `interval` is the
    number of steps between two checkpoints, and between two evaluations."""
    names = [f"run.dir={folder.parent}", f"run.name={folder.name}", f"train.num_steps={num_steps}"]
    names += [f"eval.interval={interval}", f"checkpoint.save_interval={interval}", *settings]
    process = start("--nproc-per-node=2", "--max-restarts=2", "train.py", *names, restarts=True)
    until(lambda: last_step(folder / "metrics.jsonl") > interval, "a step to lose", RUN_S)
    ranks = [child for child in psutil.Process(process.pid).children() if "train.py" in " ".join(command_of(child))]
    max(ranks, key=lambda rank: rank.pid).kill()
    output = finish(process, RUN_S)
    assert process.returncode == 0, output[-3000:]


def write_report(*arguments: str, cwd: Path = ROOT) -> None:
    command = [sys.executable, str(ROOT / "tools" / "report.py"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@contextmanager
def open_report(file: Path, width: int, height: int, scheme: str) -> Iterator[tuple[Any, list[str], list[str]]]:
    """Yield the page, the errors on its console, and the addresses that it has asked for."""
    requests: list[str] = []
    with open_page(width, height) as (page, errors):
        page.emulate_media(color_scheme=scheme)
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        yield page, errors, requests


def take_picture(report: Path, picture: Path) -> None:
    """Take the picture of docs/report.md: what a reader sees first."""
    with open_report(report, *PICTURE_SIZE, "light") as (page, _, _):
        page.evaluate(DRAW_ALL, False)
        page.screenshot(path=picture)


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "sums"
        make_run(folder, 24, 6, "train.num_prompts_per_step=16")
        write_report(str(folder))
        take_picture(folder / "report.html", target / "report.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
