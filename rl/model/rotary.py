"""Rotary positions as most families compute them, to the same bits.

A family's own function gets queries and keys as [1, heads, T, head_dim], while they lie in memory as attention wants
them, [T, heads, head_dim]. Compiled, it brings them into the first order, in kernels that divide by T for every value,
and back; and what it cuts into halves costs its backward pass a mask for every load.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"
OURS: set[Callable] = set()  # with the one that each stands for as `__wrapped__`


def replace(model: nn.Module) -> None:
    """The function of the model's family, in the module that defines it, if it is the usual one."""
    family = sys.modules[type(model).__module__]
    rotate: Any = getattr(family, NAME, None)
    if rotate is not None and rotate not in OURS and _is_usual(rotate):
        ours = _in_memory_order(rotate)
        OURS.add(ours)
        setattr(family, NAME, ours)


def _in_memory_order(theirs: Callable) -> Callable:
    @wraps(theirs)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or cos.shape[-1] != q.shape[-1]:  # in another order, or of a part of each head
            return theirs(q, k, cos, sin, unsqueeze_dim)
        half = q.shape[-1] // 2
        signs = torch.arange(-1, 2, 2, dtype=sin.dtype, device=sin.device).view(2, 1)
        cos, sin = (x.unflatten(-1, (2, half)).unsqueeze(2) for x in (cos, sin))
        q, k = (_rotate(x.transpose(1, 2), half, cos, sin * signs).transpose(1, 2) for x in (q, k))
        return q, k

    return rotate


def _rotate(x: Tensor, half: int, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.unflatten(-1, (2, half))
    return (x * cos + x.flip(-2) * sin).flatten(-2)


def _is_usual(rotate: Callable) -> bool:
    """It turns the two halves of a head against each other, and computes in the type that it is given."""
    query = torch.arange(48.0).sin().view(1, 2, 3, 8)
    angles = torch.arange(24.0).view(1, 3, 8)
    for dtype, dtype_of_angles in ((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)):
        q, k = query.to(dtype), query[:, :1].to(dtype)
        cos, sin = angles.cos().to(dtype_of_angles), angles.sin().to(dtype_of_angles)
        try:
            theirs, ours = rotate(q, k, cos, sin), _in_memory_order(rotate)(q, k, cos, sin)
            pairs = list(zip(theirs, ours, strict=True))
        except (RuntimeError, TypeError, ValueError):  # it takes or returns other things
            return False
        if any(x.dtype != y.dtype or not x.equal(y) for x, y in pairs):
            return False
    return True
