"""The kernel of rotary positions computes its formula, which CPU tests compare with the functions of model families."""

import pytest
import torch
from torch import Tensor

from rl.model import rotary

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotary.rotate_heads(x, cos, sin)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(32, 64), (40, 64), (8, 128), (3, 80), (1, 256)])
def test_the_kernel_rotates_heads_and_has_the_right_gradient(
    num_heads: int, head_dim: int, dtype: torch.dtype, compiled: bool
) -> None:
    torch.manual_seed(0)
    way = torch.compile(rotate, dynamic=True, fullgraph=True) if compiled else rotate
    for num_tokens in (1, 100):
        size = num_heads * head_dim
        wide = torch.randn(num_tokens, 3 * size, dtype=dtype, device="cuda", requires_grad=True)
        x = wide[:, size : 2 * size].view(num_tokens, num_heads, head_dim)  # keys, between queries and values
        cos, sin = torch.randn(2, num_tokens, head_dim, dtype=dtype, device="cuda")  # the two halves differ
        weights = torch.randn(num_heads, num_tokens, head_dim, dtype=dtype, device="cuda").transpose(0, 1)
        results = []
        for rotated in (
            way(x, cos, sin),
            rotary._turn(x.float(), cos.float().unsqueeze(1), sin.float().unsqueeze(1)).to(dtype),
        ):
            (grad,) = torch.autograd.grad(rotated, wide, weights)
            results.append((rotated, grad))
        (ours, our_grad), (plain, plain_grad) = results
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, plain)
        torch.testing.assert_close(our_grad, plain_grad)
