"""The files for SkyPilot and dstack, read by these tools in a separate environment."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launcher import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LAUNCH = ROOT / "launch"
PACKAGES = ["skypilot==0.14.1", "dstack==0.22.5"]
CACHE = Path(tempfile.gettempdir()) / f"oneworld-parsers-{os.getuid()}"

SKYPILOT = """
import json, sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps({"name": task.name, "nodes": task.num_nodes, "workdir": task.workdir, "env": sorted(task.envs),
                  "secrets": sorted(task.secrets), "gpus": resources.accelerators, "setup": task.setup,
                  "run": task.run}))
"""
DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
gpu = task.resources.gpu
print(json.dumps({"kind": type(task).__name__, "nodes": task.nodes, "env": sorted(task.env), "commands": task.commands,
                  "gpus": [gpu.count.min, gpu.count.max], "gpu_memory": [gpu.memory.min, gpu.memory.max],
                  "repository": task.repos[0].path, "folder": task.working_dir,
                  "volumes": [volume.path for volume in task.volumes]}))
"""


@functools.cache
def environment() -> tuple[Path | None, str]:
    """Return the Python of that environment, or why there is none. It is created once and renamed when complete."""
    marker = CACHE / "packages"
    if marker.exists() and marker.read_text() == " ".join(PACKAGES) and CACHE.stat().st_uid == os.getuid():
        return CACHE / "bin" / "python", ""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory(prefix=f"{CACHE.name}.", dir=CACHE.parent) as temporary:
        ask = [*pip, "download", "--no-deps", "--dest", f"{temporary}/wheels", *PACKAGES]
        answer = subprocess.run(ask, capture_output=True, text=True)
        if answer.returncode:
            return None, f"no package index that has {' and '.join(PACKAGES)}: {answer.stderr.strip()[-300:]}"
    shutil.rmtree(CACHE, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(CACHE)], check=True)
    subprocess.run([CACHE / "bin" / "python", *pip[1:], "install", *PACKAGES], check=True)
    marker.write_text(" ".join(PACKAGES))
    return CACHE / "bin" / "python", ""


def parse(program: str, file: Path, home: Path) -> dict[str, Any]:
    python, reason = environment()
    if python is None:
        pytest.skip(reason)
    extra = {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [python, "-c", program, file], env=os.environ | extra, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def test_skypilot_accepts_the_file(tmp_path: Path) -> None:
    task = parse(SKYPILOT, LAUNCH / "skypilot.yaml", tmp_path)
    written = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task == {
        "name": "oneworld",
        "nodes": 2,
        "workdir": ".",
        "env": ["ARGS", "HF_HOME"],
        "secrets": ["HF_TOKEN", "ONEWORLD_SECRET"],
        "gpus": {"H100": 8},
        "setup": "make setup DEVICE=cuda",
        "run": written["run"],
    }


def test_dstack_accepts_the_file(tmp_path: Path) -> None:
    task = parse(DSTACK, LAUNCH / "dstack.yml", tmp_path)
    assert task == {
        "kind": "TaskConfiguration",
        "nodes": 2,
        "env": ["ARGS", "HF_HOME", "HF_TOKEN", "ONEWORLD_SECRET"],
        "commands": yaml.safe_load((LAUNCH / "dstack.yml").read_text())["commands"],
        "gpus": [8, 8],
        "gpu_memory": [80, None],  # 80 GB or more
        "repository": "/oneworld",
        "folder": "/oneworld",
        "volumes": ["/checkpoints"],
    }


@pytest.mark.parametrize(("program", "file"), [(SKYPILOT, "skypilot.yaml"), (DSTACK, "dstack.yml")])
def test_a_misspelt_key_is_refused(program: str, file: str, tmp_path: Path) -> None:
    """The parsers are strict, so the tests above mean something."""
    (tmp_path / file).write_text((LAUNCH / file).read_text().replace("\nresources:", "\nresourcse:"))
    with pytest.raises(ValueError, match="resourcse"):
        parse(program, tmp_path / file, tmp_path)
