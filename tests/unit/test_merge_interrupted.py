"""Merge again after a kill, on a full disk, beside another process, or while the run goes on."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rl.config.schema import ROOT
from rl.export.plan import OutputFile
from rl.export.write import Merger
from tests.checkpoint_files import Made, write_checkpoint
from tests.merging import (
    RANDOM,
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


def test_an_existing_result_is_kept(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    merge(*nodes(made))
    before = files_of(result(made))
    shutil.rmtree(made.step_folder(2))  # what is merged needs no shard any more
    merge(*nodes(made))
    assert "is complete already" in capsys.readouterr().out
    assert files_of(result(made)) == before
    assert "was made with dtype=as saved; move it away" in failure(*nodes(made), "--dtype", "bfloat16")
    (made.folders[0] / "mine").mkdir()
    (made.folders[0] / "mine/note").touch()
    text = failure(*nodes(made), "--output", made.folders[0] / "mine")
    assert "mine exists already and was not made by this tool" in text


def test_missing_space_is_reported_before_anything_is_written(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.export.work_folder.free_bytes", lambda path: 1000)
    text = failure(*nodes(made))
    assert "are to be written to" in text and "--output" in text
    assert not result(made).parent.exists()


def test_a_disk_that_is_full_before_or_during_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is noticed beforehand. If it fills up later, finished files are kept."""
    tensors = {f"w{index}": RANDOM.random((64, 1024), np.float32) for index in range(8)}  # 256 KiB each
    made = write_checkpoint([tmp_path / "x"], tensors, 2)
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        arguments = [made.folders[0], "--output", disk / "model", "--max-shard-size", "300kB"]
        assert "whose disk has 1.05 MB left" in failure(*arguments)
        assert list(disk.iterdir()) == [], "nothing was written"
        with monkeypatch.context() as patch:
            patch.setattr("rl.export.work_folder.free_bytes", lambda path: 1 << 40)
            text = failure(*arguments)
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


KILLED = """
import os, sys
count = int(sys.argv.pop(1))
def counted(function):
    def call(*arguments):
        global count
        count -= 1
        if count < 0:
            os.kill(os.getpid(), 9)
        return function(*arguments)
    return call
os.pwrite, os.fsync = counted(os.pwrite), counted(os.fsync)
from pathlib import Path
Path.rename, Path.replace = counted(Path.rename), counted(Path.replace)
from tools.merge_checkpoint import main
main(sys.argv[1:])
"""


@pytest.mark.timeout(200)
def test_a_kill_at_any_moment_loses_nothing(made: Made) -> None:
    """The output folder appears when it is complete. The same command continues and keeps finished files."""
    command = [*map(str, nodes(made)), "--max-shard-size", "300"]
    expected = made.folders[0].with_name("expected")
    merge(*nodes(made), "--max-shard-size", "300", "--output", expected)
    kept = 0
    for count in range(2, 90, 3):
        finished = set((result(made).parent).glob("*/model/*.safetensors"))
        times = {path: path.stat().st_mtime_ns for path in finished}
        done = subprocess.run([sys.executable, "-c", KILLED, str(count), *command], cwd=ROOT, timeout=60, check=False)
        if done.returncode == 0:
            kept += sum(path.stat().st_mtime_ns in times.values() for path in result(made).glob("*.safetensors"))
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


def test_two_processes_do_not_share_a_work_folder(made: Made) -> None:
    script = "import os, sys, time\nos.fsync = lambda handle: time.sleep(60)\n"
    script += "from tools.merge_checkpoint import main\nmain(sys.argv[1:])"
    first = subprocess.Popen([sys.executable, "-c", script, *map(str, nodes(made))], cwd=ROOT)
    try:
        deadline = time.monotonic() + 30
        while not list(made.folders[0].glob("merged/*/shards/*/*.part")):
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        assert "another process works in" in failure(*nodes(made))
    finally:
        first.kill()
        first.wait()
    merge(*nodes(made))
    assert_equal(result(made), TENSORS)


def test_gathered_files_of_another_run_are_ignored(made: Made, tmp_path: Path) -> None:
    other = write_checkpoint([tmp_path / "other"], {"w": TENSORS["stack"]}, 2, step=500, run_id="run1", save_id="save1")
    merge(other.folders[0], "--output", tmp_path / "models/a", "--keep-shards")
    merge(*nodes(made), "--output", tmp_path / "models/b")
    assert_equal(tmp_path / "models/b", TENSORS)


def test_gathered_files_do_not_hide_a_run_that_started_over(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    write_checkpoint([folder], {"w": TENSORS["stack"]}, 2, step=40)
    merge(folder, "--keep-shards")
    shutil.rmtree(folder / "checkpoints")
    write_checkpoint([folder], TENSORS, 2, step=20, run_id="run1", save_id="save1")
    merge(folder)
    assert_equal(folder / "merged/step_20", TENSORS)


def test_the_run_may_delete_the_step_during_the_merge(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files stay open from the beginning."""
    write = Merger.write

    def delete_and_write(merger: Merger, outputs: Sequence[OutputFile]) -> None:
        for node in range(4):
            shutil.rmtree(made.step_folder(node))
        write(merger, outputs)

    monkeypatch.setattr(Merger, "write", delete_and_write)
    merge(*nodes(made))
    assert_equal(result(made), TENSORS)


def test_a_verified_result_also_serves_without_verification(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    merge(*nodes(made))
    merge(*nodes(made), "--no-verify")
    assert "is complete already" in capsys.readouterr().out
    shutil.rmtree(result(made))
    merge(*nodes(made), "--no-verify")
    assert "was made with verified=False" in failure(*nodes(made))
