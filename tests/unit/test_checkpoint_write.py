"""The files of a checkpoint that a rank writes, and their copies on another node's disk."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rl.checkpoint import save
from rl.checkpoint.manifest import CheckpointError, File
from rl.checkpoint.save import COMMIT, OTHERS_FILES, OWN_FILES, Saver
from rl.checkpoint.shard_file import digest, write_small_file
from rl.checkpoint.snapshot import Snapshot
from rl.checkpoint.store import CheckpointStore
from rl.checkpoint.write import CheckpointWriter, RunDescription, read_hf_files
from rl.model.shards import LocalSlice, TensorInfo
from rl.placement.roles import Placement, plan
from tests.launcher import until
from tests.mails import connected_worlds, stores_on

W = TensorInfo("w", (5, 3), "float32", sharded=True)
TABLE = TensorInfo("table", (2, 2), "float32", sharded=False)
WEIGHTS = {"w": torch.linspace(0, 1, 15).view(5, 3), "table": torch.tensor([[0.1, 0.2], [0.3, 0.4]])}
HF_FILES = {"config.json": b"{}", "merges.txt": b""}  # a tokenizer may have an empty file
FOLDER, SAVE_ID = "step_4.tmp-w1-4", "w1-4"
SMALL = ["hf/config.json", "hf/merges.txt"]


def record_of(dtype: str = "float32") -> RunDescription:
    infos = tuple(TensorInfo(info.name, info.shape, dtype, info.sharded) for info in (W, TABLE))
    return RunDescription("first", {}, infos, HF_FILES)


def placed(num_nodes: int, num_replicas: int = 1) -> Placement:
    return plan({"actor,rollout": "all"}, num_nodes, 1, 1, num_replicas)


def written(
    store: CheckpointStore, placement: Placement, copies: int = 1, dtype: str = "float32"
) -> dict[str, tuple[int, ...]]:
    """The files that the store's rank wrote of WEIGHTS and of their moments, and the nodes that have them."""
    rank, num_shards = store.mail.rank, len(placement.owners)
    parts: list[tuple[str, LocalSlice]] = []
    for kind, shift in (("model", 0.0), ("exp_avg", 100.0)):
        for info in (W, TABLE):
            first, end = info.rows(placement.shard_of(rank), num_shards) if info.sharded else (0, info.shape[0])
            parts.append((kind, LocalSlice(info, WEIGHTS[info.name][first:end] + shift)))
    pieces = [[part.data.reshape(-1)] for _, part in parts]
    snapshot = Snapshot(4, parts, {}, {}, frozenset())
    writer = CheckpointWriter(store, placement, rank, record_of(dtype), copies)
    return {file.name: nodes for file, nodes in writer.write(FOLDER, SAVE_ID, snapshot, pieces)}


def files_on(root: Path) -> dict[str, bytes]:
    folder = root / FOLDER
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards(shard: int, num_shards: int) -> list[str]:
    return [f"{kind}-{shard:05d}-of-{num_shards:05d}.safetensors" for kind in ("model", "optimizer")]


def test_owners_write_their_rows_and_the_leader_the_rest(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    with stores_on(roots) as stores:
        stores[0].create_roots("r1")
        for rank, store in enumerate(stores):
            names = shards(rank, 2) + (SMALL if rank == 0 else [])
            assert written(store, placed(2)) == dict.fromkeys(names, (rank,))
            assert sorted(files_on(roots[rank])) == sorted(names)
    first, second = (safetensors.torch.load(files_on(root)[shards(rank, 2)[0]]) for rank, root in enumerate(roots))
    assert torch.equal(first["w"], WEIGHTS["w"][:3])
    assert torch.equal(second["w"], WEIGHTS["w"][3:])
    assert torch.equal(first["table"], WEIGHTS["table"])
    assert set(second) == {"w"}  # a tensor that all hold is written once
    moments = safetensors.torch.load(files_on(roots[1])[shards(1, 2)[1]])
    assert torch.equal(moments["exp_avg/w"], WEIGHTS["w"][3:] + 100)
    assert files_on(roots[0])["hf/merges.txt"] == b""


def test_replicas_write_each_shard_once(tmp_path: Path) -> None:
    """Actors 0 and 1 are one replica, 2 and 3 the other; 0 and 3 are the owners."""
    placement = placed(4, num_replicas=2)
    assert placement.owners == [0, 3]
    with stores_on([tmp_path / str(rank) for rank in range(4)]) as stores:
        stores[0].create_roots("r1")
        names = [sorted(written(store, placement)) for store in stores]
    assert names == [sorted(shards(0, 2) + SMALL), [], [], shards(1, 2)]
    model = safetensors.torch.load(files_on(tmp_path / "3")[shards(1, 2)[0]])
    assert torch.equal(model["w"], WEIGHTS["w"][3:])


def test_masters_are_kept_where_the_export_is_narrower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.checkpoint.write.CAST_ELEMENTS", 4)
    with stores_on([tmp_path]) as (store,):
        written(store, placed(1), dtype="bfloat16")
    model, optimizer = (safetensors.torch.load(files_on(tmp_path)[name]) for name in shards(0, 1))
    for name, weights in WEIGHTS.items():
        assert torch.equal(model[name], weights.bfloat16())
        assert torch.equal(optimizer[f"master/{name}"], weights)
        assert torch.equal(optimizer[f"exp_avg/{name}"], weights + 100)
    assert not torch.equal(WEIGHTS["w"].bfloat16().float(), WEIGHTS["w"])


def test_a_second_copy_lies_on_the_next_nodes_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.checkpoint.write.MESSAGE_BYTES", 40)  # a shard is more pieces than are in flight at once
    roots = [tmp_path / "a", tmp_path / "b"]
    with stores_on(roots) as stores:
        stores[0].create_roots("r1")
        nodes = written(stores[0], placed(2), copies=2)
        assert nodes == dict.fromkeys(shards(0, 2) + SMALL, (0, 1))
        assert files_on(roots[1]) == files_on(roots[0])
        assert len(files_on(roots[0])[shards(0, 2)[0]]) > 40 * 5
        assert written(stores[1], placed(2), copies=2) == dict.fromkeys(shards(1, 2), (1, 0))
    assert files_on(roots[1]) == files_on(roots[0])
    assert len(files_on(roots[0])) == 4 + len(SMALL)


def test_a_second_copy_goes_to_a_smaller_node_and_back(tmp_path: Path) -> None:
    """Ranks 0 and 1 are on one node, rank 2 is on the other, which has no second rank."""
    placement, roots = plan({"actor,rollout": "all"}, 2, [2, 1]), [tmp_path / "a", tmp_path / "b"]
    with stores_on([roots[0], roots[0], roots[1]]) as stores:
        stores[0].create_roots("r1")
        nodes = [set(written(store, placement, copies=2).values()) for store in stores]
    assert nodes == [{(0, 1)}, {(0, 1)}, {(1, 0)}]
    assert files_on(roots[0]) == files_on(roots[1])
    assert len(files_on(roots[0])) == 6 + len(SMALL)


def test_nodes_on_the_same_disk_have_one_copy(tmp_path: Path) -> None:
    with stores_on([tmp_path, tmp_path]) as stores:
        assert written(stores[0], placed(2), copies=2) == dict.fromkeys(shards(0, 2) + SMALL, (0,))
        before = files_on(tmp_path)
        assert written(stores[1], placed(2), copies=2) == dict.fromkeys(shards(1, 2), (1,))
    assert {name: data for name, data in files_on(tmp_path).items() if name in before} == before


def test_the_second_copy_goes_to_a_disk_that_is_another(tmp_path: Path) -> None:
    """Nodes 0 and 1 share a disk."""
    shared, private = tmp_path / "shared", tmp_path / "private"
    with stores_on([shared, shared, private]) as stores:
        stores[0].create_roots("r1")
        nodes = [set(written(store, placed(3), copies=2).values()) for store in stores]
    assert nodes == [{(0, 2)}, {(1, 2)}, {(2, 0)}]
    assert files_on(shared) == files_on(private)


@pytest.fixture
def two(tmp_path: Path) -> Any:
    with stores_on([tmp_path / "a", tmp_path / "b"]) as stores:
        stores[0].create_roots("r1")
        (tmp_path / "a" / FOLDER).mkdir()
        yield stores


def send(store: CheckpointStore, data: bytes, change: Callable[[File], File] = lambda file: file) -> bool:
    file = write_small_file(store.root / FOLDER / "a", data)
    return CheckpointWriter(store, placed(2), 0, record_of(), 2).send_file(1, FOLDER, change(file))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40, 41])
def test_files_of_any_size_are_sent(tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("rl.checkpoint.write.MESSAGE_BYTES", 8)
    data = bytes(range(size))
    assert send(two[0], data)
    assert (tmp_path / "b" / FOLDER / "a").read_bytes() == data


def test_pieces_are_sent_a_few_at_a_time(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first alone, since it tells whether the disk is the same; then four."""
    monkeypatch.setattr("rl.checkpoint.write.MESSAGE_BYTES", 1)
    call, wait = two[0].call, two[0].wait
    in_flight, most, lasts = [0], [], []

    def counted_call(*args: Any, payload: memoryview) -> Any:
        in_flight[0] += 1
        most.append(in_flight[0])
        lasts.append(args[-1])
        return call(*args, payload=payload)

    def counted_wait(future: Any) -> Any:
        in_flight[0] -= 1
        return wait(future)

    monkeypatch.setattr(two[0], "call", counted_call)
    monkeypatch.setattr(two[0], "wait", counted_wait)
    assert send(two[0], b"0123456789")
    assert most == [1, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert lasts == [False] * 9 + [True]
    assert in_flight == [0]


def test_a_copy_that_cannot_be_written_is_an_error(tmp_path: Path, two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.checkpoint.write.MESSAGE_BYTES", 8)
    (tmp_path / "b").rename(tmp_path / "unmounted")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/b is gone"):
        send(two[0], bytes(100))
    assert not (tmp_path / "b").exists()


def test_a_file_that_has_changed_since_it_was_written_is_not_copied(tmp_path: Path, two: Any) -> None:
    def changed(file: File) -> File:
        (tmp_path / "a" / FOLDER / "a").write_bytes(b"0123456780")
        assert file.digest == digest(b"0123456789")
        return file

    with pytest.raises(CheckpointError, match=rf"{tmp_path}/b/{FOLDER}/a: the bytes that arrived differ"):
        send(two[0], b"0123456789", changed)
    assert not (tmp_path / "b" / FOLDER / "a").exists()


def test_a_disk_that_is_gone_is_not_created_again(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with stores_on([root]) as (store,), pytest.raises(CheckpointError) as caught:
        written(store, placed(1))
    assert str(caught.value).startswith(f"cannot write {root}/{FOLDER}: No such file or directory ({tmp_path} has ")
    assert not root.exists()


def test_files_that_make_a_model_folder(tmp_path: Path) -> None:
    contents = {
        "config.json": '{"dtype": "float32", "hidden_size": 8}',
        "generation_config.json": "{}",
        "tokenizer.model": "t",
        "merges.txt": "",
        "chat_template.jinja": "c",
        "model.safetensors.index.json": "{}",
        "merge.json": "{}",  # of the merge that made this model
        "model.safetensors": "weights",
        "README.md": "r",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    files = read_hf_files(tmp_path, "bfloat16")
    assert json.loads(files.pop("config.json")) == {"dtype": "bfloat16", "hidden_size": 8}
    assert files == {
        "generation_config.json": b"{}",
        "tokenizer.model": b"t",
        "merges.txt": b"",
        "chat_template.jinja": b"c",
    }


def test_logits_are_written_again_after_a_kill(tmp_path: Path) -> None:
    """A step without logits gets them at the next restart."""
    probe = {"tokens": torch.tensor([1, 2]), "logits": torch.tensor([0.5])}
    with stores_on([tmp_path]) as (store,):
        (tmp_path / "step_4").mkdir()
        (tmp_path / "step_4" / "probe.part").write_bytes(b"half")
        CheckpointWriter(store, placed(1), 0, record_of(), 1).write_probe("step_4", probe)
    saved = safetensors.torch.load_file(tmp_path / "step_4" / "probe.safetensors")
    assert (saved["tokens"].tolist(), saved["logits"].tolist()) == ([1, 2], [0.5])


def test_a_wait_for_a_checkpoint_names_the_rank_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is blamed while its own files are not written. The leader is blamed while it commits too."""
    said: dict[str, list[str]] = {"0": [], "1": []}
    is_mended, is_written, write = threading.Event(), threading.Event(), CheckpointWriter.write

    @contextmanager
    def waiting(what: str) -> Iterator[None]:
        said[threading.current_thread().name].append(what)
        yield

    def write_late(writer: CheckpointWriter, *args: Any) -> Any:
        (is_written if writer.rank == 0 else is_mended).wait()
        return write(writer, *args)

    monkeypatch.setattr(save, "waiting", waiting)
    monkeypatch.setattr(CheckpointWriter, "write", write_late)
    roots, placement = [tmp_path / "a", tmp_path / "b"], placed(2)
    with connected_worlds(2) as worlds:
        stores = [CheckpointStore(world.mail, root, None, range(2)) for world, root in zip(worlds, roots)]
        stores[0].create_roots("r1")
        savers = [Saver(world, placement, store, record_of(), copies=1) for world, store in zip(worlds, stores)]
        for saver in savers:
            saver.start(Snapshot(4, [], {}, {}, frozenset([4])))
        threads = [threading.Thread(target=saver.wait_committed, name=str(rank)) for rank, saver in enumerate(savers)]
        for thread in threads:
            thread.start()
        until(lambda: all(texts[-1:] == [OWN_FILES] for texts in said.values()), "both write")
        is_written.set()
        until(lambda: said["0"][-1] == OTHERS_FILES, "the leader has written")
        assert said["1"][-1] == OWN_FILES
        call_all, texts = stores[0].call_all, [COMMIT, OTHERS_FILES]

        def call_late(*arguments: Any) -> Any:
            until(lambda: [said["0"][-1], said["1"][-1]] == texts, "the leader commits, the other has written")
            return call_all(*arguments)

        monkeypatch.setattr(stores[0], "call_all", call_late)
        is_mended.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
    assert (roots[1] / "step_4" / "COMMITTED").exists()
    times = savers[0].take_times()
    assert times is not None and times.seconds > 0
    assert times.blocked_s == pytest.approx(times.seconds, abs=0.2), "the loop waited all the time"
    assert savers[0].take_times() is None and savers[1].take_times() is None
