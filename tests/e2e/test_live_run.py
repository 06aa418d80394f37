"""The live view of a real run: torchrun and two ranks on one terminal, with the fake engine."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.launcher import activated_environment, command_of, until
from tests.tmux import Pane, needs_tmux

pytestmark = needs_tmux
SETTINGS = "checkpoint.resume=never rollout.engine=fake eval.interval=2 eval.num_prompts=20"
PARTS = ["── ", "step ", "reward ", "step ", "stages ", "bound ", "rank"]


def command(folder: Path, *settings: str) -> str:
    run = f"torchrun --nproc-per-node 2 train.py run.dir={folder.parent} run.name={folder.name}"
    return " ".join([run, SETTINGS, *settings])


def shown_step(screen: list[str]) -> int:
    """Return the last step that the view shows, or 0 before the first."""
    found = re.search(r"^step (\d+)/\d+  .*%", "\n".join(screen), re.MULTILINE)
    return int(found[1]) if found and any(line.startswith("stages ") for line in screen) else 0


def frame_of(screen: list[str], folder: Path) -> list[str]:
    (place,) = [number for number, line in enumerate(screen) if line.startswith(f"── {folder.name} ")]
    return screen[place:]


def ranks_of(folder: Path) -> list[int]:
    """Return the process ids of both ranks, in order. Other processes of the run are children of the ranks."""
    named = [process for process in psutil.process_iter() if f"run.dir={folder.parent}" in command_of(process)]
    (launcher,) = [process for process in named if any(part.endswith("/torchrun") for part in command_of(process))]
    ranks = [process for process in launcher.children() if "train.py" in command_of(process)]
    return [process.pid for process in sorted(ranks, key=lambda process: int(process.environ()["RANK"]))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("columns", "rows"), [(80, 24), pytest.param(160, 50, marks=pytest.mark.slow)], ids=["80x24", "160x50"]
)
def test_a_run_on_a_terminal(columns: int, rows: int, tmp_path: Path) -> None:
    folder = tmp_path / f"seen{columns}"
    with Pane(tmp_path, columns, rows, activated_environment()) as pane:
        pane.type(command(folder, "train.num_steps=30") + "; echo code $?")
        first = pane.wait(lambda screen: shown_step(screen) >= 2, "steps", 200)
        frame = frame_of(first, folder)
        assert [line[: len(part)] for line, part in zip(frame, PARTS)] == PARTS, "\n".join(frame)
        assert re.fullmatch(r"step \d+/30  ━*─*  \d+%  \d:\d\d, about \d:\d\d left", frame[1])
        assert re.search(r"eval \d\.\d+ at step \d+$", frame[2])
        assert re.search(r"[\d,]+ tokens/s", frame[3])
        assert re.match(r"ranks? [01-]+ +rollout, actor: \w+", frame[6])
        assert max(map(len, first)) <= columns
        pane.resize(columns + 20, rows - 4)
        title = f"── {folder.name} ".ljust(columns + 20, "─")
        wide = pane.wait(lambda screen: title in screen and shown_step(screen), "the view after a resize", 60)
        assert [line[: len(part)] for line, part in zip(frame_of(wide, folder), PARTS)] == PARTS
        pane.wait(lambda screen: "code 0" in screen, "the end", 200)
        assert pane.is_in_order()
        everything = pane.everything
        summary = re.compile(rf"{folder.name}: reward \S+ -> \S+ in 30 steps, \d+ s, engine fake")
        assert len(list(filter(summary.fullmatch, everything))) == 1, everything
        left = [line for line in everything if line.startswith(("──", "stages", "bound", "step "))]
        assert left == [], "nothing of the view stays in the scrollback"
    log = (folder / "logs" / "attempt_1" / "rank_0.log").read_text()
    assert re.findall(r"^step (\d+)/30  reward", log, re.MULTILINE) == [str(step) for step in range(1, 31)]
    assert "\x1b" not in log


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["Ctrl-C", "SIGTERM", "SIGKILL of the leader", "SIGKILL of the other rank"])
def test_a_run_that_ends_early_leaves_the_terminal_in_order(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    with Pane(tmp_path, 80, 24, activated_environment()) as pane:
        pane.type(command(folder, "train.num_steps=10000"))
        pane.wait(lambda screen: shown_step(screen) >= 2, "steps", 200)
        ranks = ranks_of(folder)
        assert len(ranks) == 2
        if way == "Ctrl-C":
            pane.press("C-c")
        elif way == "SIGTERM":
            os.kill(psutil.Process(ranks[0]).ppid(), signal.SIGTERM)
        else:
            os.kill(ranks["other" in way], signal.SIGKILL)
            until(lambda: len(again := ranks_of(folder)) == 2 and not {*again} & {*ranks}, "torchrun restarts", 100)
            pane.wait(lambda screen: shown_step(screen) >= 1, "steps after the restart", 100)
            pane.press("C-c")
        pane.wait(lambda screen: "$" in screen, "the shell", 100)
        until(pane.is_in_order, "the terminal is in order", 20)
        everything = pane.everything
        assert any("oneworld: " in line and " at step " in line for line in everything), everything  # after ^C
        assert not any(line.startswith(("── ", "stages ")) for line in everything), everything
        pane.type("seq 40")
        pane.wait(lambda screen: [*filter(None, screen)][-2:] == ["40", "$"], "the whole screen scrolls again")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_on_another_rank_is_shown(tmp_path: Path) -> None:
    """The leader is rank 1, and shows what the engine of rank 0 is doing."""
    folder = tmp_path / "apart"
    with Pane(tmp_path, 100, 30, activated_environment()) as pane:
        placement = "placement.rollout=0 placement.actor=1"
        pane.type(command(folder, "train.num_steps=10000", placement))
        shown = lambda screen: re.search(r"^rank 0 +rollout: ", "\n".join(screen), re.MULTILINE)  # noqa: E731
        screen = pane.wait(lambda screen: shown(screen) and shown_step(screen) >= 2, "the engine", 200)
        assert re.search(r"^rank 1 +actor: ", "\n".join(screen), re.MULTILINE)
        pane.press("C-c")
        pane.wait(lambda screen: "$" in screen, "the shell", 100)
