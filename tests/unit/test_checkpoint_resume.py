"""Which checkpoint a run goes on from, and that its rows come back at any number of ranks."""

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.checkpoint.manifest import CheckpointError, File, Manifest
from rl.checkpoint.resume import Resume, SliceReader, agree_on_resume, changed_settings, fill, find_checkpoint
from rl.checkpoint.shard_file import Content, rows_to_write, write_shard, write_whole
from rl.checkpoint.store import CheckpointStore
from rl.config.schema import CheckpointConfig, Config, ConfigError, TrainConfig
from rl.model.shards import LocalSlice, TensorInfo
from rl.placement.roles import plan
from rl.world.mail import PeerLost
from tests.mails import stores_on

DTYPES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64"}
HOSTS = ("n0", "n1", "n2")
LONG_AGO = 1_000_000_000.0
W = TensorInfo("w", (7, 3), "float32", sharded=True)
BIAS = TensorInfo("bias", (2,), "float32", sharded=True)
TABLE = TensorInfo("table", (4, 2), "float32", sharded=False)
COUNT = TensorInfo("count", (), "int64", sharded=False)
MODEL = (W, BIAS, TABLE, COUNT)
MOMENTS = ("exp_avg", "exp_avg_sq")
Values = dict[tuple[str, str], Tensor]  # by kind and name


def values_of(infos: Sequence[TensorInfo], kinds: Sequence[str] = ("model", *MOMENTS)) -> Values:
    """Numbers that are nowhere else: no element of one tensor is in another."""
    made, start = {}, 0.0
    for kind in kinds:
        for info in infos:
            if kind == "model" or info.dtype != "int64":
                made[kind, info.name] = (start + torch.arange(info.num_elements)).view(info.shape).to(info.torch_dtype)
                start += info.num_elements
    return made


def rows_of(whole: Tensor, info: TensorInfo, shard: int, num_shards: int) -> Tensor:
    """A rank's memory, as torch itself would cut it."""
    if not info.sharded:
        return whole
    chunks = whole.chunk(num_shards)
    return chunks[shard] if shard < len(chunks) else whole[:0]


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_files(folder: Path, infos: Sequence[TensorInfo], values: Values, shard: int, num_shards: int) -> list[File]:
    """One rank's shards, of the rows that it owns: of a replicated tensor the first rank's."""
    by_name = {info.name: info for info in infos}
    contents: dict[str, list[Content]] = {"model": [], "optimizer": []}
    for (kind, name), whole in values.items():
        info = by_name[name]
        rows = rows_of(whole, info, shard, num_shards)
        if not rows.numel() or (shard and not info.sharded):
            continue
        first, end = info.rows(shard, num_shards)
        part = rows_to_write(kind, name, DTYPES[str(whole.dtype)[6:]], info.shape, first, end)
        contents["model" if kind == "model" else "optimizer"].append(Content(part, [as_bytes(rows)]))
    suffix = f"{shard:05d}-of-{num_shards:05d}.safetensors"
    return [write_shard(folder / f"{file}-{suffix}", parts, {}) for file, parts in contents.items()]


def save(
    roots: Sequence[Path],
    step: int,
    infos: Sequence[TensorInfo] = MODEL,
    values: Values | None = None,
    num_shards: int = 2,
    copies: int = 1,
    committed: Sequence[int] | None = None,
    small: Sequence[File] = (),
    **fields: Any,
) -> Manifest:
    """A checkpoint on these nodes' disks: shard r lies on node r modulo their number, and with two copies on the next
    node too; `committed` are the nodes that have the marker. `small` files are in the manifest alone."""
    values = values_of(infos) if values is None else values
    files: list[File] = []
    folders = [root / f"step_{step}" for root in roots]
    for folder in folders:
        folder.mkdir(parents=True)
    for shard in range(num_shards):
        nodes = sorted({(shard + distance) % len(roots) for distance in range(copies)})
        for node in nodes:
            written = write_files(folders[node], infos, values, shard, num_shards)
        hosts = tuple(HOSTS[node] for node in nodes)
        files += [File(file.name, file.num_bytes, file.digest, hosts, file.slices) for file in written]
    record = {"run_id": "r1", "run_name": "first", "save_id": f"w1-{step}", "saved_at": LONG_AGO + step} | fields
    record = {"config": {}, "placement": {}} | record
    state = {"version": step + 1, "origin": "", "best": None} | record.pop("state", {})
    manifest = Manifest(**record, step=step, state=state, files=(*files, *small))
    for node, folder in enumerate(folders):
        write_whole(folder / "manifest.json", manifest.to_json())
        if committed is None or node in committed:
            write_whole(folder / "COMMITTED", b"")
    return manifest


@pytest.fixture
def shelve() -> Iterator[Callable[..., list[CheckpointStore]]]:
    with ExitStack() as stack:
        yield lambda roots, sources=None: stack.enter_context(stores_on(roots, sources))


Shelve = Callable[..., list[CheckpointStore]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Three nodes with private disks."""
    return [tmp_path / host / "run" / "checkpoints" for host in HOSTS]


def found_step(store: CheckpointStore, resume: str = "auto") -> int | None:
    found = find_checkpoint(store, resume)
    return None if found is None else found.manifest.step


def lose(root: Path, step: int, shard: str = "model-00000-of-00002") -> None:
    """A file of the step: it was killed while it was saved, or the disk lost it."""
    (root / f"step_{step}" / f"{shard}.safetensors").unlink()


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_run_without_checkpoints_starts_from_the_model(root: Path, shelve: Shelve, resume: str) -> None:
    (store,) = shelve([root])
    assert find_checkpoint(store, resume) is None
    root.mkdir(parents=True)
    assert find_checkpoint(store, resume) is None
    (root / "step_2").mkdir()
    write_whole(root / "step_2" / "model-00000-of-00002.safetensors", b"x")
    assert find_checkpoint(store, "auto") is None


def test_an_incomplete_step_without_a_marker_is_ignored(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    save([root], 8, committed=[])
    lose(root, 8)
    assert find_checkpoint(store, "auto") is None
    save([root], 4)
    found = find_checkpoint(store, "auto")
    assert (found.manifest.step, found.committed) == (4, (4,))
    assert not (root / "step_8" / "COMMITTED").exists()


def test_a_complete_step_with_its_name_counts_without_a_marker(roots: list[Path], shelve: Shelve) -> None:
    """No node gives it that name before all have all of it: the kill came between the name and the marker."""
    stores = shelve(roots)
    save(roots, 4, num_shards=3)
    save(roots, 8, num_shards=3, committed=[])
    found = find_checkpoint(stores[1], "auto")
    assert (found.manifest.step, found.committed) == (8, (4, 8))
    assert all((root / "step_8" / "COMMITTED").exists() for root in roots)
    lose(roots[2], 8, "model-00002-of-00003")  # now it is one that was committed
    with pytest.raises(ConfigError, match="step 8 was committed, but 1 of its 6 files"):
        find_checkpoint(stores[1], "auto")


def test_a_step_whose_name_some_nodes_lack_counts_when_its_files_are_there(roots: list[Path], shelve: Shelve) -> None:
    """Two copies, and the kill came before the third node had given its folder the name."""
    store, *_ = shelve(roots)
    save(roots, 8, num_shards=3, copies=2, committed=[])
    (roots[2] / "step_8").rename(roots[2] / "step_8.tmp-w1-8")
    assert found_step(store) == 8
    assert [(root / "step_8" / "COMMITTED").exists() for root in roots] == [True, True, False]


def test_the_newest_is_the_one_that_was_saved_last(root: Path, shelve: Shelve) -> None:
    """The run went back to step 4, and on from there: 10 and 12 are of a past that it left."""
    (store,) = shelve([root])
    for step, saved_at in {4: 1, 10: 2, 12: 3, 6: 4, 8: 5}.items():
        save([root], step, saved_at=LONG_AGO + saved_at)
    found = find_checkpoint(store, "auto")
    assert (found.manifest.step, found.committed) == (8, (4, 6, 8))


def test_small_files_are_not_needed_to_go_on(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    small = [File("hf/config.json", 7, "2f", ("n0",)), File("probe.safetensors", 9, "3f", ("n0",))]
    for step, committed in ((4, None), (6, [])):
        manifest = save([root], step, small=small, committed=committed)
        found = find_checkpoint(store, "auto")
        assert found.manifest == manifest
        assert set(found.holders) == {file.name for file in manifest.files} - {file.name for file in small}
    lose(root, 6)
    with pytest.raises(ConfigError, match="but 1 of its 6 files are on no disk"):
        find_checkpoint(store, "auto")


def test_the_newest_committed_step_wins(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    for step in (4, 10, 9):
        save([root], step)
    save([root], 12, committed=[])
    lose(root, 12)
    found = find_checkpoint(store, "auto")
    assert (found.manifest.step, found.version, found.committed, found.is_own) == (10, 11, (4, 9, 10), True)
    assert set(found.holders) == {file.name for file in found.manifest.files}
    assert all(rows == [(0, str(root / "step_10"))] for rows in found.holders.values())
    assert not (root / "step_12" / "COMMITTED").exists()


def test_one_marker_on_any_node_commits_a_step_everywhere(roots: list[Path], shelve: Shelve) -> None:
    stores = shelve(roots)
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


def test_nodes_that_share_a_disk_both_hold_its_files(root: Path, shelve: Shelve) -> None:
    store, _ = shelve([root, root])
    manifest = save([root], 4)
    found = find_checkpoint(store, "auto")
    folder = str(root / "step_4")
    assert found.holders == {file.name: [(0, folder), (1, folder)] for file in manifest.files}


def test_what_other_ranks_get_to_know(roots: list[Path], shelve: Shelve) -> None:
    store, *_ = shelve(roots)
    save(roots, 2, num_shards=3)
    save(roots, 4, num_shards=3, copies=2, config={"train": {}}, placement={"owners": [0]}, state={"origin": "runs/a"})
    found = find_checkpoint(store, "auto")
    assert {len(rows) for rows in found.holders.values()} == {2}
    payload = found.to_payload()
    assert Resume.from_payload(payload) == found
    assert Resume.from_payload(bytearray(payload)) == found
    small = found.without_files()
    assert Resume.from_payload(small.to_payload()) == small
    assert (small.version, small.manifest.step, small.manifest.run_id) == (5, 4, "r1")
    assert (small.is_own, small.committed, small.origin) == (True, (2, 4), "runs/a")
    assert (small.holders, small.manifest.files, small.manifest.state) == ({}, (), {"version": 5})
    assert (small.manifest.config, small.manifest.placement) == ({}, {})
    fork = dataclasses.replace(found, is_own=False, committed=())
    assert Resume.from_payload(fork.to_payload()) == fork


def agreed(stores: Sequence[CheckpointStore], config: Config) -> list[Resume | None]:
    """What each of three ranks is told; 1 is the leader, 0 no actor."""
    placement = plan({"rollout": [0], "actor": [1, 2]}, 3, 1, 1, 1)
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(agree_on_resume, store._mail, placement, store, config) for store in stores]
        return [rank.result(timeout=20) for rank in ranks]


def test_all_ranks_agree(roots: list[Path], shelve: Shelve, capsys: pytest.CaptureFixture) -> None:
    stores = shelve(roots)
    save(roots, 4, num_shards=3, config=dataclasses.asdict(Config(train=TrainConfig(num_steps=6))))
    found = agreed(stores, Config(train=TrainConfig(num_steps=8)))
    assert found[1] == found[2]
    assert len(found[1].manifest.files) == len(found[1].holders) == 6
    assert found[0] == found[1].without_files()
    assert [store.run_id for store in stores] == ["r1"] * 3
    assert [(root / "run_id").read_text() for root in roots] == ["r1"] * 3
    assert [store.hosts for store in stores] == [[], [socket.gethostname()] * 3, []]
    told = f"{roots[1]}: goes on after step 4; set otherwise since then: train.num_steps 6 -> 8\n"
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(("num_epochs", "setting"), [(0, "train.num_steps"), (2, "train.num_epochs")])
def test_a_run_that_is_done_names_the_setting_that_counts(
    num_epochs: int, setting: str, roots: list[Path], shelve: Shelve, capsys: pytest.CaptureFixture
) -> None:
    config = Config(train=TrainConfig(num_steps=4, num_epochs=num_epochs))
    stores = shelve(roots)
    save(roots, 4, num_shards=3, config=dataclasses.asdict(config))
    agreed(stores, config)
    told = f"{roots[1]}: goes on after step 4; all 4 steps are done, raise {setting} to train on\n"
    assert capsys.readouterr().out == told


def test_a_new_run_gets_an_id_and_keeps_it(roots: list[Path], shelve: Shelve, capsys: pytest.CaptureFixture) -> None:
    """Also where it is killed before it has saved anything."""
    stores = shelve(roots)
    assert agreed(stores, Config()) == [None] * 3
    (run_id,) = {store.run_id for store in stores}
    assert len(run_id) == 16
    assert [(root / "run_id").read_text() for root in roots] == [run_id] * 3
    again = shelve(roots)
    assert agreed(again, Config()) == [None] * 3
    assert {store.run_id for store in again} == {run_id}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_run_that_saved_nothing_keeps_the_id_that_any_node_has(roots: list[Path], shelve: Shelve, node: int) -> None:
    """The other nodes are new, as after a failure of their machines."""
    roots[node].mkdir(parents=True)
    write_whole(roots[node] / "run_id", b"r1")
    agreed(shelve(roots), Config())
    assert {(root / "run_id").read_text() for root in roots} == {"r1"}
    assert agreed(shelve(roots), Config()) == [None] * 3  # else: checkpoints of different runs lie in one folder


def test_a_fork_has_an_id_of_its_own(tmp_path: Path, roots: list[Path], shelve: Shelve) -> None:
    source = tmp_path / "other"
    save([source / "checkpoints"], 4, run_id="r0")
    stores = shelve(roots, [source] * 3)
    found = agreed(stores, Config(checkpoint=CheckpointConfig(resume=str(source))))
    assert [entry.manifest.run_id for entry in found] == ["r0"] * 3
    assert not any(entry.is_own for entry in found)
    (run_id,) = {store.run_id for store in stores}
    assert run_id not in ("", "r0")


def test_a_folder_of_an_earlier_save_of_the_step_holds_nothing_of_it(roots: list[Path], shelve: Shelve) -> None:
    """A node that was away when the step was saved once more."""
    store, *_ = shelve(roots)
    save(roots[2:], 4, num_shards=2, save_id="w0-4", saved_at=LONG_AGO)
    save(roots[:2], 4, num_shards=2, save_id="w1-4", saved_at=LONG_AGO + 9)
    found = find_checkpoint(store, "auto")
    assert found.manifest.save_id == "w1-4"
    assert {rank for rows in found.holders.values() for rank, _ in rows} == {0, 1}


def test_a_missing_file_is_listed_with_its_hosts(roots: list[Path], shelve: Shelve) -> None:
    store, *_ = shelve(roots)
    save(roots, 2, num_shards=3)
    manifest = save(roots, 4, num_shards=3)
    (roots[2] / "step_4" / "model-00002-of-00003.safetensors").unlink()
    size = next(file.num_bytes for file in manifest.files if file.name == "model-00002-of-00003.safetensors")
    with pytest.raises(ConfigError) as caught:
        find_checkpoint(store, "auto")
    text = str(caught.value)
    assert "step 4 was committed, but 1 of its 6 files are on no disk in reach" in text
    assert f"\n  model-00002-of-00003.safetensors ({size} bytes): was saved on n2\n" in text
    assert "Start again with the nodes that hold them, or go on from an older step (2) in a new run" in text
    assert "checkpoint.resume=PATH" in text
    assert "checkpoint.resume=never" in text
    assert "checkpoint.copies=2" in text


def test_a_truncated_file_is_listed_with_its_place(roots: list[Path], shelve: Shelve) -> None:
    store, *_ = shelve(roots)
    save(roots, 4, num_shards=3)
    path = roots[1] / "step_4" / "optimizer-00001-of-00003.safetensors"
    os.truncate(path, 100)
    with pytest.raises(
        ConfigError, match=rf"optimizer-00001-of-00003\.safetensors \(\d+ bytes\): {path} has 100 bytes"
    ):
        find_checkpoint(store, "auto")


def test_a_node_that_is_away_is_no_harm_with_two_copies(roots: list[Path], shelve: Shelve) -> None:
    save(roots, 4, num_shards=3, copies=2)
    both = shelve(roots[:2])
    found = find_checkpoint(both[0], "auto")
    assert [len(found.holders[f"model-0000{shard}-of-00003.safetensors"]) for shard in range(3)] == [2, 1, 1]
    save(roots, 6, num_shards=3)
    with pytest.raises(ConfigError, match="2 of its 6 files are on no disk") as caught:
        find_checkpoint(both[0], "auto")
    assert str(caught.value).count("was saved on n2") == 2


def test_a_long_list_of_missing_files_is_cut(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    save([root], 4, [TensorInfo("w", (12, 3), "float32", sharded=True)], num_shards=12)
    for path in (root / "step_4").glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="24 of its 24 files") as caught:
        find_checkpoint(store, "auto")
    assert str(caught.value).count("was saved on n0") == 20
    assert "\n  and 4 more\n" in str(caught.value)
    assert "older step" not in str(caught.value)


def test_a_torn_manifest_is_no_reason_to_start_over(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    save([root], 2)
    save([root], 4)
    (root / "step_4" / "manifest.json").write_bytes(b'{"kind"')
    with pytest.raises(ConfigError, match=rf"{root}/step_4/manifest\.json is torn"):
        find_checkpoint(store, "auto")


@pytest.mark.parametrize("ignored", ["incomplete", "left behind"])
def test_a_torn_manifest_is_not_passed_over_for_a_step_that_does_not_count(
    root: Path, shelve: Shelve, ignored: str
) -> None:
    """Step 8 is the newest that was committed; the run must not go on from 4, or from 12, without a word."""
    (store,) = shelve([root])
    save([root], 4)
    if ignored == "incomplete":
        save([root], 12, committed=[])
        lose(root, 12)
    else:
        save([root], 12, saved_at=LONG_AGO)  # before step 4, where the run went back to
    save([root], 8)
    (root / "step_8" / "manifest.json").write_bytes(b'{"kind"')
    with pytest.raises(ConfigError, match=rf"{root}/step_8/manifest\.json is torn"):
        find_checkpoint(store, "auto")


def test_a_torn_manifest_is_read_from_another_node(roots: list[Path], shelve: Shelve) -> None:
    store, *_ = shelve(roots)
    save(roots, 4, num_shards=3)
    (roots[0] / "step_4" / "manifest.json").write_bytes(b'{"kind"')
    found = find_checkpoint(store, "auto")
    assert found.manifest.step == 4
    assert found.holders["model-00000-of-00003.safetensors"] == [(0, str(roots[0] / "step_4"))]


def test_checkpoints_of_two_runs_in_one_folder(roots: list[Path], shelve: Shelve) -> None:
    store, *_ = shelve(roots)
    save(roots[:2], 4)
    save(roots[2:], 2, run_id="r2")
    with pytest.raises(ConfigError, match="checkpoints of different runs lie in one folder") as caught:
        find_checkpoint(store, "auto")
    assert f"{roots[0]}/step_4 (run r1)" in str(caught.value) or f"{roots[1]}/step_4 (run r1)" in str(caught.value)
    assert f"{roots[2]}/step_2 (run r2)" in str(caught.value)
    assert "move the foreign ones away" in str(caught.value)


@pytest.mark.parametrize("first", ["r1", ""])
def test_folders_of_two_runs(roots: list[Path], shelve: Shelve, first: str) -> None:
    """Nothing was saved on the second node, or nothing at all: their folders still say whose they are."""
    store, *_ = shelve(roots)
    if first:
        save(roots[:1], 4, run_id="r1")
    else:
        roots[0].mkdir(parents=True)
        write_whole(roots[0] / "run_id", b"r1")
    roots[1].mkdir(parents=True)
    write_whole(roots[1] / "run_id", b"r2")
    with pytest.raises(ConfigError, match="checkpoints of different runs lie in one folder") as caught:
        find_checkpoint(store, "auto")
    assert f"{roots[0]}{'/step_4' if first else ''} (run r1), {roots[1]} (run r2); move" in str(caught.value)


def test_a_checkpoint_in_another_runs_folder(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    save([root], 4, run_id="r1")
    write_whole(root / "run_id", b"r1")
    assert found_step(store) == 4
    (root / "run_id").write_text("r2")
    with pytest.raises(ConfigError, match=rf"{root}/step_4 \(run r1\), {root} \(run r2\); move the foreign ones away"):
        find_checkpoint(store, "auto")


def test_never_sets_aside_what_an_earlier_launch_saved(
    roots: list[Path], shelve: Shelve, capsys: pytest.CaptureFixture
) -> None:
    store, *_ = shelve(roots)
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


def test_never_sets_aside_again_what_was_saved_in_the_same_second(root: Path, shelve: Shelve) -> None:
    """As when a checkpoint is copied back and tried once more."""
    (store,) = shelve([root])
    for _ in range(3):
        save([root], 4)
        assert find_checkpoint(store, "never") is None
    asides = list(root.parent.iterdir())
    assert len(asides) == 3
    assert all((aside / "step_4" / "COMMITTED").exists() for aside in asides)


def test_never_goes_on_from_what_this_launch_saved(roots: list[Path], shelve: Shelve) -> None:
    """torchrun restarts a world with the same settings: what it saved since is not to be lost."""
    store, *_ = shelve(roots)
    save(roots, 2, num_shards=3, saved_at=time.time() + 5)
    save(roots, 4, num_shards=3, saved_at=time.time() + 9)
    assert found_step(store, "never") == 4
    assert all((root / "step_2").is_dir() for root in roots)


@pytest.mark.parametrize(
    ("path", "step"),
    [("other", 4), ("other/checkpoints", 4), ("other/checkpoints/step_2", 2), ("other/checkpoints/step_4", 4)],
)
def test_a_fork_of_another_run(tmp_path: Path, root: Path, shelve: Shelve, path: str, step: int) -> None:
    other = tmp_path / "other" / "checkpoints"
    for saved in (2, 4):
        save([other], saved, run_id="r0", state={"origin": "an older one"})
    save([other], 6, run_id="r0", committed=[])
    lose(other, 6)
    (store,) = shelve([root], [tmp_path / path])
    found = find_checkpoint(store, str(tmp_path / path))
    assert (found.manifest.step, found.is_own, found.committed) == (step, False, ())
    assert found.origin == str(tmp_path / path)
    assert {rank_and_folder for rows in found.holders.values() for rank_and_folder in rows} == {
        (0, str(other / f"step_{step}"))
    }


def test_a_fork_of_a_run_on_other_nodes_disks(tmp_path: Path, roots: list[Path], shelve: Shelve) -> None:
    """The leader's own node has nothing of it, and a marker is not added to what is another run's."""
    others = [tmp_path / host / "other" / "checkpoints" for host in HOSTS]
    save(others[1:], 4, run_id="r0", committed=[1])
    store, *_ = shelve(roots, [other.parent for other in others])
    found = find_checkpoint(store, "runs/other")
    assert found.holders["model-00001-of-00002.safetensors"] == [(2, str(others[2] / "step_4"))]
    assert not (others[1] / "step_4" / "COMMITTED").exists()


def test_a_fork_of_a_step_without_a_marker(tmp_path: Path, root: Path, shelve: Shelve) -> None:
    """All of it is there; what is another run's is not written to."""
    other = tmp_path / "other" / "checkpoints"
    save([other], 4, run_id="r0", committed=[])
    (store,) = shelve([root], [other])
    assert found_step(store, str(other)) == 4
    assert not (other / "step_4" / "COMMITTED").exists()


def test_a_forks_path_may_be_spelt_otherwise_when_it_goes_on(
    tmp_path: Path, root: Path, shelve: Shelve, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "other"
    save([source / "checkpoints"], 4, run_id="r0")
    (tmp_path / "link").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    (first,) = shelve([root], [Path("link")])
    origin = find_checkpoint(first, "link").origin
    assert origin == str(source)
    save([root], 6, state={"origin": origin})
    for path in ("other", "./run/../other", "link", str(tmp_path / "link"), str(source)):
        (store,) = shelve([root], [Path(path)])
        assert found_step(store, path) == 6
    (store,) = shelve([root], [Path("other/checkpoints")])
    with pytest.raises(ConfigError, match=f"of a run that forked '{source}'; give this fork another run.name"):
        find_checkpoint(store, "other/checkpoints")


def test_a_fork_goes_on_with_its_own_steps(tmp_path: Path, root: Path, shelve: Shelve) -> None:
    source = tmp_path / "other"
    save([source / "checkpoints"], 4, run_id="r0")
    save([root], 6, run_id="r1", state={"origin": str(source)})
    (store,) = shelve([root], [source])
    found = find_checkpoint(store, str(source))
    assert (found.manifest.step, found.manifest.run_id, found.is_own) == (6, "r1", True)
    assert (found.origin, found.committed) == (str(source), (6,))
    assert find_checkpoint(store, "auto").origin == str(source)


@pytest.mark.parametrize(("origin", "said"), [("", "forked none"), ("runs/third", "forked 'runs/third'")])
def test_a_run_that_forked_another_one(tmp_path: Path, root: Path, shelve: Shelve, origin: str, said: str) -> None:
    source = tmp_path / "other"
    save([source / "checkpoints"], 4, run_id="r0")
    save([root], 6, state={"origin": origin})
    (store,) = shelve([root], [source])
    with pytest.raises(
        ConfigError, match=rf"{root} holds step 6 of a run that {said}; give this fork another run.name"
    ):
        find_checkpoint(store, str(source))


@pytest.mark.parametrize("path", ["run", "run/checkpoints", "run/checkpoints/step_4"])
def test_a_path_to_the_runs_own_newest_step(tmp_path: Path, root: Path, shelve: Shelve, path: str) -> None:
    for step in (2, 4):
        save([root], step)
    (store,) = shelve([root], [tmp_path / path])
    found = find_checkpoint(store, str(tmp_path / path))
    assert (found.manifest.step, found.is_own, found.origin, found.committed) == (4, True, "", (2, 4))


@pytest.mark.parametrize(
    "path", ["run", "run/checkpoints", "run/checkpoints/step_4", "link", "link/checkpoints/step_4"]
)
@pytest.mark.parametrize("root_is", ["absolute", "relative", "a link"])
def test_the_runs_own_path_may_be_spelt_otherwise(
    tmp_path: Path, root: Path, shelve: Shelve, monkeypatch: pytest.MonkeyPatch, path: str, root_is: str
) -> None:
    save([root], 4)
    (tmp_path / "link").symlink_to(root.parent)
    monkeypatch.chdir(tmp_path)
    spelt = {"absolute": root, "relative": Path("run/checkpoints"), "a link": Path("link/checkpoints")}[root_is]
    (store,) = shelve([spelt], [Path(path)])
    found = find_checkpoint(store, path)
    assert (found.manifest.step, found.is_own) == (4, True)


def test_a_first_node_without_the_folder_does_not_matter(roots: list[Path], shelve: Shelve) -> None:
    """The leader is on the second node, and the run's own folder is on the second and third."""
    _, store, _ = shelve(roots, [root.parent for root in roots])
    save(roots[1:], 4)
    found = find_checkpoint(store, str(roots[1].parent))
    assert (found.manifest.step, found.is_own) == (4, True)
    lose(roots[1], 4)
    with pytest.raises(ConfigError, match=r"step 4 was committed, but 1 of its 4 files"):
        find_checkpoint(store, str(roots[1].parent))


@pytest.mark.parametrize("ignored", ["incomplete", "left behind"])
@pytest.mark.parametrize("path", ["run", "run/checkpoints"])
def test_a_path_to_the_run_itself_where_a_higher_step_does_not_count(
    tmp_path: Path, root: Path, shelve: Shelve, path: str, ignored: str
) -> None:
    save([root], 4)
    if ignored == "incomplete":
        save([root], 6, committed=[])
        lose(root, 6)
    else:
        save([root], 6, saved_at=LONG_AGO)
    (store,) = shelve([root], [tmp_path / path])
    assert found_step(store, str(tmp_path / path)) == 4


@pytest.mark.parametrize("step", [2, 6])
def test_a_path_to_another_step_of_the_run_itself(tmp_path: Path, root: Path, shelve: Shelve, step: int) -> None:
    for saved in (2, 4):
        save([root], saved)
    save([root], 6, committed=[])
    lose(root, 6)
    path = root / f"step_{step}"
    (store,) = shelve([root], [path])
    with pytest.raises(ConfigError, match=rf"got '{path}', but this run has gone on to step 4; .*another run.name"):
        find_checkpoint(store, str(path))


def test_a_path_that_is_nowhere(tmp_path: Path, root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root], [tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="got 'nowhere', no folder on any node; give auto, never or a folder"):
        find_checkpoint(store, "nowhere")


@pytest.mark.parametrize("path", ["other", "other/checkpoints/step_6"])
def test_a_path_without_a_committed_checkpoint(tmp_path: Path, root: Path, shelve: Shelve, path: str) -> None:
    save([tmp_path / "other" / "checkpoints"], 6, committed=[])
    lose(tmp_path / "other" / "checkpoints", 6)
    (store,) = shelve([root], [tmp_path / path])
    with pytest.raises(ConfigError, match=r"holds no committed checkpoint; give a run's folder, or a step_N in it"):
        find_checkpoint(store, str(tmp_path / path))


Parts = list[tuple[str, LocalSlice]]


def empty_parts(infos: Sequence[TensorInfo], values: Values, shard: int, num_shards: int) -> Parts:
    """A rank's memory before it is filled."""
    by_name = {info.name: info for info in infos}
    parts = []
    for (kind, name), whole in values.items():
        rows = rows_of(whole, by_name[name], shard, num_shards)
        data = torch.full_like(rows, -1, dtype=by_name[name].torch_dtype)
        parts.append((kind, LocalSlice(by_name[name], data)))
    return parts


def check_filled(parts: Parts, values: Values, shard: int, num_shards: int) -> None:
    for kind, part in parts:
        expected = rows_of(values[kind, part.info.name], part.info, shard, num_shards)
        assert torch.equal(part.data, expected), (kind, part.info.name)


def test_seven_rows_of_three_ranks_on_two(roots: list[Path], shelve: Shelve) -> None:
    """3, 3 and 1 rows become 4 and 3: the second rank takes 2 of the second shard and all of the third."""
    store, *_ = shelve(roots)
    values = {("model", "w"): torch.arange(21.0).view(7, 3)}
    save(roots, 4, (W,), values, num_shards=3)
    reader = SliceReader(find_checkpoint(store, "auto"), store, own_lead=0)
    data = torch.zeros(3, 3)
    fill([("model", LocalSlice(W, data))], reader, 1, 2)
    assert data.tolist() == [[12, 13, 14], [15, 16, 17], [18, 19, 20]]
    data = torch.zeros(4, 3)
    fill([("model", LocalSlice(W, data))], reader, 0, 2)
    assert data.view(-1).tolist() == list(range(12))


@pytest.mark.parametrize("num_readers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_writers", [1, 2, 3, 5])
def test_any_number_of_ranks_gets_its_rows(
    roots: list[Path], shelve: Shelve, num_writers: int, num_readers: int
) -> None:
    """`bias` has two rows, so of five ranks three have none; `w` then has 2, 2, 2, 1 and none."""
    stores = shelve(roots)
    values = values_of(MODEL)
    save(roots, 4, MODEL, values, num_shards=num_writers)
    found = find_checkpoint(stores[0], "auto")
    for shard in range(num_readers):
        node = shard % 3
        parts = empty_parts(MODEL, values, shard, num_readers)
        fill(parts, SliceReader(found, stores[node], own_lead=node), shard, num_readers)
        check_filled(parts, values, shard, num_readers)


def test_from_one_to_two_to_three_to_five_ranks_and_back(tmp_path: Path, shelve: Shelve) -> None:
    values = values_of(MODEL)
    for step, num_shards in enumerate([1, 2, 3, 5, 1], start=1):
        root = tmp_path / str(step) / "checkpoints"
        save([root], step, MODEL, values, num_shards=num_shards)
        (store,) = shelve([root])
        reader = SliceReader(find_checkpoint(store, "auto"), store, own_lead=0)
        parts = empty_parts(MODEL, values, 0, 1)
        fill(parts, reader, 0, 1)
        values = {(kind, part.info.name): part.data for kind, part in parts}
    assert all(torch.equal(values[key], whole) for key, whole in values_of(MODEL).items())


def test_masters_are_read_where_the_export_is_narrower(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    exact = torch.linspace(0, 1, 21).view(7, 3)
    assert not torch.equal(exact.bfloat16().float(), exact)
    save([root], 4, (W,), {("model", "w"): exact.bfloat16(), ("master", "w"): exact}, num_shards=3)
    parts = [("model", LocalSlice(W, torch.zeros(7, 3)))]
    fill(parts, SliceReader(find_checkpoint(store, "auto"), store, 0), 0, 1)
    assert torch.equal(parts[0][1].data, exact)


def test_slices_of_another_node_come_in_chunks(
    roots: list[Path], shelve: Shelve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 12 bytes: three on each of two nodes, one on the third; a rank's own node is asked nothing."""
    stores = shelve(roots)
    values = {("model", "w"): torch.arange(21.0).view(7, 3)}
    save(roots, 4, (W,), values, num_shards=3)
    found = find_checkpoint(stores[0], "auto")
    asked: list[tuple[int, int]] = []
    call = stores[0].call

    def record(rank: int, operation: str, **meta: Any) -> Any:
        asked.append((rank, meta["num_bytes"]))
        return call(rank, operation, **meta)

    monkeypatch.setattr(stores[0], "call", record)
    monkeypatch.setattr("rl.checkpoint.resume.MESSAGE_BYTES", 16)
    parts = empty_parts((W,), values, 0, 1)
    fill(parts, SliceReader(found, stores[0], own_lead=0), 0, 1)
    check_filled(parts, values, 0, 1)
    assert asked == [(1, 16), (1, 16), (1, 4), (2, 12)]


def spoil(folder: Path, manifest: Manifest, file_name: str, key: str) -> None:
    """Another byte in this slice, in a file of the same size."""
    file = next(file for file in manifest.files if file.name == file_name)
    part = next(part for part in file.slices if part.key == key)
    data = bytearray((folder / file_name).read_bytes())
    data[part.begin + 5] ^= 1
    (folder / file_name).write_bytes(data)


@pytest.mark.parametrize("own_lead", [0, 1, 2])
def test_a_spoilt_slice_is_read_from_the_other_copy(roots: list[Path], shelve: Shelve, own_lead: int) -> None:
    stores = shelve(roots)
    values = values_of(MODEL)
    manifest = save(roots, 4, MODEL, values, num_shards=3, copies=2)
    spoil(roots[0] / "step_4", manifest, "model-00000-of-00003.safetensors", "w")
    spoil(roots[2] / "step_4", manifest, "optimizer-00002-of-00003.safetensors", "exp_avg/w")
    found = find_checkpoint(stores[0], "auto")
    parts = empty_parts(MODEL, values, 0, 1)
    fill(parts, SliceReader(found, stores[own_lead], own_lead), 0, 1)
    check_filled(parts, values, 0, 1)


@pytest.mark.parametrize("own_lead", [0, 1])
def test_a_file_that_was_cut_since_is_read_from_the_other_copy(
    roots: list[Path], shelve: Shelve, own_lead: int
) -> None:
    stores = shelve(roots)
    values = values_of(MODEL)
    save(roots, 4, MODEL, values, num_shards=3, copies=2)
    found = find_checkpoint(stores[0], "auto")
    os.truncate(roots[0] / "step_4" / "model-00000-of-00003.safetensors", 50)
    (roots[0] / "step_4" / "optimizer-00000-of-00003.safetensors").unlink()
    parts = empty_parts(MODEL, values, 0, 1)
    fill(parts, SliceReader(found, stores[own_lead], own_lead), 0, 1)
    check_filled(parts, values, 0, 1)


@pytest.mark.parametrize("own_lead", [0, 1])
def test_a_slice_that_is_spoilt_everywhere_is_an_error(roots: list[Path], shelve: Shelve, own_lead: int) -> None:
    stores = shelve(roots)
    manifest = save(roots, 4, num_shards=3)
    name = "model-00000-of-00003.safetensors"
    spoil(roots[0] / "step_4", manifest, name, "w")
    found = find_checkpoint(stores[0], "auto")
    with pytest.raises(ConfigError) as caught:
        fill(
            empty_parts(MODEL, values_of(MODEL), 0, 1),
            SliceReader(found, stores[own_lead], own_lead),
            0,
            1,
        )
    text = str(caught.value)
    assert text.startswith(
        f"step 4 cannot be read: {roots[0]}/step_4/{name} on the node of rank 0 has other bytes of w "
    )
    assert "Nothing was changed; restore the file, or go on from an older step in a new run" in text


@pytest.mark.parametrize("own_lead", [0, 1, 2])
def test_wrong_bytes_in_all_copies_are_for_the_user_to_mend(roots: list[Path], shelve: Shelve, own_lead: int) -> None:
    """The same error again after every restart: the run does not try once more."""
    stores = shelve(roots)
    manifest = save(roots, 4, num_shards=3, copies=2)
    name = "model-00000-of-00003.safetensors"
    for root in roots[:2]:
        spoil(root / "step_4", manifest, name, "w")
    found = find_checkpoint(stores[0], "auto")
    with pytest.raises(ConfigError) as caught:
        fill(
            empty_parts(MODEL, values_of(MODEL), 0, 1),
            SliceReader(found, stores[own_lead], own_lead),
            0,
            1,
        )
    for rank in (0, 1):
        assert f"{roots[rank]}/step_4/{name} on the node of rank {rank} has other bytes of w than" in str(caught.value)


@pytest.mark.parametrize("own_lead", [0, 1])
@pytest.mark.parametrize("fault", ["gone", "cut", "a folder"])
def test_a_file_that_cannot_be_read_may_be_readable_later(
    roots: list[Path], shelve: Shelve, own_lead: int, fault: str
) -> None:
    stores = shelve(roots)
    save(roots, 4, num_shards=3)
    found = find_checkpoint(stores[0], "auto")
    path = roots[0] / "step_4" / "model-00000-of-00003.safetensors"
    if fault == "cut":
        os.truncate(path, 50)
    else:
        path.unlink()
    if fault == "a folder":
        path.mkdir()
    with pytest.raises(CheckpointError, match=rf"^step 4 cannot be read: .*{path}.*Nothing was changed"):
        fill(
            empty_parts(MODEL, values_of(MODEL), 0, 1),
            SliceReader(found, stores[own_lead], own_lead),
            0,
            1,
        )


@pytest.mark.parametrize("spoilt", [0, 1])
def test_the_error_tells_of_every_copy(roots: list[Path], shelve: Shelve, spoilt: int) -> None:
    """One was read and is wrong, but the other may be good."""
    stores = shelve(roots)
    manifest = save(roots, 4, num_shards=3, copies=2)
    found = find_checkpoint(stores[0], "auto")
    name = "model-00000-of-00003.safetensors"
    spoil(roots[spoilt] / "step_4", manifest, name, "w")
    (roots[1 - spoilt] / "step_4" / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        fill(empty_parts(MODEL, values_of(MODEL), 0, 1), SliceReader(found, stores[0], 0), 0, 1)
    assert f"{roots[spoilt]}/step_4/{name} on the node of rank {spoilt} has other bytes of w" in str(caught.value)
    assert f"No such file or directory: '{roots[1 - spoilt]}/step_4/{name}'" in str(caught.value)


@pytest.mark.parametrize("moment", ["before it is asked", "before it answers"])
def test_a_node_that_is_lost_ends_the_world(
    roots: list[Path], shelve: Shelve, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It is no unreadable file, which another copy or a restart of this rank alone would mend."""
    stores = shelve(roots)
    save(roots, 4, num_shards=3, copies=2)
    found = find_checkpoint(stores[2], "auto")
    mail = stores[2]._mail
    if moment == "before it is asked":
        mail._gone.add(0)
    else:
        monkeypatch.setattr(stores[2], "call", lambda rank, *given, **meta: Future())
        mail.fail(PeerLost("the connection of rank 0 has ended"))
    with pytest.raises(PeerLost, match=r"rank 0.* has ended"):
        fill(empty_parts(MODEL, values_of(MODEL), 0, 1), SliceReader(found, stores[2], own_lead=2), 0, 1)


OTHER_MODELS = {
    "another shape": ((TensorInfo("w", (8, 3), "float32", True), BIAS), r"w is \(7, 3\) there and \(8, 3\) here"),
    "one tensor more": ((W, BIAS, TensorInfo("v", (2,), "float32", True)), r"v is absent there and \(2,\) here"),
    "one tensor less": ((W,), r"bias is \(2,\) there and absent here"),
}


@pytest.mark.parametrize(("infos", "said"), OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
def test_another_model(root: Path, shelve: Shelve, infos: tuple[TensorInfo, ...], said: str) -> None:
    (store,) = shelve([root])
    save([root], 4, (W, BIAS))
    parts = empty_parts(infos, values_of(infos), 0, 1)
    with pytest.raises(ConfigError, match=rf"of another model than model\.path: {said}; give the model that"):
        fill(parts, SliceReader(find_checkpoint(store, "auto"), store, 0), 0, 1)
    assert all((part.data == -1).all() for _, part in parts)


def test_another_optimizer(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    save([root], 4, (W,), values_of((W,), ("model", "momentum")))
    parts = empty_parts((W,), values_of((W,)), 0, 1)
    with pytest.raises(ConfigError, match="step 4 holds no exp_avg of w: it was saved with another optimizer"):
        fill(parts, SliceReader(find_checkpoint(store, "auto"), store, 0), 0, 1)


def test_rows_that_are_in_no_file(root: Path, shelve: Shelve) -> None:
    (store,) = shelve([root])
    values = {("model", "w"): torch.arange(21.0).view(7, 3)}
    save([root], 4, (W,), values, num_shards=3)
    found = find_checkpoint(store, "auto")
    files = tuple(file for file in found.manifest.files if "00001-of" not in file.name)
    cut = dataclasses.replace(found, manifest=dataclasses.replace(found.manifest, files=files))
    reader = SliceReader(cut, store, 0)
    with pytest.raises(ConfigError, match="step 4 holds 3 of the 4 rows of model w needed here"):
        fill([("model", LocalSlice(W, torch.zeros(4, 3)))], reader, 0, 2)


def test_settings_that_changed() -> None:
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
