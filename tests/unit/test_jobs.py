"""tools/jobs.py without a world: what becomes of a job's folder, and what Slurm is asked."""

import json
import os
from pathlib import Path

import pytest

from tools import jobs

SLURM = """#!/bin/bash
printf '%s\\n' "$(basename "$0")" "$@" > "$CALLS/$(basename "$0")"
case $(basename "$0") in
  sbatch) echo '77;cluster' ;;
  squeue) cat "$CALLS/state" ;;
  scancel) : > "$CALLS/state" ;;
esac
"""


def write_job(run: Path, **fields: object) -> None:
    run.mkdir(parents=True, exist_ok=True)
    jobs.write(run, {"pid": os.getpid(), "started_at": 1.0, "command": ["x"], "submitted_at": 0.0} | fields)


def test_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a"
    write_job(run)  # a process of that number lives, but it is another one
    assert jobs.state(run) == "ended" and not jobs.is_active(run)
    (run / "exit_code").write_text("1\n")
    assert jobs.state(run) == "failed (1)"
    write_job(run, stopped_at=1.0)
    assert jobs.state(run) == "stopped"
    (run / "status").mkdir()
    row = {"rank": 0, "done": True, "world": "w", "at": 5.0}
    (run / "status" / "rank_0.json").write_text(json.dumps(row))
    assert jobs.state(run) == "done"
    write_job(run, submitted_at=6.0)
    assert jobs.state(run) == "failed (1)", "what is done is an earlier submission"
    (run / "FATAL").touch()
    assert jobs.state(run) == "fatal"
    rows = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.25}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    jobs.main(["--runs", str(tmp_path), "list"])
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "state", "step", "reward", "submitted"]
    assert line.split()[:4] == ["a", "fatal", "2", "0.250"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["submit", "a/b"], "got the name 'a/b'; it is a folder's name"),
        (["submit", "a", "run.name=b"], "got run.name=b, which follows from the job's name"),
        (["status", "b"], "there is no job b in .*; tools/jobs.py list shows those that are"),
        (["submit", "--slurm", "", "a"], "there is no sbatch on this machine; submit without --slurm"),
    ],
)
def test_mistakes(arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=error):
        jobs.main(["--runs", str(tmp_path), *arguments])


def test_the_newest_attempt_is_followed(tmp_path: Path) -> None:
    for attempt in (9, 10):
        (tmp_path / "logs" / f"attempt_{attempt}").mkdir(parents=True)
        (tmp_path / "logs" / f"attempt_{attempt}" / "rank_1.log").write_text(f"attempt {attempt}\n")
    lines = jobs.new_lines(tmp_path, 1)
    assert [next(lines), next(lines)] == [b"attempt 10\n", b""]
    (tmp_path / "logs" / "attempt_11").mkdir()
    (tmp_path / "logs" / "attempt_11" / "rank_1.log").write_text("again\n")
    assert next(lines) == b"again\n"


def test_slurm_is_passed_through_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sbatch", "squeue", "scancel"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    (tmp_path / "calls").mkdir()
    (tmp_path / "calls" / "state").write_text("PENDING\n")
    runs = tmp_path / "runs"
    jobs.main(
        ["--runs", str(runs), "submit", "--slurm", "--nodes 4 -p gpu", "x", "--config", "my.yaml", "actor.lr=1e-6"]
    )
    asked = (tmp_path / "calls" / "sbatch").read_text().splitlines()
    assert asked[1:6] == ["--parsable", "--job-name", "x", "--output", str(runs.resolve() / "x" / "console.log")]
    assert asked[8:12] == ["--nodes", "4", "-p", "gpu"]
    assert asked[-1].startswith("srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c ")
    assert "train.py --config my.yaml actor.lr=1e-6 run.dir=" in asked[-1] and '--nnodes "$SLURM_NNODES"' in asked[-1]
    assert jobs.state(runs / "x") == "pending"
    jobs.main(["--runs", str(runs), "stop", "x"])
    assert (tmp_path / "calls" / "scancel").read_text().splitlines() == ["scancel", "77"]
    assert (tmp_path / "calls" / "squeue").read_text().splitlines() == ["squeue", "-h", "-o", "%T", "-j", "77"]
    assert capsys.readouterr().out.splitlines()[-1] == "x: stopped"
