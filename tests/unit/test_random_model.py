"""The shapes of benchmarks/random_model.py are those of published models."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.random_model import SHAPES, config_of

# Parameters of the models on the Hugging Face Hub, where tied weights count once.
PUBLISHED = {
    "135m": 134_515_008,
    "1.7b": 1_711_376_384,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
}


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("any size", "10m")])
def test_it_has_as_many_parameters_as_the_published_model(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == SHAPES[name].tied
    assert hasattr(model.model.layers[0].self_attn, "q_norm") == name.startswith("qwen3")


def test_rotary_embeddings_have_the_base_of_the_shape() -> None:
    model = AutoModelForCausalLM.from_config(config_of("10m"))
    shape = SHAPES["10m"]
    expected = 1 / shape.rope_theta ** (torch.arange(0, shape.size_of_head, 2) / shape.size_of_head)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)


def test_keys_and_values_of_a_token() -> None:
    assert SHAPES["qwen3-0.6b"].kv_bytes_per_token == 28 * (8 + 8) * 128 * 2
    assert SHAPES["1.7b"].kv_bytes_per_token == 24 * (32 + 32) * 64 * 2
