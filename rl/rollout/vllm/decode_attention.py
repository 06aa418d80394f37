"""A Triton kernel for attention of one new token per sequence over a paged KV cache.

A program computes all queries that share a head of keys and values, and reads its part of the cache once. With hundreds
of sequences, nothing else has to be parallel, so a program has a whole sequence of up to MAX_TOKENS. It reads the cache
1.1 to 1.8 times as fast as FlashAttention 3 in the cases of benchmarks/RESULTS.md (H200). Longer sequences are split
into parts of that size, which a second kernel combines. Otherwise one long sequence would delay a whole step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 2048  # of one program
TILE, NUM_WARPS, NUM_STAGES = 64, 2, 3  # tokens read at once, for heads of up to 128: benchmarks/decode_attention.py
MIN_QUERIES = 16  # rows of the smallest matrix that tensor cores multiply; most of them are padding
LOG2_E = tl.constexpr(1.4426950408889634)  # exp2 is cheaper than exp


@triton.jit
def _attend(
    queries,
    keys,
    values,
    block_table,
    lengths,
    outputs,
    parts,
    scale,
    query_stride,
    query_head_stride,
    output_stride,
    output_head_stride,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    NUM_PARTS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    head, sequence, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + sequence)
    if part > 0 and part * MAX_TOKENS >= length:
        return
    rows, columns, members = tl.arange(0, TILE), tl.arange(0, PADDED_HEAD_SIZE), tl.arange(0, PADDED_GROUP)
    is_column = columns < HEAD_SIZE
    is_query = (members < GROUP)[:, None] & is_column[None, :]
    heads = head * GROUP + members
    query = queries + sequence * query_stride + heads[:, None] * query_head_stride + columns[None, :]
    query = tl.load(query, mask=is_query, other=0.0)

    top = tl.full([PADDED_GROUP], -1e30, tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    sums = tl.zeros([PADDED_GROUP, PADDED_HEAD_SIZE], tl.float32)
    end = tl.minimum(length, (part + 1) * MAX_TOKENS)
    for start in tl.range(part * MAX_TOKENS, end, TILE, num_stages=NUM_STAGES):
        tokens = start + rows
        is_token = tokens < end
        blocks = tl.load(block_table + sequence * table_stride + tokens // BLOCK_SIZE, mask=is_token, other=0)
        places = blocks.to(tl.int64) * block_stride + tokens % BLOCK_SIZE * token_stride + head * head_stride
        places = places[:, None] + columns[None, :]
        is_place = is_token[:, None] & is_column[None, :]
        key = tl.load(keys + places, mask=is_place, other=0.0)
        value = tl.load(values + places, mask=is_place, other=0.0)
        score = tl.where(is_token[None, :], tl.dot(query, tl.trans(key)) * (scale * LOG2_E), float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        shrink, weight = tl.exp2(top - new_top), tl.exp2(score - new_top[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weight.to(value.dtype), value)
        top = new_top

    result = sums / tl.maximum(total, 1e-30)[:, None]  # padded rows of a CUDA graph have no tokens
    if NUM_PARTS == 1 or length <= MAX_TOKENS:
        output = outputs + sequence * output_stride + heads[:, None] * output_head_stride + columns[None, :]
        tl.store(output, result.to(outputs.dtype.element_ty), mask=is_query)
    else:  # the result of this part, and the logarithm of its weight
        num_heads = tl.num_programs(0) * GROUP
        place = parts + ((sequence * num_heads + heads) * NUM_PARTS + part) * (HEAD_SIZE + 1)
        tl.store(place[:, None] + columns[None, :], result, mask=is_query)
        tl.store(place + HEAD_SIZE, top + tl.log2(total), mask=members < GROUP)


@triton.jit
def _combine(
    parts,
    lengths,
    outputs,
    output_stride,
    output_head_stride,
    NUM_PARTS: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
):
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    if length <= MAX_TOKENS:
        return
    columns = tl.arange(0, PADDED_HEAD_SIZE)
    is_column = columns < HEAD_SIZE
    parts += (sequence * tl.num_programs(0) + head) * NUM_PARTS * (HEAD_SIZE + 1)
    top, total, sums = -1e30, 0.0, tl.zeros([PADDED_HEAD_SIZE], tl.float32)
    for part in range(0, tl.cdiv(length, MAX_TOKENS)):
        place = parts + part * (HEAD_SIZE + 1)
        weight = tl.load(place + HEAD_SIZE)
        new_top = tl.maximum(top, weight)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(weight - new_top)
        total = total * shrink + weight
        sums = sums * shrink + weight * tl.load(place + columns, mask=is_column, other=0.0)
        top = new_top
    output = outputs + sequence * output_stride + head * output_head_stride + columns
    tl.store(output, (sums / total).to(outputs.dtype.element_ty), mask=is_column)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    outputs: Tensor,
    max_tokens: int,
) -> None:
    """Compute attention and write it to `outputs`. Queries and outputs are [sequences, heads, head size]. Keys and
    values are [blocks, tokens per block, heads of keys, head size], with equal strides. `lengths` include the new
    token, and none of them is above `max_tokens`."""
    num_sequences, num_heads, head_size = queries.shape
    num_kv_heads, group, num_parts = keys.shape[2], num_heads // keys.shape[2], triton.cdiv(max_tokens, MAX_TOKENS)
    padded_head_size = max(16, triton.next_power_of_2(head_size))
    parts = outputs
    if num_parts > 1:
        size = num_sequences * num_heads * num_parts * (head_size + 1)
        parts = torch.empty(size, dtype=torch.float32, device=queries.device)
    tensors = (queries, keys, values, block_table, lengths, outputs, parts)
    output_strides = outputs.stride()[:2]
    strides = (*queries.stride()[:2], *output_strides, block_table.stride(0), *keys.stride()[:3])
    sizes = {"NUM_PARTS": num_parts, "MAX_TOKENS": MAX_TOKENS, "HEAD_SIZE": head_size}
    _attend[(num_kv_heads, num_sequences, num_parts)](
        *tensors,
        scale,
        *strides,
        **sizes,
        BLOCK_SIZE=keys.shape[1],
        PADDED_HEAD_SIZE=padded_head_size,
        GROUP=group,
        PADDED_GROUP=max(MIN_QUERIES, triton.next_power_of_2(group)),
        TILE=TILE if padded_head_size <= 128 else TILE // 2,  # larger ones need more shared memory than there is
        NUM_STAGES=NUM_STAGES,
        num_warps=NUM_WARPS,
    )
    if num_parts > 1:
        grid = (num_heads, num_sequences)
        _combine[grid](parts, lengths, outputs, *output_strides, **sizes, PADDED_HEAD_SIZE=padded_head_size)
