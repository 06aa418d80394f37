"""Attention over packed sequences, registered with transformers under two names.

A micro-batch is one row of tokens in which sequences lie end to end. The model's keyword arguments say where each
sequence begins. A sequence attends causally, and only to itself. If it begins with the prompt of an earlier one, the
row has only what follows, and it attends to the other's prompt (rl/data/shared_prompts.py).

    varlen    torch's own kernel for packed rows, in half precision on GPUs
    ragged    works on every device and in every dtype: sequences of similar length are gathered into padded blocks.
              Padding comes after the last real key, so causal attention never reaches it.
"""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rl.config.schema import ConfigError
from rl.data.batch import span_indices
from rl.data.shared_prompts import Rows
from rl.model.host_memory import to_device
from rl.model.spread import Places, spread_rows

RAGGED, VARLEN = "ragged", "varlen"
# Padding limit of a block: its longest sequence has at most MAX_STRETCH * n + FREE_PADDING tokens, where n is the
# length of any other of its sequences.
MAX_STRETCH, FREE_PADDING = 1.25, 16
# Without this argument (torch 2.11), the kernel takes grouped queries without being told.
TAKES_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def arguments(model: Any, lengths: Sequence[int], rows: Rows, num_extra: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a model's attention for sequences of these lengths. Extra tokens at the end of the row,
    such as a probe, are one more sequence."""
    places = Places.of(rows, num_extra)
    if model.config._attn_implementation == VARLEN:
        every, own = ([*each, num_extra] if num_extra else each for each in (lengths, rows.lengths))
        # The kernel needs only an upper bound; a power of two keeps the number of compiled variants small.
        found: dict[str, Any] = {"longest": 1 << max(every, default=1).bit_length()}
        found["cu_lengths"] = to_device(_ends(every), device)
        # A run whose prompts have several samples has these in all micro-batches. So layers are compiled once, unless
        # the first micro-batch shares nothing: torch.compile then takes both numbers of tokens for the same.
        if len(places.tokens) < len(places.rows) or model.shares_prompts:
            found["cu_rows"] = to_device(_ends(own), device)
            found["places"] = [to_device(each, device) for each in places]
        return found
    starts = [0, *itertools.accumulate(lengths)]
    spans = [([starts[s] for s in group], [lengths[s] for s in group]) for group in _group_by_length(lengths)]
    if num_extra:
        spans.append(([starts[-1]], [num_extra]))
    return {"blocks": [_make_block(*span, places, device) for span in spans]}


def _ends(lengths: Sequence[int]) -> Tensor:
    """Return [sequences + 1] int32: the start of each sequence, and the end of the last."""
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


class _Block(NamedTuple):
    """A group of sequences, which are padded to the longest one."""

    rows: Tensor  # [T] row of each token, in the whole row of the micro-batch
    sequences: Tensor  # [T] index of the token's sequence in the block
    places: Tensor  # [T] position of the token in that sequence
    own: Tensor  # tokens of the block that have a row of their own
    shape: tuple[int, int]  # number of sequences, longest length


def _make_block(starts: Sequence[int], lengths: Sequence[int], whole: Places, device: torch.device) -> _Block:
    counts = torch.tensor(lengths)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    places = span_indices(torch.zeros_like(counts), counts)
    tokens = torch.tensor(starts)[sequences] + places
    rows = whole.rows[tokens]
    own = (whole.tokens[rows] == tokens).nonzero().squeeze(1)
    rows, sequences, places, own = (to_device(each, device) for each in (rows, sequences, places, own))
    return _Block(rows, sequences, places, own, (len(lengths), max(lengths)))


def _group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences by similar length, longest first, so that a group needs little padding."""
    blocks: list[list[int]] = []
    for sequence in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        if blocks and lengths[blocks[-1][0]] <= MAX_STRETCH * lengths[sequence] + FREE_PADDING:
            blocks[-1].append(sequence)
        else:
            blocks.append([sequence])
    return blocks


def in_memory_order(x: Tensor) -> Tensor:
    """Return a [T, heads, head_dim] view of [1, heads, T, head_dim]. It avoids x[0], whose backward pass copies x."""
    return x.squeeze(0).transpose(0, 1)


# Both get queries as [1, heads, T, head_dim], and keys and values as [1, kv_heads, T, head_dim]. Some models of
# transformers pass `attention_mask` by its name.


def varlen_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    cu_lengths: Tensor,
    longest: int,
    cu_rows: Tensor | None = None,
    places: Sequence[Tensor] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with torch's kernel. `cu_lengths` and `cu_rows` are [sequences + 1] int32, and `longest` is an upper bound
    of lengths. A query's last row belongs to the last key of its sequence."""
    _check_supported(others)
    query, key, value = (in_memory_order(x) for x in (query, key, value))
    window = ((others.get("sliding_window") or 0) - 1, 0)
    options: dict[str, Any] = {"scale": others.get("scaling"), "window_size": window}
    if query.shape[1] != key.shape[1] and TAKES_GQA:
        options["enable_gqa"] = True
    if places is not None:
        key, value = spread_rows(key, *places), spread_rows(value, *places)
    cu_rows = cu_lengths if cu_rows is None else cu_rows
    output = varlen_attn(query, key, value, cu_rows, cu_lengths, longest, longest, **options)
    assert isinstance(output, Tensor)
    return output.unsqueeze(0), None


@torch.compiler.disable  # the graph depends on the number of blocks, which varies
def ragged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, blocks: list[_Block], **others: Any
) -> tuple[Tensor, None]:
    _check_supported(others)
    sliding_window = others.get("sliding_window")
    longest = max(block.shape[1] for block in blocks)
    if sliding_window is not None and longest > sliding_window:
        raise ConfigError(
            f"a sequence has {longest} tokens, but the model attends only to the last {sliding_window}, which the "
            "learner supports only on GPUs in bfloat16; lower rollout.max_new_tokens"
        )
    options: dict[str, Any] = {"is_causal": True, "scale": others.get("scaling")}
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    flat = [in_memory_order(x) for x in (query, key, value)]
    parts = []
    for block in blocks:
        q, k, v = (_pad(x[block.rows], block) for x in flat)
        attended = F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)
        parts.append(attended[block.sequences[block.own], block.places[block.own]])
    order = torch.cat([block.rows[block.own] for block in blocks])
    output = torch.empty_like(flat[0]).index_put((order,), torch.cat(parts))
    return output.unsqueeze(0), None


def _check_supported(others: Mapping[str, object]) -> None:
    """Raise ConfigError for an argument that would change the result. Others, such as position ids, are ignored."""
    for name, what in (("softcap", "caps its scores"), ("s_aux", "has sinks")):
        if others.get(name) is not None:
            raise ConfigError(
                f"the model's attention {what} ({name}), which the learner does not compute; give model.path a family "
                "without it: llama, mistral, qwen2, qwen3, granite and phi3 are tested"
            )


def _pad(flat: Tensor, block: _Block) -> Tensor:
    """Return [N, heads, head_dim] as [sequences, heads, longest, head_dim]."""
    padded = flat.new_zeros(*block.shape, *flat.shape[1:])
    return padded.index_put((block.sequences, block.places), flat).transpose(1, 2)


@cache
@torch.no_grad()
def check_kernel(device: torch.device) -> None:
    """Raise if torch's kernel takes queries that follow a shared prompt for the first ones of their sequence."""
    x = torch.arange(3 * 64, device=device).sin().view(3, 1, 64).bfloat16()
    ends, last_end = (_ends([count]).to(device) for count in (3, 1))
    whole = varlen_attn(x, x, x, ends, ends, 4, 4, window_size=(-1, 0))
    last = varlen_attn(x[2:], x, x, last_end, ends, 4, 4, window_size=(-1, 0))
    assert isinstance(whole, Tensor) and isinstance(last, Tensor)
    if not torch.allclose(whole[2:], last, atol=1e-2):
        raise RuntimeError(
            f"varlen_attn of torch {torch.__version__} does not align the last query of a sequence with its last key, "
            "so prompts cannot be shared; install a version that requirements.txt allows"
        )


def register() -> None:
    for name, function in ((RAGGED, ragged_attention), (VARLEN, varlen_attention)):
        # Register no mask function of this name: transformers would then wait for the device in every forward pass.
        AttentionInterface.register(name, function)
