"""tools/merge_checkpoint.py on checkpoints made by hand: what is merged, what is refused, what a kill leaves."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rl.config.schema import ROOT
from rl.export import write
from tests.checkpoint_files import Array, Box, Made, by_rows, read_model, write_checkpoint
from tools.merge_checkpoint import main

RANDOM = np.random.default_rng(0)
TENSORS: dict[str, Array] = {
    "embed.weight": RANDOM.standard_normal((37, 6)).astype(np.float32),  # divides by no number of shards
    "few_rows": RANDOM.standard_normal((2, 3)).astype(np.float32),  # fewer than shards
    "stack": RANDOM.standard_normal((4, 5, 6)).astype(np.float32),
    "half": RANDOM.integers(0x3F00, 0x4000, (9, 4)).astype(np.uint16),  # bfloat16: 0.5 to 2
    "scale": np.array(0.5, np.float32),
    "steps": np.arange(5, dtype=np.int64),
    "mask": np.array([True, False, True]),
}


def merge(*arguments: str | Path) -> None:
    main([str(argument) for argument in arguments])


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as error:
        merge(*arguments)
    return str(error.value.code)


def assert_equal(folder: Path, tensors: dict[str, Array]) -> None:
    merged = read_model(folder)
    assert set(merged) == set(tensors)
    for name, array in tensors.items():
        assert merged[name].dtype == array.dtype and merged[name].shape == array.shape
        assert merged[name].tobytes() == array.tobytes(), name


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Eight shards in the folders of four nodes."""
    return write_checkpoint([tmp_path / f"disk{node}" / "x" for node in range(4)], TENSORS, 8)


def nodes(made: Made) -> list[str | Path]:
    return [made.folders[0], "--nodes", ",".join(map(str, made.folders[1:]))]


def result(made: Made) -> Path:
    return made.folders[0] / "merged" / f"step_{made.manifest.step}"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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


def test_the_newest_committed_step_of_the_newest_run(tmp_path: Path) -> None:
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


def test_output_files_have_at_most_the_size_asked_for(made: Made) -> None:
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


def columns(name: str, array: Array, num_shards: int) -> list[list[Box]]:
    """The second dimension in parts; what has none by rows."""
    if array.ndim < 2:
        return by_rows(array, num_shards)
    return [
        [(slice(0, array.shape[0]), box[0]) for box in boxes] for boxes in by_rows(array.swapaxes(0, 1), num_shards)
    ]


def grid(name: str, array: Array, num_shards: int) -> list[list[Box]]:
    """Uneven cuts along every dimension, a box in each shard, and empty slices in the rest."""
    boxes: list[Box] = [()]
    for length in array.shape:
        boxes = [(*box, bound) for box in boxes for bound in (slice(0, length // 3), slice(length // 3, length))]
    empty = tuple(slice(0, 0) for _ in array.shape)
    return [[box] for box in reversed(boxes)] + [[empty]] * (num_shards - len(boxes))


@pytest.mark.parametrize("cut", [columns, grid])
@pytest.mark.parametrize("chunk_bytes", [8, 40, 4 << 20])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_slices_along_any_dimension(
    cut: Callable[[str, Array, int], list[list[Box]]],
    chunk_bytes: int,
    dtype: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(write, "CHUNK_BYTES", chunk_bytes)
    folder = tmp_path / "x"
    made = write_checkpoint([folder], TENSORS, 9, cut)
    assert any(not part.num_bytes for file in made.manifest.files for part in file.slices) == (cut is grid)
    merge(folder, *(["--dtype", dtype] if dtype else []))
    expected = dict(TENSORS)
    if dtype:
        expected["half"] = (TENSORS["half"].astype(np.uint32) << 16).view(np.float32)
    assert_equal(folder / "merged/step_40", expected)


def test_replicated_slices_are_written_once_and_must_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    text = failure(capsys, tmp_path / "other")
    assert "differs between model-00000-of-00003.safetensors and model-00002-of-00003.safetensors" in text
    assert "replicas disagree" in text


@pytest.mark.parametrize(
    ("dtype", "numpy"), [("float16", np.float16), ("bfloat16", np.uint16), ("float32", np.float32)]
)
def test_a_dtype_that_was_asked_for(made: Made, dtype: str, numpy: type) -> None:
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


def test_a_value_that_has_no_room_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "x"
    write_checkpoint([folder], {"w": np.array([[1.0, 7e4]], np.float32)}, 1)
    text = failure(capsys, folder, "--dtype", "float16")
    assert "w: 7e+04 is beyond what F16 can hold" in text
    merge(folder, "--dtype", "bfloat16")


def test_missing_shards_are_listed_with_their_nodes(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    made.shard(3).unlink()
    cut = made.shard(6)
    cut.write_bytes(cut.read_bytes()[:-1])
    text = failure(capsys, *nodes(made))
    assert "model-00003-of-00008.safetensors (" in text and "should be on node1" in text
    assert f"should be on node3; in {made.folders[3]}/checkpoints it has {cut.stat().st_size} bytes" in text
    assert "model-00002" not in text
    assert not result(made).parent.exists(), "nothing was begun"


def test_a_second_copy_takes_the_place_of_a_spoilt_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = write_checkpoint([tmp_path / f"disk{node}" / "x" for node in range(4)], TENSORS, 8, copies=2)
    made.shard(0).unlink()
    flip(made.shard(2), -1)
    made.shard(4).write_bytes(made.shard(3).read_bytes())
    merge(*nodes(made))
    assert_equal(result(made), TENSORS)
    assert capsys.readouterr().err.count("is spoilt") == 1, "of a shard with another size it is known before"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_is_found(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    flip(made.shard(5), -1)
    text = failure(capsys, *nodes(made))
    assert f"model-00005-of-00008.safetensors ({made.shard(5).stat().st_size} bytes) should be on node2" in text
    assert "it is spoilt: the bytes of mask are not those that were saved" not in text
    assert "are not those that were saved" in text
    assert not result(made).exists()
    flip(made.shard(5), -1)
    merge(*nodes(made))
    assert_equal(result(made), TENSORS)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_spoilt_config_is_found(made: Made, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flip(made.step_folder() / "hf" / name, 0)
    assert f"hf/{name}" in failure(capsys, *nodes(made))


@pytest.mark.parametrize("other", [{"step": 20}, {"run_id": "another"}, {"save_id": "save1"}])
def test_shards_of_another_step_or_run_never_mix(
    made: Made, other: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shard is of the same size, and whole; with --no-verify its header alone tells."""
    foreign = write_checkpoint([tmp_path / f"other{node}" for node in range(4)], TENSORS, 8, **other)  # type: ignore[arg-type]
    padded = foreign.shard(5).read_bytes()
    made.shard(5).write_bytes(padded[: made.shard(5).stat().st_size].ljust(made.shard(5).stat().st_size, b" "))
    (name, value), *_ = other.items()
    text = failure(capsys, *nodes(made), "--no-verify")
    assert f"is a shard of another checkpoint: {name} {value}, not" in text


def test_a_node_with_another_save_of_the_step_does_not_count(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = write_checkpoint([tmp_path / f"later{node}" for node in range(4)], TENSORS, 8, save_id="save1")
    shutil.rmtree(made.folders[2] / "checkpoints")
    shutil.copytree(later.folders[2] / "checkpoints", made.folders[2] / "checkpoints")
    (made.step_folder(2) / "COMMITTED").unlink()
    text = failure(capsys, *nodes(made))
    assert f"{made.folders[2]}/checkpoints holds another save of this step, which never mixes with this one" in text
    assert text.count("should be on node2") == 2


def test_a_duplicated_shard_is_merged_once(made: Made) -> None:
    for node in range(4):
        for index in range(8):
            copy = made.step_folder(node) / made.shard(index).name
            if not copy.exists():
                shutil.copy(made.shard(index), copy)
    merge(made.folders[3], "--nodes", made.folders[0])
    assert_equal(made.folders[3] / "merged/step_40", TENSORS)


def test_no_checkpoint_and_no_such_step(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no folder; give the folder of a run" in failure(capsys, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no committed checkpoint" in failure(capsys, tmp_path / "empty")
    (tmp_path / "begun/checkpoints").mkdir(parents=True)
    assert "no committed checkpoint in" in failure(capsys, tmp_path / "begun")
    assert "no step 41 in" in failure(capsys, *nodes(made), "--step", "41")
    assert "there are [40]" in failure(capsys, *nodes(made), "--step", "41")
    assert "contradict each other" in failure(capsys, made.step_folder(), "--step", "41")


def test_a_torn_manifest(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (made.step_folder() / "manifest.json").read_bytes()
    for node in range(4):
        (made.step_folder(node) / "manifest.json").write_bytes(whole[:-100])
    assert "manifest.json is torn" in failure(capsys, *nodes(made))


def test_slices_that_do_not_make_up_the_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {"w": TENSORS["embed.weight"]}
    hole = [[(slice(0, 10), slice(0, 6))], [(slice(10, 37), slice(0, 5))]]
    write_checkpoint([tmp_path / "hole"], tensors, 2, lambda *_: hole)
    text = failure(capsys, tmp_path / "hole")
    assert "not complete by its own manifest" in text
    assert "w [37, 6]: no file holds [10:37, 5:6]" in text
    overlap = [[(slice(0, 10),)], [(slice(9, 37),)]]
    write_checkpoint([tmp_path / "overlap"], tensors, 2, lambda *_: overlap)
    assert "[9:37, 0:6] of model-00001-of-00002.safetensors overlaps" in failure(capsys, tmp_path / "overlap")


def test_an_existing_result_is_kept(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    merge(*nodes(made))
    before = files_of(result(made))
    shutil.rmtree(made.step_folder(2))  # what is merged needs no shard any more
    merge(*nodes(made))
    assert "is complete already" in capsys.readouterr().out
    assert files_of(result(made)) == before
    assert "was made with dtype=as saved; move it away" in failure(capsys, *nodes(made), "--dtype", "bfloat16")
    (made.folders[0] / "mine").mkdir()
    (made.folders[0] / "mine/note").touch()
    text = failure(capsys, *nodes(made), "--output", made.folders[0] / "mine")
    assert "mine is there already and was not made by this tool" in text


def test_no_space_is_seen_before_anything_is_written(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl.export.work.free_bytes", lambda path: 1000)
    text = failure(capsys, *nodes(made))
    assert "are to be written to" in text and "--output" in text
    assert not result(made).parent.exists()


def test_a_disk_that_is_full_before_the_merge_and_in_the_middle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one: the check sees it beforehand; where others fill the disk after that, what is finished stays."""
    tensors = {f"w{index}": RANDOM.random((64, 1024), np.float32) for index in range(8)}  # 256 KiB each
    made = write_checkpoint([tmp_path / "x"], tensors, 2)
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        arguments = [made.folders[0], "--output", disk / "model", "--max-shard-size", "300kB"]
        assert "whose disk has 1.05 MB left" in failure(capsys, *arguments)
        assert list(disk.iterdir()) == [], "nothing was written"
        with monkeypatch.context() as patch:
            patch.setattr("rl.export.work.free_bytes", lambda path: 1 << 40)
            text = failure(capsys, *arguments)
        assert "No space left on device" in text and "free space" in text and not (disk / "model").exists()
        finished = {path: path.stat().st_mtime_ns for path in disk.glob("*/model/*.safetensors")}
        assert finished
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        merge(*arguments)
        assert_equal(disk / "model", tensors)
        kept = {path.name: path.stat().st_mtime_ns for path in (disk / "model").glob("*.safetensors")}
        assert {path.name: time_ns for path, time_ns in finished.items()}.items() <= kept.items(), (
            "what was finished stays"
        )
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_dry_run_changes_nothing(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    before = [files_of(folder) for folder in made.folders]
    merge(*nodes(made), "--dry-run", "--max-shard-size", "600")
    assert f"would merge into {result(made)}: 3 files" in capsys.readouterr().out
    assert [files_of(folder) for folder in made.folders] == before
    made.shard(3).unlink()
    assert "model-00003" in failure(capsys, *nodes(made), "--dry-run")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-shard-size", "5 apples"], "a size is a number and a unit"),
        (["--max-shard-size", "0GB"], "a size is a number and a unit"),
        (["--public"], "add --upload"),
        (["--nodes", "a:/b"], "also name the run"),
        (["--identity", "/nowhere/key"], "give the path of a private key"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert text in capsys.readouterr().err


def test_a_run_named_after_upload_is_no_name_on_the_hub(
    made: Made, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.folders[0].parent)
    with pytest.raises(SystemExit):
        main(["--upload", "x"])
    assert "name the run before --upload" in capsys.readouterr().err


def test_upload_without_a_name(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    text = failure(capsys, *nodes(made), "--upload")
    assert "the run's config has no checkpoint.hub_name; give the name: --upload ORG/NAME" in text


KILLED = """
import os, sys
from rl.export import write
count = int(sys.argv.pop(1))
def counted(function):
    def call(*arguments):
        global count
        count -= 1
        if count < 0:
            os.kill(os.getpid(), 9)
        return function(*arguments)
    return call
write._write_at, os.fsync = counted(write._write_at), counted(os.fsync)
from pathlib import Path
Path.rename = counted(Path.rename)
from tools.merge_checkpoint import main
main(sys.argv[1:])
"""


@pytest.mark.timeout(200)
def test_a_kill_at_any_moment_loses_nothing(made: Made) -> None:
    """The output folder is not there until it is complete; the same command goes on, and keeps what was finished."""
    command = [*map(str, nodes(made)), "--max-shard-size", "300"]
    expected = made.folders[0].with_name("expected")
    merge(*nodes(made), "--max-shard-size", "300", "--output", expected)
    kept = 0
    for count in range(2, 90, 3):
        finished = set((result(made).parent).glob("*/model/*.safetensors"))
        times = {path: path.stat().st_mtime_ns for path in finished}
        done = subprocess.run([sys.executable, "-c", KILLED, str(count), *command], cwd=ROOT, timeout=60, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        assert not result(made).exists()
        kept += len(times)
        assert {path: path.stat().st_mtime_ns for path in finished} == times, "what was finished stays"
        if count % 2:
            shutil.rmtree(result(made).parent)
    assert result(made).exists() and kept > 0
    assert files_of(result(made)) == files_of(expected)
    assert list(result(made).parent.iterdir()) == [result(made)]


def test_two_at_once(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import time\nfrom rl.export import write\nwrite._finish = lambda *a: time.sleep(60)\n"
    script += "import sys\nfrom tools.merge_checkpoint import main\nmain(sys.argv[1:])"
    first = subprocess.Popen([sys.executable, "-c", script, *map(str, nodes(made))], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while not list(made.folders[0].glob("merged/*/model/*.part")):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        assert "another process works in" in failure(capsys, *nodes(made))
    finally:
        first.kill()
        first.wait()
    merge(*nodes(made))
    assert_equal(result(made), TENSORS)


def test_torch_is_not_imported(made: Made) -> None:
    script = "import sys\nfrom tools.merge_checkpoint import main\nmain(sys.argv[1:])\n"
    script += "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script, *map(str, nodes(made))], cwd=ROOT, check=True, timeout=60)
    assert_equal(result(made), TENSORS)


def test_what_another_run_left_beside_the_output_is_not_taken_for_this_one(made: Made, tmp_path: Path) -> None:
    other = write_checkpoint([tmp_path / "other"], {"w": TENSORS["stack"]}, 2, step=500, run_id="run1", save_id="save1")
    merge(other.folders[0], "--output", tmp_path / "models/a", "--keep-shards")
    merge(*nodes(made), "--output", tmp_path / "models/b")
    assert_equal(tmp_path / "models/b", TENSORS)


def test_a_run_that_started_over_is_not_outranked_by_what_was_kept(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write_checkpoint([folder], {"w": TENSORS["stack"]}, 2, step=40)
    merge(folder, "--keep-shards")
    shutil.rmtree(folder / "checkpoints")
    write_checkpoint([folder], TENSORS, 2, step=20, run_id="run1", save_id="save1")
    merge(folder)
    assert_equal(folder / "merged/step_20", TENSORS)


def test_folders_of_another_run_among_the_nodes(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_checkpoint([tmp_path / "other"], {"w": TENSORS["stack"]}, 2, step=900, run_id="run1", save_id="save1")
    merge(*nodes(made)[:-1], f"{nodes(made)[-1]},{other.folders[0]}")
    assert_equal(result(made), TENSORS)
    assert f"{other.folders[0]}/checkpoints: it is of another run" in capsys.readouterr().err
    text = failure(capsys, tmp_path / "elsewhere", "--nodes", f"{made.folders[0]},{other.folders[0]}")
    assert "--nodes names folders of different runs" in text


def test_a_step_that_the_run_removes_meanwhile(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are held open from the beginning."""

    def gather(work: object, checkpoint: object) -> None:
        for node in range(4):
            shutil.rmtree(made.step_folder(node))

    monkeypatch.setattr("tools.merge_checkpoint.gather", gather)
    merge(*nodes(made))
    assert_equal(result(made), TENSORS)


def test_a_shard_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An input error is the shard's, not the output's, and another copy takes its place."""
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
    assert "is spoilt (it cannot be read: Input/output error)" in capsys.readouterr().err


def test_outputs_that_cannot_be(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in (made.step_folder().with_name("step_50"), made.folders[0] / "checkpoints", made.folders[0]):
        assert "is where the run itself works" in failure(capsys, *nodes(made), "--output", place)
    assert "give a folder that is not there yet" in failure(capsys, *nodes(made), "--output", "/")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    merge(*nodes(made), "--output", tmp_path / "link")
    assert_equal(tmp_path / "empty", TENSORS)


def test_a_verified_result_also_serves_who_asks_for_less(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    merge(*nodes(made))
    merge(*nodes(made), "--no-verify")
    assert "is complete already" in capsys.readouterr().out
    shutil.rmtree(result(made))
    merge(*nodes(made), "--no-verify")
    assert "was made with verified=False" in failure(capsys, *nodes(made))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nodes", "node1"], "no folder here; on another node it is HOST:FOLDER"),
        (["--nodes", ":/x"], "an entry is HOST:FOLDER"),
        (["--nodes", ","], "got no node"),
        (["--nodes-file", "/nowhere"], "--nodes-file: cannot read /nowhere"),
    ],
)
def test_mistaken_nodes(made: Made, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in failure(capsys, made.folders[0], *arguments)


@pytest.mark.parametrize("command", ["", "no-such-program -p 1", "ssh 'x"])
def test_an_ssh_that_cannot_run(made: Made, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        merge(*nodes(made), "--ssh", command)
    assert "it is a command that can be run" in capsys.readouterr().err


def test_metrics_that_are_none(made: Made) -> None:
    (made.folders[0] / "metrics.jsonl").write_text('5\n"x"\n{"step": 1, "reward/mean": 0.5}\n{"st')
    merge(*nodes(made))
    assert "0.5 (step 1)" in (result(made) / "README.md").read_text()
