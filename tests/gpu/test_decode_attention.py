"""Our kernel for decoding computes attention, on its own and as a backend of vLLM."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
BLOCK_SIZE = 16


def make_cache(lengths: list[int], num_heads: int, head_size: int) -> tuple[Tensor, Tensor]:
    """Return a cache [blocks, heads, tokens of a block, keys and values], with shuffled blocks, and the block table."""
    num_blocks = max(1, -(-max(lengths) // BLOCK_SIZE))
    total = len(lengths) * num_blocks
    cache = torch.randn(total, BLOCK_SIZE, num_heads, 2 * head_size, dtype=torch.bfloat16, device="cuda")
    return cache.transpose(1, 2), torch.randperm(total, device="cuda").int().view(len(lengths), num_blocks)


def written_out(queries: Tensor, cache: Tensor, table: Tensor, lengths: list[int]) -> Tensor:
    num_heads, head_size = queries.shape[1:]
    outputs = torch.zeros(queries.shape, dtype=torch.float32, device="cuda")
    for number, length in enumerate(lengths):
        tokens = cache[table[number].long()].transpose(1, 2).flatten(0, 1)[:length].float()
        tokens = tokens.repeat_interleave(num_heads // tokens.shape[1], dim=1)
        keys, values = tokens.split(head_size, dim=-1)
        scores = torch.einsum("hd,thd->ht", queries[number].float(), keys) * head_size**-0.5
        outputs[number] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
    return outputs


SHAPES = [(32, 32, 64), (16, 8, 128), (12, 2, 128), (28, 4, 128), (9, 3, 64), (3, 3, 80), (2, 1, 256), (32, 1, 64)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_size"), SHAPES)
@pytest.mark.parametrize("longest", [543, 2048, 2049, 6000])
def test_the_kernel_is_attention(num_heads: int, num_kv_heads: int, head_size: int, longest: int) -> None:
    from rl.rollout.vllm.decode_attention import attend

    torch.manual_seed(0)
    lengths = [1, 2, 15, 16, 17, 0, 100, longest]
    cache, table = make_cache(lengths, num_kv_heads, head_size)
    wide = torch.randn(len(lengths), 3 * num_heads * head_size, dtype=torch.bfloat16, device="cuda")
    queries = wide[:, : num_heads * head_size].view(len(lengths), num_heads, head_size)  # beside keys and values
    outputs = torch.full_like(queries, 9.0, memory_format=torch.contiguous_format)
    keys, values = cache.transpose(1, 2).split(head_size, dim=-1)
    device_lengths, scale = torch.tensor(lengths, device="cuda").int(), head_size**-0.5
    attend(queries, keys, values, table, device_lengths, scale, outputs, max_tokens=longest)
    torch.testing.assert_close(outputs.float(), written_out(queries, cache, table, lengths), atol=1e-2, rtol=1e-2)


def forward(impl: Any, metadata: Any, queries: Tensor, cache: Tensor) -> Tensor:
    one = torch.ones((), device="cuda")
    layer = SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one)
    return impl.forward(layer, queries, queries, queries, cache, metadata, torch.zeros_like(queries))


@pytest.mark.parametrize(
    ("num_sequences", "num_queries", "num_kv_heads", "window", "max_model_len", "is_ours"),
    [
        (200, 1, 16, None, 640, True),
        (8, 1, 16, None, 640, False),
        (200, 2, 16, None, 640, False),
        (200, 1, 8, None, 640, True),
        (200, 1, 1, None, 640, False),
        (200, 1, 16, 32, 640, False),
        (200, 1, 8, None, 32768, True),
    ],
)
def test_vllm_uses_the_kernel_where_it_applies(
    num_sequences: int,
    num_queries: int,
    num_kv_heads: int,
    window: int | None,
    max_model_len: int,
    is_ours: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends import flash_attn

    from rl.rollout.vllm import attention as vllm_attention

    torch.manual_seed(0)
    num_heads, head_size = 16, 64
    lengths = [int(length) for length in torch.randint(num_queries, 200, (num_sequences,))]
    cache, table = make_cache(lengths, num_kv_heads, head_size)
    num_tokens = num_sequences * num_queries
    queries = torch.randn(num_tokens, num_heads, head_size, dtype=torch.bfloat16, device="cuda")
    fields = {field.name for field in dataclasses.fields(flash_attn.FlashAttentionMetadata)}
    given = {
        "num_actual_tokens": num_tokens,
        "max_query_len": num_queries,
        "query_start_loc": num_queries * torch.arange(num_sequences + 1, device="cuda").int(),
        "max_seq_len": max(lengths),
        "seq_lens": torch.tensor(lengths, device="cuda").int(),
        "block_table": table,
        "slot_mapping": torch.zeros(num_tokens, dtype=torch.int64, device="cuda"),
        "sliding_window": (-1, -1) if window is None else (window - 1, 0),
        **dict.fromkeys(("use_cascade", "common_prefix_len"), 0),
        **dict.fromkeys(("cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens")),
    }
    metadata = flash_attn.FlashAttentionMetadata(**{name: value for name, value in given.items() if name in fields})
    attend = Mock(wraps=vllm_attention.attend)
    monkeypatch.setattr(vllm_attention, "attend", attend)
    sized = SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len))
    monkeypatch.setattr(vllm_attention, "get_current_vllm_config", lambda: sized)
    with set_current_vllm_config(VllmConfig()):
        arguments = (num_heads, head_size, head_size**-0.5, num_kv_heads, None, window, "auto")
        ours, theirs = vllm_attention.DecodeImpl(*arguments), flash_attn.FlashAttentionImpl(*arguments)
        output, expected = forward(ours, metadata, queries, cache), forward(theirs, metadata, queries, cache)
    assert attend.call_count == is_ours
    torch.testing.assert_close(output, expected, atol=1e-2, rtol=1e-2)
    if num_queries == 1 and window is None:
        torch.testing.assert_close(output.float(), written_out(queries, cache, table, lengths), atol=1e-2, rtol=1e-2)
