"""A merge of its own for tests: from the shards' own headers, with torch and the safetensors package; no manifest."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor


def merge_shards(paths: Sequence[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            slices = json.loads(file.metadata()["oneworld"])["slices"]
        for name, part in load_file(path).items():
            whole = tensors.setdefault(name, torch.full(slices[name]["shape"], torch.nan, dtype=part.dtype))
            place = [slice(first, first + length) for first, length in zip(slices[name]["offsets"], part.shape)]
            whole[tuple(place)] = part
    return tensors


def load_merged(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_same_bytes(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)), name
