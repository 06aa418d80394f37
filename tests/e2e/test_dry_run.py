"""`train.py --dry-run` of a model without weights, with real engines."""

import re
import shutil
from pathlib import Path

import pytest

from rl.config.load import load_config
from rl.config.modes import for_dry_run
from rl.config.schema import ROOT
from rl.run.dry_run import Footprint, describe
from tests.launcher import finish, start


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_one_step_without_weights_saves_nothing(tmp_path: Path) -> None:
    """The checkpoints of a run with that name stay as they are, and are not gone on from."""
    model, run = tmp_path / "model", tmp_path / "runs" / "x"
    model.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "configs" / "tiny" / name, model)
    (run / "checkpoints").mkdir(parents=True)
    settings = [f"run.dir={run.parent}", "run.name=x", f"model.path={model}", "train.num_prompts_per_step=4"]
    process = start(
        "--nproc-per-node=2", "train.py", "--dry-run", *settings, "placement.rollout=0", "placement.actor=1"
    )
    output = finish(process, 180)
    assert process.returncode == 0, output
    said = r"^dry run: one step took \d+\.\d s, nothing was saved; in seconds: .*rollout \d"
    assert re.search(said, output, re.M), output
    assert re.search(r"^  rank 0 \(rollout\): at most \d+\.\d\d [MG]B of host memory$", output, re.M), output
    assert re.search(r"^  rank 1 \(actor\): at most \d+\.\d\d [MG]B of host memory$", output, re.M), output
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints"]
    left = [path for path in (run.parent / "x.dry-run").rglob("*") if path.is_file()]
    assert {path.parent.name for path in left} == {"attempt_1", "status", "checkpoints", "lease"}, left
    assert {path.name for path in left if path.parent.name == "checkpoints"} == {"run_id"}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("function", "code"), [("misspelt", 1), ("sometimes_failing", 0)])
def test_it_says_that_reward_functions_fail(function: str, code: int, tmp_path: Path) -> None:
    """It ends with an error if all samples fail, even if the run itself would train on."""
    file = "tests/e2e/reward_functions.py"
    settings = [f"run.dir={tmp_path}", "run.name=x", "rollout.engine=fake", "train.num_prompts_per_step=4"]
    settings += [f"reward.function={file}:{function}", "reward.stop_if_all_fail=false"]
    process = start("--nproc-per-node=1", "train.py", "--dry-run", *settings)
    output = finish(process, 180)
    assert process.returncode == code, output
    assert f"the reward function {function} failed at {ROOT / file}:" in output
    assert ("reward.function: none of the 32 samples of step 1 could be scored" in output) == bool(code)
    assert ("dry run: one step took" in output) == (code == 0)
    summary = re.search(r"^oneworld: the reward functions failed for \d+ of 32 samples: ", output, re.M)
    assert (summary is not None) == (code == 0)


def test_what_it_changes_and_what_it_says() -> None:
    settings = ["train.num_epochs=3", "checkpoint.save_interval=1", "reward.stop_if_all_fail=false"]
    config = for_dry_run(load_config(None, settings), "default")
    assert config.reward.stop_if_all_fail
    assert (config.run.name, config.train.num_steps, config.train.num_epochs) == ("default.dry-run", 1, 0)
    assert (config.eval.interval, config.checkpoint.save_interval, config.debug.dry_run) == (0, 0, True)
    footprints = {rank: Footprint("rollout", host=(2 + rank) * 10**9) for rank in (0, 1)}
    footprints[2] = Footprint("actor", 5 * 10**8, gpu_peak=10 * 10**9, gpu_now=20 * 10**9, gpu=80 * 10**9)
    assert describe(footprints, {"step": 3.0, "rollout": 2.0, "update": 1.0}) == [
        "dry run: one step took 3.0 s, nothing was saved; in seconds: rollout 2.0, update 1.0",
        "  ranks 0-1 (rollout): at most 3.00 GB of host memory each",
        "  rank 2 (actor): at most 500.00 MB of host memory; GPU: 10.00 GB by the allocator, 20.00 GB of "
        "80.00 GB in use at the end",
    ]
