"""What reports show of conversations: metrics, samples in TensorBoard, files of an evaluation, and a replayed step."""

import dataclasses
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl.config.load import load_config
from rl.config.schema import Config, EnvironmentConfig, RolloutConfig
from rl.data.batch import Batch, empty_batch
from rl.data.group_file import groups_to_bytes, split_groups
from rl.data.prompts import Prompt
from rl.evaluation.best_metric import check_best_metric
from rl.evaluation.evaluation import Evaluation
from rl.placement.roles import plan
from rl.report.describe import check_finite, describe
from rl.rollout.collect import Gathered
from rl.rollout.overlap import GroupWhole, OverlapService
from tests.conversations import Said, Sample, batch_of_conversations
from tests.mails import connected
from tools.replay import main as replay

ONE = Sample(1.0, [[[1, 2], Said(0, [5, 5]), [9], Said(1, [7])]])
# The template rewrites 6 6 to 6.
SPLIT = Sample(0.5, [[[1, 2], Said(0, [6, 6])], [[1, 2, 6, 8, 8], Said(1, [7, 7, 7]), [9, 9], Said(2, [4])]], True)
SILENT = Sample(0.0, [[[3]]])  # it ended before the model could answer
GROUPS = [[ONE, SPLIT], [SILENT, ONE]]
ROOT_HALF = 0.5**0.5


@pytest.fixture
def pg() -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))


METRICS = {
    "reward/mean": 2.5 / 4,
    "reward/std": (2.25 / 4 - (2.5 / 4) ** 2) ** 0.5,  # the squares of 1, 1/2, 0 and 1
    "rollout/length_mean": 12 / 4,
    "rollout/length_max": 6,  # in all turns of a conversation
    "rollout/truncated": 1 / 4,
    "rollout/tokens": 12,
    "environment/observation_tokens": 6 / 4,  # 1, then 2 in the new prompt and 2 later, then 0 and 1
    "environment/sequences": 5 / 4,
    "environment/tokens_turn_1": 6 / 3,  # the silent one has no turn
    "environment/tokens_turn_2": 5 / 3,
    "environment/tokens_turn_3": 1,
}


def test_a_conversation_counts_once_in_metrics(pg: dist.ProcessGroup) -> None:
    assert describe(batch_of_conversations(GROUPS), has_turns=True).reduce(pg) == pytest.approx(METRICS)


def test_ranks_without_a_group_measure_the_same_names() -> None:
    filled, empty = describe(batch_of_conversations(GROUPS), True), describe(empty_batch(), True)
    assert filled.names == empty.names
    assert not [name for name in describe(batch_of_conversations(GROUPS)).names if name.startswith("environment/")]


def test_an_infinite_logprob_is_named_by_its_place_among_sampled_tokens() -> None:
    """The last token of ONE is the third that the policy sampled, and the sixth of its sequence."""
    batch = batch_of_conversations([[SILENT, ONE]])
    batch.rollout_logprobs[-1] = torch.inf
    with pytest.raises(FloatingPointError, match="the first is inf at token 2 of a response to prompt 0 "):
        check_finite(batch)


OBSERVED = "\r\n```\n</code>|*x*\n\n# no\n```"  # it would break out of a careless block
NAMES = {9: OBSERVED, 7: "<|eot|>"}


class Words:
    """Token 7 is special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = [token for token in token_ids if not (token == 7 and skip_special_tokens)]
        return "".join(NAMES.get(token, chr(96 + token)) for token in kept)


OK = {"parts": {"environment": 1.0}, "status": "ok", "answer": "7", "ending": "done", "counts": {"calls": 1}}
FAILED = {"parts": {"environment": 0.0}, "status": "timeout", "answer": None}


class Sampled:
    """Rollouts that answer the first prompt with ONE and SPLIT, and the second with SILENT and ONE."""

    def start(self, prompts: list[Prompt] | None, *args: Any, **options: Any) -> int:
        return 1

    def gather(self, batch: int) -> Gathered:
        groups = {position: batch_of_conversations([group]) for position, group in enumerate(GROUPS)}
        return Gathered(groups, [0, 0], {0: [OK, OK], 1: [FAILED, OK]}, 0, 0)


ENVIRONMENT = ["environment.class=my/game.py:Guess", "data.chat_template=true"]
SAMPLED_TWICE = ["eval.num_samples=2", "eval.temperature=1"]


def test_files_of_an_evaluation_have_turns(tmp_path: Path) -> None:
    config = load_config(None, [*ENVIRONMENT, *SAMPLED_TWICE])
    config = dataclasses.replace(config, eval=dataclasses.replace(config.eval, function="environment"))
    prompts = {"a": [Prompt(number, 0, f"q{number}", "7", [1]) for number in range(2)]}
    with connected(1) as mails:
        placement = plan({"actor,rollout": "all"}, 1, 1)
        evaluation = Evaluation(mails[0], placement, config, Sampled(), Words(), tmp_path, prompts)  # type: ignore[arg-type]
        values = evaluation.run(3, 4)
    assert values["eval/a/avg@2"] == 0.75
    assert values["eval/a/length_mean"] == 12 / 4
    assert values["eval/a/turns_mean"] == (2 + 3 + 0 + 2) / 4
    assert (values["eval/a/truncated"], values["eval/a/failed"]) == (0.25, 1)
    first, second = [json.loads(line) for line in (tmp_path / "eval/step_3.a.jsonl").read_text().splitlines()]
    assert first["prompt"] == "q0"
    assert first["responses"][0] == {
        **{"text": "", "score": 1.0, "answer": "7", "status": "ok", "num_tokens": 3, "is_truncated": False},
        **{"num_turns": 2, "prompt": "ab", "ending": "done", "counts": {"calls": 1}},
        "turns": [
            {"role": "model", "text": "ee"},
            {"role": "environment", "text": OBSERVED},
            {"role": "model", "text": "<|eot|>"},
        ],
    }
    split = first["responses"][1]
    assert [(turn["role"], turn["text"]) for turn in split["turns"]] == [
        ("model", "ff"),
        ("environment", "hh"),
        ("model", "<|eot|>" * 3),
        ("environment", 2 * OBSERVED),
        ("model", "d"),
    ]
    assert (split["text"], split["num_tokens"], split["num_turns"], split["is_truncated"]) == ("d", 6, 3, True)
    silent = second["responses"][0]
    assert (silent["turns"], silent["text"], silent["status"], silent["prompt"]) == ([], "", "timeout", "c")


def test_turns_can_be_the_best_metric_only_in_conversations() -> None:
    best = ["data.eval={a: x.jsonl}", "checkpoint.best_metric=eval/a/turns_mean", "eval.interval=1"]
    check_best_metric(load_config(None, [*ENVIRONMENT, *best]))
    with pytest.raises(ValueError, match="which no evaluation reports"):
        check_best_metric(load_config(None, best))


def save_step(folder: Path, batch: Batch) -> None:
    """Write step 1 of a run with conversations, and metrics that follow from it."""
    config = Config(
        rollout=RolloutConfig(num_samples_per_prompt=2), environment=EnvironmentConfig(class_="my/game.py:Guess")
    )
    facts = {"step": 1, "world": "a", "actors": [0], "config": dataclasses.asdict(config)}
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    data = groups_to_bytes(split_groups(batch, [17, 12]), facts)
    (folder / "rollouts" / "step_1.rank_0.safetensors").write_bytes(data)
    rows = [{"step": 0, "version": 3}, {"step": 1, "version": 4, **METRICS, "environment/turns": 1.75}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_step_of_conversations_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards 1 and 0.5, and 0 and 1: the advantages are the root of a half, with both signs."""
    batch = batch_of_conversations(GROUPS)
    of_sequences = torch.tensor([ROOT_HALF, -ROOT_HALF, -ROOT_HALF, -ROOT_HALF, ROOT_HALF])
    batch = batch.replace(advantages=of_sequences[batch.segment_ids].where(batch.loss_mask, 0.0))
    save_step(tmp_path, batch)
    status = replay([str(tmp_path), "--step", "1", "--no-loss", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert status == 0, result
    values = {each["name"]: each["recomputed"] for each in result["metrics"]}
    assert values.items() >= METRICS.items()
    assert [(row["samples"], row["sequences"], row["response_tokens"]) for row in result["groups"]] == [
        (2, 3, [3, 6]),
        (2, 2, [0, 3]),
    ]
    assert [row["observed_tokens"] for row in result["groups"]] == [[1, 4], [0, 1]]
    assert [row["reward_mean"] for row in result["groups"]] == [0.75, 0.5]
    assert result["not_recomputed"][-1] == "other metrics: environment/turns"
    assert replay([str(tmp_path), "--step", "1", "--no-loss"]) == 0
    shown = capsys.readouterr().out
    assert "17     2        2              3-6" in shown and "different numbers of samples" not in shown
    save_step(tmp_path, batch.replace(rewards=torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0])))
    assert replay([str(tmp_path), "--step", "1", "--no-loss"]) == 1


class Costless:
    def cost(self, group: Batch) -> float:
        return 1.0


class Ignored:
    def open(self, version: int) -> None: ...

    def add(self, position: int, group: Batch) -> None: ...


def test_parts_are_cut_by_the_tokens_of_whole_conversations() -> None:
    """Engines report the tokens of a conversation, so actors must too."""
    with connected(1) as mails:
        service = OverlapService(mails[0], 0, Costless(), Ignored(), 4)  # type: ignore[arg-type]
        service.open(1, version=1)
        service.add(1, 0, batch_of_conversations([GROUPS[0]]))
        assert mails[0].receive(GroupWhole).message.length == 6
