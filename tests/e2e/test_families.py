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
EXACT = ["llama", "mistral", "qwen2", "qwen3", "granite", "phi3"]


@pytest.mark.parametrize("family", EXACT)
def test_read_back_is_exact(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs" / "tiny", model)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    settings = ["train.num_steps=2", "train.num_prompts_per_step=4", "eval.interval=0", "actor.lr=1e-3"]
    result = train(tmp_path / "run", 1, f"model.path={model}", "sync.probe_interval=1", *settings, timeout_s=150)
    assert "cannot be read back" not in result.output
    assert max(row["policy/mismatch_kl"] for row in result.metrics) < 1e-6
