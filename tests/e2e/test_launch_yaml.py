"""The files for SkyPilot, dstack and Kubernetes, read by the parsers of these tools or checked against their schemas.

These packages are installed into a separate environment."""

import functools
import json
import os
import re
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
PACKAGES = ["skypilot==0.14.1", "dstack==0.22.5", "kubernetes-validate==1.37.0"]
CACHE = Path(tempfile.gettempdir()) / f"oneworld-parsers-{os.getuid()}"

SKYPILOT = """
import json, sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(json.dumps({"name": task.name, "nodes": task.num_nodes, "workdir": task.workdir, "env": sorted(task.envs),
                  "secrets": sorted(task.secrets), "gpus": resources.accelerators, "setup": task.setup,
                  "run": task.run, "memory": resources.memory, "cpus": resources.cpus, "ports": resources.ports,
                  "mounts": task.file_mounts}))
"""
# What SkyPilot sends to the nodes: the files of the working directory, then those of each mount.
UPLOAD = """
import json, os, sys, zipfile
import sky
from sky.data import storage_utils
task = sky.Task.from_yaml(sys.argv[1])
os.chdir(sys.argv[2])
task.expand_and_validate_file_mounts()
sent = []
for folder in [task.workdir, *task.file_mounts.values()]:
    storage_utils.zip_files_and_folders([folder], "sent.zip", sys.stderr)
    sent.append(sorted(name for name in zipfile.ZipFile("sent.zip").namelist() if not name.endswith("/")))
    os.remove("sent.zip")
print(json.dumps({"sent": sent}))
"""
DSTACK = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
gpu = task.resources.gpu
print(json.dumps({"kind": type(task).__name__, "nodes": task.nodes, "env": sorted(task.env), "commands": task.commands,
                  "gpus": [gpu.count.min, gpu.count.max], "gpu_memory": [gpu.memory.min, gpu.memory.max],
                  "repository": task.repos[0].path, "folder": task.working_dir,
                  "volumes": [volume.path for volume in task.volumes],
                  "files": [[file.local_path, file.path] for file in task.files],
                  "ports": [[port.local_port, port.container_port] for port in task.ports],
                  "memory": task.resources.memory.min}))
"""
FLEET = """
import json, sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
fleet = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
print(json.dumps({"kind": type(fleet).__name__, "name": fleet.name, "nodes": fleet.nodes.target,
                  "placement": fleet.placement.value, "gpus": fleet.resources.gpu.count.min,
                  "memory": fleet.resources.memory.min}))
"""
# The strict schemas know no other fields. The first version has every field in its final form.
KUBERNETES = """
import json, sys, yaml, kubernetes_validate
objects = list(yaml.safe_load_all(open(sys.argv[1])))
for each in objects:
    for version in ("1.31", "1.37"):
        kubernetes_validate.validate(each, version, strict=True)
print(json.dumps({"kinds": [each["kind"] for each in objects]}))
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


def parse(program: str, file: Path, home: Path, *more: Path) -> dict[str, Any]:
    python, reason = environment()
    if python is None:
        pytest.skip(reason)
    extra = {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [python, "-c", program, file, *more],
        env=os.environ | extra,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
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
        "env": ["ARGS", "DATA", "HF_HOME"],
        "secrets": ["HF_TOKEN", "ONEWORLD_SECRET"],
        "gpus": {"H100": 8},
        "setup": "make setup DEVICE=cuda",
        "run": written["run"],
        "memory": "512+",
        "cpus": "32+",
        "ports": None,  # it would open them to the internet
        "mounts": {"~/sky_workdir/data": "data"},
    }


def test_skypilot_sends_the_data(tmp_path: Path) -> None:
    """Git ignores data/, and SkyPilot leaves out what git ignores."""
    copy = tmp_path / "repository"
    (copy / "data" / "gsm8k").mkdir(parents=True)
    (copy / "data" / "gsm8k" / "train.jsonl").write_text("{}\n")
    (copy / "runs" / "x").mkdir(parents=True)
    (copy / "runs" / "x" / "metrics.jsonl").touch()
    shutil.copy(ROOT / "train.py", copy)
    shutil.copy(ROOT / ".gitignore", copy)
    subprocess.run(["git", "init", "--quiet", copy], check=True)
    repository, data = parse(UPLOAD, LAUNCH / "skypilot.yaml", tmp_path, copy)["sent"]
    assert "train.py" in repository and not [name for name in repository if name.startswith(("data", "runs"))]
    assert [Path(name).name for name in data] == ["train.jsonl"]
    shutil.rmtree(copy / "data")
    with pytest.raises(ValueError, match="does not exist"):
        parse(UPLOAD, LAUNCH / "skypilot.yaml", tmp_path, copy)


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
        "files": [],
        "ports": [[6006, 6006]],
        "memory": 512,
    }


def test_dstack_accepts_the_line_for_data(tmp_path: Path) -> None:
    text = (LAUNCH / "dstack.yml").read_text()
    (tmp_path / "dstack.yml").write_text(text.replace("\n# files:", "\nfiles:"))
    assert parse(DSTACK, tmp_path / "dstack.yml", tmp_path)["files"] == [["../data", "/oneworld/data"]]


def test_dstack_accepts_the_fleet(tmp_path: Path) -> None:
    fleet = {"kind": "FleetConfiguration", "name": "oneworld", "nodes": 2, "placement": "cluster", "gpus": 8}
    assert parse(FLEET, LAUNCH / "dstack_fleet.yml", tmp_path) == fleet | {"memory": 512}
    task = yaml.safe_load((LAUNCH / "dstack.yml").read_text())
    nodes = yaml.safe_load((LAUNCH / "dstack_fleet.yml").read_text())["resources"]
    assert {key: task["resources"][key] for key in nodes} == nodes, "the nodes fit the task"


def test_kubernetes_accepts_the_manifest(tmp_path: Path) -> None:
    kinds = ["Service", "PersistentVolumeClaim", "Job"]
    assert parse(KUBERNETES, LAUNCH / "kubernetes.yaml", tmp_path) == {"kinds": kinds}


@pytest.mark.parametrize(
    ("program", "file", "key"),
    [
        (SKYPILOT, "skypilot.yaml", "resources"),
        (SKYPILOT, "skypilot.yaml", "file_mounts"),
        (DSTACK, "dstack.yml", "resources"),
        (DSTACK, "dstack.yml", "ports"),
        (FLEET, "dstack_fleet.yml", "placement"),
        (KUBERNETES, "kubernetes.yaml", "completionMode"),
        (KUBERNETES, "kubernetes.yaml", "initContainers"),
        (KUBERNETES, "kubernetes.yaml", "publishNotReadyAddresses"),
        (KUBERNETES, "kubernetes.yaml", "accessModes"),
        (KUBERNETES, "kubernetes.yaml", "subPath"),
        (KUBERNETES, "kubernetes.yaml", "onExitCodes"),
    ],
)
def test_a_misspelt_key_is_refused(program: str, file: str, key: str, tmp_path: Path) -> None:
    """The parsers are strict, so the tests above mean something."""
    text = (LAUNCH / file).read_text()
    misspelt = f"{key[:-2]}{key[-1]}{key[-2]}x"
    assert f"{key}:" in text
    (tmp_path / file).write_text(re.sub(rf"(?<![\w#]){key}:", f"{misspelt}:", text))
    with pytest.raises(ValueError, match=misspelt):
        parse(program, tmp_path / file, tmp_path)
