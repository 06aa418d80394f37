"""Token logprobs of a ragged micro-batch under a model, whose forward pass is replaced by one that returns them.

The head runs inside the model's own forward: there FSDP has its weight in place, and frees it again.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl.config import ConfigError
from rl.data.batch import Batch
from rl.model import attention
from rl.model.head import token_scores


class TokenScores(NamedTuple):
    """Of the R response tokens of a micro-batch, laid end to end."""

    logprobs: Tensor  # [R] float32, carries the gradient
    entropy: Tensor  # [R] float32, carries the gradient
    probe_logits: Tensor  # [P, vocabulary] float32 of the probe that was carried along, without gradient


def give_scores(model: Any) -> None:
    """From now on this causal LM of transformers returns TokenScores."""
    if getattr(model.config, "final_logit_softcapping", None):
        raise ConfigError(f"{type(model).__name__} caps its logits, which the learner does not do yet; choose another")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{type(model).__name__} has a bias in its head, which the learner does not add yet")
    model.forward = MethodType(_scores_of, model)


def _scores_of(
    self: Any,
    tokens: Tensor,  # [T]
    positions: Tensor,  # [T]
    kept: Tensor,  # [R + P] places whose logits count: those before response tokens, then a probe's
    targets: Tensor,  # [R]
    temperature: float,
    **about_sequences: Any,
) -> TokenScores:
    output = self.get_decoder()(
        input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **about_sequences
    )
    hidden, riders = output.last_hidden_state[0, kept].split([len(targets), len(kept) - len(targets)])
    weight, divisor = self.get_output_embeddings().weight, _logit_divisor(self.config)
    logprobs, entropy = token_scores(hidden, weight, targets, temperature * divisor)
    with torch.no_grad():
        probe_logits = (riders @ weight.t()).float() / divisor
    return TokenScores(logprobs, entropy, probe_logits)


def _logit_divisor(config: Any) -> float:
    """Granite divides its logits by a constant, Cohere multiplies them."""
    return getattr(config, "logits_scaling", 1.0) / getattr(config, "logit_scale", 1.0)


def hidden_size_of(model: Any) -> int:
    return model.config.get_text_config().hidden_size


def score_responses(
    model: Any, batch: Batch, temperature: float, device: torch.device, probe: Sequence[int] = ()
) -> TokenScores:
    """Scores of the response tokens of a batch in host memory, on the device. An empty batch still runs the forward: it
    is a collective. The tokens of a `probe` ride along as one more sequence."""
    response = batch.response_mask.nonzero().squeeze(1)
    riders = torch.tensor(probe or ([] if batch.num_tokens else [0]), dtype=torch.int64)
    places = torch.arange(len(riders))
    inputs = {
        "tokens": torch.cat([batch.tokens, riders]),
        "positions": torch.cat([batch.positions, places]),
        # A token is predicted at the place before it; of a probe every place is wanted.
        "kept": torch.cat([response - 1, batch.num_tokens + places[: len(probe)]]),
        "targets": batch.tokens[response],
    }
    moved = {name: attention.to_device(tensor, device) for name, tensor in inputs.items()}
    name = model.config._attn_implementation
    about = attention.arguments(name, batch.lengths.tolist(), len(riders), device)
    return model(**moved, temperature=temperature, **about)
