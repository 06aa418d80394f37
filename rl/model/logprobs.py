"""Token logprobs and values of a packed micro-batch.

The forward method of a model is replaced by one that returns them. So the head runs inside the model's own forward
pass, where FSDP gathers the head's weight and frees it again.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from rl.config.schema import ConfigError
from rl.data.batch import Batch
from rl.data.shared_prompts import rows_of
from rl.model import attention
from rl.model.head import Reference, Scores, self_certainty, token_scores
from rl.model.host_memory import to_device


def patch_forward_to_score(model: Any, keeps_logits: bool = False) -> None:
    """Let the model return scores. With `keeps_logits`, a backward pass does not compute the logits again."""
    if getattr(model.config, "final_logit_softcapping", None):
        raise ConfigError(f"{type(model).__name__} caps its logits, which the learner does not support; choose another")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"{type(model).__name__} has a bias in its head, which the learner does not support")
    model.keeps_logits = keeps_logits
    patch_forward(model)


def patch_forward(model: Any) -> None:
    model.forward = MethodType(_forward, model)


def _forward(
    self: Any,
    tokens: Tensor,  # [T]
    positions: Tensor,  # [T]
    kept: Tensor,  # [R + P] rows whose logits are needed: those before response tokens, then the probe's
    targets: Tensor,  # [R]
    temperature: float = 1.0,
    wanted: str = "scores",
    reference: Reference | None = None,
    **about_sequences: Any,
) -> Scores | tuple[Tensor, Tensor] | Reference | Tensor:
    """Return what `wanted` names: scores, certainty (logprobs and self-certainty), reference (for a full KL), or values
    (of a critic, whose head has one row)."""
    output = self.get_decoder()(
        input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **about_sequences
    )
    hidden, probe_rows = output.last_hidden_state[0, kept].split([len(targets), len(kept) - len(targets)])
    weight = self.get_output_embeddings().weight
    if wanted == "values":
        return hidden.float() @ weight[0].float()
    # Granite divides its logits by a constant, Cohere multiplies them.
    divisor = getattr(self.config, "logits_scaling", 1.0) / getattr(self.config, "logit_scale", 1.0)
    if wanted == "reference":
        return Reference(hidden, weight, temperature * divisor)
    scores = token_scores(hidden, weight, targets, temperature * divisor, reference, self.keeps_logits)
    if wanted == "certainty":
        return scores.logprobs, self_certainty(hidden, weight, temperature * divisor)
    with torch.no_grad():
        probe_logits = (probe_rows @ weight.t()).float() / divisor
    return scores._replace(probe_logits=probe_logits)


def hidden_size_of(model: Any) -> int:
    return model.config.get_text_config().hidden_size


def score_responses(
    model: Any,
    batch: Batch,
    temperature: float,
    device: torch.device,
    probe: Sequence[int] = (),
    reference: Reference | None = None,
) -> Scores:
    """Return the scores of a batch's response tokens. The batch is in host memory, the scores are on the device. A
    `probe` is one more sequence in the forward pass."""
    return model(**_inputs(model, batch, device, probe), temperature=temperature, reference=reference)


def certainty_of_responses(model: Any, batch: Batch, temperature: float, device: torch.device) -> tuple[Tensor, Tensor]:
    return model(**_inputs(model, batch, device), temperature=temperature, wanted="certainty")


def reference_of_responses(model: Any, batch: Batch, temperature: float, device: torch.device) -> Reference:
    """Return the reference that `score_responses` needs for a KL over the whole vocabulary."""
    return model(**_inputs(model, batch, device), temperature=temperature, wanted="reference")


def value_responses(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """Return the critic's value before each response token, [R] float32."""
    return model(**_inputs(model, batch, device), wanted="values")


def _inputs(model: Any, batch: Batch, device: torch.device, probe: Sequence[int] = ()) -> dict[str, Any]:
    """Return the inputs of a forward pass. An empty batch gets one token, since the forward pass is a collective."""
    rows, response = rows_of(batch), batch.loss_mask.nonzero().squeeze(1)
    extra = torch.tensor(probe or ([] if batch.num_tokens else [0]), dtype=torch.int64)
    places = torch.arange(len(extra))
    inputs = {
        "tokens": torch.cat([batch.tokens[rows.tokens], extra]),
        "positions": torch.cat([batch.positions[rows.tokens], places]),
        # A token is predicted at the row before it. A probe needs all of its rows.
        "kept": torch.cat([rows.of_tokens[response - 1], len(rows.tokens) + places[: len(probe)]]),
        "targets": batch.tokens[response],
    }
    moved = {name: to_device(tensor, device) for name, tensor in inputs.items()}
    return moved | attention.arguments(model, batch.lengths.tolist(), rows, len(extra), device)
