"""Attention over a ragged batch, registered with transformers under two names.

A micro-batch is one row of tokens in which sequences lie end to end; where they begin travels through the model's
keyword arguments. Each sequence attends causally to itself alone.

    varlen    torch's own kernel for ragged rows: half precision on GPUs
    ragged    exact on every device: sequences are gathered into a padded block, where padding comes after the last real
              key and so is never attended to
"""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rl.config import ConfigError

RAGGED, VARLEN = "ragged", "varlen"
TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 does not


def implementation(device: torch.device, dtype: str) -> str:
    return VARLEN if device.type == "cuda" and dtype == "bfloat16" else RAGGED


def arguments(name: str, lengths: Sequence[int], num_riders: int, device: torch.device) -> dict[str, Any]:
    """What the attention of this name needs to know about a row of tokens: sequences of these lengths, and riders at
    the end that are one more sequence."""
    if name == VARLEN:
        every = [*lengths, num_riders] if num_riders else lengths
        cu_lengths = F.pad(torch.tensor(every, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
        # The kernel needs a bound alone; the next power of two keeps the number of compiled variants small.
        bound = 1 << max(every, default=1).bit_length()
        return {"cu_lengths": to_device(cu_lengths, device), "max_length": bound}
    counts = torch.tensor(lengths, dtype=torch.int64)
    segment_ids = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    places = torch.cat([torch.arange(length) for length in [0, *lengths]])
    return {
        "segment_ids": to_device(segment_ids, device),
        "places": to_device(places, device),
        "padded_shape": (len(lengths), max(lengths, default=0)),
    }


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Without waiting for what the device is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def varlen_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: None,
    *,
    cu_lengths: Tensor,  # [sequences + 1] int32
    max_length: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": ((sliding_window or 0) - 1, 0)}
    if query.shape[1] != key.shape[1]:
        if TAKES_GQA:
            options["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    output = varlen_attn(query, key, value, cu_lengths, cu_lengths, max_length, max_length, **options)
    assert isinstance(output, Tensor)
    return output.unsqueeze(0), None


def ragged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: None,
    *,
    segment_ids: Tensor,  # [T] without riders
    places: Tensor,  # [T] in their sequences
    padded_shape: tuple[int, int],  # sequences, longest length
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    num_sequences, longest = padded_shape
    if sliding_window is not None and longest > sliding_window:
        raise ConfigError(
            f"a sequence has {longest} tokens, but the model attends to the last {sliding_window} only, which the "
            "learner does on GPUs in bfloat16 alone; lower rollout.max_new_tokens"
        )
    grouped = query.shape[1] != key.shape[1]
    attend = partial(
        F.scaled_dot_product_attention, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    count = segment_ids.numel()
    parts = []
    if count:
        padded = [_pad(x[0, :, :count], segment_ids, places, num_sequences, longest) for x in (query, key, value)]
        parts.append(attend(*padded).transpose(1, 2)[segment_ids, places])
    if count < query.shape[2]:  # riders by themselves: in the block they would be padded to the longest sequence
        riders = [x[:, :, count:] for x in (query, key, value)]
        parts.append(attend(*riders)[0].transpose(0, 1))
    return torch.cat(parts).unsqueeze(0), None


def _pad(flat: Tensor, segment_ids: Tensor, places: Tensor, num_sequences: int, longest: int) -> Tensor:
    """[heads, T, head_dim] -> [S, heads, L, head_dim]."""
    padded = flat.new_zeros(num_sequences, longest, flat.shape[0], flat.shape[2])
    return padded.index_put((segment_ids, places), flat.transpose(0, 1)).transpose(1, 2)


def register() -> None:
    for name, function in ((RAGGED, ragged_attention), (VARLEN, varlen_attention)):
        AttentionInterface.register(name, function)
        # These functions need no mask; without an entry here transformers would build one of T x T.
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
