"""Merge checkpoints with tools/merge_checkpoint.py: the content of the merged model."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl.config.schema import ROOT
from rl.export import write
from tests.checkpoint_files import Array, Box, Made, read_model, write_checkpoint
from tests.merging import (
    TENSORS,
    assert_equal,
    eight_shards_on_four_nodes,
    failure,
    files_of,
    merge,
    nodes,
    result,
)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return eight_shards_on_four_nodes(tmp_path)


@pytest.mark.parametrize("verify", [(), ("--no-verify",)])
def test_shards_of_four_nodes_become_one_model(made: Made, verify: tuple[str, ...]) -> None:
    before = [files_of(folder) for folder in made.folders]
    merge(*nodes(made), *verify)
    assert_equal(result(made), TENSORS)
    assert (result(made) / "tokenizer.json").read_bytes() == b"{}"
    assert not (result(made) / "model.safetensors.index.json").exists()
    assert list(result(made).parent.iterdir()) == [result(made)], "nothing is left of the work"
    shutil.rmtree(result(made).parent)
    assert [files_of(folder) for folder in made.folders] == before, "the run's own files are never touched"


def test_the_kernel_may_copy_a_part_of_an_element(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, sizes = os.copy_file_range, itertools.cycle([3, 5, 1, 7])

    def copy_little(source: int, target: int, count: int, begin: int, place: int) -> int:
        return copy(source, target, min(count, next(sizes)), begin, place)

    monkeypatch.setattr(os, "copy_file_range", copy_little)
    merge(*nodes(made), "--no-verify")
    assert_equal(result(made), TENSORS)


def test_the_default_is_the_newest_committed_step_of_the_newest_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, step in (("old", 60), ("new", 20), ("new", 40), ("new", 80)):
        write_checkpoint([runs / name], TENSORS, 2, step=step)
    (runs / "new/checkpoints/step_80/COMMITTED").unlink()  # a kill came before the marker
    shutil.copytree(runs / "new/checkpoints/step_40", runs / "new/checkpoints/step_90.tmp-1")
    os.utime(runs / "old/checkpoints/step_60/manifest.json", (1, 1))
    merge(runs)
    assert [path.name for path in runs.glob("*/merged/*")] == ["step_40"]
    merge(runs / "new", "--step", 80)  # all of it is there
    merge(runs / "new/checkpoints/step_20")
    merge(runs / "old/checkpoints")
    assert sorted(path.name for path in runs.glob("*/merged/*")) == ["step_20", "step_40", "step_60", "step_80"]


def test_output_files_respect_the_maximum_size(made: Made) -> None:
    merge(*nodes(made), "--max-shard-size", "600B")
    files = sorted(result(made).glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert_equal(result(made), TENSORS)
    index = json.loads((result(made) / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in TENSORS.values())
    where = {name: file.name for file in files for name in read_names(file)}
    assert index["weight_map"] == where
    sizes = [sum(TENSORS[name].nbytes for name in where if where[name] == file.name) for file in files]
    large = TENSORS["embed.weight"].nbytes
    assert sorted(sizes)[-1] == large > 600 >= sorted(sizes)[-2], "a larger tensor has a file of its own"


def read_names(file: Path) -> list[str]:
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def uneven(name: str, array: Array, num_shards: int) -> list[list[Box]]:
    """Uneven ranges of rows, the last ones in the first shard, and empty slices in the other shards."""
    cut = array.shape[0] // 3
    return [[(slice(cut, array.shape[0]),)], [(slice(0, cut),)], *([[(slice(0, 0),)]] * (num_shards - 2))]


@pytest.mark.parametrize("chunk_bytes", [8, 40, 4 << 20])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_slices_of_any_size_in_any_order(
    chunk_bytes: int, dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "CHUNK_BYTES", chunk_bytes)
    folder = tmp_path / "x"
    made = write_checkpoint([folder], TENSORS, 9, uneven)
    assert any(not part.num_bytes for file in made.manifest.files for part in file.slices)
    merge(folder, *(["--dtype", dtype] if dtype else []))
    expected = dict(TENSORS)
    if dtype:
        expected["half"] = (TENSORS["half"].astype(np.uint32) << 16).view(np.float32)
    assert_equal(folder / "merged/step_40", expected)


def test_replicated_slices_are_written_once_and_must_agree(tmp_path: Path) -> None:
    def everywhere(name: str, array: Array, num_shards: int) -> list[list[Box]]:
        return [[(slice(0, array.shape[0]),)]] * num_shards

    same = tmp_path / "same"
    write_checkpoint([same], {"buffer": TENSORS["half"]}, 3, everywhere)
    merge(same)
    assert_equal(same / "merged/step_40", {"buffer": TENSORS["half"]})
    made = write_checkpoint([tmp_path / "other"], {"buffer": TENSORS["half"]}, 3, everywhere)
    path = made.step_folder() / "manifest.json"
    rows = json.loads(path.read_bytes())
    rows["files"][-1]["slices"][0][-1] = "0" * 16
    assert rows["files"][-1]["slices"][0][0] == "exp_avg", "the last file is an optimizer's"
    next(file for file in rows["files"] if file["name"].startswith("model-00002"))["slices"][0][-1] = "0" * 16
    path.write_text(json.dumps(rows))
    text = failure(tmp_path / "other")
    assert f"rows 0:9 differ between the replicas in {made.shard(0).name} and {made.shard(2).name}" in text


@pytest.mark.parametrize(
    ("dtype", "numpy"), [("float16", np.float16), ("bfloat16", np.uint16), ("float32", np.float32)]
)
def test_dtype_converts_floating_point_tensors(made: Made, dtype: str, numpy: type) -> None:
    merge(*nodes(made), "--dtype", dtype)
    merged = read_model(result(made))
    assert json.loads((result(made) / "config.json").read_bytes())["dtype"] == dtype
    assert {merged[name].dtype.type for name in ("embed.weight", "half", "scale", "stack")} == {numpy}
    assert merged["steps"].tolist() == [0, 1, 2, 3, 4] and merged["mask"].tolist() == [True, False, True]
    if dtype == "bfloat16":
        assert merged["half"].tobytes() == TENSORS["half"].tobytes()
        exact = (merged["stack"].astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(exact, TENSORS["stack"], rtol=2**-8)
    else:
        np.testing.assert_allclose(merged["stack"], TENSORS["stack"], rtol=2**-11)


def test_a_value_out_of_range_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write_checkpoint([folder], {"w": np.array([[1.0, 7e4]], np.float32)}, 1)
    text = failure(folder, "--dtype", "float16")
    assert "w: 7e+04 is beyond the range of F16" in text
    merge(folder, "--dtype", "bfloat16")


def test_a_duplicated_shard_is_merged_once(made: Made) -> None:
    for node in range(4):
        for index in range(8):
            copy = made.step_folder(node) / made.shard(index).name
            if not copy.exists():
                shutil.copy(made.shard(index), copy)
    merge(made.folders[3], "--nodes", made.folders[0])
    assert_equal(made.folders[3] / "merged/step_40", TENSORS)


def test_torch_is_not_imported(made: Made) -> None:
    script = "import sys\nfrom tools.merge_checkpoint import main\nmain(sys.argv[1:])\n"
    script += "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script, *map(str, nodes(made))], cwd=ROOT, check=True, timeout=60)
    assert_equal(result(made), TENSORS)


def test_unreadable_lines_of_metrics_are_skipped(made: Made) -> None:
    (made.folders[0] / "metrics.jsonl").write_text('5\n"x"\n{"step": 1, "reward/mean": 0.5}\n{"st')
    merge(*nodes(made))
    assert "0.5 (step 1)" in (result(made) / "README.md").read_text()
