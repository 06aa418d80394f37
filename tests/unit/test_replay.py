"""tools/replay.py on a step that was written by hand: what matches, what differs, and what is missing."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.config.schema import Config, RolloutConfig
from rl.data.batch import Batch, batch_of_responses
from rl.data.group_file import StoredGroup, groups_to_bytes
from tools.replay import main

CONFIG = Config(rollout=RolloutConfig(num_samples_per_prompt=2))
ROOT_HALF = 0.5**0.5  # two rewards that differ by 1 are +-0.5 from their mean; their standard deviation is 0.7071
ADVANTAGES = [[ROOT_HALF, -ROOT_HALF], [-ROOT_HALF, ROOT_HALF]]  # by group and sample
RECORDED = {"reward/mean": 0.5, "rollout/length_mean": 2.0, "rollout/truncated": 0.25, "rollout/tokens": 8.0}


def make_batch(place: int, rewards: list[float]) -> Batch:
    """Return a group of two samples: a prompt of 1 token, then responses of 1 and 3 tokens by versions 3 and 4."""
    advantages = [0.0, ADVANTAGES[place][0], 0.0, *[ADVANTAGES[place][1]] * 3]
    return batch_of_responses(
        tokens=torch.arange(6),
        lengths=torch.tensor([2, 4]),
        prompt_lengths=torch.tensor([1, 1]),
        versions=torch.tensor([-1, 4, -1, 3, 3, 4], dtype=torch.int32),
        rollout_logprobs=torch.zeros(6),
        rewards=torch.tensor(rewards),
        group_ids=torch.full((2,), place),
        truncated=torch.tensor([False, place == 0]),
        lags=torch.tensor([0, 0, 0, 1, 1, 0], dtype=torch.int32),
        advantages=torch.tensor(advantages),
    )


class MadeRun:
    """A run of the ranks 1 and 2 that has saved step 4."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "rollouts").mkdir(parents=True)
        self.save(1, make_batch(0, [1.0, 0.0]))
        self.save(2, make_batch(1, [0.0, 1.0]))
        self.record()

    def file(self, rank: int) -> Path:
        return self.folder / "rollouts" / f"step_4.rank_{rank}.safetensors"

    def save(self, rank: int, group: Batch, **facts: Any) -> None:
        known = {"step": 4, "world": "a", "actors": [1, 2], "config": dataclasses.asdict(CONFIG)}
        self.file(rank).write_bytes(groups_to_bytes([StoredGroup([5, 17, 12][rank], group)], known | facts))

    def record(self, **changes: Any) -> None:
        rows = [{"step": 3, "version": 4}, {"step": 4, "version": 5, "time/step": 1.0, **RECORDED, **changes}]
        (self.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path / "run")


def replay(made: MadeRun, capsys: pytest.CaptureFixture[str], *options: str, step: int = 4) -> tuple[int, str]:
    status = main([str(made.folder), "--step", str(step), *options])
    shown = capsys.readouterr()
    return status, shown.err if status == 2 else shown.out


def test_a_step_that_matches(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    made.record(**{"rollout/lag_mean": 0.5, "rollout/lag_max": 1, "reward/errors": 0.0})
    status, output = replay(made, capsys, "--json")
    result = json.loads(output)
    assert (status, result["matches"], result["step"]) == (0, True, 4)
    values = {each["name"]: each["recomputed"] for each in result["metrics"]}
    assert values == pytest.approx(
        {"groups": 2, "lags": 1, "advantages": ROOT_HALF, **RECORDED, "rollout/lag_mean": 0.5, "rollout/lag_max": 1},
        abs=1e-5,
    )
    assert result["groups"] == [
        {
            "group": number,
            "place": place,
            "samples": 2,
            "prompt_tokens": 1,
            "response_tokens": [1, 3],
            "versions": [3, 4],
            "reward_mean": 0.5,
            "lag_mean": 0.5,
            "lag_max": 1,
        }
        for place, number in enumerate([17, 12])
    ]
    missing, left = result["not_recomputed"]
    assert "there is no whole checkpoint in" in missing and "checkpoint.save_interval=1" in missing
    assert left == "other metrics: reward/errors"
    status, output = replay(made, capsys)
    assert status == 0
    assert "step 4 of" in output and "2 groups, lag at most 1; 2 of 2 groups have tokens of older versions" in output
    assert output.endswith("all 9 values match\n")


@pytest.mark.parametrize(
    ("changes", "different"),
    [
        ({"rewards": torch.tensor([3.0, 1.0])}, {"advantages", "reward/mean"}),
        ({"rewards": torch.tensor([1.0, 3.0])}, {"reward/mean"}),  # the advantages stay: they are normalized
        ({"advantages": torch.tensor([0.0, 0.7, 0.0, 0.7, 0.7, 0.7])}, {"advantages"}),
        ({"versions": torch.tensor([-1, 4, -1, 2, 3, 4], dtype=torch.int32)}, {"lags"}),
        ({"lags": torch.tensor([0, 0, 0, 1, 0, 0], dtype=torch.int32)}, {"lags"}),
        ({"group_ids": torch.tensor([0, 0])}, {"groups", "advantages"}),
        ({"group_ids": torch.tensor([2, 2])}, {"groups"}),
        ({"group_ids": torch.tensor([2**40, 2**40])}, {"groups"}),
    ],
    ids=["rewards", "scaled rewards", "advantages", "versions", "lags", "place", "gap", "far"],
)
def test_a_changed_file_is_reported(
    changes: dict[str, torch.Tensor], different: set[str], made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    made.save(2, make_batch(1, [0.0, 1.0]).replace(**changes))
    status, output = replay(made, capsys, "--json")
    found = {each["name"] for each in json.loads(output)["metrics"] if not each["matches"]}
    assert (status, found) == (1, different)
    status, output = replay(made, capsys)
    assert status == 1
    assert {line.split(": ")[1] for line in output.splitlines() if line.startswith("DIFFERS: ")} == different
    assert "match" not in output


def test_groups_may_have_different_numbers_of_samples(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A resume with another rollout.num_samples_per_prompt carries groups over as they are."""
    told = "different numbers of samples"
    assert told not in replay(made, capsys)[1]
    group, scale = make_batch(1, [0.0, 1.0]), 1.5**0.5  # the standard deviation of 0, 1, 0, 1 is the root of 1/3
    assert group.advantages is not None
    made.save(2, Batch.concat([group.replace(advantages=group.advantages * scale)] * 2))
    made.record(**{"rollout/truncated": 1 / 6, "rollout/tokens": 12.0})
    status, output = replay(made, capsys)
    assert status == 0, output
    assert f"the groups have {told}: 1 group of 2, 1 group of 4. After a resume" in output
    status, output = replay(made, capsys, "--json")
    assert (status, [group["samples"] for group in json.loads(output)["groups"]]) == (0, [2, 4])
    made.save(2, make_batch(1, [0.0, 1.0]).replace(group_ids=torch.tensor([1, 0])))
    made.record()
    status, output = replay(made, capsys)
    assert status == 1, "a sample is at another place than its group"
    assert "DIFFERS: groups: 2 was recorded, but the stored groups give 1" in output
    assert "places without a whole one: 1)" in output


def test_a_changed_metric_is_reported(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    made.record(**{"rollout/tokens": 9.0})
    status, output = replay(made, capsys)
    assert status == 1
    assert "DIFFERS: rollout/tokens: 9 was recorded, but the stored groups give 8; rounding explains at most" in output
    made.record(**{"rollout/tokens": None})
    assert replay(made, capsys)[0] == 1, "a finite number is not what was recorded as not finite"


def test_files_that_another_start_has_left_are_ignored(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    made.save(0, make_batch(0, [5.0, 0.0]), world="before", actors=[0, 1])
    for rank in (1, 2):
        made.file(rank).touch()  # newer
    assert replay(made, capsys)[0] == 0
    made.save(1, make_batch(0, [1.0, 0.0]), world="before", actors=[0, 1])
    made.file(2).touch()
    status, error = replay(made, capsys)
    assert status == 2 and "are of different starts of the run" in error


def test_what_is_missing_is_named(made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(step: int = 4) -> str:
        status, text = replay(made, capsys, step=step)
        assert status == 2 and text.startswith("replay: ") and text.count("\n") == 1
        return text

    assert f"{made.folder}/rollouts has no step 3, but steps 4; give one of them" in error(step=3)
    data = made.file(2).read_bytes()
    made.file(2).write_bytes(data[:-3])
    assert f"{made.file(2)} cannot be read: its tensors cannot be read" in error()
    made.save(2, make_batch(1, [0.0, 1.0]).replace(rewards=torch.zeros(2, dtype=torch.int64)))
    assert f"{made.file(2)} cannot be read: the tensor rewards has the dtype torch.int64" in error()
    for facts in ({"actors": ["../1"]}, {"actors": 3}, {"world": None}, {"config": {"rollout": 5}}):
        made.save(2, make_batch(1, [0.0, 1.0]), **facts)
        assert f'{made.file(2)} cannot be read: the entry "step" of its metadata is damaged: Expected' in error()
    unfinished = {"ended": torch.tensor([True, False]), "noise": torch.zeros(2, 1, dtype=torch.uint8)}
    made.save(2, make_batch(1, [0.0, 1.0]).replace(**unfinished))
    assert f"{made.file(2)} cannot be read: it holds groups that no update has trained on" in error()
    made.save(2, make_batch(1, [0.0, 1.0]).replace(old_logprobs=torch.zeros(6)))
    assert "step_4.rank_1.safetensors, step_4.rank_2.safetensors in" in error()
    made.file(2).unlink()
    assert f"{made.file(2)} is missing: the actors of step 4 were the ranks 1-2." in error()
    made.file(2).write_bytes(data)
    (made.folder / "metrics.jsonl").write_text(json.dumps({"step": 3, "version": 4}))
    assert "metrics.jsonl has no row of step 4, so there is nothing to compare with" in error()
    for rank in (1, 2):
        made.file(rank).unlink()
    assert "holds no rollouts; start the run with debug.save_rollouts=true" in error()
    made.folder = tmp_path / "elsewhere"
    assert f"there is no folder {tmp_path}/elsewhere; give the folder of a run" in error()


def test_without_the_version_of_the_step_only_the_lag_is_unknown(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first step of a fork has no row before it."""
    rows = (made.folder / "metrics.jsonl").read_text().splitlines()
    (made.folder / "metrics.jsonl").write_text(rows[1])
    status, output = replay(made, capsys)
    assert status == 0
    assert "not recomputed: lags: metrics.jsonl has no row of step 3, which names the version" in output
    assert "2 groups, lag unknown" in output
