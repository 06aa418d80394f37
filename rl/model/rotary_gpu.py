"""The GPU kernel of rotary position embeddings. Each program rotates some heads of one token in float32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # elements in the first (and in the second) halves of the heads that one program rotates
NUM_WARPS = 4


@triton.jit
def _rotate(
    source,
    target,
    cos,
    sin,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    place = tl.arange(0, PADDED_HALF)[None, :]
    is_place = place < HALF
    inside = is_place & (head < NUM_HEADS)

    begin = source + token * token_stride + head * head_stride + place
    first = tl.load(begin, mask=inside).to(tl.float32)
    second = tl.load(begin + HALF, mask=inside).to(tl.float32)
    cos += token * cos_stride + place
    sin += token * sin_stride + place
    first_cos = tl.load(cos, mask=is_place).to(tl.float32)
    second_cos = tl.load(cos + HALF, mask=is_place).to(tl.float32)
    first_sin = tl.load(sin, mask=is_place).to(tl.float32)
    second_sin = tl.load(sin + HALF, mask=is_place).to(tl.float32)

    target += (token * NUM_HEADS + head) * (2 * HALF) + place
    tl.store(target, first * first_cos - second * first_sin, mask=inside)
    tl.store(target + HALF, second * second_cos + first * second_sin, mask=inside)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim]; see rotary.py."""
    num_tokens, num_heads, head_dim = x.shape
    assert cos.shape == sin.shape == (num_tokens, head_dim), (x.shape, cos.shape, sin.shape)
    x, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, cos, sin))
    padded_half = triton.next_power_of_2(head_dim // 2)
    tile_heads = min(triton.next_power_of_2(num_heads), max(1, TILE // padded_half))
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    strides = (*x.stride()[:2], cos.stride(0), sin.stride(0))
    sizes = (num_heads, head_dim // 2, tile_heads, padded_half)
    grid = (num_tokens, triton.cdiv(num_heads, tile_heads))
    _rotate[grid](x, rotated, cos, sin, *strides, *sizes, num_warps=NUM_WARPS)
    return rotated
