"""Give every sequence of a packed row its own copy of the keys and values of a prompt that several sequences share.

The kernel for packed rows wants the keys of a sequence end to end. In the backward pass, the gradients of all copies
add up in float32, always in the same order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl.data.shared_prompts import Rows


class Places(NamedTuple):
    """Where the rows of a forward pass go, all int64."""

    rows: Tensor  # [T] row of each token
    tokens: Tensor  # [N] the token whose row it is
    shared: Tensor  # [U] rows that several tokens have, and the first two
    members: Tensor  # [M] tokens of these rows
    targets: Tensor  # [M] index in `shared` of the row of each member

    @staticmethod
    def of(rows: Rows, num_extra: int) -> "Places":
        """Return the places of these rows, with extra tokens at the end."""
        tokens = torch.cat([rows.tokens, len(rows.of_tokens) + torch.arange(num_extra)])
        of_tokens = torch.cat([rows.of_tokens, len(rows.tokens) + torch.arange(num_extra)])
        is_shared = torch.bincount(of_tokens) > 1
        is_shared[:2] = True  # torch.compile makes another variant where a tensor has one element or none
        members = is_shared[of_tokens].nonzero().squeeze(1)
        targets = (is_shared.cumsum(0) - 1)[of_tokens[members]]
        return Places(of_tokens, tokens, is_shared.nonzero().squeeze(1), members, targets)


@torch.library.custom_op("oneworld::spread_rows", mutates_args=())
def spread_rows(x: Tensor, rows: Tensor, tokens: Tensor, shared: Tensor, members: Tensor, targets: Tensor) -> Tensor:
    """Return [T, ...] from [N, ...]. The other arguments are those of `Places`."""
    return x.index_select(0, rows)


@spread_rows.register_fake
def _empty_copies(x: Tensor, rows: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(rows.shape[0], *x.shape[1:])  # len(rows) would fix the number


@torch.library.custom_op("oneworld::collect_rows", mutates_args=())
def collect_rows(x: Tensor, tokens: Tensor, shared: Tensor, members: Tensor, targets: Tensor) -> Tensor:
    """Return [N, ...] from [T, ...]: the sum over all tokens of a row."""
    sums = x.new_zeros(len(shared), *x.shape[1:], dtype=torch.float32)
    sums.index_put_((targets,), x.index_select(0, members).float(), accumulate=True)  # index_add_ has no order on GPUs
    return x.index_select(0, tokens).index_copy_(0, shared, sums.to(x.dtype))


@collect_rows.register_fake
def _empty_sums(x: Tensor, tokens: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(tokens.shape[0], *x.shape[1:])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _collect_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return collect_rows(grad, *ctx.saved_tensors), *[None] * len(Places._fields)


spread_rows.register_autograd(_collect_gradients, setup_context=_save)
