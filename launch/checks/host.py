"""Facts about this host: versions, code, memory, disk and ports."""

import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from launch.checks.facts import DiskFacts, MemoryFacts
from launch.checks.sockets import reason
from rl.config.schema import ROOT

CODE = ("train.py", "rl", "launch")  # config files are not code: the digest of the settings covers their content
CODE_ENDINGS = (".py", ".sh", ".sbatch")
SHARED_MEMORY = Path("/dev/shm")
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMORY_FILES = {  # by controller: tree, limit and use; version 2 has one tree for all controllers
    "": ("", "memory.max", "memory.current"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def code_digest(others: Mapping[str, Path], root: Path = ROOT) -> str:
    """Hash the project's programs, tracked by git or not, and `others`, files by names that all nodes share."""
    files = [file for part in CODE for file in (root / part, *(root / part).rglob("*"))]
    own = {str(file.relative_to(root)): file for file in files if file.suffix in CODE_ENDINGS and file.is_file()}
    digest = hashlib.sha256()
    for name, file in sorted((own | dict(others)).items()):
        digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def read_memory() -> MemoryFacts:
    """Return total and available bytes: those of the host, or of the tightest control group of this process."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for line in OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else []:
        _, controllers, path = line.split(":", 2)
        for controller in MEMORY_FILES.keys() & controllers.split(","):
            tree, limit, used = MEMORY_FILES[controller]
            own = CGROUPS / tree / path.lstrip("/")
            for group in (own, *own.parents):
                with suppress(OSError, ValueError):  # a container may not see the group; "max" means no limit
                    most = int((group / limit).read_text())
                    if most < host.total:
                        total, available = min(total, most), min(available, most - int((group / used).read_text()))
    return {"total": total, "available": available}


def read_shared_memory() -> DiskFacts:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return {"total": 0, "free": 0, "error": f"{SHARED_MEMORY}: {error.strerror}"}
    trouble = "" if os.access(SHARED_MEMORY, os.W_OK) else f"{SHARED_MEMORY} cannot be written to"
    return {"total": usage.total, "free": usage.free, "error": trouble}


def write_marker(folder: str, marker: str) -> DiskFacts:
    """Create an empty file in the directory of the runs. Return the `free` bytes, or an `error`; both if it is full."""
    path = Path(folder)
    found: DiskFacts = {"error": ""}
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / marker).touch()
    except OSError as error:
        found["error"] = f"{error.strerror}: {error.filename}"
        if error.errno != errno.ENOSPC:
            return found
    existing = next(each for each in (path, *path.parents) if each.exists())
    found["free"] = shutil.disk_usage(existing).free
    return found


def find_markers(folder: str, markers: list[str]) -> list[str]:
    return [marker for marker in markers if (Path(folder) / marker).exists()]


def remove_marker(folder: str, marker: str) -> None:
    with suppress(OSError):
        (Path(folder) / marker).unlink()


def port_holder(port: int, error: OSError) -> str:
    """Return which process of this host listens on a port that cannot be bound because of `error`."""
    with suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
                command = " ".join(psutil.Process(entry.pid).cmdline())
                return f"process {entry.pid} ({command[:80]})"
    return f"a process that this user may not see ({reason(error)})"
