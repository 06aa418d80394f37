"""Files that other tools read: a manifest for Kubernetes, tasks for SkyPilot and dstack, and definitions of images.

tests/e2e/test_launch_yaml.py checks them with the parsers of these tools."""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launcher import ROOT
from tests.unit.test_launchers import ARGUMENTS, LAUNCH, Machine, dstack_script, expected

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.end()


# Kubernetes


def manifest() -> dict[str, dict[str, Any]]:
    """Return the objects of the manifest by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())}


def pod() -> dict[str, Any]:
    return manifest()["Job"]["spec"]["template"]["spec"]


def expand(word: str, variables: dict[str, str]) -> str:
    """Do what Kubernetes does with the words of a command: replace $(NAME) if there is such a variable."""
    return re.sub(r"\$\(([^)]*)\)", lambda found: variables.get(found[1], found[0]), word)


def run_container(machine: Machine, container: dict[str, Any], index: int, **extra: str) -> str:
    variables = {each["name"]: each.get("value", "uid-7") for each in container["env"]} | extra
    words = [expand(word, variables) for word in [*container["command"], *container.get("args", [])]]
    environment = machine.environment | variables | {"JOB_COMPLETION_INDEX": str(index)}
    done = subprocess.run(words, cwd=machine.root, env=environment, text=True, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_objects_of_the_manifest_fit_together() -> None:
    """A pod is JOB-INDEX.SERVICE only if the job, the service and the selector have these names."""
    service, claim, job = (manifest()[kind] for kind in ("Service", "PersistentVolumeClaim", "Job"))
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod()["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    (preflight,), (train,) = pod()["initContainers"], pod()["containers"]
    for container in (preflight, train):
        values = {each["name"]: each.get("value") for each in container["env"]}
        assert values["NODES"] == str(spec["completions"])
        assert f"--head {name}-0.{service['metadata']['name']} " in container["command"][2]
        assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod()["volumes"]}
    assert preflight["resources"] == train["resources"], "preflight needs the GPUs"
    claims = [each["persistentVolumeClaim"]["claimName"] for each in pod()["volumes"] if "emptyDir" not in each]
    assert claims == [claim["metadata"]["name"]] and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert pod()["restartPolicy"] == "Never", "podFailurePolicy needs it"
    mounts = {mount["mountPath"] for mount in train["volumeMounts"]}
    assert {"/oneworld/runs", "/oneworld/data", "/huggingface", "/dev/shm"} == mounts
    config = next(each["value"] for each in train["env"] if each["name"] == "ARGS").split()[1]
    assert (ROOT / config).exists()


def test_kubernetes_builds_the_command(machine: Machine) -> None:
    (container,) = pod()["containers"]
    arguments = f"--print --nproc 8 {shlex.join(ARGUMENTS)}"
    line = run_container(machine, container, 2, ARGS=arguments)
    assert shlex.split(line) == expected(4, "oneworld-0.oneworld:29500", "rloo-uid-7")


def test_the_init_container_runs_preflight_and_the_other_one_trains(machine: Machine) -> None:
    """A fake torchrun is called once by each."""
    del machine.environment["ONEWORLD_PREFLIGHT"]
    (preflight,), (train,) = pod()["initContainers"], pod()["containers"]
    arguments = {"NODES": "1", "ARGS": "--nproc 1 run.name=x"}
    run_container(machine, preflight, 0, **arguments)
    assert machine.num_calls == 1 and "launch/preflight.py" in machine.call(1)
    assert machine.seen()["ONEWORLD_NODES"].split() == ["oneworld-0.oneworld"]
    run_container(machine, train, 0, **arguments)
    assert machine.num_calls == 2 and "train.py" in machine.call(2)


# SkyPilot and dstack


def test_dstack_keeps_runs_on_the_volume(machine: Machine) -> None:
    """The containers are lost at the end, and runs/ with them, unless it is a link to the volume."""
    task = yaml.safe_load((LAUNCH / "dstack.yml").read_text())
    assert "/checkpoints:/checkpoints" in task["volumes"]
    cluster = {"DSTACK_NODES_NUM": "1", "DSTACK_MASTER_NODE_IP": "127.0.0.1", "DSTACK_NODE_RANK": "0"}
    cluster |= {"DSTACK_GPUS_PER_NODE": "1", "DSTACK_RUN_NAME": "oneworld", "ARGS": "run.name=x"}
    machine.script("mkdir -p runs/x && touch runs/x/metrics.jsonl")
    done = subprocess.run(
        ["sh", "-ec", dstack_script(machine, task)],
        cwd=machine.root,
        env=machine.environment | cluster,
        text=True,
        capture_output=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    assert (machine.folder / "checkpoints" / "runs" / "x" / "metrics.jsonl").exists()


def test_skypilot_mounts_data_where_settings_expect_it() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["file_mounts"] == {"~/sky_workdir/data": "${DATA}"} and task["envs"]["DATA"] == "data"
    assert task["workdir"] == ".", "its copy on the nodes is ~/sky_workdir"


# Images


def base_of(file: Path) -> str:
    found = re.search(r"^\s*(?:ARG )?BASE=(\S+)$", file.read_text(), re.MULTILINE)
    assert found
    return found[1]


@pytest.mark.parametrize("name", ["Dockerfile.cuda", "Dockerfile.rocm", "apptainer.def"])
def test_base_images_are_pinned(name: str) -> None:
    tag = base_of(LAUNCH / name).partition(":")[2]
    assert re.search(r"\d+\.\d+", tag), f"{tag!r} may be another image tomorrow"


def test_the_rocm_image_has_our_vllm() -> None:
    version = re.search(r"^vllm==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert version and base_of(LAUNCH / "Dockerfile.rocm") == f"vllm/vllm-openai-rocm:v{version[1]}"
    assert "\nENTRYPOINT []\n" in (LAUNCH / "Dockerfile.rocm").read_text(), "the base starts a server"


def sections() -> dict[str, list[str]]:
    """Return the lines of each section of the definition file. The header has the name ''."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in (LAUNCH / "apptainer.def").read_text().splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            found[name] = []
        elif line.strip() and not line.startswith("#"):
            found[name].append(line.strip())
    return found


def test_the_definition_for_apptainer_names_files_that_exist() -> None:
    """tests/e2e/test_launch_apptainer.py builds it, if there is an apptainer."""
    found = sections()
    assert found[""] == ["Bootstrap: docker", "From: {{ BASE }}"]
    assert set(found) == {"", "arguments", "files", "post", "environment", "runscript", "test"}
    copied = [line.split() for line in found["files"]]
    assert copied and all((ROOT / source).exists() and target == f"/oneworld/{source}" for source, target in copied)
    cuda = (LAUNCH / "Dockerfile.cuda").read_text()
    assert base_of(LAUNCH / "apptainer.def") == base_of(LAUNCH / "Dockerfile.cuda")
    packages = [
        word for word in " ".join(found["post"]).split("recommends ")[1].split("rm -rf")[0].split() if word != "\\"
    ]
    assert packages and all(re.search(rf"\s{re.escape(package)}\s", cuda) for package in packages)


def test_code_that_an_image_needs_is_copied() -> None:
    """Whatever launch/, rl/, tools/ and train.py import or read from the repository is in the image."""
    copied = {line.split()[0] for line in sections()["files"]}
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert packages - {"tests", "benchmarks", ".venv", "docs"} - copied - {os.environ.get("VIRTUAL_ENV", "")} <= {
        "runs"
    }
