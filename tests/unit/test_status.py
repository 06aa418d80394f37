"""tools/status.py on files as watchdogs write them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rl.watch.reports import Cause, Report
from tools import status


def row(rank: int, **values: Any) -> dict[str, Any]:
    fields = {"rank": rank, "host": "node0", "roles": "actor", "stage": "update", "step": 3, "version": 3, "item": "x"}
    fields |= {
        "num_steps": 50,
        "waits_for": "",
        "silent_s": 0.2,
        "stage_s": 1.5,
        "frozen": "",
        "tokens_per_s": 7,
        "memory_mb": 8,
    }
    return fields | {"done": False, "world": "b"} | values


def write(run: Path, name: str, value: dict[str, Any]) -> None:
    (run / "status").mkdir(parents=True, exist_ok=True)
    (run / "status" / f"{name}.json").write_text(json.dumps(value))


def test_a_running_run(tmp_path: Path) -> None:
    now = time.time()
    ranks = [row(0, heard_s_ago=0.1), row(1, heard_s_ago=0.5, stage="rollout", waits_for="work from rank 0")]
    write(tmp_path, "board", {"at": now, "world": "b", "ranks": ranks})
    write(tmp_path, "rank_7", row(7, at=now - 50, world="a"))
    write(tmp_path, "rank_0", row(0, at=now - 0.5, stage="older"))
    first, head, *lines = status.show(tmp_path).splitlines()
    assert first == f"{tmp_path}: running, step 3 of 50, 2 ranks"
    squeezed = [" ".join(line.split()) for line in (head, *lines)]
    assert squeezed == [
        "rank host roles stage step version in stage s silent s tokens/s MB doing",
        "0 node0 actor update 3 3 1.5 0.2 7 8 x",
        "1 node0 actor rollout 3 3 1.5 0.2 7 8 waits for work from rank 0",
    ]


def test_gpus_are_shown_if_a_rank_has_one(tmp_path: Path) -> None:
    """The second rank's card is not known, as on a node without NVML."""
    cards = [row(0, gpu_memory_mb=81_000, gpu_utilization=97), row(1)]
    write(tmp_path, "board", {"at": time.time(), "world": "b", "ranks": [one | {"heard_s_ago": 0.1} for one in cards]})
    _, head, *lines = status.show(tmp_path).splitlines()
    first, last = head.index("GPU MB"), head.index("doing")
    assert head[first:last].split() == ["GPU", "MB", "GPU", "%"]
    assert [line[first:last].split() for line in lines] == [["81000", "97"], []]
    write(tmp_path, "board", {"at": time.time(), "world": "b", "ranks": cards, "end": "ended by Ctrl-C at step 2"})
    assert "GPU" not in status.show(tmp_path)  # what the cards did then says nothing


def test_a_dead_run_on_a_node_without_the_board(tmp_path: Path) -> None:
    write(tmp_path, "rank_2", row(2, at=time.time() - 100, frozen="its interpreter is frozen"))
    write(tmp_path, "rank_3", row(3, at=time.time() - 101, ended=True))
    (tmp_path / "FATAL").write_text("the reason\nmore\n")
    first, fatal, _, *lines = status.show(tmp_path).splitlines()
    after = "it was killed, or its node is gone"
    assert first == f"{tmp_path}: no status for 100 s, at step 3 of 50, 2 ranks; {after}"
    assert fatal == f"{tmp_path}/FATAL: the reason"
    assert [line.split("8   ")[1] for line in lines] == ["its interpreter is frozen", "ended"]


def test_a_finished_run_with_half_a_file(tmp_path: Path) -> None:
    write(tmp_path, "rank_0", row(0, at=time.time() - 100, done=True))
    (tmp_path / "status" / "rank_1.json").write_text("{")
    assert status.show(tmp_path).splitlines()[0] == f"{tmp_path}: done after 50 of 50 steps"
    write(tmp_path, "rank_0", row(0, at=time.time(), done=True, num_steps=0))  # it only evaluated
    assert status.show(tmp_path).splitlines()[0] == f"{tmp_path}: done"


def test_an_end_that_the_board_knows(tmp_path: Path) -> None:
    """Of the newest world, and at once: a run that has ended is not shown as running."""
    ranks = [row(0, heard_s_ago=0.1), row(1, heard_s_ago=0.5)]
    end = "rank 1 failed at step 7: ValueError: no; not restarted"
    write(tmp_path, "board", {"at": time.time(), "world": "b", "ranks": ranks, "end": end})
    write(tmp_path, "rank_7", row(7, at=time.time() - 50, world="a", end="ended by Ctrl-C at step 2"))
    assert status.show(tmp_path).splitlines()[0] == f"{tmp_path}: {end}"
    assert " ".join(status.show(tmp_path).splitlines()[1].split()) == "rank host roles stage step version doing"
    (tmp_path / "FATAL").write_text("oneworld: rank 1 ...\nmore\n")
    assert status.show(tmp_path).splitlines()[:2] == [f"{tmp_path}: {end}", f"the whole report: {tmp_path}/FATAL"]


@pytest.mark.parametrize(
    ("cause", "error", "is_final", "said"),
    [
        ("interrupt", "", True, "ended by Ctrl-C at step 7"),
        ("interrupt", "step 6 is saved", True, "ended by Ctrl-C at step 7: step 6 is saved"),
        ("stopped", "step 6 is saved", False, "stopped by a signal at step 7: step 6 is saved"),
        ("terminated", "told to end by SIGTERM", False, "ended by a signal at step 7: told to end by SIGTERM"),
        ("fatal", "model.path: got 'x'", True, "ended at step 7: model.path: got 'x'; not restarted"),
        ("error", "ValueError: no\nmore", False, "rank 1 failed at step 7: ValueError: no"),
        ("error", "ValueError: no", True, "rank 1 failed at step 7: ValueError: no; not restarted"),
        ("lost", "its process ended", False, "rank 1 was lost at step 7: its process ended"),
        ("silent", "silent for 61 s", False, "rank 1 failed at step 7: silent for 61 s"),
    ],
)
def test_every_end_in_one_line(cause: Cause, error: str, is_final: bool, said: str) -> None:
    assert Report(1, "actor", "node0", "update", 7, error, "trace", cause).describe_end(is_final) == said


def test_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="there is no run with status files in runs; give the directory of a run"):
        status.main([])
    with pytest.raises(SystemExit, match="there is no directory runs/x; give the directory of a run"):
        status.main(["runs/x"])
    (tmp_path / "runs" / "y" / "status").mkdir(parents=True)
    assert status.find_run(None) == Path("runs/y")
    assert status.show(Path("runs/y")) == "runs/y: no rank has written a status yet"
