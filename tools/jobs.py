"""Start, list, follow and stop runs in the background: on this machine, on nodes over ssh, or through Slurm.

    python tools/jobs.py submit NAME [arguments]
    python tools/jobs.py submit --hosts FILE NAME [arguments]
    python tools/jobs.py submit --slurm="--nodes 4 --gpus-per-node 8" NAME [arguments]
    python tools/jobs.py list
    python tools/jobs.py status NAME
    python tools/jobs.py logs [-f] [--rank R] NAME
    python tools/jobs.py stop [--now] NAME

The arguments go to the launcher: launch/local.sh, launch/ssh.sh start or launch/slurm.sbatch. First come its options,
such as --nproc 2, then those of train.py, such as --config my.yaml actor.lr=2e-6. A job is the directory of a run,
runs/NAME, with a job.json that says what was started. --runs names another directory of runs. A job continues when the
terminal is closed. `stop` saves the last step first. The same `submit` again resumes from the newest checkpoint.
"""

import argparse
import json
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.common.files import write_atomically
from rl.report.console import print_or_exit
from tools import status
from tools.job_kinds import POLL_S, STOP_S, JobInfo, JobKind, kind_for, kind_of

RUNS = Path("runs")
TERMINAL_OPTIONS = ("--print", "--help", "--follow")


def command(runs: Path, *words: str) -> str:
    """Return the command of this tool for a person to type."""
    given = [] if runs == RUNS else ["--runs", str(runs)]
    return shlex.join(["python", "tools/jobs.py", *given, *words])


def submit(runs: Path, args: argparse.Namespace) -> None:
    run, kind = runs / args.name, kind_for(args)
    if "/" in args.name or args.name.startswith((".", "-")) or not args.name:
        raise SystemExit(
            f"got the name {args.name!r}; it is the name of a directory, without '/': --runs gives the path"
        )
    if own := [word for word in args.arguments if word.startswith(("run.dir=", "run.name="))]:
        raise SystemExit(f"got {own[0]}, but the job's name and --runs set this; leave it out")
    if other := [word for word in args.arguments if word in TERMINAL_OPTIONS]:
        raise SystemExit(f"got {other[0]}, which is for a terminal: give it to the launcher itself, in launch/")
    if args.amd and args.slurm is None:
        raise SystemExit('got --amd without --slurm="...", whose launcher it chooses; give both')
    if args.hosts and not args.hosts.is_file():
        raise SystemExit(f"--hosts {args.hosts}: there is no such file; it needs a host or user@host in each line")
    if (run / "job.json").exists() and (active := inspect(run).active):
        ended = f"; if it has ended, remove {run / 'job.json'}" if active.startswith("unknown") else ""
        raise SystemExit(
            f"{run} is {active}; stop it first, or give another name: {command(runs, 'stop', args.name)}{ended}"
        )
    write(run, start(run, kind, args.arguments) | {"submitted_at": time.time()})
    print(f"{run}: submitted; follow it with: {command(runs, 'logs', '-f', args.name)}")


def start(run: Path, kind: JobKind, arguments: list[str]) -> dict[str, Any]:
    """Start a job. If that fails, the results of an earlier submission stay unchanged."""
    is_new, fatal, aside = not run.exists(), run / "FATAL", run / "FATAL.before"
    run.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        fatal.replace(aside)
    try:
        job = kind.submit(run, arguments)
    except BaseException:
        with suppress(FileNotFoundError):
            aside.replace(fatal)
        with suppress(OSError):  # not empty
            if is_new:
                run.rmdir()
        raise
    aside.unlink(missing_ok=True)
    return job


def write(run: Path, job: dict[str, Any]) -> None:
    write_atomically(run / "job.json", json.dumps(job, indent=2))


def read(run: Path) -> dict[str, Any]:
    file = run / "job.json"
    if not file.exists():
        raise SystemExit(
            f"there is no job {run.name} in {run.parent}; {command(run.parent, 'list')} shows the jobs there"
        )
    return json.loads(file.read_text())


def inspect(run: Path) -> JobInfo:
    """Return the state of a job. The final state of a job on other nodes is saved, because they may go away."""
    job = read(run)
    if "ended" in job:
        return JobInfo(**job["ended"])
    info = kind_of(job).inspect(run, job)
    if "cluster" in job and not info.active:
        write(run, job | {"ended": vars(info)})
    return info


def state(run: Path, info: JobInfo | None = None) -> str:
    job, info = read(run), info or inspect(run)
    if info.active:
        return info.active
    if info.fatal:
        return "fatal"
    if set(info.codes) == {"0"}:
        return "done"
    rows, at = status.merge(info.statuses)
    if not info.codes and at > job["submitted_at"] and all(row["done"] for row in rows):
        return "done"
    if "stopped_at" in job:
        return "stopped"
    return f"failed ({', '.join(sorted(set(info.codes)))})" if info.codes else "ended"


def list_jobs(runs: Path) -> None:
    rows = [["name", "state", "step", "reward", "submitted"]]
    for file in sorted(runs.glob("*/job.json"), key=lambda file: read(file.parent)["submitted_at"]):
        run = file.parent
        info = inspect(run)
        reward = f"{info.metrics['reward/mean']:.3f}" if "reward/mean" in info.metrics else ""
        submitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(read(run)["submitted_at"]))
        rows.append([run.name, state(run, info), str(info.metrics.get("step", "")), reward, submitted])
    print_or_exit(status.align(rows))


def show_status(run: Path) -> None:
    job, info = read(run), inspect(run)
    shown = status.describe(run, *status.merge(info.statuses), info.fatal)
    print_or_exit(f"{run.name}: {state(run, info)}\n{shlex.join(job['command'])}\n{shown}")


def stop(run: Path, now: bool) -> None:
    job = read(run)
    if not inspect(run).active:
        print(f"{run.name}: {state(run)} already")
        return
    job |= {"stopped_at": time.time()}
    write(run, job)
    kind_of(job).stop(run, job, now)
    deadline = time.monotonic() + STOP_S
    while inspect(run).active:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{run.name} has not ended in {STOP_S:g} s; {command(run.parent, 'stop', '--now', run.name)} kills it"
            )
        time.sleep(POLL_S)
    print(f"{run.name}: {state(run)}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="directory that holds the runs")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("submit", help="start a run in the background")
    where = one.add_mutually_exclusive_group()
    where.add_argument("--hosts", type=Path, metavar="FILE", help="start it on these nodes, over ssh")
    where.add_argument(
        "--slurm", metavar="OPTIONS", help="submit it through sbatch with these options, which may be empty"
    )
    one.add_argument("--amd", action="store_true", help="with --slurm: use launch/slurm_amd.sbatch")
    one.add_argument("name", metavar="NAME")
    one.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="for the launcher and train.py")
    commands.add_parser("list", help="show all jobs, their states and steps")
    commands.add_parser("status", help="show what the ranks of a job are doing").add_argument("name", metavar="NAME")
    one = commands.add_parser("logs", help="show the console of a job")
    one.add_argument("-f", "--follow", action="store_true", help="follow it until the job ends")
    one.add_argument("--rank", type=int, metavar="R", help="only the log of this rank, in the newest attempt")
    one.add_argument("name", metavar="NAME")
    one = commands.add_parser("stop", help="save, then end a job")
    one.add_argument("--now", action="store_true", help="save nothing")
    one.add_argument("name", metavar="NAME")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.command == "list":
        list_jobs(args.runs)
    elif args.command == "submit":
        submit(args.runs, args)
    elif args.command == "status":
        show_status(args.runs / args.name)
    elif args.command == "logs":
        run = args.runs / args.name
        kind_of(read(run)).show_logs(run, read(run), args.rank, args.follow)
    else:
        stop(args.runs / args.name, args.now)


if __name__ == "__main__":
    main()
