"""Attention over a ragged batch, registered with transformers under the name `ragged`.

A micro-batch is one row of tokens in which sequences lie end to end; where they begin travels through the model's
keyword arguments. Each sequence attends causally to itself alone. Exact on every device: sequences are gathered into
a padded block, where padding comes after the last real key and so is never attended to.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rl.config import ConfigError

RAGGED = "ragged"


def ragged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,
    attention_mask: None,
    *,
    segment_ids: Tensor,  # [T]
    positions: Tensor,  # [T]
    padded_shape: tuple[int, int],  # sequences, longest length
    num_riders: int = 0,  # tokens at the end that are one more sequence, not among these
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    num_sequences, longest = padded_shape
    if sliding_window is not None and longest > sliding_window:
        raise ConfigError(
            f"a sequence has {longest} tokens, but the model attends to the last {sliding_window} only, which the "
            "learner does not do yet; lower rollout.max_new_tokens"
        )
    grouped = query.shape[1] != key.shape[1]
    attend = partial(
        F.scaled_dot_product_attention, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=grouped
    )
    count = query.shape[2] - num_riders
    segment_ids, positions = segment_ids[:count], positions[:count]
    parts = []
    if count:
        padded = [_pad(x[0, :, :count], segment_ids, positions, num_sequences, longest) for x in (query, key, value)]
        parts.append(attend(*padded).transpose(1, 2)[segment_ids, positions])
    if num_riders:  # by themselves: in the block they would be padded to the longest sequence
        riders = [x[:, :, count:] for x in (query, key, value)]
        parts.append(attend(*riders)[0].transpose(0, 1))
    return torch.cat(parts).unsqueeze(0), None


def _pad(flat: Tensor, segment_ids: Tensor, positions: Tensor, num_sequences: int, longest: int) -> Tensor:
    """[heads, T, head_dim] -> [S, heads, L, head_dim]."""
    padded = flat.new_zeros(num_sequences, longest, flat.shape[0], flat.shape[2])
    return padded.index_put((segment_ids, positions), flat.transpose(0, 1)).transpose(1, 2)


def register() -> None:
    AttentionInterface.register(RAGGED, ragged_attention)
    # The function above needs no mask; without an entry here transformers would build one of T x T.
    AttentionMaskInterface.register(RAGGED, lambda *args, **kwargs: None)
