"""Whole runs that stop and go on: at another size, after signals, on disks that fail, from damaged checkpoints.

Most of them run the fake engine; test_on_real_engines runs vLLM.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl.checkpoint.manifest import MANIFEST
from tests.launcher import Result, finish, start, status_line, steps_on, train

pytestmark = pytest.mark.timeout(200)
SETTINGS = ["rollout.engine=fake", "train.num_prompts_per_step=6", "eval.interval=0", "checkpoint.save_interval=1"]
REAL = ["train.num_prompts_per_step=8", "eval.interval=0", "checkpoint.save_interval=2", "debug.save_rollouts=true"]
COMPARED = ["reward/mean", "loss/policy", "optim/grad_norm", "optim/lr", "rollout/tokens"]


def launch(folder: Path, num_ranks: int, what: str, *overrides: str, restarts: bool = False) -> subprocess.Popen[str]:
    script = ["tests/e2e/broken_train.py", what, "0", f"run.dir={folder.parent}", f"run.name={folder.name}"]
    return start(f"--nproc-per-node={num_ranks}", *script, *SETTINGS, *overrides, restarts=restarts)


def run(folder: Path, num_ranks: int, *overrides: str) -> Result:
    """A run with rewards that differ, so that something is learnt."""
    return train(folder, num_ranks, *SETTINGS, *overrides, broken="varied rewards")


def fail(folder: Path, *overrides: str) -> str:
    process = launch(folder, 1, "varied rewards", *overrides)
    output = finish(process, 120)
    assert process.returncode != 0, output
    return output


def wait_for(folder: Path, process: subprocess.Popen[str], step: int) -> None:
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, "the world did not get there"
        time.sleep(0.05)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
def test_four_ranks_two_disaggregated_three(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 4, "train.num_steps=6", "debug.save_rollouts=true")
    parts = tmp_path / "parts"
    run(parts, 4, "train.num_steps=2", "debug.save_rollouts=true")
    placement = ["placement.rollout=0", "placement.actor=1"]
    run(parts, 2, "train.num_steps=4", "debug.save_rollouts=true", *placement)
    result = run(parts, 3, "train.num_steps=6", "debug.save_rollouts=true")
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4, 5, 6]
    for ours, theirs in zip(result.metrics, whole.metrics, strict=True):
        assert ours["version"] == theirs["version"] == ours["step"] + 1
        for name in COMPARED:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), (ours["step"], name)
    assert max(row["optim/grad_norm"] for row in whole.metrics) > 0
    for step in (3, 5):
        assert result.rollouts(step).tokens.tolist() == whole.rollouts(step).tokens.tolist()
        assert result.rollouts(step).versions.tolist() == whole.rollouts(step).versions.tolist()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_on_real_engines(tmp_path: Path) -> None:
    """Two ranks: 4 steps equal 2, a resume and 2, bit for bit."""
    whole = train(tmp_path / "whole", 2, *REAL, "train.num_steps=4")
    train(tmp_path / "same", 2, *REAL, "train.num_steps=2")
    same = train(tmp_path / "same", 2, *REAL, "train.num_steps=4")
    for ours, theirs in zip(same.metrics, whole.metrics, strict=True):
        assert [ours[name] for name in COMPARED] == [theirs[name] for name in COMPARED]
    for file in (tmp_path / "whole" / "checkpoints" / "step_4").glob("*-of-*.safetensors"):
        expected = load_file(file)
        for name, tensor in load_file(tmp_path / "same" / "checkpoints" / "step_4" / file.name).items():
            assert tensor.equal(expected[name]), name


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_engines_in_another_placement_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, *REAL, "train.num_steps=4")
    train(tmp_path / "other", 2, *REAL, "train.num_steps=2")
    placement = ["placement.rollout=0", "placement.actor=1"]
    other = train(tmp_path / "other", 2, *REAL, "train.num_steps=4", *placement)
    for step in (3, 4):
        assert other.rollouts(step).tokens.tolist() == whole.rollouts(step).tokens.tolist()
        assert other.metrics[step - 1]["loss/policy"] == pytest.approx(whole.metrics[step - 1]["loss/policy"], abs=1e-5)
        assert other.metrics[step - 1]["policy/mismatch_kl"] < 1e-6


def test_a_crash_is_restarted_from_the_last_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = launch(folder, 2, "killed, once", "train.num_steps=4", restarts=True)
    output = finish(process, 150)
    assert process.returncode == 0, output
    assert output.count("resumes after step 1") == 1, output
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert re.search(r"in 4 steps, the last 3 of them in \d+ s after a resume, engine fake\n", output)
    assert status_line(folder) == "done after 4 of 4 steps"


@pytest.mark.alone
def test_sigusr1_saves_now_and_training_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = launch(folder, 2, "slow engines", "train.num_steps=12", "checkpoint.save_interval=0")
    wait_for(folder, process, 2)
    rank = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()[-1]
    os.kill(int(rank), signal.SIGUSR1)
    output = finish(process, 120)
    assert process.returncode == 0, output
    saved = steps_on(folder)
    assert len(saved) == 2, "one by the signal, and the last"
    assert 2 <= saved[0] < 12
    assert saved[1] == 12


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_orders_reach_both_ranks_of_a_tensor_parallel_engine_between_its_calls(tmp_path: Path) -> None:
    """On real vLLM: a rank that saved while the other stepped the engine would wait for it, and it for that rank."""
    folder = tmp_path / "run"
    settings = [f"run.dir={tmp_path}", "run.name=run", "rollout.tensor_parallel_size=2", "checkpoint.save_interval=0"]
    settings += ["eval.interval=0", "train.num_steps=30", "checkpoint.keep_last=99", "world.transfer_timeout_s=30"]
    process = start("--nproc-per-node=2", "train.py", *settings)
    wait_for(folder, process, 1)
    ranks = [int(rank) for rank in subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()]
    for turn in range(12):
        if process.poll() is None:
            os.kill(ranks[turn % 2], signal.SIGUSR1)
            time.sleep(0.4)
    output = finish(process, 250)
    assert process.returncode == 0, output[-4000:]
    assert len(steps_on(folder)) >= 4


@pytest.mark.alone
@pytest.mark.parametrize("target", ["launcher", pytest.param("rank", marks=pytest.mark.slow)])
def test_sigterm_saves_and_stops(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = launch(folder, 2, "slow engines", "train.num_steps=9999", "checkpoint.save_interval=0")
    wait_for(folder, process, 2)
    ranks = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()
    os.kill(process.pid if target == "launcher" else int(ranks[-1]), signal.SIGTERM)
    started = time.monotonic()
    output = finish(process, 60)
    assert time.monotonic() - started < 15
    assert process.returncode != 0
    (saved,) = steps_on(folder)
    assert output.count(f"oneworld: stopped at step {saved + 1}, stage ") == 1, output
    assert f"step {saved} is saved" in output
    assert status_line(folder) == f"stopped by a signal at step {saved + 1}: step {saved} is saved (run.name=run)"
    last = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert saved == last
    result = run(folder, 1, f"train.num_steps={saved + 1}")
    assert [row["step"] for row in result.metrics] == list(range(1, saved + 2))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run whose checkpoints lie on a disk of their own, with room for two."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(folder / "checkpoints")], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder / "checkpoints")], check=True)


def test_a_full_disk_ends_the_run_and_keeps_what_is_there(small_disk: Path) -> None:
    output = fail(small_disk, "train.num_steps=5", "checkpoint.keep_last=5")
    assert "stage checkpoint, step 3: CheckpointError: cannot write " in output, output
    assert "No space left on device" in output
    assert output.count("oneworld: rank ") == 1
    assert steps_on(small_disk) == [1, 2]
    subprocess.run(["mount", "-o", "remount,size=30m", str(small_disk / "checkpoints")], check=True)
    result = run(small_disk, 1, "train.num_steps=5", "checkpoint.keep_last=5")
    assert "resumes after step 2" in result.output
    assert steps_on(small_disk) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_read_only_disk_ends_the_run_and_keeps_what_is_there(small_disk: Path) -> None:
    run(small_disk, 1, "train.num_steps=1")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk / "checkpoints")], check=True)
    output = fail(small_disk, "train.num_steps=3")
    assert "resumes after step 1" in output
    assert "stage checkpoint, step 2: CheckpointError: cannot write " in output, output
    assert "Read-only file system" in output
    assert steps_on(small_disk) == [1]


@pytest.mark.alone
@pytest.mark.slow
def test_a_vanished_folder_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = launch(folder, 2, "slow engines", "train.num_steps=9999")
    wait_for(folder, process, 2)
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    output = finish(process, 60)
    assert process.returncode != 0
    assert "stage checkpoint, step " in output
    assert "No such file or directory" in output or "is gone" in output, output
    assert not (folder / "checkpoints").exists()
    (tmp_path / "elsewhere").rename(folder / "checkpoints")
    saved = steps_on(folder)[-1]
    assert f"resumes after step {saved}" in run(folder, 1, f"train.num_steps={saved + 1}").output


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps by one rank; tests copy it."""
    folder = tmp_path_factory.mktemp("done") / "run"
    run(folder, 1, "train.num_steps=2")
    return folder


def cut_shard(place: Path) -> str:
    shard = place / "model-00000-of-00001.safetensors"
    os.truncate(shard, 1000)
    return "model-00000-of-00001.safetensors has 1000 bytes"


def flip_byte(place: Path) -> str:
    shard = place / "optimizer-00000-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    return "the bytes of exp_avg"


def tear_manifest(place: Path) -> str:
    os.truncate(place / MANIFEST, 5000)
    return "is damaged"


def make_newer(place: Path) -> str:
    body = json.loads((place / MANIFEST).read_text()) | {"format": 2}
    (place / MANIFEST).write_text(json.dumps(body))
    return "has format 2, but this program reads format 1"


def make_foreign(place: Path) -> str:
    (place / MANIFEST).write_text('{"metadata": {"total_size": 1}}')
    return "another program wrote it"


def drop_shard(place: Path) -> str:
    (place / "model-00000-of-00001.safetensors").unlink()
    return "was saved on "


DAMAGES = (cut_shard, tear_manifest, make_newer, make_foreign, drop_shard)
SLOW = [pytest.param(damage, marks=pytest.mark.slow) for damage in DAMAGES]


@pytest.mark.parametrize("damage", [flip_byte, *SLOW])
def test_a_damaged_checkpoint_is_a_clear_error_and_nothing_is_deleted(damage, two_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    reason = damage(folder / "checkpoints" / "step_2")
    before = snapshot(folder / "checkpoints")
    output = fail(folder, "train.num_steps=3")
    assert reason in output, output
    assert "oneworld: fatal, will not be restarted" in output
    assert "Traceback" not in output.split("oneworld: fatal")[0]
    assert snapshot(folder / "checkpoints") == before


@pytest.mark.slow
def test_a_fork_goes_on_in_its_own_folder(two_steps: Path, tmp_path: Path) -> None:
    before = snapshot(two_steps)
    fork = run(tmp_path / "fork", 1, "train.num_steps=3", f"checkpoint.resume={two_steps}", "actor.lr=1e-5")
    assert "resumes after step 2; settings changed since then: " in fork.output
    assert "actor.lr 0.0002 -> 1e-05" in fork.output
    assert [row["step"] for row in fork.metrics] == [3]
    assert snapshot(two_steps) == before
    older = run(tmp_path / "older", 1, "train.num_steps=2", f"checkpoint.resume={two_steps}/checkpoints/step_1")
    assert [row["step"] for row in older.metrics] == [2]
    again = run(tmp_path / "fork", 1, "train.num_steps=4", f"checkpoint.resume={two_steps}")
    assert "resumes after step 3" in again.output
    assert [row["step"] for row in again.metrics] == [3, 4]


@pytest.mark.slow
def test_never_starts_over_and_keeps_the_old_ones(two_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    result = run(folder, 1, "train.num_steps=1", "checkpoint.resume=never")
    assert [row["step"] for row in result.metrics] == [1]
    assert steps_on(folder) == [1]
    (aside,) = folder.glob("checkpoints.*")
    assert sorted(path.name for path in aside.glob("step_*")) == ["step_1", "step_2"]


def test_a_run_that_is_done_says_so(two_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    before = snapshot(folder / "checkpoints")
    result = run(folder, 1, "train.num_steps=2")
    assert "resumes after step 2" in result.output
    assert "all 2 steps are done; raise train.num_steps to continue training" in result.output
    assert snapshot(folder / "checkpoints") == before


@pytest.mark.slow
def test_other_prompts_need_a_new_run(two_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_steps, folder)
    output = fail(folder, "train.num_steps=3", "run.seed=1")
    assert "data.train, its templates or run.seed differ from those of step 2" in output, output
