"""Model families whose engines are read back exactly, on real vLLM; docs/weight_sync.md lists them."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl.config import ROOT
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
EXACT = ["llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3"]


def run_family(folder: Path, family: str, **shape: int) -> tuple[str, float]:
    """The output of two steps with a random model of the family, and how far engine and learner are apart."""
    model = folder / "model"
    shutil.copytree(ROOT / "configs" / "tiny", model)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    settings = ["train.num_steps=2", "train.num_prompts_per_step=4", "eval.interval=0", "actor.lr=1e-3"]
    result = train(folder / "run", 1, f"model.path={model}", "sync.probe_interval=1", *settings, timeout_s=150)
    return result.output, max(row["policy/mismatch_kl"] for row in result.metrics)


@pytest.mark.parametrize("family", EXACT)
def test_read_back_is_exact(family: str, tmp_path: Path) -> None:
    output, mismatch = run_family(tmp_path, family)
    assert "cannot be read back" not in output
    assert mismatch < 1e-6


def test_experts_are_proven_by_transport_and_probe(tmp_path: Path) -> None:
    output, mismatch = run_family(tmp_path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    assert "may be repacked by UnquantizedFusedMoEMethod, so what it holds cannot be read back exactly" in output
    assert mismatch < 1e-6
