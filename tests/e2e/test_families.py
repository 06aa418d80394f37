"""Model families whose engines are read back exactly, on real vLLM. docs/weight_sync.md lists them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl.config.schema import ROOT
from tests.launcher import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": None,
}
EXACT = ["llama", "mistral", "qwen2", "qwen3", "granite", "phi3"]


def longrope(trained_length: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [2.0 + i for i in range(16)]}
    return {
        "original_max_position_embeddings": trained_length,
        "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": trained_length, **factors},
    }


# Settings of config.json that engine and learner could interpret differently.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    "longrope, longer than trained": longrope(16),  # max_model_len is larger, although sequences are shorter
    "longrope, as trained": longrope(128),
}
CASES = [(family, "plain") for family in EXACT]
CASES += [("granite", "dropout"), ("phi3", "dropout"), ("llama", "dynamic"), ("llama", "longrope, longer than trained")]
CASES += [("phi3", "longrope, longer than trained"), ("phi3", "longrope, as trained")]


@pytest.mark.parametrize(("family", "options"), CASES)
def test_engine_and_learner_are_the_same_model(family: str, options: str, tmp_path: Path) -> None:
    """The weights of engines are read back exactly, and their logprobs equal the learner's at any length."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs" / "tiny", model)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SHAPE | OPTIONS[options]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    settings = ["train.num_steps=2", "train.num_prompts_per_step=4", "eval.interval=0", "actor.lr=1e-3"]
    result = train(tmp_path / "run", 1, f"model.path={model}", "sync.probe_interval=1", *settings, timeout_s=150)
    assert "cannot be read back" not in result.output
    assert max(row["policy/mismatch_kl"] for row in result.metrics) < 1e-6
