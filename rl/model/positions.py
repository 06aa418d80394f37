"""Fix rotary frequencies, so that they do not depend on the sequences that a token is packed with.

For `dynamic` and `longrope` scaling, transformers chooses the frequencies in every forward pass, by the longest
sequence of the row. vLLM chooses them once. For `longrope` it uses the longest sequence that it allows (max_model_len).
For `dynamic` it uses the frequencies of training. The learner does the same as vLLM, so a token's logprob depends only
on its own sequence and equals the engine's.
"""

from typing import Any

import torch
from torch import Tensor

from rl.config.schema import ConfigError


def freeze_frequencies(model: Any, max_tokens: int) -> None:
    """Fix the frequencies for sequences of at most `max_tokens` tokens, the longest that the run allows."""
    for module in model.modules():
        for layer_type, rope_type in _scalings(module).items():
            if "dynamic" not in rope_type and rope_type != "longrope":
                continue
            if rope_type == "longrope":
                _angles(module, [max_tokens - 1], layer_type)  # makes the module choose its frequencies and keep them
            is_single = layer_type is None
            module.rope_type = "default" if is_single else module.rope_type | {layer_type: "default"}
            if not _is_frozen(module, max_tokens, layer_type):
                raise ConfigError(
                    f"{type(model).__name__}: its rotary frequencies ({rope_type}) depend on the longest sequence that "
                    "a token is packed with, and so would its logprob. Keep data.max_prompt_tokens plus "
                    "rollout.max_new_tokens (and eval.max_new_tokens) at most "
                    f"{_trained_length(module, layer_type)}, or give another model.path"
                )


def _scalings(module: Any) -> dict[str | None, str]:
    """Return the kinds of scaling of a rotary module by layer type. The key is None if it has only one kind."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        return dict(rope_type)
    return {None: rope_type} if isinstance(rope_type, str) else {}


def _angles(module: Any, positions: list[int], layer_type: str | None) -> list[Tensor]:
    device = next(module.buffers()).device
    options = {} if layer_type is None else {"layer_type": layer_type}
    return list(module(torch.zeros(1, device=device), torch.tensor([positions], device=device), **options))


def _is_frozen(module: Any, max_tokens: int, layer_type: str | None) -> bool:
    short = _angles(module, [0, 1], layer_type)
    long = _angles(module, [0, 1, max_tokens - 1], layer_type)
    return all(torch.equal(one, other[:, :2]) for one, other in zip(short, long, strict=True))


def _trained_length(module: Any, layer_type: str | None) -> int:
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return parameters.get("original_max_position_embeddings", module.config.max_position_embeddings)
