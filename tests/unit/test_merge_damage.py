"""Merge damaged checkpoints: missing, corrupt and foreign files are detected, and other copies are used."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.checkpoint_files import Made, write_checkpoint
from tests.merging import (
    TENSORS,
    assert_equal,
    eight_shards_on_four_nodes,
    failure,
    merge,
    nodes,
    result,
)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return eight_shards_on_four_nodes(tmp_path)


def test_missing_shards_are_listed_with_their_nodes(made: Made) -> None:
    made.shard(3).unlink()
    cut = made.shard(6)
    cut.write_bytes(cut.read_bytes()[:-1])
    text = failure(*nodes(made))
    assert "model-00003-of-00008.safetensors (" in text and "should be on node1" in text
    assert f"should be on node3; the copy in {made.folders[3]}/checkpoints has {cut.stat().st_size} bytes" in text
    assert "model-00002" not in text
    assert not result(made).parent.exists(), "nothing was begun"


def test_a_second_copy_replaces_a_corrupt_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write_checkpoint([tmp_path / f"disk{node}" / "x" for node in range(4)], TENSORS, 8, copies=2)
    made.shard(0).unlink()
    flip(made.shard(2), -1)
    made.shard(4).write_bytes(made.shard(3).read_bytes())
    merge(*nodes(made))
    assert_equal(result(made), TENSORS)
    assert capsys.readouterr().err.count("is corrupt") == 1, "shards of another size are not even opened"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_detected(made: Made) -> None:
    flip(made.shard(5), -1)
    text = failure(*nodes(made))
    assert f"model-00005-of-00008.safetensors ({made.shard(5).stat().st_size} bytes) should be on node2" in text
    assert "differ from those that were saved" in text
    assert not result(made).exists()
    flip(made.shard(5), -1)
    merge(*nodes(made))
    assert_equal(result(made), TENSORS)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_corrupt_config_is_detected(made: Made, name: str) -> None:
    flip(made.step_folder() / "hf" / name, 0)
    assert f"hf/{name}" in failure(*nodes(made))


@pytest.mark.parametrize("other", [{"step": 20}, {"run_id": "another"}, {"save_id": "save1"}])
def test_shards_of_another_step_or_run_never_mix(made: Made, other: dict[str, object], tmp_path: Path) -> None:
    """The shard has the right size and is intact. With --no-verify only its header reveals it."""
    foreign = write_checkpoint([tmp_path / f"other{node}" for node in range(4)], TENSORS, 8, **other)  # type: ignore[arg-type]
    padded = foreign.shard(5).read_bytes()
    made.shard(5).write_bytes(padded[: made.shard(5).stat().st_size].ljust(made.shard(5).stat().st_size, b" "))
    (name, value), *_ = other.items()
    text = failure(*nodes(made), "--no-verify")
    assert f"is a shard of another checkpoint: {name} {value}, not" in text


def test_another_save_of_the_same_step_is_not_used(made: Made, tmp_path: Path) -> None:
    later = write_checkpoint([tmp_path / f"later{node}" for node in range(4)], TENSORS, 8, save_id="save1")
    shutil.rmtree(made.folders[2] / "checkpoints")
    shutil.copytree(later.folders[2] / "checkpoints", made.folders[2] / "checkpoints")
    (made.step_folder(2) / "COMMITTED").unlink()
    text = failure(*nodes(made))
    assert f"{made.folders[2]}/checkpoints holds another save of this step, which cannot be mixed with this one" in text
    assert text.count("should be on node2") == 2


def test_a_truncated_manifest_is_reported(made: Made) -> None:
    whole = (made.step_folder() / "manifest.json").read_bytes()
    for node in range(4):
        (made.step_folder(node) / "manifest.json").write_bytes(whole[:-100])
    assert "manifest.json is damaged" in failure(*nodes(made))


def test_gaps_and_overlaps_of_slices_are_reported(tmp_path: Path) -> None:
    tensors = {"w": TENSORS["embed.weight"]}
    holes = [[(slice(20, 30),)], [(slice(1, 10),)]]
    write_checkpoint([tmp_path / "holes"], tensors, 2, lambda *_: holes)
    text = failure(tmp_path / "holes")
    assert "the manifest of step 40 of holes is incomplete" in text
    assert "w [37, 6]: no file holds rows 0:1, 10:20, 30:37" in text
    overlap = [[(slice(0, 10),)], [(slice(9, 37),)]]
    write_checkpoint([tmp_path / "overlap"], tensors, 2, lambda *_: overlap)
    assert "rows 9:37 of model-00001-of-00002.safetensors overlap" in failure(tmp_path / "overlap")
    columns = [[(slice(0, 37), slice(0, 5))], [(slice(0, 37), slice(5, 6))]]
    write_checkpoint([tmp_path / "columns"], tensors, 2, lambda *_: columns)
    text = failure(tmp_path / "columns")
    assert "model-00000-of-00002.safetensors holds a slice [37, 5] at [0, 0] that is not a range of its rows" in text


def test_another_copy_replaces_a_shard_with_read_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read error concerns the shard and not the output, and another copy replaces the shard."""
    made = write_checkpoint([tmp_path / f"disk{node}" / "x" for node in range(2)], TENSORS, 2, copies=2)
    broken = os.stat(made.shard(0)).st_ino
    read = os.preadv

    def preadv(handle: int, buffers: list[memoryview], begin: int) -> int:
        if os.fstat(handle).st_ino == broken and begin > 1000:
            raise OSError(errno.EIO, "Input/output error")
        return read(handle, buffers, begin)

    monkeypatch.setattr(os, "preadv", preadv)
    merge(made.folders[0], "--nodes", made.folders[1])
    assert_equal(made.folders[0] / "merged/step_40", TENSORS)
    assert "is corrupt (it cannot be read: Input/output error)" in capsys.readouterr().err


def test_folders_of_other_runs_are_ignored(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_checkpoint([tmp_path / "other"], {"w": TENSORS["stack"]}, 2, step=900, run_id="run1", save_id="save1")
    merge(*nodes(made)[:-1], f"{nodes(made)[-1]},{other.folders[0]}")
    assert_equal(result(made), TENSORS)
    assert f"{other.folders[0]}/checkpoints: it belongs to another run" in capsys.readouterr().err
    text = failure(tmp_path / "elsewhere", "--nodes", f"{made.folders[0]},{other.folders[0]}")
    assert "--nodes names folders of different runs" in text
