"""A faster rotary position embedding for most model families. One kernel serves the forward and the backward pass.

The function in transformers gets queries and keys as [1, heads, T, head_dim], but in memory they are
[T, heads, head_dim], as attention needs them. So even when compiled, it reaches only a fifth of the memory bandwidth
(benchmarks/RESULTS.md).
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from rl.config.schema import ConfigError
from rl.model.attention import in_memory_order

NAME = "apply_rotary_pos_emb"
OURS: set[Callable] = set()  # our functions; each replaces the function in its `__wrapped__`


def load_kernels() -> None:
    """Import the GPU kernel before a forward pass needs it."""
    from rl.model import rotary_gpu  # noqa: F401  needs triton, which only GPU builds of torch bring


def replace(model: nn.Module) -> None:
    """Replace the rotary function of the module that defines the model, if it is the usual one (`_is_usual`)."""
    family = sys.modules[type(model).__module__]
    rotate: Any = getattr(family, NAME, None)
    if rotate is not None and rotate not in OURS and _is_usual(rotate):
        ours = _ours_for(rotate)
        OURS.add(ours)
        setattr(family, NAME, ours)


def _ours_for(theirs: Callable) -> Callable:
    @wraps(theirs)
    def rotate(*args: Any, **options: Any) -> Any:
        if options or len(args) != 4 or not _is_row(*args):
            return theirs(*args, **options)
        q, k, cos, sin = args
        cos, sin = cos.squeeze(0), sin.squeeze(0)
        return tuple(rotate_heads(in_memory_order(x), cos, sin).transpose(0, 1).unsqueeze(0) for x in (q, k))

    return rotate


def _is_row(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether `rotate_heads` supports these: one row, one dtype, angles for whole heads and without gradient."""
    is_one = len(q) == len(k) == 1 and q.shape[2:] == k.shape[2:] and cos.shape == sin.shape == (1, *q.shape[2:])
    return is_one and q.dtype == k.dtype == cos.dtype == sin.dtype and not (cos.requires_grad or sin.requires_grad)


@torch.library.custom_op("oneworld::rotate_heads", mutates_args=())
def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim] by the angles whose cosines and sines are [T, head_dim]."""
    if x.is_cuda:
        from rl.model import rotary_gpu  # needs triton, which only GPU builds of torch bring

        return rotary_gpu.rotate_heads(x, cos, sin)
    return _turn(x, cos.unsqueeze(1), sin.unsqueeze(1)).contiguous()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the elements i and i + head_dim / 2 of each head as a pair."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


@rotate_heads.register_fake
def _empty_result(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _turn_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    cos, sin = ctx.saved_tensors
    return rotate_heads(grad, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None


rotate_heads.register_autograd(_turn_back, setup_context=_save)


def _is_usual(rotate: Callable) -> bool:
    """Return whether a family's function rotates as `_turn` does, in the dtype of its inputs. The check runs on the
    CPU, where both results must be equal bit for bit. The GPU kernel rounds only once, at the end, as the family's
    function does when it is compiled."""
    query = torch.arange(48.0).sin().view(1, 2, 3, 8)
    angles = torch.arange(24.0).view(1, 3, 8)
    for dtype in (torch.float32, torch.bfloat16):
        q, k, cos, sin = (x.to(dtype) for x in (query, query[:, :1], angles.cos(), angles.sin()))
        try:
            theirs, ours = rotate(q, k, cos, sin), _ours_for(rotate)(q, k, cos, sin)
            pairs = list(zip(theirs, ours, strict=True))
        except (RuntimeError, TypeError, ValueError):  # the function has another signature or result
            return False
        if any(x.dtype != y.dtype or not x.equal(y) for x, y in pairs):
            return False
    return True


def freeze_frequencies(model: Any, max_tokens: int) -> None:
    """Fix the rotary frequencies, so that a token's logprob depends only on its own sequence and equals the engine's.

    For `dynamic` and `longrope` scaling, transformers chooses the frequencies in every forward pass, by the longest
    sequence in the row. vLLM chooses them once. For `longrope`, it goes by the longest sequence that it allows
    (max_model_len). For `dynamic`, it keeps the frequencies that the model was trained with. This function does the
    same. `max_tokens` is the length of the longest sequence that the run allows.
    """
    for module in model.modules():
        for layer_type, rope_type in _scalings(module).items():
            if "dynamic" not in rope_type and rope_type != "longrope":
                continue
            if rope_type == "longrope":
                _angles(module, [max_tokens - 1], layer_type)  # makes the module choose its frequencies and keep them
            is_single = layer_type is None
            module.rope_type = "default" if is_single else module.rope_type | {layer_type: "default"}
            short = _angles(module, [0, 1], layer_type)
            long = _angles(module, [0, 1, max_tokens - 1], layer_type)
            if not all(torch.equal(one, other[:, :2]) for one, other in zip(short, long, strict=True)):
                ropes = module.config.rope_parameters
                parameters = ropes if is_single else ropes[layer_type]
                trained = parameters.get("original_max_position_embeddings", module.config.max_position_embeddings)
                raise ConfigError(
                    f"{type(model).__name__}: its rotary frequencies ({rope_type}) depend on the longest sequence in "
                    "a packed row, so its logprobs would too. Keep data.max_prompt_tokens plus "
                    f"rollout.max_new_tokens (and eval.max_new_tokens) at most {trained}, or set another model.path"
                )


def _scalings(module: Any) -> dict[str | None, str]:
    """Return the rope type of each layer type of a rotary module. The key is None if all layers have the same."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        return dict(rope_type)
    return {None: rope_type} if isinstance(rope_type, str) else {}


def _angles(module: Any, positions: list[int], layer_type: str | None) -> list[Tensor]:
    device = next(module.buffers()).device
    options = {} if layer_type is None else {"layer_type": layer_type}
    return list(module(torch.zeros(1, device=device), torch.tensor([positions], device=device), **options))
