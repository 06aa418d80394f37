"""What the benchmark programs share: starting torchrun, checking what they need, facts of the GPU."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from launch.environment import ROOT, TORCHRUN, activated_environment


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def join_alone(device: torch.device) -> dist.ProcessGroup:
    """Return the process group of a world of one rank, without torchrun."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def run_torchrun(num_ranks: int, *program: str, quiet: bool = False, **environment: str) -> None:
    """Run a program on ranks of this machine, in the repository's root, and end with an error if it fails.

    With `quiet` its output goes to stderr, so that stdout has only the benchmark's own line.
    """
    command = [*TORCHRUN, "--max-restarts", "0", "--nproc-per-node", str(num_ranks), *program]
    out = sys.stderr if quiet else None
    done = subprocess.run(command, cwd=ROOT, env=activated_environment(**environment), stdout=out, check=False)
    if done.returncode:
        fail(f"torchrun {program[0]} ended with status {done.returncode}; its own messages are above")


def need_cluster() -> None:
    """End the program if it cannot create network namespaces, which tests/cluster.py uses as nodes."""
    missing = [program for program in ("ip", "unshare") if shutil.which(program) is None]
    if os.geteuid() or missing:
        found = f"user id {os.geteuid()}, missing programs: {', '.join(missing) or 'none'}"
        fail(f"needs root and the programs ip (iproute2) and unshare (util-linux); {found}")


def need_gpu() -> None:
    """End the program if this machine has no GPU that torch can use."""
    if not torch.cuda.is_available():
        fail("needs a GPU; torch finds none")


def need_packages(**packages: str) -> None:
    """End the program if a package is missing. Each is given as module=distribution."""
    missing = [name for module, name in packages.items() if importlib.util.find_spec(module) is None]
    if missing:
        fail(f"needs the packages {', '.join(packages.values())}; missing: {', '.join(missing)}")


def fail(reason: str) -> NoReturn:
    """End the program with one line that says why."""
    sys.exit(f"benchmarks/{Path(sys.argv[0]).name}: {reason}")
