"""Whole runs with adapters on real vLLM engines, unless a test says otherwise."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.config.schema import ROOT
from tests.e2e.test_engine_errors import PROMISE, assert_same, broken
from tests.e2e.test_engine_errors import SETTINGS as BROKEN_SETTINGS
from tests.e2e.test_phases import (
    ROLLOUT,
    UPDATE,
    Command,
    assert_same_batch,
    assert_same_checkpoint,
    manifest_of,
    run_all,
)
from tests.launcher import Result, finish, start, train
from tools.merge_checkpoint import main as merge_checkpoint
from tools.replay import main as replay

pytestmark = pytest.mark.timeout(300)
LORA = ["model.lora.rank=8", "actor.lr=2e-3"]
SETTINGS = [
    *LORA,
    *("train.num_prompts_per_step=8", "rollout.num_samples_per_prompt=4", "eval.interval=0", "algo.kl_coef=0.05"),
    *("algo.num_mini_batches=2", "checkpoint.save_interval=1", "checkpoint.keep_last=9", "debug.save_rollouts=true"),
    "reward.function=tests/e2e/reward_functions.py:varied",
]
APART = ["placement.rollout=0", "placement.actor=1"]
COMPARED = ("reward/mean", "loss/policy", "loss/kl", "optim/grad_norm", "rollout/tokens")


def assert_trained(result: Result, near: float = 1e-4) -> None:
    """Every update has moved the adapters, and engines have sampled from the merged weights: their logprobs are those
    of the learner. At first the policy is the reference."""
    rows = result.metrics
    assert "engine vllm" in result.output
    for row in rows:
        batch = result.rollouts(int(row["step"]))
        mask = batch.loss_mask
        assert batch.old_logprobs is not None and row["optim/grad_norm"] > 0
        torch.testing.assert_close(batch.rollout_logprobs[mask], batch.old_logprobs[mask], atol=near, rtol=0)
        if batch.ref_logprobs is not None:
            distance = (batch.old_logprobs - batch.ref_logprobs)[mask].abs().max()
            assert (distance <= near) if row["step"] == 1 else (distance > 10 * near), row["step"]
    assert max(row["policy/mismatch_kl"] for row in rows) < near / 100


def saved_tensors(folder: Path, step: int) -> set[tuple[str, str]]:
    """Return kind and name of every tensor that a checkpoint holds a slice of."""
    return {(kind, name) for file in manifest_of(folder, step)["files"] for kind, name, *_ in file["slices"]}


def test_a_run_trains_adapters_and_saves_nothing_else(tmp_path: Path) -> None:
    """14 layers with 4096 inputs and outputs. The merged model has the same weights but for those of the layers."""
    folder = tmp_path / "run"
    result = train(folder, 2, *SETTINGS, "train.num_steps=3", "sync.probe_interval=1")
    assert result.output.count("adapters of rank 8 on 14 linear layers: 0.03 M of 0.34 M parameters are trained") == 1
    assert_trained(result)
    assert max(row["policy/probe_gap"] for row in result.metrics) < 1e-4
    saved = saved_tensors(folder, 3)
    assert len(saved) == 3 * 2 * 14 and {kind for kind, _ in saved} == {"model", "exp_avg", "exp_avg_sq"}
    assert {name.split(".")[-2] for _, name in saved} == {"lora_A", "lora_B"}
    merge_checkpoint([str(folder), "--verify-logits"])
    merged = load_file(folder / "merged/step_3/model.safetensors")
    base = load_file(ROOT / "configs/tiny/model.safetensors")
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}


@pytest.mark.slow
def test_a_resume_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, *SETTINGS, "train.num_steps=4")
    train(tmp_path / "parts", 2, *SETTINGS, "train.num_steps=2")
    parts = train(tmp_path / "parts", 2, *SETTINGS, "train.num_steps=4")
    for ours, theirs in zip(parts.metrics, whole.metrics, strict=True):
        assert [ours[name] for name in COMPARED] == [theirs[name] for name in COMPARED]
    assert_same_checkpoint(tmp_path / "parts", tmp_path / "whole", 4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resume_at_other_sizes_and_in_other_placements(tmp_path: Path) -> None:
    """2 collocated ranks, then an engine and an actor, then 3 ranks."""
    whole = train(tmp_path / "whole", 2, *SETTINGS, "train.num_steps=6")
    train(tmp_path / "parts", 2, *SETTINGS, "train.num_steps=2")
    train(tmp_path / "parts", 2, *SETTINGS, *APART, "train.num_steps=4")
    parts = train(tmp_path / "parts", 3, *SETTINGS, "train.num_steps=6")
    assert_trained(parts)
    for step in range(1, 7):
        assert parts.rollouts(step).tokens.tolist() == whole.rollouts(step).tokens.tolist()
    for ours, theirs in zip(parts.metrics, whole.metrics, strict=True):
        for name in COMPARED:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), (ours["step"], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "rank", "what", "overrides"),
    [
        (2, 1, "engine, once", []),
        (3, 0, "engine, once", ["placement.rollout=0-1", "placement.actor=2"]),
        (3, 2, "last engine", ["placement.actor=0", "placement.rollout=1-2", "rollout.ahead=1", "train.num_steps=4"]),
    ],
    ids=["collocated", "disaggregated", "by a donor"],
)
def test_an_engine_is_rebuilt(num_ranks: int, rank: int, what: str, overrides: list[str], tmp_path: Path) -> None:
    """The new engine lacks the frozen tensors, which are otherwise not sent again. Tokens and losses stay the same."""
    code, result = broken(tmp_path / "broken", num_ranks, what, rank, *LORA, *overrides)
    assert code == 0, result.output
    assert result.output.count(PROMISE) == 1, result.output
    assert all(row["optim/grad_norm"] > 0 for row in result.metrics), "every version differs from the one before"
    assert_same(result, train(tmp_path / "whole", num_ranks, *BROKEN_SETTINGS, *LORA, *overrides))


WAYS = {
    "full KL": ["algo.kl_estimator=full", "algo.kl_coef=0.05"],
    "KL in the reward": ["algo.kl_place=reward"],
    "PPO": ["algo.advantage=gae", "critic.lr=1e-3"],
    "PPO, whole critic": ["algo.advantage=gae", "critic.lr=1e-3", "critic.lora=false"],
    "offload": ["actor.offload=rollout", "actor.recompute=full"],
    "offload, always": ["actor.offload=always"],
    "rounds": ["rollout.max_tokens_per_round=2", "algo.correction=token"],
    "some layers": ["model.lora.targets=[q_proj,v_proj]"],
    "muon": ["actor.optimizer=muon"],
    "tensor parallel, replicas": ["rollout.tensor_parallel_size=2", "actor.num_replicas=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_it_works_together_with(name: str, tmp_path: Path) -> None:
    result = train(tmp_path / "run", 2, *SETTINGS, "algo.old_logprobs=always", *WAYS[name], "train.num_steps=3")
    rows = result.metrics
    assert len(rows) == 3 and all(row["optim/grad_norm"] > 0 for row in rows)
    if name != "rounds":  # there, older weights have sampled some tokens
        assert_trained(result)
    if "PPO" in name:
        assert all(row["critic/grad_norm"] > 0 for row in rows)
        critic = [tensor for kind, tensor in saved_tensors(tmp_path / "run", 3) if kind == "critic"]
        others = [tensor for tensor in critic if ".lora_" not in tensor]
        assert "lm_head.weight" in others and (len(others) > 1) == ("whole" in name)


@pytest.mark.slow
def test_phases_equal_a_run(tmp_path: Path) -> None:
    """With the fake engine. The rank that leads the phase rollout adds the adapters of the checkpoint to the model."""
    both, phases = tmp_path / "both", tmp_path / "phases"
    settings = [*SETTINGS, "train.num_steps=2"]
    run_all(
        [
            Command(both, 2, settings),
            Command(phases, 2, [*ROLLOUT, *settings, "placement.rollout=all"]),
            Command(phases, 2, [*UPDATE, *settings, "placement.actor=all"]),
            Command(phases, 2, [*ROLLOUT, *settings]),
            Command(phases, 2, [*UPDATE, *settings, "placement.actor=all"]),
        ]
    )
    for step in (1, 2):
        assert_same_batch(both, phases, step)
        assert_same_checkpoint(both, phases, step)


@pytest.mark.slow
def test_a_step_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", 2, *SETTINGS, "train.num_steps=3")
    for step in (1, 3):
        capsys.readouterr()
        status = replay([str(tmp_path / "run"), "--step", str(step), "--json"])
        result = json.loads(capsys.readouterr().out)
        assert (status, result["matches"]) == (0, True), [each for each in result["metrics"] if not each["matches"]]
        assert "loss/policy" in {each["name"] for each in result["metrics"]}


@pytest.mark.slow
def test_other_adapters_are_refused_by_a_resume(tmp_path: Path) -> None:
    train(tmp_path / "run", 1, *SETTINGS, "rollout.engine=fake", "train.num_steps=1")
    run = [f"run.dir={tmp_path}", "run.name=run", "rollout.engine=fake", "train.num_steps=2"]
    for setting, said in {
        "model.lora.rank=4": "model.lora.rank: got 4, but the adapters of step 1 were trained with 8",
        "model.lora.rank=0": "model.lora.rank: got 0, but step 1 holds adapters and no other weights",
        "reference.offload=always": "reference.offload: got always, but with model.lora",
    }.items():
        process = start("--nproc-per-node=1", "train.py", *SETTINGS, *run, setting)
        output = finish(process, 100)
        assert process.returncode != 0 and said in output, output[-3000:]


@pytest.mark.slow
def test_another_base_model_is_refused_by_every_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files have changed since the checkpoint. The actors, the lead of the phase rollout and a replay read them."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs/tiny", model)
    settings = [*SETTINGS, "rollout.engine=fake", f"model.path={model}"]
    train(tmp_path / "run", 1, *settings, "train.num_steps=2")
    tensors = load_file(model / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, model / "model.safetensors")
    said = "holds adapters of another base model (its model.norm.weight differs); its files have changed since then"
    for phase in ([], ROLLOUT):
        run = [f"run.dir={tmp_path}", "run.name=run", "train.num_steps=3"]
        process = start("--nproc-per-node=1", "train.py", *phase, *settings, *run)
        output = finish(process, 100)
        assert process.returncode != 0 and f"step 2 {said}" in output, output[-3000:]
    assert replay([str(tmp_path / "run"), "--step", "2"]) == 2
    assert f"step 1 {said}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run(tmp_path: Path) -> None:
    run = [f"run.dir={tmp_path}", "run.name=x", "rollout.engine=fake"]
    process = start("--nproc-per-node=1", "train.py", "--dry-run", *SETTINGS, *run)
    output = finish(process, 150)
    assert process.returncode == 0 and "dry run: one step took" in output, output[-3000:]
    assert not list(tmp_path.rglob("step_*"))
