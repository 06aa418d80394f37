"""Ranks that live but do nothing: the right one is named, with its stack, and the run ends in time. tools/status.py
shows all ranks, before and after."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.test_endings import launch, wait_for_step
from tests.launcher import ROOT, finish, until

pytestmark = [pytest.mark.alone, pytest.mark.timeout(150)]
FLOOR_S = 4.0
MAX_NAMED_S = 5.0  # from the floor to the report


def status(run: Path) -> tuple[str, list[list[str]]]:
    """Return the line on the run, and the cells of each rank."""
    command = [sys.executable, "tools/status.py", str(run)]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return shown[0], [line.split() for line in shown[2:]]


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("stopped", 0, "its process was stopped by a signal; silent for "),
        pytest.param("stopped", 1, "its process was stopped by a signal; silent for ", marks=pytest.mark.slow),
        pytest.param("frozen", 1, "its interpreter is frozen; silent for ", marks=pytest.mark.slow),
        pytest.param("sleeping", 2, "silent for ", marks=pytest.mark.slow),
    ],
)
def test_a_silent_rank_is_named(what: str, rank: int, said: str, tmp_path: Path) -> None:
    """The others wait in a collective and are just as silent."""
    process = launch(tmp_path, 3, what, rank, f"world.silence_floor_s={FLOOR_S}")
    run = tmp_path / "run"
    wait_for_step(tmp_path, process, 1)
    started = time.monotonic()
    there = [[str(rank), socket.gethostname(), "rollout,actor", "update", "2", "2"] for rank in range(3)]
    until(lambda: [cells[:6] for cells in status(run)[1]] == there, "all ranks in the update", 15)
    assert status(run)[0] == f"{run}: running, step 2 of 3, 3 ranks"
    output = finish(process, 60)
    assert process.returncode != 0
    block = output[output.index("oneworld: rank ") :].splitlines()
    assert block[0].startswith(f"oneworld: rank {rank} (rollout,actor) on "), output
    assert f"stage update, step 2: {said}" in block[0]
    assert "on micro-batch 1 of 1" in block[0]
    stacks = Path(block[1].removeprefix("  stacks: "))
    assert "broken_train.py" in stacks.read_text()
    others = {0: "1-2", 1: "0,2", 2: "0-1"}[rank]
    assert block[2].startswith(f"  ranks {others} (rollout,actor): stage update, ")
    assert output.count("oneworld: rank ") == 1, output
    assert time.monotonic() - started < FLOOR_S + MAX_NAMED_S + 10.0  # to the end of the launcher
    head, ranks = status(run)
    assert head.startswith(f"{run}: rank {rank} failed at step 2: {said}")
    assert ranks[rank][:6] == there[rank]
    assert [cells[-1] for cells in ranks] == ["ended"] * 3


@pytest.mark.slow  # limits of seconds, which a loaded machine may exceed
def test_a_late_compilation_is_no_silence_and_a_sleep_as_long_is(tmp_path: Path) -> None:
    """Both come after three quick steps. The other rank waits in a collective, longer than known work may take."""
    limits = ["world.silence_floor_s=3", "train.num_steps=6"]
    process = launch(tmp_path, 2, "compiles late, then sleeps", 1, *limits)
    output = finish(process, 100)
    assert process.returncode != 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    seconds = {row["step"]: row["time/update"] for row in rows if row["step"]}
    assert list(seconds) == [1, 2, 3, 4], output
    assert max(seconds[2], seconds[3]) < 3.0 and seconds[4] > 5.0, seconds
    block = output[output.index("oneworld: rank ") :].splitlines()
    assert block[0].startswith("oneworld: rank 1 (rollout,actor) on "), output
    assert "stage update, step 5: silent for " in block[0]
    assert "compiling" not in block[0]
    assert output.count("oneworld: rank ") == 1, output


@pytest.mark.slow
def test_a_disk_that_hangs_is_named(tmp_path: Path) -> None:
    """Every rank waits for the checkpoint: one for its own disk, the others for that rank."""
    cap_s = 20.0  # it also applies while the run is built
    limits = [f"world.silence_floor_s={FLOOR_S}", f"world.silence_cap_s={cap_s}", "checkpoint.save_interval=1"]
    process = launch(tmp_path, 3, "disk hangs", 1, *limits)
    wait_for_step(tmp_path, process, 1)
    started = time.monotonic()
    output = finish(process, 90)
    assert process.returncode != 0
    block = output[output.index("oneworld: rank ") :].splitlines()
    assert block[0].startswith("oneworld: rank 1 (rollout,actor) on "), output
    assert ", waiting for its checkpoint, " in block[0]
    assert "shard_file.py" in Path(block[1].removeprefix("  stacks: ")).read_text()
    assert block[2].startswith("  ranks 0,2 (rollout,actor): stage checkpoint, waiting for the others' checkpoints, ")
    assert output.count("oneworld: rank ") == 1, output
    assert time.monotonic() - started < cap_s + MAX_NAMED_S + 15.0
