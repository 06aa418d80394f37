"""Which checkpoint a run resumes from."""

import dataclasses
import json
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from rl.checkpoint.manifest import File
from rl.checkpoint.resume import Resume, agree_on_resume, find_checkpoint
from rl.checkpoint.settings import changed_settings
from rl.checkpoint.shard_file import write_small_file
from rl.checkpoint.store import CheckpointStore
from rl.config.schema import CheckpointConfig, Config, ConfigError, TrainConfig
from rl.model.shards import TensorInfo
from rl.placement.roles import plan
from tests.saved_steps import LONG_AGO, OpenStores, found_step, lose, save


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_without_checkpoints_starts_from_the_model(root: Path, open_stores: OpenStores, resume: str) -> None:
    (store,) = open_stores([root])
    assert find_checkpoint(store, resume) is None
    root.mkdir(parents=True)
    assert find_checkpoint(store, resume) is None
    (root / "step_2").mkdir()
    write_small_file(root / "step_2" / "model-00000-of-00002.safetensors", b"x")
    assert find_checkpoint(store, "auto") is None


def test_an_incomplete_step_without_a_marker_is_ignored(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    save([root], 8, committed=[])
    lose(root, 8)
    assert find_checkpoint(store, "auto") is None
    save([root], 4)
    found = find_checkpoint(store, "auto")
    assert (found.manifest.step, found.committed) == (4, (4,))
    assert not (root / "step_8" / "COMMITTED").exists()


def test_a_complete_step_with_its_name_counts_without_a_marker(roots: list[Path], open_stores: OpenStores) -> None:
    """No node gives it that name before all have all of it: the kill came between the name and the marker."""
    stores = open_stores(roots)
    save(roots, 4, num_shards=3)
    save(roots, 8, num_shards=3, committed=[])
    found = find_checkpoint(stores[1], "auto")
    assert (found.manifest.step, found.committed) == (8, (4, 8))
    assert all((root / "step_8" / "COMMITTED").exists() for root in roots)
    lose(roots[2], 8, "model-00002-of-00003")  # now it is one that was committed
    with pytest.raises(ConfigError, match="step 8 was committed, but no reachable disk holds 1 of its 6 files"):
        find_checkpoint(stores[1], "auto")


def test_a_step_whose_name_some_nodes_lack_counts_when_its_files_are_there(
    roots: list[Path], open_stores: OpenStores
) -> None:
    """Two copies, and the kill came before the third node had given its folder the name."""
    store, *_ = open_stores(roots)
    save(roots, 8, num_shards=3, copies=2, committed=[])
    (roots[2] / "step_8").rename(roots[2] / "step_8.tmp-w1-8")
    assert found_step(store) == 8
    assert [(root / "step_8" / "COMMITTED").exists() for root in roots] == [True, True, False]


def test_the_newest_is_the_one_that_was_saved_last(root: Path, open_stores: OpenStores) -> None:
    """The run went back to step 4, and on from there: 10 and 12 are of a past that it left."""
    (store,) = open_stores([root])
    for step, saved_at in {4: 1, 10: 2, 12: 3, 6: 4, 8: 5}.items():
        save([root], step, saved_at=LONG_AGO + saved_at)
    found = find_checkpoint(store, "auto")
    assert (found.manifest.step, found.committed) == (8, (4, 6, 8))


def test_small_files_are_not_needed_to_resume(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    small = [File("hf/config.json", 7, "2f", ("n0",), ()), File("probe.safetensors", 9, "3f", ("n0",), ())]
    for step, committed in ((4, None), (6, [])):
        manifest = save([root], step, small=small, committed=committed)
        found = find_checkpoint(store, "auto")
        assert found.manifest == manifest
        assert set(found.holders) == {file.name for file in manifest.files} - {file.name for file in small}
    lose(root, 6)
    with pytest.raises(ConfigError, match="no reachable disk holds 1 of its 6 files"):
        find_checkpoint(store, "auto")


def test_the_newest_committed_step_wins(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    for step in (4, 10, 9):
        save([root], step)
    save([root], 12, committed=[])
    lose(root, 12)
    found = find_checkpoint(store, "auto")
    assert (found.manifest.step, found.version, found.committed, found.is_own) == (10, 11, (4, 9, 10), True)
    assert set(found.holders) == {file.name for file in found.manifest.files}
    assert all(rows == [(0, str(root / "step_10"))] for rows in found.holders.values())
    assert not (root / "step_12" / "COMMITTED").exists()


def test_one_marker_on_any_node_commits_a_step_everywhere(roots: list[Path], open_stores: OpenStores) -> None:
    stores = open_stores(roots)
    save(roots, 4, num_shards=3)
    save(roots, 8, num_shards=3, committed=[2])
    save(roots, 12, num_shards=3, committed=[])
    lose(roots[1], 12, "optimizer-00001-of-00003")
    found = find_checkpoint(stores[1], "auto")
    assert (found.manifest.step, found.committed) == (8, (4, 8))
    assert all((root / "step_8" / "COMMITTED").exists() for root in roots)
    assert not any((root / "step_12" / "COMMITTED").exists() for root in roots)
    name = "model-00001-of-00003.safetensors"
    assert found.holders[name] == [(1, str(roots[1] / "step_8"))]


def test_nodes_that_share_a_disk_both_hold_its_files(root: Path, open_stores: OpenStores) -> None:
    store, _ = open_stores([root, root])
    manifest = save([root], 4)
    found = find_checkpoint(store, "auto")
    folder = str(root / "step_4")
    assert found.holders == {file.name: [(0, folder), (1, folder)] for file in manifest.files}


def test_only_actors_get_the_list_of_files(roots: list[Path], open_stores: OpenStores) -> None:
    store, *_ = open_stores(roots)
    save(roots, 2, num_shards=3)
    save(roots, 4, num_shards=3, copies=2, config={"train": {}}, placement={"owners": [0]}, state={"origin": "runs/a"})
    found = find_checkpoint(store, "auto")
    assert {len(rows) for rows in found.holders.values()} == {2}
    payload = found.to_payload()
    assert msgspec.convert(json.loads(payload), Resume) == found
    assert msgspec.convert(json.loads(bytearray(payload)), Resume) == found
    small = found.without_files()
    assert msgspec.convert(json.loads(small.to_payload()), Resume) == small
    assert (small.version, small.manifest.step, small.manifest.run_id) == (5, 4, "r1")
    assert (small.is_own, small.committed, small.origin) == (True, (2, 4), "runs/a")
    assert (small.holders, small.manifest.files, small.manifest.state) == ({}, (), {"version": 5})
    assert (small.manifest.config, small.manifest.placement) == ({}, {})
    fork = dataclasses.replace(found, is_own=False, committed=())
    assert msgspec.convert(json.loads(fork.to_payload()), Resume) == fork


def agreed(stores: Sequence[CheckpointStore], config: Config) -> list[Resume | None]:
    """What each of three ranks is told; 1 is the leader, 0 no actor."""
    placement = plan({"rollout": [0], "actor": [1, 2]}, 3, 1, 1, 1)
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(agree_on_resume, store.mail, placement, store, config) for store in stores]
        return [rank.result(timeout=20) for rank in ranks]


def test_all_ranks_agree(roots: list[Path], open_stores: OpenStores, capsys: pytest.CaptureFixture) -> None:
    stores = open_stores(roots)
    save(roots, 4, num_shards=3, config=dataclasses.asdict(Config(train=TrainConfig(num_steps=6))))
    found = agreed(stores, Config(train=TrainConfig(num_steps=8)))
    assert found[1] == found[2]
    assert len(found[1].manifest.files) == len(found[1].holders) == 6
    assert found[0] == found[1].without_files()
    assert [store.run_id for store in stores] == ["r1"] * 3
    assert [(root / "run_id").read_text() for root in roots] == ["r1"] * 3
    assert [store.hosts for store in stores] == [[], [socket.gethostname()] * 3, []]
    told = f"{roots[1]}: resumes after step 4; settings changed since then: train.num_steps 6 -> 8\n"
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(("num_epochs", "setting"), [(0, "train.num_steps"), (2, "train.num_epochs")])
def test_a_finished_run_names_the_setting_to_raise(
    num_epochs: int, setting: str, roots: list[Path], open_stores: OpenStores, capsys: pytest.CaptureFixture
) -> None:
    config = Config(train=TrainConfig(num_steps=4, num_epochs=num_epochs))
    stores = open_stores(roots)
    save(roots, 4, num_shards=3, config=dataclasses.asdict(config))
    agreed(stores, config)
    told = f"{roots[1]}: resumes after step 4; all 4 steps are done; raise {setting} to continue training\n"
    assert capsys.readouterr().out == told


def test_a_new_run_gets_an_id_and_keeps_it(
    roots: list[Path], open_stores: OpenStores, capsys: pytest.CaptureFixture
) -> None:
    """Also where it is killed before it has saved anything."""
    stores = open_stores(roots)
    assert agreed(stores, Config()) == [None] * 3
    (run_id,) = {store.run_id for store in stores}
    assert len(run_id) == 16
    assert [(root / "run_id").read_text() for root in roots] == [run_id] * 3
    again = open_stores(roots)
    assert agreed(again, Config()) == [None] * 3
    assert {store.run_id for store in again} == {run_id}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_run_without_checkpoints_keeps_the_id_on_any_node(
    roots: list[Path], open_stores: OpenStores, node: int
) -> None:
    """The other nodes are new, as after a failure of their machines."""
    roots[node].mkdir(parents=True)
    write_small_file(roots[node] / "run_id", b"r1")
    agreed(open_stores(roots), Config())
    assert {(root / "run_id").read_text() for root in roots} == {"r1"}
    assert agreed(open_stores(roots), Config()) == [None] * 3  # else: checkpoints of different runs lie in one folder


def test_a_fork_gets_its_own_id(tmp_path: Path, roots: list[Path], open_stores: OpenStores) -> None:
    source = tmp_path / "other"
    save([source / "checkpoints"], 4, run_id="r0")
    stores = open_stores(roots, [source] * 3)
    found = agreed(stores, Config(checkpoint=CheckpointConfig(resume=str(source))))
    assert [entry.manifest.run_id for entry in found] == ["r0"] * 3
    assert not any(entry.is_own for entry in found)
    (run_id,) = {store.run_id for store in stores}
    assert run_id not in ("", "r0")


def test_files_of_an_earlier_save_of_the_step_are_not_used(roots: list[Path], open_stores: OpenStores) -> None:
    """A node that was away when the step was saved once more."""
    store, *_ = open_stores(roots)
    save(roots[2:], 4, num_shards=2, save_id="w0-4", saved_at=LONG_AGO)
    save(roots[:2], 4, num_shards=2, save_id="w1-4", saved_at=LONG_AGO + 9)
    found = find_checkpoint(store, "auto")
    assert found.manifest.save_id == "w1-4"
    assert {rank for rows in found.holders.values() for rank, _ in rows} == {0, 1}


def test_a_missing_file_is_listed_with_its_hosts(roots: list[Path], open_stores: OpenStores) -> None:
    store, *_ = open_stores(roots)
    save(roots, 2, num_shards=3)
    manifest = save(roots, 4, num_shards=3)
    (roots[2] / "step_4" / "model-00002-of-00003.safetensors").unlink()
    size = next(file.num_bytes for file in manifest.files if file.name == "model-00002-of-00003.safetensors")
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(store, "auto")
    text = str(caught.value)
    assert "step 4 was committed, but no reachable disk holds 1 of its 6 files" in text
    assert f"\n  model-00002-of-00003.safetensors ({size} bytes): was saved on n2\n" in text
    assert "Start again with the nodes that hold them, or resume from an older step (2) in a new run" in text
    assert "checkpoint.resume=PATH" in text
    assert "checkpoint.resume=never" in text
    assert "checkpoint.copies=2" in text


def test_a_truncated_file_is_listed_with_its_place(roots: list[Path], open_stores: OpenStores) -> None:
    store, *_ = open_stores(roots)
    save(roots, 4, num_shards=3)
    path = roots[1] / "step_4" / "optimizer-00001-of-00003.safetensors"
    os.truncate(path, 100)
    with pytest.raises(
        ConfigError, match=rf"optimizer-00001-of-00003\.safetensors \(\d+ bytes\): {path} has 100 bytes"
    ):
        find_checkpoint(store, "auto")


def test_a_missing_node_does_not_matter_with_two_copies(roots: list[Path], open_stores: OpenStores) -> None:
    save(roots, 4, num_shards=3, copies=2)
    both = open_stores(roots[:2])
    found = find_checkpoint(both[0], "auto")
    assert [len(found.holders[f"model-0000{shard}-of-00003.safetensors"]) for shard in range(3)] == [2, 1, 1]
    save(roots, 6, num_shards=3)
    with pytest.raises(ConfigError, match="no reachable disk holds 2 of its 6 files") as caught:
        find_checkpoint(both[0], "auto")
    assert str(caught.value).count("was saved on n2") == 2


def test_a_long_list_of_missing_files_is_cut(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    save([root], 4, [TensorInfo("w", (12, 3), "float32", sharded=True)], num_shards=12)
    for path in (root / "step_4").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="24 of its 24 files") as caught:
        find_checkpoint(store, "auto")
    assert str(caught.value).count("was saved on n0") == 20
    assert "\n  and 4 more\n" in str(caught.value)
    assert "older step" not in str(caught.value)


def test_a_damaged_manifest_is_an_error(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    save([root], 2)
    save([root], 4)
    (root / "step_4" / "manifest.json").write_bytes(b'{"kind"')
    with pytest.raises(ConfigError, match=rf"{root}/step_4/manifest\.json is damaged"):
        find_checkpoint(store, "auto")


@pytest.mark.parametrize("ignored", ["incomplete", "left behind"])
def test_a_damaged_manifest_is_an_error_beside_incomplete_steps(
    root: Path, open_stores: OpenStores, ignored: str
) -> None:
    """Step 8 is the newest that was committed; the run must not go on from 4, or from 12, without a word."""
    (store,) = open_stores([root])
    save([root], 4)
    if ignored == "incomplete":
        save([root], 12, committed=[])
        lose(root, 12)
    else:
        save([root], 12, saved_at=LONG_AGO)  # before step 4, where the run went back to
    save([root], 8)
    (root / "step_8" / "manifest.json").write_bytes(b'{"kind"')
    with pytest.raises(ConfigError, match=rf"{root}/step_8/manifest\.json is damaged"):
        find_checkpoint(store, "auto")


def test_a_damaged_manifest_is_read_from_another_node(roots: list[Path], open_stores: OpenStores) -> None:
    store, *_ = open_stores(roots)
    save(roots, 4, num_shards=3)
    (roots[0] / "step_4" / "manifest.json").write_bytes(b'{"kind"')
    found = find_checkpoint(store, "auto")
    assert found.manifest.step == 4
    assert found.holders["model-00000-of-00003.safetensors"] == [(0, str(roots[0] / "step_4"))]


def test_checkpoints_of_two_runs_are_an_error(roots: list[Path], open_stores: OpenStores) -> None:
    store, *_ = open_stores(roots)
    save(roots[:2], 4)
    save(roots[2:], 2, run_id="r2")
    with pytest.raises(ConfigError, match="checkpoints of different runs lie in one folder") as caught:
        find_checkpoint(store, "auto")
    assert f"{roots[0]}/step_4 (run r1)" in str(caught.value) or f"{roots[1]}/step_4 (run r1)" in str(caught.value)
    assert f"{roots[2]}/step_2 (run r2)" in str(caught.value)
    assert "move those of other runs away" in str(caught.value)


@pytest.mark.parametrize("first", ["r1", ""])
def test_folders_of_two_runs_are_an_error(roots: list[Path], open_stores: OpenStores, first: str) -> None:
    """Nothing was saved on the second node, or nothing at all: their folders still say whose they are."""
    store, *_ = open_stores(roots)
    if first:
        save(roots[:1], 4, run_id="r1")
    else:
        roots[0].mkdir(parents=True)
        write_small_file(roots[0] / "run_id", b"r1")
    roots[1].mkdir(parents=True)
    write_small_file(roots[1] / "run_id", b"r2")
    with pytest.raises(ConfigError, match="checkpoints of different runs lie in one folder") as caught:
        find_checkpoint(store, "auto")
    assert f"{roots[0]}{'/step_4' if first else ''} (run r1), {roots[1]} (run r2); move" in str(caught.value)


def test_a_checkpoint_in_another_runs_folder(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    save([root], 4, run_id="r1")
    write_small_file(root / "run_id", b"r1")
    assert found_step(store) == 4
    (root / "run_id").write_text("r2")
    with pytest.raises(
        ConfigError, match=rf"{root}/step_4 \(run r1\), {root} \(run r2\); move those of other runs away"
    ):
        find_checkpoint(store, "auto")


def test_never_renames_the_folder_of_an_earlier_launch(
    roots: list[Path], open_stores: OpenStores, capsys: pytest.CaptureFixture
) -> None:
    store, *_ = open_stores(roots)
    save(roots[:2], 2)
    save(roots[:2], 4)
    assert find_checkpoint(store, "never") is None
    suffix = time.strftime("%Y%m%d-%H%M%S", time.localtime(LONG_AGO + 4))
    names = set()
    for root in roots[:2]:
        (aside,) = root.parent.iterdir()
        names.add(aside.name)
        assert sorted(path.name for path in aside.iterdir()) == ["step_2", "step_4"]
    (name,) = names
    assert name.startswith(f"checkpoints.{suffix}-")
    assert f"{roots[0]} is now {name}\n" in capsys.readouterr().out
    assert find_checkpoint(store, "auto") is None


def test_never_renames_twice_in_the_same_second(root: Path, open_stores: OpenStores) -> None:
    """As when a checkpoint is copied back and tried once more."""
    (store,) = open_stores([root])
    for _ in range(3):
        save([root], 4)
        assert find_checkpoint(store, "never") is None
    asides = list(root.parent.iterdir())
    assert len(asides) == 3
    assert all((aside / "step_4" / "COMMITTED").exists() for aside in asides)


def test_never_resumes_from_steps_of_this_launch(roots: list[Path], open_stores: OpenStores) -> None:
    """torchrun restarts a world with the same settings: what it saved since is not to be lost."""
    store, *_ = open_stores(roots)
    save(roots, 2, num_shards=3, saved_at=time.time() + 5)
    save(roots, 4, num_shards=3, saved_at=time.time() + 9)
    assert found_step(store, "never") == 4
    assert all((root / "step_2").is_dir() for root in roots)


def test_changed_settings_are_listed() -> None:
    before = {
        "run": {"name": "a", "seed": 1},
        "train": {"num_steps": 8},
        "algo": {"clip": {"low": 0.2, "high": 0.2}, "gone": 1},
        "data": {"train": "x", "none": None},
        "checkpoint": {"resume": "auto"},
        "placement": {"actor": "all"},
    }
    now = {
        "run": {"name": "b", "seed": 2},
        "train": {"num_steps": 16},
        "algo": {"clip": {"low": 0.2, "high": 0.3}, "new": True},
        "data": {"train": "x", "none": None},
        "checkpoint": {"resume": "runs/a"},
        "placement": {"actor": "0-1"},
    }
    assert changed_settings(before, now) == [
        "train.num_steps 8 -> 16",
        "algo.clip.high 0.2 -> 0.3",
        "algo.new None -> True",
    ]
    assert changed_settings(before, before) == []


def test_derived_settings_are_no_changes() -> None:
    before = {"actor": {"lr": 1.0, "offload": "none"}}
    now = {"actor": {"lr": 2.0, "offload": "moments"}}
    assert changed_settings(before, now, ["actor.offload"]) == ["actor.lr 1.0 -> 2.0"]
