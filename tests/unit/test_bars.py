"""Progress that a person waits for: bars of a process, of tools, and of vLLM."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from tqdm.auto import tqdm as auto_tqdm
from tqdm.std import tqdm

from rl.common.bars import Bar, Bars
from rl.config.schema import ROOT
from rl.rollout.vllm.progress import bars_as_heartbeats
from rl.watch.heart import HEART


def test_open_bars_are_seen_with_what_is_done() -> None:
    bars = Bars()
    arrived = [1, 2]
    with bars.open("loading", 10, "B") as count:
        count(3)
        count(4)
        with bars.open("evaluation", 5, "prompts", lambda: len(arrived)):
            loading, evaluation = bars.read()
            assert loading == Bar("loading", 10, "B", 7, loading.age_s)
            assert evaluation == Bar("evaluation", 5, "prompts", 2, evaluation.age_s)
            assert loading.age_s > evaluation.age_s > 0
            arrived.append(3)
            assert bars.read()[1].done == 3
        assert [bar.title for bar in bars.read()] == ["loading"]
    assert bars.read() == []


def test_a_bar_ends_with_its_work_also_after_an_error() -> None:
    bars = Bars()
    with suppress(KeyError), bars.open("loading", 10, "B"):
        raise KeyError
    assert bars.read() == []


TOOL = """
import time
from rl.report import bars
bars.LONG_S = {long_s}
with bars.show_bytes("merge", 5_000_000) as count:
    for _ in range(5):
        count(1_000_000)
        time.sleep(0.1)
"""


def test_a_tool_draws_a_bar_on_a_terminal_only() -> None:
    command = [sys.executable, "-c", TOOL.format(long_s=10)]
    piped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert (piped.stdout, piped.stderr) == ("", ""), "short work is not worth a line in a log"
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "NO_COLOR": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the end of a pseudo-terminal
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    assert process.wait(10) == 0
    assert "merge ━" in shown.decode() and "5.0/5.0 MB" in shown.decode()
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is visible again"


def test_long_work_has_two_lines_in_a_log() -> None:
    command = [sys.executable, "-c", TOOL.format(long_s=0.25)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stderr
    assert re.fullmatch(r"merge: \d\.00 MB of 5.00 MB after \d s\nmerge: 5.00 MB in \d s\n", said)


def test_bars_of_vllm_are_heartbeats(capfd: pytest.CaptureFixture[str]) -> None:
    items = []
    with bars_as_heartbeats():
        for _ in tqdm(range(3), desc="Capturing CUDA graphs (decode, FULL)", mininterval=0):
            items.append(HEART.read().activity.item)
        with auto_tqdm(total=10, mininterval=0) as bar:
            bar.update(4)
            items.append(HEART.read().activity.item)
    assert items[1:] == [
        "Capturing CUDA graphs (decode, FULL): 1 of 3",
        "Capturing CUDA graphs (decode, FULL): 2 of 3",
        "progress: 4 of 10",
    ]
    assert capfd.readouterr() == ("", "")
    HEART.beat()
    list(tqdm(range(2), desc="drawn"))
    assert "drawn: 100%" in capfd.readouterr().err, "tqdm is as before"
    assert HEART.read().activity.item == ""
