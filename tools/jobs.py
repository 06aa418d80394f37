"""Runs in the background, by name: on this machine, or through Slurm.

    python tools/jobs.py submit [--nproc-per-node N] NAME [train.py's arguments]
    python tools/jobs.py submit --slurm="--nodes 4 --gpus-per-node 8" NAME [train.py's arguments]
    python tools/jobs.py list
    python tools/jobs.py status NAME
    python tools/jobs.py logs [-f] [--rank R] NAME
    python tools/jobs.py stop [--now] NAME

A job is a run's folder, runs/NAME, with a job.json that says what was started; --runs names another folder of runs. Its
console is console.log there, and it lives on when the terminal is closed. `stop` lets it save its last step. The same
`submit` again goes on from the newest checkpoint. With --slurm, where its text goes to sbatch as options, every node
starts one torchrun, and the others pass through to squeue and scancel.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own
from tools import status

ROOT = Path(__file__).resolve().parent.parent
PORT = 29500
STOP_S = 60.0  # torchrun kills ranks 30 s after it has been told to end
POLL_S = 0.2
# A signal is for torchrun, which lets the ranks save; the shell stays to write down how that ended.
LOCAL = 'trap : TERM INT; . "$1"; shift; "$@"; echo $? > "$EXIT_FILE"'
# Within Slurm, on every node.
NODE = '. {env}; exec {python} -m torch.distributed.run --nnodes "$SLURM_NNODES" {torchrun} {arguments}'


def submit(runs: Path, args: argparse.Namespace) -> None:
    run = runs / args.name
    if "/" in args.name or args.name in ("", ".", ".."):
        raise SystemExit(f"got the name {args.name!r}; it is a folder's name, without '/': --runs gives the path")
    if own := [word for word in args.arguments if word.startswith(("run.dir=", "run.name="))]:
        raise SystemExit(f"got {own[0]}, which follows from the job's name and --runs; leave it out")
    if is_active(run):
        raise SystemExit(f"{run} is {state(run)}; stop it first, or give another name: tools/jobs.py stop {args.name}")
    run.mkdir(parents=True, exist_ok=True)
    for leftover in ("exit_code", "FATAL", "job.json"):
        (run / leftover).unlink(missing_ok=True)
    arguments = [str(ROOT / "train.py"), *args.arguments, f"run.dir={runs.resolve()}", f"run.name={args.name}"]
    job = submit_slurm(run, args, arguments) if args.slurm is not None else submit_local(run, args, arguments)
    write(run, job | {"submitted_at": time.time()})
    print(f"{run}: submitted; follow it with: python tools/jobs.py logs -f {args.name}")


def submit_local(run: Path, args: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", args.nproc_per_node, *arguments]
    with (run / "console.log").open("ab") as console:
        process = subprocess.Popen(
            ["bash", "-c", LOCAL, "oneworld", str(ROOT / "launch" / "env.sh"), *torchrun],
            env=os.environ | {"EXIT_FILE": str((run / "exit_code").resolve())},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return {"pid": process.pid, "started_at": psutil.Process(process.pid).create_time(), "command": torchrun}


def submit_slurm(run: Path, args: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    head = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    torchrun = f"--nproc-per-node {args.nproc_per_node} --rdzv-endpoint {head}:{PORT}"
    words = {"env": shlex.quote(str(ROOT / "launch" / "env.sh")), "python": shlex.quote(sys.executable)}
    node = NODE.format(torchrun=torchrun, arguments=shlex.join(arguments), **words)
    wrapped = f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c {shlex.quote(node)}"
    command = ["sbatch", "--parsable", "--job-name", args.name, "--output", str((run / "console.log").resolve())]
    command += ["--open-mode=append", "--signal=TERM@60", *shlex.split(args.slurm), "--wrap", wrapped]
    return {"slurm_id": run_slurm(command).strip().split(";")[0], "command": command}


def run_slurm(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise SystemExit(
            f"there is no {command[0]} on this machine; submit without --slurm, or on a login node"
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{command[0]}: {error.stderr.strip()}") from None


def write(run: Path, job: dict[str, Any]) -> None:
    part = run / "job.json.part"
    part.write_text(json.dumps(job, indent=2))
    part.replace(run / "job.json")


def read(run: Path) -> dict[str, Any]:
    file = run / "job.json"
    if not file.exists():
        raise SystemExit(f"there is no job {run.name} in {run.parent}; tools/jobs.py list shows those that are")
    return json.loads(file.read_text())


def process_of(job: dict[str, Any]) -> psutil.Process | None:
    """None: it has ended, and its number may be another process's now."""
    with suppress(psutil.Error):
        process = psutil.Process(job["pid"])
        if process.create_time() == job["started_at"] and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def slurm_state(job: dict[str, Any]) -> str:
    """As squeue tells it, which forgets jobs that have ended."""
    with suppress(SystemExit):
        return run_slurm(["squeue", "-h", "-o", "%T", "-j", job["slurm_id"]]).strip().lower()
    return ""


def state(run: Path) -> str:
    job = read(run)
    if "slurm_id" in job:
        if found := slurm_state(job):
            return found
    elif process_of(job) is not None:
        return "running"
    if (run / "FATAL").exists():
        return "fatal"
    rows, at = status.read(run)
    if at > job["submitted_at"] and all(row["done"] for row in rows):
        return "done"
    if "stopped_at" in job:
        return "stopped"
    code = run / "exit_code"
    return f"failed ({code.read_text().strip()})" if code.exists() else "ended"


def is_active(run: Path) -> bool:
    if not (run / "job.json").exists():
        return False
    job = read(run)
    return bool(slurm_state(job)) if "slurm_id" in job else process_of(job) is not None


def last_metrics(run: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, IndexError):
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {}


def list_jobs(runs: Path) -> None:
    rows = [["name", "state", "step", "reward", "submitted"]]
    for file in sorted(runs.glob("*/job.json"), key=lambda file: file.stat().st_mtime):
        run, metrics = file.parent, last_metrics(file.parent)
        reward = f"{metrics['reward/mean']:.3f}" if "reward/mean" in metrics else ""
        submitted = time.strftime("%Y-%m-%d %H:%M", time.localtime(read(run)["submitted_at"]))
        rows.append([run.name, state(run), str(metrics.get("step", "")), reward, submitted])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


def show_status(run: Path) -> None:
    job = read(run)
    print(f"{run.name}: {state(run)}\n{shlex.join(job['command'])}\n{status.show(run)}")


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


def show_logs(run: Path, rank: int | None, follow: bool) -> None:
    read(run)
    if not follow and not log_of(run, rank).is_file():
        raise SystemExit(f"{run} has no log{'' if rank is None else f' of rank {rank}'} yet")
    is_over = False
    with suppress(KeyboardInterrupt):
        for part in new_lines(run, rank):
            sys.stdout.buffer.write(part)
            sys.stdout.flush()
            if not part and (is_over or not follow):
                return
            if not part:
                is_over = not is_active(run)  # and then once more: it may have written since
                time.sleep(POLL_S)


def stop(run: Path, now: bool) -> None:
    job = read(run)
    if not is_active(run):
        print(f"{run.name}: {state(run)} already")
        return
    write(run, job | {"stopped_at": time.time()})
    if "slurm_id" in job:
        how = ["--signal=KILL", "--full"] if now else []
        run_slurm(["scancel", *how, job["slurm_id"]])
    else:
        with suppress(ProcessLookupError):
            os.killpg(job["pid"], signal.SIGKILL if now else signal.SIGTERM)  # a session, and so a group, of its own
    deadline = time.monotonic() + STOP_S
    while is_active(run):
        if time.monotonic() > deadline:
            raise SystemExit(f"{run.name} has not ended in {STOP_S:g} s; tools/jobs.py stop --now kills it")
        time.sleep(POLL_S)
    print(f"{run.name}: {state(run)}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder that holds the runs")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("submit", help="start a run in the background")
    one.add_argument("--nproc-per-node", default="auto", metavar="N", help="ranks; default: one for each GPU, or core")
    one.add_argument("--slurm", metavar="OPTIONS", help="through sbatch, with these options; may be empty")
    one.add_argument("name", metavar="NAME")
    one.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="for train.py")
    commands.add_parser("list", help="all jobs, their states and steps")
    commands.add_parser("status", help="what its ranks are doing").add_argument("name", metavar="NAME")
    one = commands.add_parser("logs", help="its console")
    one.add_argument("-f", "--follow", action="store_true", help="until it ends")
    one.add_argument("--rank", type=int, metavar="R", help="only what this rank wrote, in the newest attempt")
    one.add_argument("name", metavar="NAME")
    one = commands.add_parser("stop", help="save, then end")
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
        show_logs(args.runs / args.name, args.rank, args.follow)
    else:
        stop(args.runs / args.name, args.now)


if __name__ == "__main__":
    main()
