"""tools/jobs.py without training: the states of a job, its directory, and the calls of Slurm and ssh."""

import json
import os
from pathlib import Path

import pytest

from tests.launcher import ROOT
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


def test_states_of_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "a"
    write_job(run)  # the process with that id is another one
    assert jobs.state(run) == "ended" and not jobs.inspect(run).active
    (run / "exit_code").write_text("1\n")
    assert jobs.state(run) == "failed (1)"
    write_job(run, stopped_at=1.0)
    assert jobs.state(run) == "stopped"
    (run / "exit_code").write_text("0\n")
    assert jobs.state(run) == "done"
    (run / "exit_code").unlink()
    (run / "status").mkdir()
    row = {"rank": 0, "done": True, "world": "w", "at": 5.0}
    (run / "status" / "rank_0.json").write_text(json.dumps(row))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\necho slurm_load_jobs error: Unable to contact controller >&2; exit 1\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    write_job(run, slurm_id="7")
    assert jobs.state(run).startswith("unknown (squeue") and jobs.inspect(run).active, "it may well run"
    (tmp_path / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2; exit 1\n")
    assert jobs.state(run) == "done", "Slurm has forgotten it, but its ranks have written their status"
    write_job(run, slurm_id="7", submitted_at=6.0)
    assert jobs.state(run) == "ended", "the status is from an earlier submission"
    (run / "FATAL").write_text("bad data\n")
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
        (["submit", "a/b"], "got the name 'a/b'; it is the name of a directory"),
        (["submit", "a", "run.name=b"], "got run.name=b, but the job's name and --runs set this"),
        (["status", "b"], "there is no job b in .*; python tools/jobs.py --runs .* list shows the jobs there"),
        (["submit", "--slurm", "", "a"], "there is no sbatch on this machine; submit without --slurm"),
        (["submit", "--amd", "a"], "got --amd without --slurm"),
        (
            ["submit", "--hosts", "none", "a"],
            "--hosts none: there is no such file; it needs a host or user@host in each",
        ),
        (["submit", "a", "--nproc", "2", "--print"], "got --print, which is for a terminal: give it to the launcher"),
    ],
)
def test_mistakes_are_refused(
    arguments: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=error):
        jobs.main(["--runs", str(tmp_path), *arguments])


def test_the_newest_attempt_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    run = tmp_path / "a"
    write_job(run)

    def begin(attempt: int) -> None:
        (run / "logs" / f"attempt_{attempt}").mkdir(parents=True)
        (run / "logs" / f"attempt_{attempt}" / "rank_1.log").write_text(f"attempt {attempt}\n")

    begin(9)
    begin(10)
    monkeypatch.setattr(jobs, "inspect", lambda run: jobs.JobInfo(active="" if attempts else "running"))
    attempts: list[int] = []

    def sleep(seconds: float) -> None:
        """Begin the next attempt while the tool waits. After it the job ends."""
        attempts.append(11)
        begin(11)

    monkeypatch.setattr(jobs.time, "sleep", sleep)
    monkeypatch.setattr(jobs, "POLL_S", 0.0)
    jobs.main(["--runs", str(tmp_path), "logs", "-f", "--rank", "1", "a"])
    assert capfdbinary.readouterr().out == b"attempt 10\nattempt 11\n"


def test_arguments_are_passed_to_slurm(
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
    assert asked[6:11] == ["--nodes", "4", "-p", "gpu", str(ROOT / "launch" / "slurm.sbatch")]
    assert asked[11:] == ["--config", "my.yaml", "actor.lr=1e-6", f"run.dir={runs.resolve()}", "run.name=x"]
    assert jobs.state(runs / "x") == "pending"
    jobs.main(["--runs", str(runs), "stop", "x"])
    assert (tmp_path / "calls" / "scancel").read_text().splitlines() == ["scancel", "77"]
    assert (tmp_path / "calls" / "squeue").read_text().splitlines() == ["squeue", "-h", "-o", "%T", "-j", "77"]
    assert capsys.readouterr().out.splitlines()[-1] == "x: stopped"


def test_a_refused_submission_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho Invalid partition >&2; exit 1\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho PREEMPTED\n")
    for name in ("sbatch", "squeue"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    runs = tmp_path / "runs"
    arguments = ["--runs", str(runs), "submit", "--slurm", "-p none"]
    with pytest.raises(SystemExit, match="Invalid partition"):
        jobs.main([*arguments, "new"])
    assert not (runs / "new").exists()
    write_job(runs / "old", slurm_id="7")
    (runs / "old" / "FATAL").write_text("bad data\n")
    before = (runs / "old" / "job.json").read_text()
    with pytest.raises(SystemExit, match="Invalid partition"):
        jobs.main([*arguments, "old"])
    assert (runs / "old" / "job.json").read_text() == before
    assert (runs / "old" / "FATAL").read_text() == "bad data\n" and jobs.state(runs / "old") == "fatal"
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 78\n")
    jobs.main([*arguments, "old"])
    assert jobs.state(runs / "old") == "ended", (
        "the new job was preempted; the fatal error of the old one no longer counts"
    )


def test_suggested_commands_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 78\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho RUNNING\n")
    for name in ("sbatch", "squeue"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    jobs.main(["--runs", "my runs", "submit", "--slurm", "", "a b"])
    assert capsys.readouterr().out.endswith(": python tools/jobs.py --runs 'my runs' logs -f 'a b'\n")
    with pytest.raises(SystemExit, match=r"is running; .* name: python tools/jobs.py --runs 'my runs' stop 'a b'$"):
        jobs.main(["--runs", "my runs", "submit", "--slurm", "", "a b"])
    jobs.main(["submit", "--slurm", "", "c"])
    assert capsys.readouterr().out.endswith(": python tools/jobs.py logs -f c\n")


# Stands for ssh: runs the commands for a host here, unless that host is away.
SSH = """#!/bin/bash
while [ "$1" != -- ]; do shift; done
shift
[ "$1" != "$(cat "$CALLS/away" 2>/dev/null)" ] || exit 255
exec bash -s
"""


def test_nodes_over_ssh_are_all_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their answers are combined. When all nodes have ended, the result is kept and no node is asked again."""
    root, runs = tmp_path / "repository", tmp_path / "runs"
    (root / "launch").mkdir(parents=True)
    for name in ("ssh.sh", "forward.sh", "check_numbers.sh", "secret.sh"):
        (root / "launch" / name).write_bytes((ROOT / "launch" / name).read_bytes())
    (root / "launch" / "run_node.sh").write_text('#!/bin/bash\nsleep 20 & trap "kill $!; exit 143" TERM; wait\n')
    (root / "launch" / "run_node.sh").chmod(0o755)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setattr(jobs, "SSH", ["bash", str(root / "launch" / "ssh.sh")])
    monkeypatch.setenv("ONEWORLD_SSH", str(tmp_path / "ssh"))
    monkeypatch.setenv("CALLS", str(tmp_path))
    (tmp_path / "hosts").write_text("alpha\nbeta\n")
    arguments = ["--runs", str(runs)]
    jobs.main([*arguments, "submit", "--hosts", str(tmp_path / "hosts"), "x", "--nproc", "2", "actor.lr=1e-6"])
    run = runs / "x"
    command = json.loads((run / "job.json").read_text())["command"]
    assert command[1:5] == [str(root / "launch" / "ssh.sh"), "start", "x", "--hosts"]
    assert command[6:] == ["--nproc", "2", "actor.lr=1e-6", f"run.dir={runs}", "run.name=x"]
    (run / "status").mkdir()
    for rank in range(2):
        row = {"rank": rank, "done": False, "world": "w", "at": 5.0, "step": 3}
        row |= {"waits_for": "", "item": "", "frozen": ""}
        (run / "status" / f"rank_{rank}.json").write_text(json.dumps(row))
    (run / "metrics.jsonl").write_text('{"step": 3, "reward/mean": 0.5}\n')
    assert jobs.state(run) == "running"
    with pytest.raises(SystemExit, match=r"is running; stop it first"):
        jobs.main([*arguments, "submit", "x"])
    (tmp_path / "away").write_text("beta")
    assert jobs.state(run) == "running on 1 of 2"
    (tmp_path / "away").unlink()
    capsys.readouterr()
    jobs.main([*arguments, "status", "x"])
    assert "step 3, 2 ranks" in capsys.readouterr().out
    jobs.main([*arguments, "stop", "x"])
    assert capsys.readouterr().out == "x: stopped\n"
    monkeypatch.setenv("ONEWORLD_SSH", "false")
    jobs.main([*arguments, "list"])
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["x", "stopped", "3", "0.500"]


def test_a_cluster_without_files_does_not_hide_the_other_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path / "gone", cluster="no-such-cluster-of-a-test", folder="runs/gone")
    write_job(tmp_path / "other", submitted_at=1.0)
    jobs.main(["--runs", str(tmp_path), "list"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["gone", "unknown"], ["other", "ended"]]
    assert "(oneworld: no cluster no-such-cluster-of-a-test; " in lines[1]
    with pytest.raises(SystemExit, match=r"gone is unknown .*; if it has ended, remove .*gone/job.json"):
        jobs.main(["--runs", str(tmp_path), "submit", "gone"])
