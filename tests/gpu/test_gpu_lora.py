"""Adapters on a GPU: updates against a plain peft model on a CPU, memory against the estimate, and learning.

    ONEWORLD_MODEL=... ONEWORLD_PROMPTS=.../train.jsonl pytest -m gpu -s tests/gpu/test_gpu_lora.py

The variables are those of tests/gpu/test_worlds.py. Each test prints one JSON line.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.random_model import save_random_model
from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.model.memory import estimate
from rl.model.shape import measure_size
from rl.placement.roles import plan
from tests.gpu.test_worlds import SEPARATE, check, settings
from tests.launcher import torchrun_train as train
from tests.update import MODELS, check_lora, lora_job, lora_update, make_adapted, make_batch, run_jobs, weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]
LORA = ["model.lora.rank=16", "actor.lr=3e-4"]
WAYS = [
    {},
    {"offload": "rollout"},
    {"offload": "moments"},
    {"offload": "always"},
    {"compile": True},
    {"compile": True, "recompute": "full"},
    {"compile": True, "recompute": "selective", "offload": "rollout"},
]
LIMITS = {"float32": (1e-4, 1e-4), "bfloat16": (2e-2, 4e-3)}  # for losses and weights; a step moves a weight by 1e-3


def test_every_way_to_compute_an_update(tmp_path: Path) -> None:
    batch = make_batch()
    (tmp_path / "batch.safetensors").write_bytes(batch.to_bytes())
    wanted = {model: lora_update(make_adapted(tmp_path, model), batch) for model in MODELS}
    jobs = [
        lora_job(f"{model} {dtype} {number}", model, dtype, device="cuda", **way)
        for model in MODELS
        for dtype in LIMITS
        for number, way in enumerate(WAYS)
    ]
    run_jobs(tmp_path, {1: jobs}, timeout_s=500)
    for each in jobs:
        check_lora(tmp_path, wanted[each["model"]], each, *LIMITS[each["dtype"]])
    for model in MODELS:  # offloading changes no bit of the result
        plain, *moved = (weights_of(tmp_path, lora_job(f"{model} bfloat16 {n}", model)) for n in (0, 1, 2))
        assert all(torch.equal(plain[name], each[name]) for each in moved for name in plain)


@pytest.mark.parametrize("offload", ["none", "rollout"])
def test_collocated(offload: str, tmp_path: Path) -> None:
    """The engine has slept, so it gets all tensors at every version. Merged weights agree with adapters."""
    options = [*LORA, f"actor.offload={offload}", "rollout.gpu_memory_fraction=0.4", "algo.kl_coef=0.01"]
    result = train(tmp_path / "run", 1, *settings(), *options, timeout_s=500)
    check(f"adapters, collocated, actor.offload={offload}", result)


def test_disaggregated_on_one_card(tmp_path: Path) -> None:
    """Over NCCL. Tensors without adapters are sent once."""
    result = train(tmp_path / "run", 2, *settings(), *LORA, *SEPARATE, "sync.probe_interval=1", timeout_s=500)
    check("adapters, disaggregated, 2 ranks on one card", result)


def state_of(rows: list[dict[str, float]]) -> float:
    """Return the GB of weights, gradients and moments on the card during an update."""
    return sum(rows[-1][f"gpu/memory_gb/{kind}"] for kind in ("weights", "gradients", "optimizer"))


def test_memory_of_a_model_of_1_7_billion_parameters(tmp_path: Path) -> None:
    """The state is below 35 % of that of full training, and within 15 % of the estimate."""
    model = tmp_path / "model"
    save_random_model(model, "1.7b", 0, "bfloat16", torch.device("cuda"))
    AutoTokenizer.from_pretrained(os.environ["ONEWORLD_MODEL"]).save_pretrained(model)
    options = [*settings(), *LORA, f"model.path={model}", "train.num_steps=3", "rollout.gpu_memory_fraction=0.3"]
    options += ["algo.kl_coef=0.01", "rollout.max_mismatch_kl=0", "actor.recompute=full"]
    rows = train(tmp_path / "run", 1, *options, timeout_s=500).metrics
    config = load_config("configs/gsm8k_smollm2_135m.yaml", [*LORA, "algo.kl_coef=0.01"])
    size = measure_size(model, config.model.lora.targets)
    assert size is not None
    (role,) = estimate(config, plan(config.placement, 1, 1, 1, 1), size)
    measured, estimated = state_of(rows), role.learner / 1e9
    line = {"state_gb": measured, "estimated_gb": estimated, "full_gb": 16e-9 * size.num_parameters}
    print("\n" + json.dumps({"world": "adapters, 1.7 B", **line}), flush=True)
    assert measured == pytest.approx(estimated, rel=0.15)
    assert measured < 0.35 * line["full_gb"]


def learn(*overrides: str) -> dict[str, list[float]]:
    """Train SmolLM2 on sums, and return its accuracy before and after, with the ends of the 95 % interval."""
    command = [sys.executable, "benchmarks/learn.py", os.environ["ONEWORLD_MODEL"], "--steps", "100", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"\n{done.stdout.splitlines()[-1]}", flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_adapters_learn_sums_as_full_training_does() -> None:
    """The intervals of the accuracies after 100 steps overlap, or adapters are better."""
    full, adapted = learn(), learn(*LORA)
    assert adapted["before"][0] < 0.3 < adapted["after"][0]
    assert adapted["after"][2] > full["after"][1]
