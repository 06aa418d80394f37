"""The live view on a terminal that several processes share (rl/report/live.py, rl/watch/screen.py, rl/watch/tee.py)."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launcher import ROOT, command_of, until
from tests.tmux import Pane, needs_tmux

pytestmark = needs_tmux
RANK = f"{sys.executable} -m tests.live_ranks"
TITLE = "── shared ─"


def step_of(folder: Path) -> int:
    file = folder / "step"
    return int(file.read_text() or 0) if file.exists() else 0


def shown_step(screen: list[str]) -> int:
    found = re.search(r"^step (\d+)/1000  ", "\n".join(screen), re.MULTILINE)
    return int(found[1]) if found else 0


def check_frame(screen: list[str], columns: int) -> None:
    """Check that the view is whole, and stands at the bottom of the screen."""
    (place,) = [number for number, line in enumerate(screen) if line.startswith(TITLE)]
    frame = screen[place:]
    begins = [TITLE, "step ", "reward ", "step ", "stages ", "ranks 0-1 rollout, actor: update", "warning "]
    assert [line[: len(begin)] for line, begin in zip(frame, begins, strict=True)] == begins, "\n".join(frame)
    assert len(frame[0]) == columns
    assert re.fullmatch(r"step \d+/1000  .*\d%  \d:\d\d(, about \S+ left)?", frame[1])
    assert "rollout 50%" in frame[4] and "update 50%" in frame[4]


def is_shown(screen: list[str]) -> bool:
    return any(line.startswith("warning ") and "times" in line for line in screen)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), pytest.param(160, 50, marks=pytest.mark.slow)])
def test_lines_of_others_scroll_above_the_view(columns: int, rows: int, tmp_path: Path) -> None:
    """Three processes write to one terminal. No line is lost or torn, and the frame is whole whenever one looks."""
    with Pane(tmp_path, columns, rows) as pane:
        printers = " & ".join(f"{RANK} printer {tmp_path} {name} 600" for name in "ab")
        pane.type(f"bash -c '{RANK} leader {tmp_path} & {printers} & wait'; echo over")
        first = pane.wait(is_shown, "the view")
        (tmp_path / "print").touch()
        while not re.search(r"^[ab] 00599 ", "\n".join(pane.everything), re.MULTILINE):
            check_frame(pane.screen, columns)
        until(lambda: len(numbers_of(pane, "a")) == len(numbers_of(pane, "b")) == 600, "all lines are shown")
        check_frame(pane.wait(lambda screen: shown_step(screen) > shown_step(first), "a later step"), columns)
        (tmp_path / "stop").touch()
        pane.wait(lambda screen: "over" in screen, "the end")
        assert pane.is_in_order()
        assert numbers_of(pane, "a") == numbers_of(pane, "b") == list(range(600))
        rest = [line for line in pane.everything[1:] if line and not re.fullmatch(r"[ab] \d{5} x* end", line)]
        rest = [line for line in rest if not line.startswith("$") and "tests.live_ranks" not in line]
        summary = rest[-2:]
        assert re.fullmatch(r"shared: reward 0\.\d\d -> \d\.\d\d in \d+ steps, \d+ s, engine none", summary[0])
        assert summary[1] == "over"
        assert len(rest) == 4, rest  # the first warning, its count, the summary, over: nothing is left of the view
        assert re.search(r"oneworld: \d+ times: the disk is slow", rest[1])
        log = (tmp_path / "leader.log").read_text()
        assert re.findall(r"^step (\d+)/1000  reward", log, re.MULTILINE) == [
            str(step) for step in range(1, step_of(tmp_path) + 1)
        ]
        assert "\x1b" not in log and TITLE not in log


def numbers_of(pane: Pane, name: str) -> list[int]:
    text = "\n".join(pane.everything)
    return [int(number) for number in re.findall(rf"^{name} (\d{{5}}) x* end$", text, re.MULTILINE)]


def test_the_view_survives_a_resize(tmp_path: Path) -> None:
    with Pane(tmp_path, 100, 30) as pane:
        pane.type(f"seq 200; {RANK} leader {tmp_path}")
        pane.wait(is_shown, "the view")
        for columns, rows in [(70, 20), (160, 50), (80, 24), (120, 16)]:
            pane.resize(columns, rows)
            fits = lambda screen: is_shown(screen) and any(line == TITLE.ljust(columns, "─") for line in screen)  # noqa: B023, E731
            check_frame(pane.wait(fits, f"the view at {columns}x{rows}"), columns)
        pane.resize(80, 8)  # too small
        pane.wait(lambda screen: re.search(r"step \d+/1000  reward", screen[-3]), "plain lines")
        assert not any(line.startswith(TITLE) for line in pane.screen)
        pane.resize(80, 24)
        check_frame(pane.wait(is_shown, "the view again"), 80)
        (tmp_path / "stop").touch()
        pane.wait(lambda screen: any(line.startswith("shared: reward") for line in screen), "the end")
        assert pane.is_in_order()
        assert not any(line.startswith(TITLE) for line in pane.screen)


def leader_of(folder: Path) -> psutil.Process:
    """Return the leader itself, not its tee: the parent of the two."""
    command = [sys.executable, "-m", "tests.live_ranks", "leader", str(folder)]
    found = [process for process in psutil.process_iter() if command_of(process)[:5] == command]
    return next(process for process in found if process.parent() not in found)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_terminal_is_in_order_after_a_kill(number: int, tmp_path: Path) -> None:
    """The leader is in a session of its own, as torchrun starts ranks. Its launcher and a child live on."""
    with Pane(tmp_path, 80, 24) as pane:
        leader = f"setsid {RANK} leader {tmp_path} sleep 20 2>{tmp_path}/errors"
        pane.type(f"bash -c '{leader} & wait; sleep 4'")
        check_frame(pane.wait(is_shown, "the view"), 80)
        leader_of(tmp_path).send_signal(number)
        pane.wait(lambda screen: not any(line.startswith(("──", "stages")) for line in screen), "no view")
        assert pane.is_in_order()
        pane.wait(lambda screen: "$" in screen, "the shell")
        pane.type("seq 40")
        pane.wait(lambda screen: screen[-2:] == ["40", "$"], "the whole screen scrolls again")


def test_a_stopped_terminal_does_not_stop_the_run(tmp_path: Path) -> None:
    """Ctrl-S, and a leader that also prints: after Ctrl-Q, the terminal catches up."""
    with Pane(tmp_path, 80, 24) as pane:
        pane.type(f"stty ixon; {RANK} leader {tmp_path}")
        pane.wait(is_shown, "the view")
        pane.press("C-s")

        def is_stopped() -> bool:
            begin, screen = step_of(tmp_path), pane.screen
            until(lambda: step_of(tmp_path) > begin + 30, "the run goes on", 30)
            return pane.screen == screen

        until(is_stopped, "the terminal is really stopped")
        begin = step_of(tmp_path)
        pane.press("C-q")
        pane.wait(lambda screen: shown_step(screen) > begin + 30, "the view goes on")
        check_frame(pane.screen, 80)


def test_the_view_leaves_the_terminal_to_the_shell_after_ctrl_z(tmp_path: Path) -> None:
    with Pane(tmp_path, 80, 24) as pane:
        script = f"{RANK} leader {tmp_path} & wait"  # as torchrun, whose ranks are in sessions of their own
        pane.type(f"set -m; bash -c '{script}'")
        pane.wait(is_shown, "the view")
        pane.press("C-z")
        pane.wait(lambda screen: not is_shown(screen) and any("Stopped" in line for line in screen), "the shell")
        until(pane.is_in_order, "the terminal is in order", 10)
        pane.type("fg")
        check_frame(pane.wait(is_shown, "the view again"), 80)


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"PIPE": "1"}])
def test_without_a_capable_terminal_there_are_plain_lines(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.live_ranks", "leader", str(tmp_path)]
    if environment == {"PIPE": "1"}:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=os.environ | {"TERM": "xterm"})
        until(lambda: step_of(tmp_path) > 5, "steps")
        (tmp_path / "stop").touch()
        text = process.communicate(timeout=30)[0].decode()
    else:
        with Pane(tmp_path, 80, 24) as pane:
            pane.type(f"TERM=dumb {' '.join(command)}; echo over")
            until(lambda: step_of(tmp_path) > 5, "steps")
            (tmp_path / "stop").touch()
            pane.wait(lambda screen: "over" in screen, "the end")
            text = "\n".join(pane.everything)
    num_steps = step_of(tmp_path)
    assert re.findall(r"^step (\d+)/1000  reward \S+  seconds 0.2$", text, re.MULTILINE) == [
        str(step) for step in range(1, num_steps + 1)
    ]
    assert "\x1b" not in text and TITLE not in text
