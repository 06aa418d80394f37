"""Names from other nodes, manifests and model folders that lead out of their folder: `..`, absolute paths, symlinks."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rl.checkpoint.directory import CheckpointDirectory as Directory
from rl.checkpoint.manifest import CheckpointError, File, Manifest, Slice
from rl.checkpoint.resume import Resume, SliceReader
from rl.checkpoint.shard_file import digest
from rl.checkpoint.store import CheckpointStore
from rl.common.files import UnsafeName, check_name, join_inside, write_atomically
from rl.config.load import load_config
from rl.config.schema import ROOT, ConfigError
from rl.export.upload import HubRepository
from rl.model.shape import ModelSize, measure_size, tensor_files
from tests.checkpoint_files import Made, write_checkpoint
from tests.mails import stores_on
from tests.merging import failure, files_of, merge
from tests.unit.test_checkpoint_store import MANIFEST, answer

pytestmark = pytest.mark.timeout(60)

BAD_NAMES = ["", ".", "..", "/", "/etc/passwd", "../x", "a/../x", "a/..", "a//b", "a/", "./a", "a/./b", "a\0b", "a\nb"]
BAD_NAMES += ["a\x1b[2Jb", "\x7f", "a\x85b", "\u2028", "\udc80", "a/" * 3000 + "b", "x" * 300]
GOOD_NAMES = ["a", "hf/config.json", "model-00000-of-00002.safetensors", "..a", "a..", "...", "~", "-", "a b", "café"]
EVIL = b"written by another node"


# The one function that all of them use


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_is_not_plain_is_refused(name: str, tmp_path: Path) -> None:
    for check in (check_name, lambda name: join_inside(tmp_path, name)):
        with pytest.raises(UnsafeName) as caught:
            check(name)
        assert str(caught.value).isprintable(), "a log or terminal would interpret it"


@pytest.mark.parametrize("name", GOOD_NAMES)
def test_a_plain_name_is_joined(name: str, tmp_path: Path) -> None:
    assert join_inside(tmp_path, name) == tmp_path / name


def test_a_symlink_must_stay_in_the_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "secret").touch()
    (folder / "inner").mkdir()
    links = {"file": outside / "secret", "dir": outside, "up": "..", "new": tmp_path / "not there yet", "chain": "file"}
    links |= {"inner/deep": "../../outside", "loop": "loop", "sibling": tmp_path / "folder2"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    for name in [*links, "dir/secret", "dir/new", "up/outside/secret", "inner/deep/secret", "chain"]:
        with pytest.raises(UnsafeName, match=re.escape(name)):
            join_inside(folder, name)
    (folder / "fine").symlink_to("inner")
    assert join_inside(folder, "fine/x") == folder / "fine" / "x"
    (tmp_path / "link").symlink_to(folder)
    assert join_inside(tmp_path / "link", "inner/x") == tmp_path / "link" / "inner" / "x"


def random_name(source: random.Random) -> str:
    """Join pieces of names: dots, separators, symlinks of the test, control characters, and what resembles dots."""
    pieces = [*"./~\\\0\n", "", "..", "..a", "a", "hf", "link", "out", "%2e%2e", "\uff0e\uff0e", "\u202e"]
    parts = ["".join(source.choices(pieces, k=source.randint(1, 2))) for _ in range(source.randint(1, 5))]
    return "/".join(parts)


def test_no_random_name_leads_outside(tmp_path: Path) -> None:
    """Whatever name is accepted, the file that is written under it lies in the folder, by the kernel's own account."""
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for each in (folder / "a", folder / "hf", outside):
        each.mkdir(parents=True)
    (folder / "link").symlink_to("a")
    (folder / "out").symlink_to(outside)
    source, num_written = random.Random(0), 0
    for _ in range(3000):
        try:
            path = join_inside(folder, random_name(source))
        except UnsafeName:
            continue
        with suppress(FileExistsError, NotADirectoryError):  # it was made as a file before
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not path.parent.is_dir():
            continue
        handle = os.open(path, os.O_WRONLY | os.O_CREAT)
        assert os.readlink(f"/proc/self/fd/{handle}").startswith(f"{folder}/"), path
        os.close(handle)
        num_written += 1
    assert num_written > 200 and not any(outside.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "outside"]


def test_a_temporary_file_is_not_written_through_a_symlink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if somebody guesses its name."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("rl.common.files.secrets.token_hex", lambda count: "guess")
    (tmp_path / "board.json.guess.part").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "board.json", "new")
    assert victim.read_text() == "mine"
    write_atomically(tmp_path / "board.json", "newer")
    assert (tmp_path / "board.json").read_text() == "newer" and not (tmp_path / "board.json").is_symlink()


# Calls from other nodes


def saved_step(root: Path, step: int = 4, **files: str) -> Path:
    folder = root / f"step_{step}"
    folder.mkdir(parents=True)
    manifest = replace(MANIFEST, step=step, save_id=f"w1-{step}")
    for name, text in {"manifest.json": manifest.to_json().decode(), "model": "0123456789", **files}.items():
        (folder / name).write_text(text)
    return folder


def refused(store: CheckpointStore, method: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^rank 0 called \w+ "):
        answer(store, 1, method, *arguments, **named)


@pytest.mark.parametrize(
    ("folder", "file"),
    [
        ("..", "evil.pth"),
        (".", "evil.pth"),
        ("", "evil.pth"),
        ("step_4.tmp-w1-4", "../evil.pth"),
        ("step_4.tmp-w1-4", "../../evil.pth"),
        ("step_4.tmp-w1-4", "{outside}/evil.pth"),
        ("{outside}", "evil.pth"),
        ("step_4.tmp-w1-4/../..", "evil.pth"),
        ("step_4.tmp-../../../x", "evil.pth"),
        ("step_4.tmp-w1-4", "evil.pth\n"),
        ("step_4.tmp-w1-4", ""),
        ("step_9.tmp-w1-9", "evil.pth"),  # a symlink to another folder
        ("step_5.tmp-w1-5", "link/evil.pth"),
        ("step_4", "model-2"),  # another file in a committed step
        ("step_4", "COMMITTED"),
        ("step_4.old-w1-4", "evil.pth"),
        ("step_4.claim-w1-4", "evil.pth"),
        ("notes", "evil.pth"),
    ],
)
def test_a_node_writes_only_into_a_save_in_progress(folder: str, file: str, tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "b" / "checkpoints"
    outside.mkdir()
    with stores_on([tmp_path / "a" / "checkpoints", root]) as (store, _):
        store.create_roots("r1")
        saved_step(root)
        (root / "step_9.tmp-w1-9").symlink_to(outside)
        (root / "step_5.tmp-w1-5").mkdir()
        (root / "step_5.tmp-w1-5" / "link").symlink_to(outside)
        before = files_of(tmp_path)
        arguments = (folder.format(outside=outside), file.format(outside=outside), 0, digest(EVIL), True)
        refused(store, Directory.write, *arguments, payload=EVIL)
        assert files_of(tmp_path) == before
        assert answer(store, 1, Directory.write, "step_4.tmp-w1-4", "hf/x.json", 0, digest(b"1"), True, payload=b"1")
        probe = ("step_4", "probe.safetensors", 0, digest(b"1"), True)
        assert answer(store, 1, Directory.write, *probe, payload=b"1"), "logits are added to a committed step"


def test_a_node_reads_only_steps_of_the_run_and_its_source(tmp_path: Path) -> None:
    root, source, outside = (tmp_path / name / "checkpoints" for name in ("run", "source", "outside"))
    steps = {place: saved_step(place) for place in (root, source, outside)}
    (tmp_path / "secret").write_text("secret")
    (root / "secret").write_text("secret")
    (steps[root] / "link").symlink_to(tmp_path / "secret")
    (steps[root] / "hf").symlink_to(tmp_path)
    (root / "step_9").symlink_to(steps[outside])
    attacks = [
        (tmp_path, "secret"),
        (root, "secret"),
        (steps[root], "../secret"),
        (steps[root], "../../../secret"),
        (steps[root], str(tmp_path / "secret")),
        (steps[root], "link"),
        (steps[root], "hf/secret"),
        (steps[outside], "model"),
        (root / "step_9", "model"),
        (root / ".." / ".." / "outside" / "checkpoints" / "step_4", "model"),
        (Path("/proc/self"), "environ"),
    ]
    with stores_on([tmp_path / "a" / "checkpoints", root], [source.parent, source.parent]) as (store, _):
        for folder, file in attacks:
            refused(store, Directory.read, str(folder), file)
        for place in (root, source):
            assert answer(store, 1, Directory.read, str(steps[place]), "model") == b"0123456789"


@pytest.mark.parametrize("given", ["source", "source/checkpoints", "source/checkpoints/step_4", "link"])
def test_every_form_of_the_source_can_be_read(given: str, tmp_path: Path) -> None:
    saved_step(tmp_path / "source" / "checkpoints")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    with stores_on([tmp_path / "run" / "checkpoints"], [tmp_path / given]) as (store,):
        (step,) = answer(store, 0, Directory.list_steps, "source").steps
        assert answer(store, 0, Directory.read, step.folder, "model") == b"0123456789"


def test_a_rank_reads_only_steps_although_its_leader_names_others(tmp_path: Path) -> None:
    """The leader's message names a folder for each file, and a rank reads files of its own node without a call."""
    (tmp_path / "secret").write_bytes(b"0123")
    part = Slice("model", "w", "F32", (1,), (0,), (1,), 0, 4, digest(b"0123"))
    file = File("secret", 4, "", (), (part,))
    manifest = replace(MANIFEST, files=(file,))
    with stores_on([tmp_path / "run" / "checkpoints"]) as (store,):
        reader = SliceReader(Resume(manifest, {"secret": [(0, str(tmp_path))]}, True, (), "", False), store, 0)
        with pytest.raises(CheckpointError, match="is not a step of this run"):
            reader.read(file, part)


def test_a_save_cannot_place_or_delete_what_is_not_its_own(tmp_path: Path) -> None:
    root, other = tmp_path / "run" / "checkpoints", tmp_path / "other" / "checkpoints"
    with stores_on([tmp_path / "a" / "checkpoints", root]) as (store, _):
        store.create_roots("r1")
        saved_step(root)
        saved_step(other)
        (root / "step_6.tmp-w1-6").mkdir()
        (root / "step_6.tmp-w1-6" / "model").write_text("of another save")
        before = files_of(tmp_path)
        text = MANIFEST.to_json()
        for folder, save_id in (
            ("../../other/checkpoints/step_4", "w1-7"),
            (str(other / "step_4"), "w1-7"),
            ("step_6.tmp-w1-6", "w1-7"),
            ("step_7.tmp-*", "*"),
            ("step_7.tmp-../x", "../x"),
            ("step_7.tmp-", ""),
        ):
            refused(store, Directory.prepare, 7, save_id, folder, {}, payload=text)
        refused(store, Directory.prepare, 7, "w1-7", "step_7.tmp-w1-7", {"../../../other/run_id": 0}, payload=text)
        refused(store, Directory.commit, 7, "*")
        refused(store, Directory.remove, "*", [4])
        refused(store, Directory.rename_root, "x/../../evil")
        refused(store, Directory.create_root, "\x1b[2J")
        refused(store, Directory.confirm, str(other / "step_4"), "w1-4")
        assert files_of(tmp_path) == before
        answer(store, 1, Directory.confirm, str(root / "step_4"), "w1-4")
        assert (root / "step_4" / "COMMITTED").exists()


# Manifests


def with_file(name: str, /, **slices: Any) -> dict[str, Any]:
    body = {"kind": "oneworld checkpoint", "format": 1, **asdict(MANIFEST)}
    part = ["model", "w", "F32", [2], [0], [2], 8, 8, "d"]
    for place, value in slices.items():
        part[Slice._fields.index(place)] = value
    return body | {"files": [{"name": name, "num_bytes": 16, "digest": "d", "hosts": ["n0"], "slices": [part]}]}


def parse(body: dict[str, Any]) -> Manifest:
    return Manifest.from_json(json.dumps(body).encode(), "node1:/x/manifest.json")


def test_a_manifest_with_plain_names_is_read() -> None:
    for name in GOOD_NAMES:
        assert parse(with_file(name)).files[0].name == name


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_manifest_names_only_files_of_its_step(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"^node1:/x/manifest\.json is damaged: "):
        parse(with_file(name))


BAD_SLICES: list[dict[str, Any]] = [
    {"name": "../w"},
    {"name": "a\0b"},
    {"name": "__metadata__"},
    {"kind": "/etc", "name": "w"},
    {"dtype": "F31"},
    {"shape": [-2]},
    {"offsets": []},
    {"size": [1, 1]},
    {"size": [1 << 62]},
    {"begin": -1},
    {"begin": 9},
    {"num_bytes": -8},
    {"num_bytes": 4},
]
BAD_FIELDS: list[dict[str, Any]] = [
    {"save_id": "../../x"},
    {"save_id": "*"},
    {"save_id": ""},
    {"run_id": "a/b"},
    {"run_name": "\x1b]0;x\x07"},
    {"step": -1},
    {"config": {"model": "not a section"}},
    {"placement": {"folders": ["/x"]}},
    {"placement": {"folders": {"n0": 1}}},
]


@pytest.mark.parametrize("slices", BAD_SLICES)
def test_slices_that_do_not_fit_their_file_are_refused(slices: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="is damaged: "):
        parse(with_file("model", **slices))


@pytest.mark.parametrize("fields", BAD_FIELDS)
def test_fields_that_become_names_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="is damaged: "):
        parse(with_file("model") | fields)


def test_a_manifest_of_brackets_is_damaged() -> None:
    with pytest.raises(CheckpointError, match="is damaged: "):
        Manifest.from_json(b"[" * 200_000, "x")


def test_mutated_manifests_are_read_or_damaged() -> None:
    """No other exception, and no name that leads outside."""
    source, num_read = random.Random(0), 0
    text = json.dumps(with_file("hf/config.json")).encode()
    for _ in range(3000):
        mutated = bytearray(text)
        for _ in range(source.randint(1, 2)):
            place = source.randrange(len(mutated))
            piece = source.choice([b"../", b"/", b"\\u0000", b"\\n", b"-", b"9", b'"', b"[", b"}", b"null", b""])
            mutated[place : place + source.randint(0, 4)] = piece
        try:
            manifest = Manifest.from_json(mutated, "x")
        except CheckpointError:
            continue
        num_read += 1
        for file in manifest.files:
            assert os.path.normpath(f"/folder/{file.name}") == f"/folder/{file.name}" and "\0" not in file.name
    assert num_read > 100


# Merging files of hostile nodes

TENSORS = {"w": np.arange(32, dtype=np.float32).reshape(8, 4)}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Shards on this machine, node0, and on node1."""
    monkeypatch.setattr("socket.gethostname", lambda: "node0")
    return write_checkpoint([tmp_path / f"disk{node}" / "x" for node in range(2)], TENSORS, 2)


def hostile_ssh(folder: Path, *names: str) -> list[str]:
    """Return options for a command in place of ssh. The node also lists files with these names, and sends EVIL."""
    script, calls = folder / "ssh", folder / "calls"
    lines = "".join(f"{len(EVIL)} step_40/{name}\\n" for name in names)
    listing = f"printf %s\\\\n \"$all\" | sh | sed 's,^oneworld end$,{lines}oneworld end,'"
    patterns = "|".join(f"*{shlex.quote(name)}*" for name in names) or "nothing"
    script.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >> {calls}\nall=$(cat)\ncase "$all" in\n'
        f'  {patterns}) echo oneworld begin; printf %s "{EVIL.decode()}";;\n'
        f'  *"find -L"*) {listing};;\n  *) printf %s\\\\n "$all" | sh;;\nesac\n'
    )
    script.chmod(0o755)
    return ["--ssh", str(script)]


def test_the_hostile_node_of_these_tests_delivers(made: Made, tmp_path: Path) -> None:
    add_file(made, "hf/notes.txt")
    merge(*hostile_ssh(tmp_path, "hf/notes.txt"), made.folders[0])
    assert (made.folders[0] / "merged/step_40/notes.txt").read_bytes() == EVIL


def add_file(made: Made, name: str, **fields: Any) -> None:
    """Add a file to the manifest of all nodes, without a check."""
    body = json.loads(made.manifest.to_json()) | fields
    if name:
        body["files"] += [{"name": name, "num_bytes": len(EVIL), "digest": digest(EVIL), "hosts": ["node1"]}]
        body["files"][-1]["slices"] = []
    for node in range(2):
        (made.step_folder(node) / "manifest.json").write_text(json.dumps(body))


@pytest.mark.parametrize(
    "name", ["hf/../../../../../../../victim.txt", "hf/../../../../../victim.txt", "hf/{victim}", "hf/../config.json"]
)
def test_a_manifest_cannot_overwrite_files_at_a_merge(name: str, made: Made, tmp_path: Path) -> None:
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    (made.folders[0] / "victim.txt").write_text("mine")
    name = name.format(victim=victim)
    add_file(made, name)
    before = files_of(tmp_path)
    with pytest.raises((SystemExit, KeyError)) as caught:
        merge(*hostile_ssh(tmp_path, name), made.folders[0])
    after = {path: data for path, data in files_of(tmp_path).items() if path not in ("ssh", "calls")}
    assert after == before
    assert "manifest.json is damaged" in str(caught.value) and repr(name) in str(caught.value)


@pytest.mark.parametrize("save_id", ["../../../evil", "/evil", "a\nb", ".."])
def test_a_manifest_cannot_choose_the_work_folder(save_id: str, made: Made, tmp_path: Path) -> None:
    add_file(made, "", save_id=save_id)
    assert "manifest.json is damaged" in failure(*hostile_ssh(tmp_path), made.folders[0])


@pytest.mark.parametrize("host", ["-oProxyCommand=touch evil", "$(touch evil)", "a b", "`x`", "\x1b[2J", ""])
def test_a_manifest_cannot_choose_what_ssh_executes(host: str, made: Made, tmp_path: Path) -> None:
    """Nor does it get odd characters into the command lines of a user's ProxyCommand."""
    files = [asdict(file) | {"hosts": [host]} for file in made.manifest.files]
    add_file(made, "", files=files)
    (made.shard(1)).unlink()
    text = failure(*hostile_ssh(tmp_path), made.folders[0])
    assert ("is not the name of a host" if host.isprintable() else "is damaged") in text and text.replace(
        "\n", ""
    ).isprintable()
    assert not (tmp_path / "calls").exists()


WORK = "merged/step_40.work-save0"


@pytest.mark.parametrize(
    ("link", "is_folder"),
    [
        (WORK, True),
        (f"{WORK}/shards", True),
        (f"{WORK}/shards/step_40", True),
        (f"{WORK}/shards/step_40/model-00001-of-00002.safetensors.part", False),
        (f"{WORK}/model/model.safetensors.part", False),
        (f"{WORK}/model", True),
    ],
)
def test_a_merge_does_not_write_through_planted_symlinks(
    link: str, is_folder: bool, made: Made, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "model-00001-of-00002.safetensors.part"
    victim.write_text("mine")
    # An earlier merge was killed: it has neither the shard of node1 nor the model yet.
    merge(*hostile_ssh(tmp_path), made.folders[0], "--keep-shards")
    work, path = made.folders[0] / WORK, made.folders[0] / link
    (made.folders[0] / "merged" / "step_40").rename(work / "model")
    (work / "model" / "model.safetensors").unlink()
    (work / "shards/step_40/model-00001-of-00002.safetensors").unlink()
    if path.exists():
        path.rename(tmp_path / "away")
    path.symlink_to(outside if is_folder else victim)
    text = failure(*hostile_ssh(tmp_path), made.folders[0])
    assert files_of(outside) == {victim.name: b"mine"}
    assert "through a symlink" in text


def test_an_upload_does_not_follow_symlinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that somebody planted in the model's folder would publish the file that it leads to."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "id_rsa").write_text("private")
    (folder / "notes.txt").symlink_to(tmp_path / "id_rsa")
    sent: list[dict[str, Path]] = []
    monkeypatch.setattr(HubRepository, "_exists", lambda self: True)
    monkeypatch.setattr(HubRepository, "_commit", lambda self, files, message: sent.append(files))
    with pytest.raises(Exception, match=r"notes\.txt.* symlink"):
        HubRepository("org/name").upload(folder, "step 1")
    assert not sent


# Model folders and settings


def test_an_index_names_only_files_of_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    for name in ["../other.safetensors", str(tmp_path / "other.safetensors"), "", "a\0b", 5, ["x"]]:
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
            tensor_files(model)
        assert measure_size(model) is None
    # The hub's cache consists of symlinks to its blobs.
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    (model / "a.safetensors").symlink_to("../other.safetensors")
    assert tensor_files(model) == {"w": "a.safetensors"} and measure_size(model) == ModelSize(3)


BAD_RUNS = ["..", ".", "/abs", "a/b", "../x", "a\nb", "a\x1bb", "x" * 300]


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_runs_name_is_one_plain_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name") as caught:
        load_config(None, [f"run.name={json.dumps(name)}"])
    assert "directory name" in str(caught.value)


def test_names_of_runs_may_be_unusual() -> None:
    for name in ("a b", "..a", "run-1", "実験"):
        assert load_config(None, [f"run.name={json.dumps(name)}"]).run.name == name


PLAN = ["train.py", "--plan", "--nproc-per-node", "2"]


@pytest.mark.parametrize("command", [["launch/settings.py", "", ""], pytest.param(PLAN, marks=pytest.mark.slow)])
def test_programs_refuse_a_runs_name_that_leads_elsewhere(command: list[str]) -> None:
    words = [sys.executable, *command, "run.name=.."]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode != 0 and "run.name" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert "directory name" in done.stderr and not done.stdout
