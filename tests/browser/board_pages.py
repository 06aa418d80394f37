"""A run with a kill in its middle, and TensorBoard's pages of it in Chromium: what they show, and pictures of them.

python -m tests.browser.board_pages docs       takes the pictures of docs/tensorboard.md
"""

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl.report.rows import last_step
from tests.browser.chromium import WAIT_MS, open_page
from tests.launcher import ROOT, finish, members, start, until

NUM_STEPS, SAVED, KILLED = 16, 4, 10  # of the run, between two checkpoints, and before the kill
# Engine and actor have a rank each, and a round samples at most 3 tokens of a response (Q).
SETTINGS = ["placement.rollout=0", "placement.actor=1", "rollout.max_tokens_per_round=3"]
SETTINGS += ["reward.function={exact_match: 1.0, regex: 0}", "reward.options={regex: {pattern: '[0-9]+', whole: true}}"]
SETTINGS += [f"train.num_steps={NUM_STEPS}", f"checkpoint.save_interval={SAVED}", "metrics.samples_interval=5"]
SETTINGS += [f"eval.interval={SAVED}", "eval.num_samples=4", "eval.temperature=0.8", "eval.num_prompts=60"]
RUN_S = 300
CARDS = "tf-custom-scalar-multi-line-chart-card, tf-custom-scalar-margin-chart-card"
# The title and the paths of every chart. A band has one more path, which is no line.
READ_CARDS = """cards => {
    const find = (node, found) => {
        for (const child of node.querySelectorAll('*')) {
            if (child.matches('path.line')) found.push(child.getAttribute('d') || '');
            if (child.shadowRoot) find(child.shadowRoot, found);
        }
        return found;
    };
    return cards.map(card => ({title: card.title, lines: find(card.shadowRoot || card, [])}));
}"""
SIZE = (1180, 900)

Line = list[tuple[float, float]]


def make_run(folder: Path) -> str:
    """Make the run: kill all of its processes in the middle, and start it again. Return the second start's output."""
    arguments = ["--nproc-per-node=2", "train.py", f"run.dir={folder.parent}", f"run.name={folder.name}", *SETTINGS]
    process = start(*arguments)
    until(lambda: last_step(folder / "metrics.jsonl") >= KILLED, f"step {KILLED}", RUN_S)
    for member in members(process.pid):
        member.kill()
    process.wait()
    process = start(*arguments)
    output = finish(process, RUN_S)
    assert process.returncode == 0, output[-3000:]
    return output


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Run tools/open_tensorboard.py as a user in the folder that has the folder of runs. Yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    here, run = folder.parent.parent, folder.relative_to(folder.parent.parent)
    command = [sys.executable, "-u", str(ROOT / "tools" / "open_tensorboard.py"), str(run), "--port", str(port)]
    process = subprocess.Popen(command, cwd=here, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if re.match(r"TensorBoard \S+ at", line):
                break
        (address,) = re.findall(r"(http://\S+) on this machine", "".join(lines))
        yield address
    finally:
        process.terminate()
        process.wait()


class BoardPages:
    """TensorBoard's pages of one run. It keeps what they have fetched."""

    def __init__(self, page: Any, address: str):
        self._page, self._address = page, address
        self.layout: dict[str, Any] = {}
        self.points: dict[str, list[tuple[int, float]]] = {}  # of the charts, by tag
        page.on("response", self._keep)

    def _keep(self, answer: Any) -> None:
        if "/custom_scalars/layout" in answer.url:
            self.layout = answer.json()
        elif "/custom_scalars/scalars" in answer.url:
            found = answer.json()["tag_to_events"]
            self.points |= {tag: [(step, value) for _, step, value in events] for tag, events in found.items()}

    def open_charts(self) -> dict[str, list[Line]]:
        """Open the address that the tool prints. Return the lines that are drawn, by the title of their chart."""
        page = self._page
        page.goto(self._address)
        page.wait_for_selector(CARDS, state="attached")
        titles = [chart["title"] for category in self.layout["category"] for chart in category["chart"]]
        deadline = time.monotonic() + WAIT_MS / 1000
        while True:
            drawn = page.locator(CARDS).evaluate_all(READ_CARDS)
            if len(drawn) == len(titles) and all(chart["lines"] for chart in drawn):
                break
            assert time.monotonic() < deadline, f"{titles} are expected, but these are drawn: {drawn}"
            page.wait_for_timeout(1000)
        assert sorted(chart["title"] for chart in drawn) == sorted(titles)
        return {chart["title"]: [read_path(path) for path in chart["lines"]] for chart in drawn}

    def scroll_to(self, text: str, block: str) -> None:
        """Scroll until a text is at the start or in the center of the page."""
        self._page.get_by_text(text).first.evaluate("(node, block) => node.scrollIntoView({block})", block)
        self._page.wait_for_timeout(2000)

    def open_tab(self, fragment: str, *wanted: str) -> None:
        """Open a tab, and wait until these texts are shown."""
        self._page.goto("about:blank")
        self._page.goto(f"{self._address.partition('#')[0]}#{fragment}")
        for text in wanted:
            self._page.get_by_text(text).first.wait_for()

    def count_texts(self, text: str) -> int:
        return self._page.get_by_text(text, exact=True).count()

    def take_picture(self, file: Path) -> None:
        self._page.screenshot(path=str(file), timeout=WAIT_MS, animations="disabled")


def read_path(path: str) -> Line:
    """Return the corners of a drawn line, in pixels."""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[0-9.e+-]+),(-?[0-9.e+-]+)", path)]


def take_pictures(pages: BoardPages, target: Path) -> None:
    """Take the pictures of docs/tensorboard.md."""
    pages.open_charts()
    pages.take_picture(target / "tensorboard_learning.png")
    pages.scroll_to("learning: evaluations", "start")
    pages.take_picture(target / "tensorboard_evaluations.png")
    pages.scroll_to("share of a step", "center")
    pages.take_picture(target / "tensorboard_system.png")
    pages.open_tab("text", "reference answer")
    pages.take_picture(target / "tensorboard_samples.png")


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "runs" / "sums"
        make_run(folder)
        with serve(folder) as address, open_page(*SIZE) as (page, _):
            take_pictures(BoardPages(page, address), target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
