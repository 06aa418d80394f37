"""Folders with the files of public models, but for their weights: the headers are real, and the data are holes."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from rl.config.schema import ROOT

CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Shape(NamedTuple):
    """Sizes in config.json of a Qwen2 model."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int
    is_tied: bool


QWEN_0_5B = Shape(896, 4864, 24, 14, 2, 151_936, is_tied=True)
QWEN_7B = Shape(3584, 18_944, 28, 28, 4, 152_064, is_tied=False)
QWEN_14B = Shape(5120, 13_824, 48, 40, 8, 152_064, is_tied=False)


def tensors_of(shape: Shape) -> dict[str, list[int]]:
    """Return the shape of every tensor of a Qwen2 model."""
    hidden, kv = shape.hidden, shape.hidden // shape.num_heads * shape.num_kv_heads
    found = {"model.embed_tokens.weight": [shape.vocabulary, hidden], "model.norm.weight": [hidden]}
    if not shape.is_tied:
        found["lm_head.weight"] = [shape.vocabulary, hidden]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            found[f"{prefix}self_attn.{name}_proj.weight"] = [rows, hidden]
            found[f"{prefix}self_attn.{name}_proj.bias"] = [rows]
        found[f"{prefix}self_attn.o_proj.weight"] = [hidden, hidden]
        for name in ("gate", "up"):
            found[f"{prefix}mlp.{name}_proj.weight"] = [shape.intermediate, hidden]
        found[f"{prefix}mlp.down_proj.weight"] = [hidden, shape.intermediate]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = [hidden]
    return found


def write_model(folder: Path, shape: Shape) -> None:
    """Write a model folder whose weights take no space on disk. The tokenizer is that of configs/tiny."""
    folder.mkdir(parents=True)
    about = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.is_tied,
        "max_position_embeddings": 32_768,
        "model_type": "qwen2",
    }
    (folder / "config.json").write_text(json.dumps(about))
    shutil.copy2(ROOT / "configs" / "tiny" / "tokenizer.json", folder)
    tokenizer = json.loads((ROOT / "configs" / "tiny" / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": CHAT}))
    header, end = {}, 0
    for name, sizes in tensors_of(shape).items():
        begin, end = end, end + 2 * (sizes[0] * sizes[1] if len(sizes) == 2 else sizes[0])
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
