"""The kinds of jobs that tools/jobs.py knows: on this machine, on nodes over ssh, and under Slurm.

Each kind starts a launcher of launch/, which builds the torchrun command, and inspects the job later.
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
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rl.report.console import print_or_exit

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
STOP_S = 60.0  # torchrun kills ranks 30 s after it has been told to end
POLL_S = 0.2
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
    """The state of a job."""

    active: str = ""  # a description while the job runs, empty after its end
    codes: list[str] = field(default_factory=list)  # exit codes of its launchers
    statuses: list[str] = field(default_factory=list)  # contents of the run's status files
    fatal: str = ""  # content of the run's FATAL file
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last step


def environment(**extra: str) -> dict[str, str]:
    """Return an environment in which a launcher finds the torchrun of this Python."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | extra


def call(command: list[str], remedy: str) -> str:
    """Return the output of a command, or exit with its error."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment()).stdout
    except FileNotFoundError:
        raise SystemExit(f"there is no {command[0]} on this machine; {remedy}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{shlex.join(command[:3])} ...: {(error.stderr or error.stdout).strip()}") from None


class JobKind(ABC):
    """How to start, inspect, show and stop a job. `job` is the content of its job.json.

    The default methods read the run's directory, which must be visible from this machine.
    """

    INSPECT_S: float  # between two inspections of a job whose log is followed

    @abstractmethod
    def submit(self, run: Path, arguments: list[str]) -> dict[str, Any]:
        """Start the job. Return what job.json must keep to find it again."""

    @abstractmethod
    def inspect(self, run: Path, job: dict[str, Any]) -> JobInfo: ...

    @abstractmethod
    def stop(self, run: Path, job: dict[str, Any], now: bool) -> None:
        """Tell the job to end: after saving, or with `now` at once."""

    def read_files(self, run: Path, info: JobInfo) -> JobInfo:
        for path in sorted(run.glob("status/*.json")):
            info.statuses.append(path.read_text())
        with suppress(OSError):
            info.fatal = (run / "FATAL").read_text()
        with suppress(OSError, ValueError, IndexError):
            info.metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        return info

    def show_logs(self, run: Path, job: dict[str, Any], rank: int | None, follow: bool) -> None:
        if not follow and not log_of(run, rank).is_file():
            raise SystemExit(f"{run} has no log{'' if rank is None else f' of rank {rank}'} yet")
        is_over, inspect_at = False, 0.0
        with suppress(KeyboardInterrupt):
            for part in new_lines(run, rank):
                print_or_exit(part)
                if not part and (is_over or not follow):
                    return
                if not part and time.monotonic() >= inspect_at:
                    is_over = not self.inspect(run, job).active  # then read once more: it may have written since
                    inspect_at = time.monotonic() + self.INSPECT_S
                if not part and not is_over:
                    time.sleep(POLL_S)


def log_of(run: Path, rank: int | None) -> Path:
    """Return the console log, or the log of one rank in the newest attempt."""
    if rank is None:
        return run / "console.log"
    logs = list(run.glob(f"logs/attempt_*/rank_{rank}.log"))
    return max(logs, key=lambda log: int(log.parent.name.removeprefix("attempt_")), default=run / "logs")


def new_lines(run: Path, rank: int | None) -> Iterator[bytes]:
    """Yield the content of the log, then what is added to it. Yield an empty part if nothing was added."""
    path, position = Path(), 0
    while True:
        if (now := log_of(run, rank)) != path:  # a new attempt has begun
            path, position = now, 0
        part = b""
        if path.is_file():
            with path.open("rb") as file:
                file.seek(position)
                part = file.read(1 << 20)
        position += len(part)
        yield part


class LocalJob(JobKind):
    INSPECT_S = POLL_S

    def submit(self, run: Path, arguments: list[str]) -> dict[str, Any]:
        command = ["bash", str(LAUNCH / "local.sh"), *arguments, f"run.dir={run.parent.resolve()}"]
        command.append(f"run.name={run.name}")
        (run / "exit_code").unlink(missing_ok=True)
        with (run / "console.log").open("ab") as console:
            process = subprocess.Popen(
                ["bash", "-c", LOCAL_SHELL, "oneworld", *command],
                env=environment(EXIT_FILE=str((run / "exit_code").resolve())),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
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
        return self.read_files(run, info)

    def stop(self, run: Path, job: dict[str, Any], now: bool) -> None:
        with suppress(ProcessLookupError):
            os.killpg(job["pid"], signal.SIGKILL if now else signal.SIGTERM)  # its session is a process group too


class SlurmJob(JobKind):
    INSPECT_S = 3.0  # many users ask the same controller
    REMEDY = "submit without --slurm, or on a login node"

    def __init__(self, options: str = "", launcher: str = "slurm.sbatch"):
        self._options, self._launcher = options, launcher

    def submit(self, run: Path, arguments: list[str]) -> dict[str, Any]:
        command = ["sbatch", "--parsable", "--job-name", run.name, "--output", str((run / "console.log").resolve())]
        command += [*shlex.split(self._options), str(LAUNCH / self._launcher), *arguments]
        command += [f"run.dir={run.parent.resolve()}", f"run.name={run.name}"]
        return {"slurm_id": call(command, self.REMEDY).strip().split(";")[0], "command": command}

    def inspect(self, run: Path, job: dict[str, Any]) -> JobInfo:
        """Ask squeue, which soon forgets jobs that have ended. If it cannot answer, the job may still run."""
        try:
            state = call(["squeue", "-h", "-o", "%T", "-j", job["slurm_id"]], self.REMEDY).strip().lower()
        except SystemExit as error:
            state = "" if "Invalid job id" in str(error) else f"unknown ({error})"
        return self.read_files(run, JobInfo(active="" if ENDED.fullmatch(state) else state))

    def stop(self, run: Path, job: dict[str, Any], now: bool) -> None:
        if now:  # kill the batch script too, so that it asks for no requeue
            call(["scancel", "--signal=KILL", "--full", job["slurm_id"]], self.REMEDY)
        call(["scancel", job["slurm_id"]], self.REMEDY)


class SshJob(JobKind):
    """A job that launch/ssh.sh runs. All nodes are asked, because each may have its own run directory."""

    def __init__(self, hosts: Path | None = None):
        self._hosts = hosts

    def submit(self, run: Path, arguments: list[str]) -> dict[str, Any]:
        runs = run.parent.resolve()
        if runs.is_relative_to(ROOT):  # the repository may lie elsewhere on the nodes
            runs = runs.relative_to(ROOT)
        command = [*self._launcher("start", run.name), "--hosts", str(Path(self._hosts or "").resolve()), *arguments]
        command += [f"run.dir={runs}", f"run.name={run.name}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:  # it has printed what went wrong
            raise SystemExit(f"{run.name} was not started")
        return {"cluster": run.name, "folder": str(runs / run.name), "command": command}

    def inspect(self, run: Path, job: dict[str, Any]) -> JobInfo:
        try:
            states = dict(self._ask("status", job["cluster"]))
        except SystemExit as error:  # its files in runs/.clusters are gone, but the nodes may run
            return JobInfo(active=f"unknown ({error})")
        info = JobInfo(codes=re.findall(r"ended with status (\d+)", " ".join(states.values())))
        running = [node for node, text in states.items() if text.startswith("runs")]
        away = [node for node, text in states.items() if text == "cannot be reached"]
        if running:
            info.active = "running" + (f" on {len(running)} of {len(states)}" if len(running) < len(states) else "")
        elif away:
            info.active = f"unreachable ({', '.join(node.split()[1] for node in away)})"
        info.codes += ["lost" for text in states.values() if text == "was lost"]
        for _, text in self._ask("run", job["cluster"], FILES.format(run=shlex.quote(job["folder"]))):
            name, _, content = text.partition("\t")
            if name == "FATAL":
                info.fatal = content
            elif name == "metrics":
                with suppress(ValueError):  # half written
                    info.metrics = max(info.metrics, json.loads(content), key=lambda row: row.get("step", -1))
            elif name.startswith("status/"):
                info.statuses.append(content)
        return info

    def show_logs(self, run: Path, job: dict[str, Any], rank: int | None, follow: bool) -> None:
        if rank is None:
            what = ["follow", job["cluster"]] if follow else ["run", job["cluster"], 'cat "$node.log"']
            self._become(*what)
        find = f"ls -d {shlex.quote(job['folder'])}/logs/attempt_*/rank_{rank}.log 2>/dev/null; true"
        logs = [(node.split()[0], text) for node, text in self._ask("run", job["cluster"], find)]
        found = [(int(text.split("/")[-2].removeprefix("attempt_")), node, text) for node, text in logs]
        if not found:
            raise SystemExit(f"no node of {job['cluster']} has a log of rank {rank} yet")
        _, node, path = max(found, key=lambda entry: entry[0])
        path = shlex.quote(path)
        show = f'if lives; then tail -n +1 --pid "$pid" -F {path}; else cat {path}; fi' if follow else f"cat {path}"
        self._become("run", job["cluster"], "--node", node, show)

    def stop(self, run: Path, job: dict[str, Any], now: bool) -> None:
        extra = {"ONEWORLD_STOP_S": "0"} if now else {}
        command = self._launcher("stop", job["cluster"])
        if subprocess.run(command, env=environment(**extra), stdout=subprocess.DEVNULL).returncode:
            raise SystemExit(f"some nodes could not be stopped; see: launch/ssh.sh status {job['cluster']}")

    def _launcher(self, *words: str) -> list[str]:
        return ["bash", str(LAUNCH / "ssh.sh"), *words]

    def _ask(self, *words: str) -> Iterable[tuple[str, str]]:
        """Return the lines of all nodes, each with the number and host of its node."""
        done = subprocess.run(self._launcher(*words), capture_output=True, text=True)
        if done.returncode and not done.stdout:
            raise SystemExit(done.stderr.strip() or f"launch/ssh.sh {words[0]} ended with status {done.returncode}")
        return re.findall(r"^\[(.*?)\] (.*)$", done.stdout, re.MULTILINE)

    def _become(self, *words: str) -> None:
        """Replace this process by the launcher, which then handles Ctrl-C itself."""
        sys.stdout.flush()
        command = self._launcher(*words)
        os.execvp(command[0], command)


def kind_of(job: dict[str, Any]) -> JobKind:
    """Return the kind of a job that was submitted."""
    if "slurm_id" in job:
        return SlurmJob()
    return SshJob() if "cluster" in job else LocalJob()


def kind_for(args: argparse.Namespace) -> JobKind:
    """Return the kind that the arguments of `submit` ask for."""
    if args.slurm is not None:
        return SlurmJob(args.slurm, "slurm_amd.sbatch" if args.amd else "slurm.sbatch")
    return SshJob(args.hosts) if args.hosts else LocalJob()
