"""Where a job of tools/jobs.py runs: on this machine, on nodes over ssh, or under Slurm. Each kind starts its launcher
in launch/, which makes the torchrun line, and asks what became of it."""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from rl.report.console import print_or_exit

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
STOP_S = 60.0  # torchrun kills ranks 30 s after it has been told to end
POLL_S = 0.2
# The launcher passes a signal on; this shell stays to write down how that ended.
LOCAL = 'trap : TERM INT HUP; "$@"; echo $? > "$EXIT_FILE"'
ENDED = (
    "completed",
    "cancelled",
    "failed",
    "timeout",
    "preempted",
    "node_fail",
    "out_of_memory",
    "boot_fail",
    "deadline",
)
# On a node, of a run's folder: a line for each file that tells of it.
FILES = """cd {run} 2>/dev/null || exit 0
for file in status/*.json FATAL; do
  if [ -e "$file" ]; then printf '%s\\t%s\\n' "$file" "$(tr '\\n' ' ' <"$file")"; fi
done
if [ -s metrics.jsonl ]; then printf 'metrics\\t%s\\n' "$(tail -n 1 metrics.jsonl)"; fi"""


@dataclass
class Look:
    """What is known of a job."""

    active: str = ""  # how it lives; empty where it has ended
    codes: list[str] = field(default_factory=list)  # with which its launchers ended
    statuses: list[str] = field(default_factory=list)  # the texts of the run's status files
    fatal: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last step


class Kind(Protocol):
    def submit(self, run: Path, arguments: list[str]) -> dict[str, Any]: ...

    def look(self, run: Path, job: dict[str, Any]) -> Look: ...

    def show_logs(self, run: Path, job: dict[str, Any], rank: int | None, follow: bool) -> None: ...

    def stop(self, run: Path, job: dict[str, Any], now: bool) -> None: ...


def kind_of(job: dict[str, Any]) -> Kind:
    if "slurm_id" in job:
        return Slurm()
    return Ssh() if "cluster" in job else Local()


def kind_for(args: argparse.Namespace) -> Kind:
    if args.slurm is not None:
        return Slurm(args.slurm, "slurm_amd.sbatch" if args.amd else "slurm.sbatch")
    return Ssh(args.hosts) if args.hosts else Local()


def environment(**extra: str) -> dict[str, str]:
    """In which a launcher finds this Python's torchrun."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | extra


def call(command: list[str], remedy: str) -> str:
    """What a program of the system answers."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment()).stdout
    except FileNotFoundError:
        raise SystemExit(f"there is no {command[0]} on this machine; {remedy}") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{shlex.join(command[:3])} ...: {(error.stderr or error.stdout).strip()}") from None


class OnDisk:
    """A run whose folder is seen from here, with its console in it."""

    LOOK_S: float  # between two questions whether a job that is followed has ended

    def look(self, run: Path, job: dict[str, Any]) -> Look:
        raise NotImplementedError

    def read_files(self, run: Path, look: Look) -> Look:
        for path in sorted(run.glob("status/*.json")):
            look.statuses.append(path.read_text())
        with suppress(OSError):
            look.fatal = (run / "FATAL").read_text()
        with suppress(OSError, ValueError, IndexError):
            look.metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        return look

    def show_logs(self, run: Path, job: dict[str, Any], rank: int | None, follow: bool) -> None:
        if not follow and not log_of(run, rank).is_file():
            raise SystemExit(f"{run} has no log{'' if rank is None else f' of rank {rank}'} yet")
        is_over, look_at = False, 0.0
        with suppress(KeyboardInterrupt):
            for part in new_lines(run, rank):
                print_or_exit(part)
                if not part and (is_over or not follow):
                    return
                if not part and time.monotonic() >= look_at:
                    is_over = not self.look(run, job).active  # and then once more: it may have written since
                    look_at = time.monotonic() + self.LOOK_S
                if not part and not is_over:
                    time.sleep(POLL_S)


def log_of(run: Path, rank: int | None) -> Path:
    """The console, or what one rank wrote in the newest attempt."""
    if rank is None:
        return run / "console.log"
    logs = list(run.glob(f"logs/attempt_*/rank_{rank}.log"))
    return max(logs, key=lambda log: int(log.parent.name.removeprefix("attempt_")), default=run / "logs")


def new_lines(run: Path, rank: int | None) -> Iterator[bytes]:
    """What there is, then what comes: empty where nothing has."""
    path, position = Path(), 0
    while True:
        if (now := log_of(run, rank)) != path:  # of a new attempt
            path, position = now, 0
        part = b""
        if path.is_file():
            with path.open("rb") as file:
                file.seek(position)
                part = file.read(1 << 20)
        position += len(part)
        yield part


class Local(OnDisk):
    LOOK_S = POLL_S

    def submit(self, run: Path, arguments: list[str]) -> dict[str, Any]:
        command = ["bash", str(LAUNCH / "local.sh"), *arguments, f"run.dir={run.parent.resolve()}"]
        command.append(f"run.name={run.name}")
        (run / "exit_code").unlink(missing_ok=True)
        with (run / "console.log").open("ab") as console:
            process = subprocess.Popen(
                ["bash", "-c", LOCAL, "oneworld", *command],
                env=environment(EXIT_FILE=str((run / "exit_code").resolve())),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return {"pid": process.pid, "started_at": psutil.Process(process.pid).create_time(), "command": command}

    def look(self, run: Path, job: dict[str, Any]) -> Look:
        look = Look()
        with suppress(psutil.Error):  # its number may be another process's now
            process = psutil.Process(job["pid"])
            if process.create_time() == job["started_at"] and process.status() != psutil.STATUS_ZOMBIE:
                look.active = "running"
        with suppress(OSError):
            look.codes = (run / "exit_code").read_text().split()
        return self.read_files(run, look)

    def stop(self, run: Path, job: dict[str, Any], now: bool) -> None:
        with suppress(ProcessLookupError):
            os.killpg(job["pid"], signal.SIGKILL if now else signal.SIGTERM)  # a session, and so a group, of its own


class Slurm(OnDisk):
    LOOK_S = 3.0  # between questions to a controller that many ask
    REMEDY = "submit without --slurm, or on a login node"

    def __init__(self, options: str = "", launcher: str = "slurm.sbatch"):
        self._options, self._launcher = options, launcher

    def submit(self, run: Path, arguments: list[str]) -> dict[str, Any]:
        command = ["sbatch", "--parsable", "--job-name", run.name, "--output", str((run / "console.log").resolve())]
        command += [*shlex.split(self._options), str(LAUNCH / self._launcher), *arguments]
        command += [f"run.dir={run.parent.resolve()}", f"run.name={run.name}"]
        return {"slurm_id": call(command, self.REMEDY).strip().split(";")[0], "command": command}

    def look(self, run: Path, job: dict[str, Any]) -> Look:
        """As squeue tells it, which soon forgets jobs that have ended; while it tells nothing the job may run."""
        try:
            state = call(["squeue", "-h", "-o", "%T", "-j", job["slurm_id"]], self.REMEDY).strip().lower()
        except SystemExit as error:
            state = "" if "Invalid job id" in str(error) else f"unknown ({error})"
        return self.read_files(run, Look(active="" if state in ENDED else state))

    def stop(self, run: Path, job: dict[str, Any], now: bool) -> None:
        if now:  # the batch script too, which then asks for no requeue
            call(["scancel", "--signal=KILL", "--full", job["slurm_id"]], self.REMEDY)
        call(["scancel", job["slurm_id"]], self.REMEDY)


class Ssh:
    """The cluster of launch/ssh.sh has the job's name. Each node may have a run's folder of its own: all are asked."""

    def __init__(self, hosts: Path | None = None):
        self._hosts = hosts

    def submit(self, run: Path, arguments: list[str]) -> dict[str, Any]:
        runs = run.parent.resolve()
        if runs.is_relative_to(ROOT):  # the nodes' repository may lie elsewhere
            runs = runs.relative_to(ROOT)
        command = [*self._launcher("start", run.name), "--hosts", str(Path(self._hosts or "").resolve()), *arguments]
        command += [f"run.dir={runs}", f"run.name={run.name}"]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:  # it says itself what went wrong
            raise SystemExit(f"{run.name} was not started")
        return {"cluster": run.name, "folder": str(runs / run.name), "command": command}

    def look(self, run: Path, job: dict[str, Any]) -> Look:
        try:
            states = dict(self._ask("status", job["cluster"]))
        except SystemExit as error:  # its files in runs/.clusters are gone; the nodes may run
            return Look(active=f"unknown ({error})")
        look = Look(codes=re.findall(r"ended with status (\d+)", " ".join(states.values())))
        running = [node for node, text in states.items() if text.startswith("runs")]
        away = [node for node, text in states.items() if text == "cannot be reached"]
        if running:
            look.active = "running" + (f" on {len(running)} of {len(states)}" if len(running) < len(states) else "")
        elif away:
            look.active = f"unreachable ({', '.join(node.split()[1] for node in away)})"
        look.codes += ["lost" for text in states.values() if text == "was lost"]
        for _, text in self._ask("run", job["cluster"], FILES.format(run=shlex.quote(job["folder"]))):
            name, _, content = text.partition("\t")
            if name == "FATAL":
                look.fatal = content
            elif name == "metrics":
                with suppress(ValueError):  # torn
                    look.metrics = max(look.metrics, json.loads(content), key=lambda row: row.get("step", -1))
            elif name.startswith("status/"):
                look.statuses.append(content)
        return look

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
            raise SystemExit(f"not all nodes could be told; see: launch/ssh.sh status {job['cluster']}")

    def _launcher(self, *words: str) -> list[str]:
        return ["bash", str(LAUNCH / "ssh.sh"), *words]

    def _ask(self, *words: str) -> Iterable[tuple[str, str]]:
        """Lines of the nodes, each with its node's number and host."""
        done = subprocess.run(self._launcher(*words), capture_output=True, text=True)
        if done.returncode and not done.stdout:
            raise SystemExit(done.stderr.strip() or f"launch/ssh.sh {words[0]} ended with status {done.returncode}")
        return re.findall(r"^\[(.*?)\] (.*)$", done.stdout, re.MULTILINE)

    def _become(self, *words: str) -> None:
        """The launcher in this process's place: Ctrl-C is its own matter."""
        sys.stdout.flush()
        command = self._launcher(*words)
        os.execvp(command[0], command)
