"""A Triton kernel for attention of one new token per sequence over a paged KV cache.

The kernel is for models without grouped-query attention. There, kernels for tensor cores pad a head's single query to
sixteen. This kernel uses no tensor cores, and reads the cache 1.4 to 3 times as fast as FlashAttention 3 in the cases
of benchmarks/RESULTS.md (H200). Each row of a tile has its own running softmax. The rows are combined at the end.
"""

import triton
import triton.language as tl
from torch import Tensor

TILE, NUM_WARPS, NUM_STAGES = 16, 1, 3  # fastest on an H200 for heads of 64: benchmarks/decode_attention.py --sweep
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    queries,
    keys,
    values,
    block_table,
    lengths,
    outputs,
    scale,
    query_stride,
    query_head_stride,
    output_stride,
    output_head_stride,
    table_stride,
    block_stride,
    token_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    rows = tl.arange(0, TILE)
    columns = tl.arange(0, PADDED_HEAD_SIZE)
    is_column = columns < HEAD_SIZE
    query = tl.load(queries + sequence * query_stride + head * query_head_stride + columns, mask=is_column, other=0.0)
    query = query.to(tl.float32) * (scale * LOG2_E)  # exp2 is cheaper than exp

    top = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, PADDED_HEAD_SIZE], tl.float32)
    for start in tl.range(0, length, TILE, num_stages=NUM_STAGES):
        tokens = start + rows
        is_token = tokens < length
        blocks = tl.load(block_table + sequence * table_stride + tokens // BLOCK_SIZE, mask=is_token, other=0)
        places = blocks.to(tl.int64) * block_stride + tokens % BLOCK_SIZE * token_stride + head * head_stride
        places = places[:, None] + columns[None, :]
        is_place = is_token[:, None] & is_column[None, :]
        key = tl.load(keys + places, mask=is_place, other=0.0).to(tl.float32)
        value = tl.load(values + places, mask=is_place, other=0.0).to(tl.float32)
        score = tl.where(is_token, tl.sum(query[None, :] * key, axis=1), float("-inf"))
        new_top = tl.maximum(top, score)
        shrink, weight = tl.exp2(top - new_top), tl.exp2(score - new_top)
        total = total * shrink + weight
        sums = sums * shrink[:, None] + weight[:, None] * value
        top = new_top

    shrink = tl.exp2(top - tl.max(top, axis=0))
    total = tl.maximum(tl.sum(total * shrink, axis=0), 1e-30)  # padded rows of a CUDA graph have no tokens
    output = (tl.sum(sums * shrink[:, None], axis=0) / total).to(outputs.dtype.element_ty)
    tl.store(outputs + sequence * output_stride + head * output_head_stride + columns, output, mask=is_column)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, lengths: Tensor, scale: float, outputs: Tensor
) -> None:
    """Compute attention and write it to `outputs`. Queries and outputs are [sequences, heads, head size]. Keys and
    values are [blocks, tokens per block, heads, head size], with equal strides. `lengths` include the new token."""
    num_sequences, num_heads, head_size = queries.shape
    padded_head_size = triton.next_power_of_2(head_size)
    tensors = (queries, keys, values, block_table, lengths, outputs)
    strides = (*queries.stride()[:2], *outputs.stride()[:2], block_table.stride(0), *keys.stride()[:3])
    _attend[(num_heads, num_sequences)](
        *tensors,
        scale,
        *strides,
        BLOCK_SIZE=keys.shape[1],
        HEAD_SIZE=head_size,
        PADDED_HEAD_SIZE=padded_head_size,
        TILE=TILE,
        NUM_STAGES=NUM_STAGES,
        num_warps=NUM_WARPS * max(1, padded_head_size // 128),  # with fewer warps, registers would spill
    )
