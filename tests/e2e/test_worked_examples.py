"""The worked examples of CONTRIBUTING.md in one real step of a changed tree."""

import json
from pathlib import Path

import pytest

from launch.environment import TORCHRUN
from tests.launcher import activated_environment, finish, spawn
from tests.worked_examples import apply, copy_tree, worked_examples

pytestmark = pytest.mark.timeout(150)
SETTINGS = [
    *("run.name=x", "rollout.engine=fake", "train.num_steps=1", "train.num_prompts_per_step=6", "eval.interval=0"),
    *("reward.function={length: 1, multiple_choice: 0}", "reward.options={length: {most: 100}}"),
    *("algo.loss=sapo", "algo.loss_norm=sequence"),
]


def test_a_step_uses_the_loss_the_reward_and_the_metric(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path)
    for diff in worked_examples().values():
        apply(diff, tree)
    environment = activated_environment(PYTHONPATH=str(tree)) | {"PET_MAX_RESTARTS": "0"}
    command = [*TORCHRUN, "--nproc-per-node=1", str(tree / "train.py"), f"run.dir={tree / 'runs'}", *SETTINGS]
    process = spawn(command, environment)
    output = finish(process, 120)
    assert process.returncode == 0, output[-6000:]
    row = json.loads((tree / "runs" / "x" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["reward/multiple_choice"] == 0  # the sums have no letters
    assert row["reward/positive"] == 0 > row["reward/mean"]  # a long response costs, and none gains
    # At ratio 1, clip's loss is the mean of -A over sequences, which is 0. SAPO's is -2 A where A > 0, and
    # -4 / 1.05 / 2 A where A < 0, so it is negative.
    assert row["loss/policy"] < -1e-3
