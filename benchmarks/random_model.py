"""Models with random weights for benchmarks, in the shapes of real ones or of a given size."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int  # 0: as many as make up the size
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0  # 0: hidden / heads
    family: type = LlamaConfig
    tied: bool = True  # the output layer has the weights of the embedding
    rope_theta: float = 10000.0

    @property
    def size_of_head(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the size of a token's keys and values in bfloat16."""
        return self.layers * 2 * self.kv_heads * self.size_of_head * 2


SHAPES = {  # from config.json of the models with these names; 135m and 1.7b are SmolLM2
    "any size": Shape(1024, 2816, 0, 16, 8, 16384),
    "10m": Shape(256, 768, 6, 8, 4, 8192),
    "135m": Shape(576, 1536, 30, 9, 3, 49152, rope_theta=1e5),
    "1.7b": Shape(2048, 8192, 24, 32, 32, 49152, rope_theta=1.3e5),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 151936, family=Qwen2Config, rope_theta=1e6),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4, 152064, family=Qwen2Config, tied=False, rope_theta=1e6),
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 151936, 128, Qwen3Config, rope_theta=1e6),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 151936, 128, Qwen3Config, rope_theta=1e6),
}


def config_of(name: str, num_parameters: float = 0) -> PretrainedConfig:
    """Return the config of a shape. `num_parameters` is used for "any size", to a whole layer."""
    shape = SHAPES[name]
    layers = shape.layers
    if not layers:
        in_layer = 2 * shape.hidden + 2 * shape.hidden * shape.kv_heads // shape.heads + 3 * shape.intermediate
        layers = max(1, round((num_parameters - shape.vocab * shape.hidden) / (in_layer * shape.hidden)))
    return shape.family(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.size_of_head,
        vocab_size=shape.vocab,
        max_position_embeddings=32768,
        tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )


def save_random_model(folder: Path, name: str, num_parameters: float, dtype: str, device: torch.device) -> int:
    """Write a model and return its number of parameters. `num_parameters` is used for "any size", to a whole layer."""
    with device:
        model = AutoModelForCausalLM.from_config(config_of(name, num_parameters), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
