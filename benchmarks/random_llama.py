"""Models of random weights for benchmarks: shapes of real ones, or as many layers as a size asks for."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SHAPES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "any size": (1024, 2816, 0, 16, 8, 16384),  # as many layers as the size asks for
    "135m": (576, 1536, 30, 9, 3, 49152),
    "1.7b": (2048, 8192, 24, 32, 32, 49152),
}


def save_random_llama(folder: Path, shape: str, num_parameters: float, dtype: str, device: torch.device) -> None:
    """`num_parameters` is for "any size", to the nearest layer."""
    hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[shape]
    if not layers:
        in_layer = (2 * hidden + 2 * hidden * kv_heads // heads + 3 * intermediate) * hidden
        layers = max(1, round((num_parameters - vocab * hidden) / in_layer))
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=True,
    )
    with device:
        AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
