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
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.common.files import write_atomically
from rl.config.schema import ROOT
from rl.report.printing import print_and_go_on, print_or_exit
from tools import status

LAUNCH = ROOT / "launch"
SSH = ["bash", str(LAUNCH / "ssh.sh")]
RUNS = Path("runs")
STOP_S = 60.0  # torchrun kills ranks 30 s after it has been told to end
POLL_S = 0.2
SLURM_POLL_S = 3.0  # many users ask the same controller
# The launcher forwards signals. This shell survives them to record the launcher's exit code.
LOCAL_SHELL = 'trap : TERM INT HUP; "$@"; echo $? > "$EXIT_FILE"'
ENDED = re.compile("completed|cancelled|failed|timeout|preempted|node_fail|out_of_memory|boot_fail|deadline")
# A script for a node. It prints one line for each file in the run's directory that describes the run's state.
FILES = """cd {run} 2>/dev/null || exit 0
for file in status/*.json FATAL; do
  if [ -e "$file" ]; then printf '%s\\t%s\\n' "$file" "$(tr '\\n' ' ' <"$file")"; fi
done
if [ -s metrics.jsonl ]; then printf 'metrics\\t%s\\n' "$(tail -n 1 metrics.jsonl)"; fi"""


@dataclass
class JobInfo:
    active: str = ""  # a description while the job runs, empty after its end
    codes: list[str] = field(default_factory=list)  # exit codes of its launchers
    statuses: list[str] = field(default_factory=list)  # contents of the run's status files
    fatal: str = ""  # content of the run's FATAL file
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last step


def environment(**extra: str) -> dict[str, str]:
    """Return an environment in which a launcher finds the torchrun of this Python."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | extra


def call_slurm(*command: str) -> str:
    """Return the output of a command of Slurm, or exit with its error."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment()).stdout
    except FileNotFoundError:
        remedy = "submit without --slurm, or on a login node"
        raise SystemExit(f"there is no {command[0]} on this machine; {remedy}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{shlex.join(command[:3])} ...: {(error.stderr or error.stdout).strip()}") from None


class LocalJob:
    def submit(self, run: Path, args: argparse.Namespace) -> dict[str, Any]:
        """Start the job. Return what job.json must keep to find it again."""
        command = ["bash", str(LAUNCH / "local.sh"), *args.arguments]
        command += [f"run.dir={run.parent.resolve()}", f"run.name={run.name}"]
        (run / "exit_code").unlink(missing_ok=True)
        with (run / "console.log").open("ab") as console:
            shell = ["bash", "-c", LOCAL_SHELL, "oneworld", *command]
            env = environment(EXIT_FILE=str((run / "exit_code").resolve()))
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(shell, env=env, start_new_session=True, **streams)
        return {"pid": process.pid, "started_at": psutil.Process(process.pid).create_time(), "command": command}

    def inspect(self, run: Path, job: dict[str, Any]) -> JobInfo:
        info = JobInfo()
        with suppress(psutil.Error):
            process = psutil.Process(job["pid"])
            # The process id may belong to another process by now.
            if process.create_time() == job["started_at"] and process.status() != psutil.STATUS_ZOMBIE:
                info.active = "running"
        with suppress(OSError):
            info.codes = (run / "exit_code").read_text().split()
        return info

    def stop(self, job: dict[str, Any], now: bool) -> None:
        """Tell the job to end: after saving, or with `now` at once."""
        with suppress(ProcessLookupError):
            os.killpg(job["pid"], signal.SIGKILL if now else signal.SIGTERM)  # its session is a process group too


class SlurmJob:
    def submit(self, run: Path, args: argparse.Namespace) -> dict[str, Any]:
        command = ["sbatch", "--parsable", "--job-name", run.name, "--output", str((run / "console.log").resolve())]
        launcher = LAUNCH / ("slurm_amd.sbatch" if args.amd else "slurm.sbatch")
        command += [*shlex.split(args.slurm), str(launcher), *args.arguments]
        command += [f"run.dir={run.parent.resolve()}", f"run.name={run.name}"]
        return {"slurm_id": call_slurm(*command).strip().split(";")[0], "command": command}

    def inspect(self, run: Path, job: dict[str, Any]) -> JobInfo:
        """Ask squeue, which soon forgets jobs that have ended. If it cannot answer, the job may still run."""
        try:
            state = call_slurm("squeue", "-h", "-o", "%T", "-j", job["slurm_id"]).strip().lower()
        except SystemExit as error:
            state = "" if "Invalid job id" in str(error) else f"unknown ({error})"
        return JobInfo(active="" if ENDED.fullmatch(state) else state)

    def stop(self, job: dict[str, Any], now: bool) -> None:
        if now:  # kill the batch script too, so that it asks for no requeue
            call_slurm("scancel", "--signal=KILL", "--full", job["slurm_id"])
        call_slurm("scancel", job["slurm_id"])


class SshJob:
    """A job that launch/ssh.sh runs. All nodes are asked, because each may have its own run directory."""

    def submit(self, run: Path, args: argparse.Namespace) -> dict[str, Any]:
        runs = run.parent.resolve()
        if runs.is_relative_to(ROOT):  # the repository may lie elsewhere on the nodes
            runs = runs.relative_to(ROOT)
        command = [*SSH, "start", run.name, "--hosts", str(args.hosts.resolve()), *args.arguments]
        command += [f"run.dir={runs}", f"run.name={run.name}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:  # it has printed what went wrong
            raise SystemExit(f"{run.name} was not started")
        return {"cluster": run.name, "folder": str(runs / run.name), "command": command}

    def inspect(self, run: Path, job: dict[str, Any]) -> JobInfo:
        try:
            states = dict(self.ask("status", job["cluster"]))
        except SystemExit as error:  # its files in runs/.clusters are gone, but the nodes may run
            return JobInfo(active=f"unknown ({error})")
        info = JobInfo(codes=re.findall(r"ended with status (\d+)", " ".join(states.values())))
        info.codes += ["lost" for text in states.values() if text == "was lost"]
        num_running = sum(text.startswith("runs") for text in states.values())
        away = [node.split()[1] for node, text in states.items() if text == "cannot be reached"]
        if num_running:
            info.active = "running" + (f" on {num_running} of {len(states)}" if num_running < len(states) else "")
        elif away:
            info.active = f"unreachable ({', '.join(away)})"
        for _, text in self.ask("run", job["cluster"], FILES.format(run=shlex.quote(job["folder"]))):
            name, _, content = text.partition("\t")
            if name == "FATAL":
                info.fatal = content
            elif name == "metrics":
                with suppress(ValueError):  # half written
                    info.metrics = max(info.metrics, json.loads(content), key=lambda row: row.get("step", -1))
            elif name.startswith("status/"):
                info.statuses.append(content)
        return info

    def stop(self, job: dict[str, Any], now: bool) -> None:
        env = environment(ONEWORLD_STOP_S="0") if now else environment()
        if subprocess.run([*SSH, "stop", job["cluster"]], env=env, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"some nodes could not be stopped; see: launch/ssh.sh status {job['cluster']}")

    def show_logs(self, job: dict[str, Any], rank: int | None, follow: bool) -> NoReturn:
        """Replace this process by the launcher, which then handles Ctrl-C itself."""
        words = ["follow", job["cluster"]] if follow else ["run", job["cluster"], 'cat "$node.log"']
        if rank is not None:
            find = f"ls -d {shlex.quote(job['folder'])}/logs/attempt_*/rank_{rank}.log 2>/dev/null; true"
            logs = self.ask("run", job["cluster"], find)
            if not logs:
                raise SystemExit(f"no node of {job['cluster']} has a log of rank {rank} yet")
            node, path = max(logs, key=lambda log: attempt_of(Path(log[1])))
            path = shlex.quote(path)
            show = f'if lives; then tail -n +1 --pid "$pid" -F {path}; else cat {path}; fi' if follow else f"cat {path}"
            words = ["run", job["cluster"], "--node", node.split()[0], show]
        sys.stdout.flush()
        os.execvp(SSH[0], [*SSH, *words])

    def ask(self, *words: str) -> list[tuple[str, str]]:
        """Return the lines of all nodes, each with the number and host of its node."""
        done = subprocess.run([*SSH, *words], capture_output=True, text=True)
        if done.returncode and not done.stdout:
            raise SystemExit(done.stderr.strip() or f"launch/ssh.sh {words[0]} ended with status {done.returncode}")
        return re.findall(r"^\[(.*?)\] (.*)$", done.stdout, re.MULTILINE)


def kind_of(job: dict[str, Any]) -> LocalJob | SlurmJob | SshJob:
    return SlurmJob() if "slurm_id" in job else SshJob() if "cluster" in job else LocalJob()


def command(runs: Path, *words: str) -> str:
    """Return the command of this tool for a person to type."""
    given = [] if runs == RUNS else ["--runs", str(runs)]
    return shlex.join(["python", "tools/jobs.py", *given, *words])


def submit(args: argparse.Namespace) -> None:
    run, name = args.run, args.name
    if "/" in name or name.startswith((".", "-")) or not name:
        raise SystemExit(f"got the name {name!r}; it is the name of a directory, without '/': --runs gives the path")
    if own := [word for word in args.arguments if word.startswith(("run.dir=", "run.name="))]:
        raise SystemExit(f"got {own[0]}, but the job's name and --runs set this; leave it out")
    if other := [word for word in args.arguments if word in ("--print", "--help", "--follow")]:
        raise SystemExit(f"got {other[0]}, which is for a terminal: give it to the launcher itself, in launch/")
    if args.amd and args.slurm is None:
        raise SystemExit('got --amd without --slurm="...", whose launcher it chooses; give both')
    if args.hosts and not args.hosts.is_file():
        raise SystemExit(f"--hosts {args.hosts}: there is no such file; it needs a host or user@host in each line")
    if (run / "job.json").exists() and (active := inspect(run).active):
        ended = f"; if it has ended, remove {run / 'job.json'}" if active.startswith("unknown") else ""
        remedy = f"stop it first, or give another name: {command(args.runs, 'stop', name)}"
        raise SystemExit(f"{run} is {active}; {remedy}{ended}")
    write(run, start(run, args) | {"submitted_at": time.time()})
    print_and_go_on(f"{run}: submitted; follow it with: {command(args.runs, 'logs', '-f', name)}")


def start(run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Start a job. If that fails, the results of an earlier submission stay unchanged."""
    kind = SlurmJob() if args.slurm is not None else SshJob() if args.hosts else LocalJob()
    fatal, aside = run / "FATAL", run / "FATAL.before"
    run.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        fatal.replace(aside)
    try:
        job = kind.submit(run, args)
    except BaseException:
        with suppress(FileNotFoundError):
            aside.replace(fatal)
        with suppress(OSError):  # not empty
            run.rmdir()
        raise
    aside.unlink(missing_ok=True)
    return job


def write(run: Path, job: dict[str, Any]) -> None:
    write_atomically(run / "job.json", json.dumps(job, indent=2))


def read(run: Path) -> dict[str, Any]:
    if not (run / "job.json").exists():
        listing = command(run.parent, "list")
        raise SystemExit(f"there is no job {run.name} in {run.parent}; {listing} shows the jobs there")
    return json.loads((run / "job.json").read_text())


def inspect(run: Path) -> JobInfo:
    """Return the state of a job. The final state of a job on other nodes is saved, because they may go away."""
    job = read(run)
    if "ended" in job:
        return JobInfo(**job["ended"])
    info = kind_of(job).inspect(run, job)
    if "cluster" in job:
        if not info.active:
            write(run, job | {"ended": vars(info)})
        return info
    info.statuses = [path.read_text() for path in sorted(run.glob("status/*.json"))]
    with suppress(OSError):
        info.fatal = (run / "FATAL").read_text()
    with suppress(OSError, ValueError, IndexError):
        info.metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return info


def state(run: Path, info: JobInfo | None = None) -> str:
    job, info = read(run), info or inspect(run)
    if info.active:
        return info.active
    if info.fatal:
        return "fatal"
    if set(info.codes) == {"0"}:
        return "done"
    found = status.merge(info.statuses)
    if not info.codes and found.at > job["submitted_at"] and all(row["done"] for row in found.rows):
        return "done"
    if "stopped_at" in job:
        return "stopped"
    return f"failed ({', '.join(sorted(set(info.codes)))})" if info.codes else "ended"


def list_jobs(args: argparse.Namespace) -> None:
    rows = [["name", "state", "step", "reward", "submitted"]]
    submitted_at = {file.parent: read(file.parent)["submitted_at"] for file in args.runs.glob("*/job.json")}
    for run in sorted(submitted_at, key=submitted_at.__getitem__):
        info = inspect(run)
        reward = f"{info.metrics['reward/mean']:.3f}" if "reward/mean" in info.metrics else ""
        submitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(submitted_at[run]))
        rows.append([run.name, state(run, info), str(info.metrics.get("step", "")), reward, submitted])
    print_or_exit(status.align(rows))


def show_status(args: argparse.Namespace) -> None:
    run, job, info = args.run, read(args.run), inspect(args.run)
    shown = status.describe(run, status.merge(info.statuses), info.fatal)
    print_or_exit(f"{run.name}: {state(run, info)}\n{shlex.join(job['command'])}\n{shown}")


def attempt_of(log: Path) -> int:
    return int(log.parent.name.removeprefix("attempt_"))


def log_of(run: Path, rank: int | None) -> Path:
    """Return the console log, or the log of one rank in the newest attempt."""
    if rank is None:
        return run / "console.log"
    return max(run.glob(f"logs/attempt_*/rank_{rank}.log"), key=attempt_of, default=run / "logs")


def show_logs(args: argparse.Namespace) -> None:
    run, rank, job = args.run, args.rank, read(args.run)
    if "cluster" in job:
        SshJob().show_logs(job, rank, args.follow)
    if not args.follow and not log_of(run, rank).is_file():
        raise SystemExit(f"{run} has no log{'' if rank is None else f' of rank {rank}'} yet")
    path, position, is_over, inspect_at = Path(), 0, not args.follow, 0.0
    with suppress(KeyboardInterrupt):
        while True:
            if (now := log_of(run, rank)) != path:  # a new attempt has begun
                path, position = now, 0
            part = b""
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(position)
                    part = file.read(1 << 20)
            position += len(part)
            print_or_exit(part)
            if not part and is_over:
                return
            if not part and time.monotonic() >= inspect_at:
                is_over = not inspect(run).active  # then read once more: it may have written since
                inspect_at = time.monotonic() + (SLURM_POLL_S if "slurm_id" in job else POLL_S)
            if not part and not is_over:
                time.sleep(POLL_S)


def stop(args: argparse.Namespace) -> None:
    run, job = args.run, read(args.run)
    if not inspect(run).active:
        print_and_go_on(f"{run.name}: {state(run)} already")
        return
    write(run, job | {"stopped_at": time.time()})
    kind_of(job).stop(job, args.now)
    deadline = time.monotonic() + STOP_S
    while inspect(run).active:
        if time.monotonic() > deadline:
            kill = command(args.runs, "stop", "--now", run.name)
            raise SystemExit(f"{run.name} has not ended in {STOP_S:g} s; {kill} kills it")
        time.sleep(POLL_S)
    print_and_go_on(f"{run.name}: {state(run)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="directory that holds the runs")
    commands = parser.add_subparsers(dest="command", required=True)
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("name", metavar="NAME")
    one = commands.add_parser("submit", parents=[named], help="start a run in the background")
    where = one.add_mutually_exclusive_group()
    where.add_argument("--hosts", type=Path, metavar="FILE", help="start it on these nodes, over ssh")
    what = "submit it through sbatch with these options, which may be empty"
    where.add_argument("--slurm", metavar="OPTIONS", help=what)
    one.add_argument("--amd", action="store_true", help="with --slurm: use launch/slurm_amd.sbatch")
    one.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="for the launcher and train.py")
    commands.add_parser("list", help="show all jobs, their states and steps")
    commands.add_parser("status", parents=[named], help="show what the ranks of a job are doing")
    one = commands.add_parser("logs", parents=[named], help="show the console of a job")
    one.add_argument("-f", "--follow", action="store_true", help="follow it until the job ends")
    one.add_argument("--rank", type=int, metavar="R", help="only the log of this rank, in the newest attempt")
    one = commands.add_parser("stop", parents=[named], help="save, then end a job")
    one.add_argument("--now", action="store_true", help="save nothing")
    args = parser.parse_args(arguments)
    args.run = args.runs / getattr(args, "name", "")
    act = {"submit": submit, "list": list_jobs, "status": show_status, "logs": show_logs, "stop": stop}[args.command]
    act(args)


if __name__ == "__main__":
    main()
