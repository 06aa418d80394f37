"""Uploads by the real client, in a process of its own, to a hub on the loopback interface: what arrives, and what is
said when it does not."""

import hashlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.common.text import format_bytes
from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.export.errors import MergeError
from rl.export.upload import is_model_weights, may_write, name_for_run
from rl.model.hub import http_status, is_temporary
from tests.checkpoint_files import Made, read_model, write_checkpoint
from tests.hub import READ_TOKEN, TOKEN, FakeHub, hub, impatient

DRIVER = """
import json, sys
from pathlib import Path
from rl.export import upload
from rl.export.errors import MergeError
from rl.model import hub as client

def step(hub, spec, name):
    if name == "upload":
        return hub.upload(Path(spec["folder"]), "step 40 of run")
    if name == "download":
        from huggingface_hub import snapshot_download
        return snapshot_download(spec["name"], local_dir=spec["to"])
    return getattr(hub, name)()

for spec in map(json.loads, sys.argv[1:]):
    client.TIMEOUTS_S |= spec.get("timeouts_s", {})
    done, error = [], ""
    try:
        hub = upload.HubRepository(spec["name"], spec.get("revision", ""), spec.get("public", False))
        for name in spec["steps"]:
            done.append(step(hub, spec, name))
    except MergeError as problem:
        error = str(problem)
    print(json.dumps({"done": done, "error": error}))
"""
EVERYTHING = ["describe", "create", "upload"]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NUM_BYTES = 200_000  # of a shard


@dataclass(frozen=True)
class Outcome:
    done: list[str]
    error: str
    log: str  # stderr of all


class Client:
    """Runs the driver; whatever happens, it says no token and leaves the folder as it is."""

    def __init__(self, fake: FakeHub, folder: Path, scratch: Path):
        self.fake, self.folder, self._scratch = fake, folder, scratch
        self._driver = scratch / "driver.py"
        self._driver.write_text(DRIVER)

    def run(self, *specs: dict[str, Any], **environment: str) -> list[Outcome]:
        """One process for all; an environment variable without a value is not set."""
        before = snapshot(self.folder)
        rows = [json.dumps({"folder": str(self.folder), "steps": EVERYTHING, **spec}) for spec in specs]
        own = self.fake.environment(self._scratch / "home") | {"PYTHONPATH": str(ROOT)} | environment
        own = {name: value for name, value in own.items() if value}
        command = impatient(self._driver, *rows)
        process = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
        output = process.stdout + process.stderr
        assert TOKEN not in output
        assert READ_TOKEN not in output
        assert process.returncode == 0, output
        assert snapshot(self.folder) == before
        return [Outcome(**json.loads(line), log=process.stderr) for line in process.stdout.splitlines()]

    def upload(self, name: str = "ada/model", **spec: Any) -> Outcome:
        (outcome,) = self.run({"name": name, **spec})
        return outcome


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "merged"
    folder.mkdir()
    numbers = random.Random(0)
    for name in SHARDS:
        (folder / name).write_bytes(numbers.randbytes(NUM_BYTES))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "config.json").write_text('{"model_type": "llama"}\n')
    (folder / "README.md").write_text("---\nlibrary_name: transformers\n---\n# Model\n")
    (folder / "reward.png").write_bytes(b"\x89PNG\r\n\x1a\n" + numbers.randbytes(500))
    return folder


@pytest.fixture
def client(folder: Path, tmp_path: Path) -> Iterator[Client]:
    with hub() as fake:
        yield Client(fake, folder, tmp_path)


def oid_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def uploaded(fake: FakeHub, name: str = "ada/model", revision: str = "main") -> dict[str, bytes]:
    files = fake.repos[name].files(revision)
    del files[".gitattributes"]
    return files


def test_a_new_repository_is_private_and_gets_all_files_in_one_commit(client: Client, tmp_path: Path) -> None:
    outcome = client.upload(steps=[*EVERYTHING, "download"], to=str(tmp_path / "copy"))
    assert outcome.error == ""
    repo = client.fake.repos["ada/model"]
    assert repo.private
    initial, commit = repo.branches["main"]
    assert list(initial.files) == [".gitattributes"]
    assert commit.message == "step 40 of run"
    assert uploaded(client.fake) == content(client.folder)
    assert {name for name, blob in commit.files.items() if blob.is_large} == set(SHARDS)
    assert outcome.done[:2] == [f"ada/model on {client.fake.url} (new and private)", "ada/model"]
    assert outcome.done[2] == f"{client.fake.url}/ada/model/commit/{commit.oid}"
    for name, data in content(client.folder).items():
        assert (tmp_path / "copy" / name).read_bytes() == data, name


def test_a_description_changes_nothing(client: Client) -> None:
    client.fake.add_repo("ada/empty", files={"README.md": b"to come"})
    client.fake.add_repo("ada/full", files={"model.safetensors": b"mine"})
    names = {"model": {"revision": "b"}, "engines/model": {"public": True}, "empty": {}, "full": {}}
    outcomes = client.run(*({"name": name, "steps": ["describe"], **spec} for name, spec in names.items()))
    said = [outcome.done[0].replace(f" on {client.fake.url}", "") for outcome in outcomes]
    assert said == [
        "ada/model, branch b (new and private)",
        "engines/model (new and public)",
        "ada/empty (private, exists, and has no model yet)",
        "ada/full (private, exists, and holds other files; its weights are replaced)",
    ]
    assert {line.split()[0] for line in client.fake.requests} == {"GET"}
    assert {*client.fake.repos} == {"ada/empty", "ada/full"}


def test_a_public_one_in_the_own_namespace_and_large_files_in_parts(client: Client) -> None:
    client.fake.part_bytes = 70_000
    outcome = client.upload("shown", public=True)
    assert outcome.error == ""
    assert outcome.done[:2] == [f"ada/shown on {client.fake.url} (new and public)", "ada/shown"]
    assert not client.fake.repos["ada/shown"].private
    assert uploaded(client.fake, "ada/shown") == content(client.folder)
    assert client.fake.count("PUT /storage/") == 2 * 3  # of 70, 70 and 60 kB


def test_visibility_of_what_is_there_never_changes(client: Client) -> None:
    client.fake.add_repo("ada/open", private=False)
    client.fake.add_repo("ada/closed", private=True)
    refused, shown, kept = client.run(
        {"name": "ada/open"}, {"name": "ada/open", "public": True}, {"name": "ada/closed", "public": True}
    )
    assert refused.done == []
    assert "ada/open exists and is public" in refused.error
    assert "--public" in refused.error
    assert [len(outcome.done) for outcome in (shown, kept)] == [3, 3]
    assert kept.log.count("ada/closed exists and stays private") == 1
    assert [(name, repo.private) for name, repo in client.fake.repos.items()] == [
        ("ada/open", False),
        ("ada/closed", True),
    ]
    assert client.fake.count("POST /api/repos/create") == 0


def test_a_public_repository_that_somebody_else_makes_meanwhile_gets_no_weights(client: Client) -> None:
    client.fake.add_repo("ada/model", private=False)
    client.fake.fail("GET", "/api/models/ada/model", status=404, headers={"X-Error-Code": "RepoNotFound"})
    outcome = client.upload(steps=["create", "upload"])
    assert client.fake.count("POST /api/repos/create") == 1
    assert "ada/model exists and is public" in outcome.error
    assert len(client.fake.repos["ada/model"].branches["main"]) == 1


def test_a_repository_that_is_made_public_during_the_merge_gets_no_weights(client: Client) -> None:
    assert client.upload(steps=["create"]).error == ""
    client.fake.repos["ada/model"].private = False
    assert "ada/model exists and is public" in client.upload(steps=["upload"]).error
    assert len(client.fake.repos["ada/model"].branches["main"]) == 1


def test_a_revision_is_a_branch(client: Client) -> None:
    client.fake.add_repo("ada/model", files={"notes.md": b"of main"})
    spec = {"name": "ada/model", "revision": "step-40"}
    assert [outcome.error for outcome in client.run(spec, spec)] == ["", ""]
    branches = client.fake.repos["ada/model"].branches
    assert set(branches) == {"main", "step-40"}
    assert len(branches["main"]) == 1
    assert uploaded(client.fake, revision="step-40") == content(client.folder) | {"notes.md": b"of main"}
    assert len(branches["step-40"]) == 2  # the second time nothing had changed


def test_weights_of_an_earlier_upload_go_in_the_same_commit(client: Client) -> None:
    earlier = {f"model-0000{shard}-of-00003.safetensors": b"old" for shard in (1, 2, 3)}
    earlier |= {
        SHARDS[0]: b"old",
        "model.safetensors.index.json": b"old",
        "consolidated.safetensors.index.json": b"old",
    }
    others = {"notes.md": b"mine", "adapter/model.safetensors": b"mine", "training_args.bin": b"mine"}
    client.fake.add_repo("ada/model", files=earlier | others)
    outcome = client.upload()
    assert outcome.error == ""
    assert "deletes 4 files of an earlier model" in outcome.log
    assert uploaded(client.fake) == content(client.folder) | others
    assert len(client.fake.repos["ada/model"].branches["main"]) == 2


def test_a_passing_fault_is_overcome(client: Client) -> None:
    client.fake.fail("PUT", "/storage/", cut_at=50_000)
    client.fake.fail("PUT", "/storage/", status=503)
    client.fake.fail("GET", "/api/whoami-v2", status=502)
    client.fake.fail("POST", "/api/repos/create")
    client.fake.fail("POST", "/commit/main", is_lost=True)
    outcome = client.upload()
    assert outcome.error == ""
    assert uploaded(client.fake) == content(client.folder)
    assert client.fake.received.total() == 50_000 + NUM_BYTES + 2 * NUM_BYTES
    assert client.fake.count("POST /api/models/ada/model/commit/main") == 1  # it had been made, the answer was lost
    assert len(client.fake.repos["ada/model"].branches["main"]) == 2
    assert outcome.done[2].endswith(client.fake.repos["ada/model"].branches["main"][-1].oid)
    assert outcome.log.count("retrying in") >= 3  # whoami, create, commit; some clients also leave PUT to us


def test_what_arrived_is_not_sent_again(client: Client) -> None:
    oids = sorted(oid_of(client.folder / name) for name in SHARDS)
    client.fake.fail("PUT", f"/storage/{oids[1]}", cut_at=50_000, times=999)
    first = client.upload()
    assert f"The merged model stays in {client.folder}; run the same command again" in first.error
    assert "is not reachable" in first.error
    assert client.fake.received[oids[0]] == NUM_BYTES
    assert len(client.fake.repos["ada/model"].branches["main"]) == 1
    client.fake.recover()
    client.fake.received.clear()
    client.fake.fail("POST", "/commit/main", status=500, times=999)
    second = client.upload()
    assert client.fake.received == {oids[1]: NUM_BYTES}
    assert "failed 3 times: " in second.error
    assert "500" in second.error
    assert len(client.fake.repos["ada/model"].branches["main"]) == 1
    client.fake.recover()
    client.fake.received.clear()
    assert client.upload().error == ""
    assert client.fake.received == {}
    assert uploaded(client.fake) == content(client.folder)
    assert len(client.fake.repos["ada/model"].branches["main"]) == 2


def test_xet_carries_large_files_and_sends_none_twice(client: Client) -> None:
    pytest.importorskip("hf_xet")
    client.fake.fail("POST", "/ada/model/commit/main", status=500, times=3)
    client.fake.fail("GET", "/ada/closed/xet-write-token", status=403, times=999)
    failed, denied = client.run({"name": "ada/model"}, {"name": "ada/closed"}, HF_HUB_DISABLE_XET="")
    assert "failed 3 times" in failed.error
    assert "does not let ada write to ada/closed" in denied.error
    assert 2 * NUM_BYTES < client.fake.received["xorbs"] < 2.1 * NUM_BYTES
    (again,) = client.run({"name": "ada/model"}, HF_HUB_DISABLE_XET="")
    assert again.error == ""
    assert client.fake.received["xorbs"] < 2.1 * NUM_BYTES
    assert uploaded(client.fake) == content(client.folder)
    assert client.fake.count("/storage/") == 0


def test_a_file_that_the_repository_ignores_is_missed(client: Client) -> None:
    client.fake.add_repo("ada/model", files={".gitignore": b"*.safetensors\n"})
    error = client.upload().error
    assert f"lacks {', '.join(SHARDS)}" in error
    assert ".gitignore" in error


def test_who_may_not_write_is_told_what_to_do(client: Client) -> None:
    client.fake.add_repo("engines/denied")
    client.fake.fail("POST", "/api/repos/create", status=403)
    client.fake.fail("POST", "/engines/denied/commit/main", status=403)
    no_create, no_commit, reader, stranger = client.run(
        *({"name": name} for name in ("ada/model", "engines/denied", "museum/model", "others/model"))
    )
    assert len(no_create.done) == 1
    assert "does not let ada write to ada/model" in no_create.error
    assert "leave out --upload" in no_create.error
    assert no_commit.done[1:] == ["engines/denied"]
    assert "does not let ada write to engines/denied" in no_commit.error
    assert f"stays in {client.folder}" in no_commit.error
    for outcome, namespace in ((reader, "museum"), (stranger, "others")):
        assert outcome.done == []
        assert f"logged in as ada, who may not write to {namespace}" in outcome.error
        assert "choose one of ada, engines, such as --upload ada/model" in outcome.error
    assert set(client.fake.repos) == {"engines/denied"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_TOKEN": ""}, ["not logged in", "`hf auth login`", "HF_TOKEN"]),
        ({"HF_TOKEN": "hf_unknown"}, ["does not accept this login", "`hf auth login`", "HF_TOKEN"]),
        ({"HF_TOKEN": READ_TOKEN}, ["logged in as ada with a read-only token", "/settings/tokens"]),
        ({"HF_TOKEN": "hf_torn\x7ftoken"}, ["the token contains invalid characters"]),
        ({"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE", "not reachable", "leave out --upload"]),
    ],
)
def test_without_a_login_or_a_network_nothing_begins(
    client: Client, environment: dict[str, str], words: list[str]
) -> None:
    (outcome,) = client.run({"name": "ada/model"}, **environment)
    assert outcome.done == []
    assert [word for word in words if word not in outcome.error] == []
    assert client.fake.repos == {}


def test_a_hub_that_does_not_answer(client: Client) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        (outcome,) = client.run({"name": "ada/model"}, HF_ENDPOINT=f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert "is not reachable" in outcome.error
    assert "leave out --upload" in outcome.error
    assert outcome.log.count("retrying in") == 2
    client.fake.fail("GET", "/api/models/ada/model", times=999, is_hung=True)
    outcome = client.upload(timeouts_s={"read": 0.1})
    assert "is not reachable" in outcome.error
    assert client.fake.count("GET /api/models/ada/model") == 3


def test_names_are_checked_before_anything_else(client: Client) -> None:
    names = ["a/b/c", "ada/", "/model", "ada/mo del", "ada/model.git", "a--b", "https://huggingface.co/ada/model"]
    revisions = ["two words", "refs/pr/1", "a..b", "a/", "-x", "x.lock"]
    outcomes = client.run(
        *({"name": name} for name in names), *({"name": "ada/model", "revision": name} for name in revisions)
    )
    got = [(outcome.done, outcome.error.split(";")[0]) for outcome in outcomes]
    assert got == [
        *(([], f"--upload: got {name!r}") for name in names),
        *(([], f"--revision: got {name!r}") for name in revisions),
    ]
    assert client.fake.count("whoami") == 0


def test_an_empty_folder_is_no_model(client: Client, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no files to upload" in client.upload(folder=str(tmp_path / "empty")).error


def test_importing_is_cheap() -> None:
    code = "import sys, rl.export.upload; print(sorted({'huggingface_hub', 'torch'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True, timeout=30) == "[]\n"


@pytest.mark.parametrize(
    ("org", "may"),
    [
        ({"roleInOrg": "admin"}, True),
        ({"roleInOrg": "contributor"}, True),
        ({"roleInOrg": "read"}, False),
        ({"roleInOrg": "no_access", "resourceGroups": [{"role": "read"}]}, False),
        ({"roleInOrg": "read", "resourceGroups": [{"role": "read"}, {"role": "write"}]}, True),
        ({}, True),
    ],
)
def test_roles(org: dict[str, Any], may: bool) -> None:
    assert may_write(org) is may


@pytest.mark.parametrize(
    ("error", "status", "passes"),
    [
        (ConnectionError("Request error: HTTP status client error (403 Forbidden), domain: x"), 403, False),
        (ConnectionError("Request error: HTTP status server error (502 Bad Gateway), domain: x"), 502, True),
        (PermissionError("the uploader's token was refused"), 403, False),
        (PermissionError(13, "Permission denied", "model.safetensors"), 0, False),
        (ConnectionError("reset"), 0, True),
        (json.JSONDecodeError("no JSON", "<html>", 0), 0, True),
        (ValueError("Invalid metadata in README.md"), 0, False),
        (FileNotFoundError(2, "gone", "model.safetensors"), 0, False),
    ],
)
def test_which_errorsis_temporary(error: Exception, status: int, passes: bool) -> None:
    wrapped = RuntimeError("Error while uploading")
    wrapped.__cause__ = error
    assert [http_status(error), http_status(wrapped)] == [status] * 2
    assert [is_temporary(error), is_temporary(wrapped)] == [passes] * 2


def test_only_weights_at_the_top_are_ours() -> None:
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["adapter/model.safetensors", "model.bin", "config.json", "safetensors"]
    assert [name for name in names + others if is_model_weights(name)] == names


def merge_command(
    fake: FakeHub, tmp_path: Path, *arguments: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run tools/merge_checkpoint.py as a user does, in a folder that has the folder `runs`."""
    command = impatient(ROOT / "tools" / "merge_checkpoint.py", *arguments)
    own = fake.environment(tmp_path / "home") | {"PYTHONPATH": str(ROOT)} | environment
    own = {name: value for name, value in own.items() if value}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, timeout=100, check=False)
    assert TOKEN not in done.stdout + done.stderr
    return done


Done = subprocess.CompletedProcess[str]
TENSORS = {"w": np.arange(600, dtype=np.float32).reshape(60, 10)}
LORA_OFF = ["model.lora.rank=0"]


EVERY_FOLDER = """
import os, sys
from tools.merge_checkpoint import main

for folder in sys.argv[1:]:
    os.chdir(folder)
    main(["--upload"])
"""


def test_every_recipe_needs_no_name(tmp_path: Path) -> None:
    """The settings of each shipped config, as a run saves them, with as many nodes as it has, all on one disk. The name
    is one that train.py makes from the config's. One process takes them all, in a folder of runs each. All weights are
    trained: a merge of adapters needs their base model (tests/unit/test_merge_lora.py)."""
    made: dict[Path, Made] = {}
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        run, config = tmp_path / file.stem / "runs" / f"{file.stem}-20261118-101500-4711", load_config(file, LORA_OFF)
        made[run] = write_checkpoint([run], TENSORS, 2 * config.placement.get("num_nodes", 1), config=asdict(config))
    with hub() as fake:
        environment = fake.environment(tmp_path / "home") | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", EVERY_FOLDER, *(str(run.parent.parent) for run in made)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    assert fake.repos.keys() == {f"ada/{run.name}" for run in made} and len(made) > 10
    said = done.stdout.splitlines()
    for run, one in made.items():
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.manifest.saved_at))
        shards = [*one.step_folder().glob("model-*")]
        size = format_bytes(sum(path.stat().st_size for path in shards))
        lines, said = said[:6], said[6:]
        assert lines[:4] == [
            f"step 40 of {run.name}, saved {saved}: {len(shards)} shards of the model, {size}, in {run}",
            "will gather nothing, because all files are on this machine",
            f"will merge into {run}/merged/step_40: 1 file, 2.50 kB to write in all",
            f"will upload to ada/{run.name} on {fake.url} (new and private)",
        ]
        assert lines[5].startswith(f"uploaded to {fake.url}/ada/{run.name}/commit/")
        assert fake.repos[f"ada/{run.name}"].private
        files = uploaded(fake, f"ada/{run.name}")
        assert files == content(run / "merged" / "step_40")
        assert one.manifest.config["model"]["path"].rpartition("/")[2] in files["README.md"].decode()
    assert said == []


def test_an_upload_without_a_name_replaces_only_its_own_run(tmp_path: Path) -> None:
    write_checkpoint([tmp_path / "runs" / "my run"], TENSORS, 2, step=20)
    with hub() as fake:
        assert merge_command(fake, tmp_path, "--upload").returncode == 0
        write_checkpoint([tmp_path / "runs" / "my run"], TENSORS, 2, step=40)
        done = merge_command(fake, tmp_path, "--upload")
        assert "will upload to ada/my-run on" in done.stdout
        assert "(private, exists, and its step 20 of this run is replaced)" in done.stdout and done.returncode == 0
        shutil.rmtree(tmp_path / "runs")
        write_checkpoint([tmp_path / "runs" / "my run"], TENSORS, 2, run_id="another")
        done = merge_command(fake, tmp_path, "--upload")
        assert done.returncode == 1 and not (tmp_path / "runs" / "my run" / "merged").exists()
        taken = "merge_checkpoint: ada/my-run holds step 40 of another run, 'my run', which an upload without a name "
        taken += (
            "does not replace: give --upload ada/my-run to replace it, or another name, such as --upload ada/my-run-2"
        )
        assert done.stderr.startswith(taken)
        fake.add_repo("ada/my-run", files={"notes.md": b"of another kind", "merge.json": b"[1"})
        assert "ada/my-run holds other files, which" in merge_command(fake, tmp_path, "--upload").stderr
        done = merge_command(fake, tmp_path, "--upload", "ada/my-run")
        assert done.returncode == 0 and "and holds other files; its weights are replaced)" in done.stdout
        assert "notes.md" in fake.repos["ada/my-run"].files()


def test_what_an_upload_without_a_name_needs(tmp_path: Path) -> None:
    with hub() as fake:
        done = merge_command(fake, tmp_path, "--upload")
        assert f"{tmp_path / 'runs'} is not a folder; give the folder of a run" in done.stderr
        (tmp_path / "runs" / "begun" / "checkpoints").mkdir(parents=True)
        done = merge_command(fake, tmp_path, "--upload")
        assert f"{tmp_path / 'runs'} holds no run with a committed checkpoint; give the folder" in done.stderr
        made = [write_checkpoint([tmp_path / "runs" / name], TENSORS, 2) for name in ("b", "a")]
        for one, seconds in zip(made, (0.2, 0.9), strict=True):
            os.utime(one.step_folder() / "manifest.json", (1_700_000_000 + seconds,) * 2)
        done = merge_command(fake, tmp_path, "--upload")
        runs = [str(tmp_path / "runs" / name) for name in ("a", "b")]
        assert f"several runs are equally new: {', '.join(runs)}; name one of them, as in tools/" in done.stderr
        os.utime(made[0].step_folder() / "manifest.json", (1_700_000_002,) * 2)
        done = merge_command(fake, tmp_path, "--upload", HF_TOKEN="")
        assert "not logged in to the hub: run `hf auth login`" in done.stderr
        assert fake.repos == {} and not [*(tmp_path / "runs").glob("*/merged")]
        done = merge_command(fake, tmp_path, "--upload")
        assert done.returncode == 0 and {*fake.repos} == {"ada/b"}


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("gsm8k_qwen2.5_0.5b-20261118-101500-4711", "gsm8k_qwen2.5_0.5b-20261118-101500-4711"),
        ("über lr=1e-6, v2..final.git", "ber-lr-1e-6-v2.final"),
        ("x" * 200, "x" * 96),
        ("-a--b.", "a-b"),
    ],
)
def test_the_name_of_a_run_becomes_one_that_the_hub_accepts(run: str, name: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    assert name_for_run(run) == name
    validate_repo_id(f"ada/{name}")


def test_a_run_whose_name_has_no_usable_character() -> None:
    with pytest.raises(MergeError, match="has no letter or digit for the hub; give one: --upload NAME"):
        name_for_run("实验")


def test_the_whole_command(tmp_path: Path) -> None:
    """Shards of two nodes to a repository, by the name in the run's config. The hub fails, the command goes on where it
    stopped; what was gathered is deleted when the upload is done, not before."""
    tensors = {f"w{index}": np.random.default_rng(index).random((256, 100), np.float32) for index in range(4)}
    runs = tmp_path / "runs"
    config = {"checkpoint": {"hub_name": "engines/adder"}, "train": {"num_steps": 40}}
    made = write_checkpoint([runs / "x", tmp_path / "node1" / "x"], tensors, 4, config=config)
    (runs / "x" / "metrics.jsonl").write_text(
        '{"step": 1, "reward/mean": 0.25}\n{"step": 2, "reward/mean": 0.75}\n{"st'
    )
    shutil.rmtree(tmp_path / "node1" / "x" / "checkpoints" / "step_40" / "hf")
    arguments = ["--upload", "--max-shard-size", "250kB"]
    nodes = [str(runs / "x"), "--nodes", str(tmp_path / "node1" / "x")]
    work = runs / "x" / "merged" / "step_40.work-save0"
    with hub() as fake:
        run = partial(merge_command, fake, tmp_path)

        done = run(*nodes, *arguments, "--dry-run")
        assert "would upload to engines/adder" in done.stdout
        assert not fake.repos and not (runs / "x" / "merged").exists()
        done = run(*nodes, "--upload", "museum/adder")
        assert done.returncode == 1 and "who may not write to museum" in done.stderr
        assert not (runs / "x" / "merged").exists(), "a wrong name costs no merge"
        fake.fail("POST", "/commit/", status=500, times=100)
        done = run(*nodes, *arguments)
        assert done.returncode == 1 and "The merged model stays in" in done.stderr
        assert work.exists() and (runs / "x" / "merged" / "step_40").exists()
        sent = sum(fake.received.values())
        fake.recover()
        shutil.rmtree(made.step_folder())  # the run may remove the step meanwhile
        done = run(*nodes, *arguments, "--step", "40")
        assert done.returncode == 0, done.stderr
        assert "uploaded to" in done.stdout and "is complete already" in done.stdout
        assert sum(fake.received.values()) == sent, "large files are not sent again"
        assert not work.exists()
        shutil.rmtree(made.step_folder(1))
        assert "give the name: --upload NAME" in run(*nodes, "--upload", "--step", "40").stderr
        done = run(*nodes, "--upload", "engines/second", "--step", "40")
        assert done.returncode == 0 and "step 40 no longer exists" in done.stdout, "what was merged can be uploaded"
        assert uploaded(fake, "engines/second") == uploaded(fake, "engines/adder")
        repository = fake.repos["engines/adder"]
        assert repository.private
        files = uploaded(fake, "engines/adder")
    merged = runs / "x" / "merged" / "step_40"
    assert files == content(merged)
    assert {"config.json", "README.md", "reward.png", "merge.json", "model.safetensors.index.json"} < set(files)
    assert read_model(merged)["w3"].tobytes() == tensors["w3"].tobytes()
    assert "0.75 (step 2)" in files["README.md"].decode()
