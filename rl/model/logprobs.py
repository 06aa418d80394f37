"""Token logprobs of a ragged micro-batch under a model."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl.data.batch import Batch


class TokenScores(NamedTuple):
    """Of the R response tokens of a micro-batch, laid end to end."""

    logprobs: Tensor  # [R] float32, carries the gradient
    entropy: Tensor  # [R] float32, without gradient


def score_responses(model: nn.Module, batch: Batch, temperature: float) -> TokenScores:
    """Logprobs of the response tokens at this temperature. An empty batch still runs the forward: it is a
    collective."""
    device = batch.tokens.device
    response = batch.response_mask.nonzero().squeeze(1)
    if batch.num_tokens:
        tokens, positions, segment_ids = batch.tokens, batch.positions, batch.segment_ids
        padded_shape = (batch.num_sequences, int(batch.lengths.max()))
    else:
        tokens = positions = segment_ids = torch.zeros(1, dtype=torch.int64, device=device)
        padded_shape = (1, 1)
    output = model(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=response - 1,  # a token is predicted at the position before it
        segment_ids=segment_ids,
        positions=positions,
        padded_shape=padded_shape,
    )
    logits = output.logits[0].float() / temperature
    all_logprobs = torch.log_softmax(logits, dim=-1)
    chosen = all_logprobs.gather(1, batch.tokens[response].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return TokenScores(chosen, entropy)
