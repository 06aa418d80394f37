"""Build the environment that `. .venv/bin/activate` sets. Benchmarks and tests start torchrun in it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]  # a torchrun in PATH could belong to another Python
FOREIGN = ("PET_", "TORCHELASTIC_", "MAKE", "MFLAGS")  # set by a launcher or a make that started this process


def activated_environment(**extra: str) -> dict[str, str]:
    """Return the variables of this process and those of launch/env.sh, with this Python's programs in PATH."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    script = f'. "{ROOT}/launch/env.sh" && env -0'
    output = subprocess.run(["bash", "-c", script], env=clean, check=True, capture_output=True).stdout
    environment = dict(entry.split("=", 1) for entry in output.decode().split("\0") if entry)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(search)} | extra
