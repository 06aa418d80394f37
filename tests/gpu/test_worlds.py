"""Whole runs on a real GPU with a real model: collocated with sleep mode, disaggregated over NCCL, tensor parallel.

    ONEWORLD_MODEL=... ONEWORLD_PROMPTS=.../train.jsonl pytest -m gpu -s tests/gpu

ONEWORLD_MODEL is a folder of SmolLM2-135M-Instruct, ONEWORLD_PROMPTS GSM8K's train.jsonl. Each test prints one
JSON line for benchmarks/RESULTS.md.
"""

import json
import os
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.launcher import Result
from tests.launcher import torchrun_train as train
from tools.merge_checkpoint import main as merge_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]
NUM_STEPS = int(os.environ.get("ONEWORLD_STEPS", "20"))
MAX_MISMATCH_KL = 0.01  # bfloat16 kernels of engine and learner differ; wrong weights give more than 0.1


def settings() -> list[str]:
    model, prompts = os.environ.get("ONEWORLD_MODEL"), os.environ.get("ONEWORLD_PROMPTS")
    assert model and prompts, "set ONEWORLD_MODEL and ONEWORLD_PROMPTS as the docstring of this file says"
    return [
        "--config=configs/gsm8k_smollm2_135m.yaml",
        f"model.path={model}",
        f"data.train={prompts}",
        "data.prompt_key=question",
        "eval.interval=0",
        f"train.num_steps={NUM_STEPS}",
        "debug.save_rollouts=true",
    ]


def check(name: str, result: Result) -> None:
    rows = result.metrics
    assert len(rows) == NUM_STEPS
    assert "engine vllm" in result.output
    mismatch = [row["policy/mismatch_kl"] for row in rows if "policy/mismatch_kl" in row]
    line = {"world": name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": NUM_STEPS}
    line["mismatch_kl_mean"], line["mismatch_kl_max"] = statistics.mean(mismatch), max(mismatch)
    for key in ("time/step", "time/rollout", "time/logprobs", "time/update", "time/sync", "perf/tokens_per_s"):
        line[key] = round(statistics.median(row[key] for row in rows[2:]), 3)
    line["reward_first_5"] = statistics.mean(row["reward/mean"] for row in rows[:5])
    line["reward_last_5"] = statistics.mean(row["reward/mean"] for row in rows[-5:])
    if gaps := [row["policy/probe_gap"] for row in rows if "policy/probe_gap" in row]:
        line["probe_gap_mean"], line["probe_gap_max"] = statistics.mean(gaps), max(gaps)
    print("\n" + json.dumps(line), flush=True)
    assert max(mismatch) < MAX_MISMATCH_KL


@pytest.mark.parametrize(("offload", "fraction"), [("none", 0.4), ("rollout", 0.93), ("moments", 0.8), ("always", 0.4)])
def test_collocated_with_sleep_mode(offload: str, fraction: float, tmp_path: Path) -> None:
    """If the learner is offloaded, the engine can have nearly all of the device: both are never there together."""
    options = [f"actor.offload={offload}", f"rollout.gpu_memory_fraction={fraction}"]
    result = train(tmp_path / "run", 1, *settings(), *options, timeout_s=500)
    check(f"collocated, 1 rank, actor.offload={offload}, fraction {fraction}", result)


def test_collocated_with_an_engine_that_stays_awake(tmp_path: Path) -> None:
    """The KV cache is there during the update, so at its peak the card holds all kinds of memory at once."""
    options = ["actor.offload=none", "rollout.gpu_memory_fraction=0.3", "rollout.sleep=never"]
    result = train(tmp_path / "run", 1, *settings(), *options, timeout_s=500)
    check("collocated, 1 rank, rollout.sleep=never", result)
    kinds = [f"gpu/memory_gb/{kind}" for kind in ("weights", "gradients", "optimizer", "other", "kv")]
    together = sum(result.metrics[-1][kind] for kind in kinds)
    assert max(row.get("gpu/memory_gb/rank_0", 0.0) for row in result.metrics) > together


def test_what_a_run_reports_about_its_card(tmp_path: Path) -> None:
    """The kinds of memory are parts of what the card has in use, and the update uses a part of its peak."""
    options = ["rollout.gpu_memory_fraction=0.3", "actor.offload=none", "train.num_steps=6"]
    rows = train(tmp_path / "run", 1, *settings(), *options, timeout_s=400).metrics
    last = rows[-1]
    names = [name for name in last if name.startswith(("gpu/", "perf/", "host/", "rollout/kv", "rollout/prefix"))]
    print("\n" + json.dumps({name: last[name] for name in sorted(names)}), flush=True)
    kinds = {kind: last[f"gpu/memory_gb/{kind}"] for kind in ("weights", "gradients", "optimizer", "kv")}
    assert all(size > 0 for size in kinds.values())
    assert kinds["optimizer"] == pytest.approx(2 * kinds["weights"], rel=0.05)  # two moments of float32
    assert sum(kinds.values()) < max(row.get("gpu/memory_gb/rank_0", 0.0) for row in rows)
    assert 0 < last["perf/mfu"] < 1 and 0 < last["rollout/kv_use"] <= 1 and last["perf/sync_gb_per_s"] > 0


SEPARATE = ["placement.num_gpus_per_node=2", "placement.rollout=0", "placement.actor=1", "debug.share_gpu=true"]


def test_disaggregated_on_one_card(tmp_path: Path) -> None:
    result = train(tmp_path / "run", 2, *settings(), *SEPARATE, "sync.probe_interval=1", timeout_s=500)
    check("disaggregated, 2 ranks on one card", result)


def test_one_round_ahead_on_one_card(tmp_path: Path) -> None:
    """Every update trains on the tokens of the version before, except the first, and each version is probed."""
    result = train(tmp_path / "run", 2, *settings(), *SEPARATE, "rollout.ahead=1", timeout_s=500)
    check("disaggregated, 2 ranks on one card, one round ahead", result)
    assert [row["rollout/lag_max"] for row in result.metrics] == [0, *[1] * (NUM_STEPS - 1)]
    assert [row["rollout/lag_mean"] for row in result.metrics] == [0, *[1] * (NUM_STEPS - 1)]
    names = [name for name in result.metrics[-1] if name.startswith(("perf/busy/", "perf/wait/"))]
    waits = {name: statistics.median(row.get(name, 0.0) for row in result.metrics) for name in names}
    staleness = statistics.mean(row["policy/staleness_kl"] for row in result.metrics[1:])
    print(json.dumps(waits | {"staleness_kl_mean": staleness}), flush=True)


def test_overlapped_updates_on_one_card(tmp_path: Path) -> None:
    """The first step trains on the tokens of a serial run, so its gradients are the same but for rounding."""
    lengths = ["rollout.max_new_tokens=512", "debug.mean_response_tokens=100"]  # otherwise most have the maximum
    options = [*settings(), *SEPARATE, *lengths, "train.num_steps=6"]
    serial = train(tmp_path / "serial", 2, *options, timeout_s=250).metrics
    overlapped = train(tmp_path / "overlapped", 2, *options, "actor.overlap=true", timeout_s=250).metrics
    names = ("perf/overlap", "time/step", "policy/mismatch_kl", "optim/grad_norm", "reward/mean", "rollout/tokens")
    for rows in (serial, overlapped):
        print("\n" + json.dumps({name: [row.get(name) for row in rows] for name in names}), flush=True)
    assert all(row["perf/overlap"] > 0 for row in overlapped)
    assert overlapped[0]["rollout/tokens"] == serial[0]["rollout/tokens"]
    assert overlapped[0]["optim/grad_norm"] == pytest.approx(serial[0]["optim/grad_norm"], rel=0.02)
    assert max(row["policy/mismatch_kl"] for row in overlapped) < MAX_MISMATCH_KL


@pytest.mark.parametrize("limit", [64, 100])
def test_rounds_of_a_few_tokens(limit: int, tmp_path: Path) -> None:
    """A response that continues in another round is computed again. Engine and learner then agree as before."""
    options = ["rollout.gpu_memory_fraction=0.4", f"rollout.max_tokens_per_round={limit}", "train.num_steps=6"]
    result = train(tmp_path / "run", 1, *settings(), *options, timeout_s=500)
    rows = result.metrics
    names = ("policy/mismatch_kl", "policy/staleness_kl", "rollout/lag_mean", "rollout/lag_max", "rollout/carried")
    print("\n" + json.dumps({name: [row.get(name) for row in rows] for name in names}), flush=True)
    assert any(row["rollout/carried"] for row in rows) and any(row["rollout/lag_max"] for row in rows)
    assert max(row.get("policy/mismatch_kl", 0.0) for row in rows) < MAX_MISMATCH_KL


def test_a_kv_cache_survives_updates_on_the_same_gpu(tmp_path: Path) -> None:
    """The engine stays awake, and reads only new prompts and what fills no block. An evaluation comes in between."""
    options = ["rollout.keep_kv=true", "rollout.max_tokens_per_round=64", "train.num_steps=6", "eval.interval=3"]
    options += [f"data.eval={os.environ['ONEWORLD_PROMPTS']}", "eval.num_prompts=4"]
    result = train(tmp_path / "run", 1, *settings(), *options, timeout_s=500)
    rows = result.metrics
    names = ("rollout/kept_kv_tokens", "rollout/carried", "rollout/prefix_hit_rate", "policy/mismatch_kl")
    print("\n" + json.dumps({name: [row.get(name) for row in rows] for name in names}), flush=True)
    assert "rollout.sleep=never" in result.output
    assert all(row["rollout/kept_kv_tokens"] > 0 for row in rows[1:])
    assert max(row.get("policy/mismatch_kl", 0.0) for row in rows) < MAX_MISMATCH_KL


def test_a_checkpoint_holds_the_policy_and_another_placement_goes_on_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank saves, two resume. The merged model gives the logits that were recorded when it was saved."""
    folder, options = tmp_path / "run", [*settings(), "checkpoint.save_interval=1"]
    train(folder, 1, *options, "train.num_steps=2", timeout_s=250)
    merge_checkpoint([str(folder), "--verify-logits"])
    difference = float(capsys.readouterr().out.partition("relative difference ")[2])
    result = train(folder, 2, *options, "train.num_steps=4", *SEPARATE, timeout_s=250)
    assert "resumes after step 2" in result.output
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4]
    mismatch = max(row["policy/mismatch_kl"] for row in result.metrics)
    seconds = {"checkpoint": [round(row.get("time/checkpoint", 0.0), 4) for row in result.metrics]}
    seconds["resume"] = round(result.metrics[2]["time/resume"], 2)
    print("\n" + json.dumps({"world": "resumed on 2 ranks", "logits_difference": difference, **seconds}), flush=True)
    assert difference < 0.06, "two bfloat16 passes differ by 0.03 to 0.05"
    assert mismatch < MAX_MISMATCH_KL


def random_model(folder: Path, num_kv_heads: int) -> list[str]:
    """Write a model with 16 heads, and return the settings for it. SmolLM2 has 9, which 2 ranks cannot share."""
    config = AutoConfig.from_pretrained(os.environ["ONEWORLD_MODEL"])
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 1024, 2816, 8
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 16, num_kv_heads, 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(os.environ["ONEWORLD_MODEL"]).save_pretrained(folder)
    return [*settings(), f"model.path={folder}"]


def test_tensor_parallel_on_one_card(tmp_path: Path) -> None:
    options = [*random_model(tmp_path / "model", 8), "rollout.tensor_parallel_size=2", "placement.num_gpus_per_node=2"]
    options += ["rollout.gpu_memory_fraction=0.25", "debug.share_gpu=true"]
    result = train(tmp_path / "run", 2, *options, timeout_s=500)
    check("tensor parallel 2, collocated, both ranks on one card", result)


def test_our_kernel_decodes_heads_with_keys_of_their_own(tmp_path: Path) -> None:
    options = [*random_model(tmp_path / "model", 16), "rollout.gpu_memory_fraction=0.4", "debug.profile_step=2"]
    result = train(tmp_path / "run", 1, *options, timeout_s=500)
    check("collocated, 1 rank, 16 heads of 16", result)
    [profile] = (tmp_path / "run").rglob("step_2.rank_0.txt")
    assert " _attend\n" in profile.read_text().partition("rollout:")[2].partition("update:")[0]


@pytest.mark.parametrize("placement", [["rollout.gpu_memory_fraction=0.4"], SEPARATE], ids=["collocated", "separate"])
def test_conversations(placement: list[str], tmp_path: Path) -> None:
    """Three turns of a real model. The prefix cache has what the model has read before, and logprobs agree."""
    environment = [f"environment.class={Path(__file__).parent / 'doubt.py'}:Doubt", "reward.function=environment"]
    limits = ["environment.max_tokens_per_turn=64", "rollout.max_new_tokens=192", "data.chat_template=true"]
    num_ranks = 2 if placement is SEPARATE else 1
    options = [*settings(), *environment, *limits, *placement, "train.num_steps=6"]
    rows = train(tmp_path / "run", num_ranks, *options, timeout_s=400).metrics
    names = ["policy/mismatch_kl", "rollout/prefix_hit_rate", "environment/turns", "environment/observation_tokens"]
    names += ["rollout/length_mean", "time/rollout", "time/step", "reward/mean"]
    print("\n" + json.dumps({name: [row.get(name) for row in rows] for name in names}), flush=True)
    assert all(row["environment/turns"] == 3 and row["environment/sequences"] == 1 for row in rows)
    assert all(row["rollout/prefix_hit_rate"] > 0.5 for row in rows)
    assert max(row["policy/mismatch_kl"] for row in rows) < MAX_MISMATCH_KL
