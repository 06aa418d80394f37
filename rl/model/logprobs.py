"""Token logprobs of a ragged micro-batch under a model."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl.data.batch import Batch


class TokenScores(NamedTuple):
    """Of the R response tokens of a micro-batch, laid end to end."""

    logprobs: Tensor  # [R] float32, carries the gradient
    entropy: Tensor  # [R] float32, without gradient
    probe_logits: Tensor  # [P, vocabulary] float32 of the probe that was carried along, without gradient


def score_responses(model: nn.Module, batch: Batch, temperature: float, probe: Sequence[int] = ()) -> TokenScores:
    """Logprobs of the response tokens at this temperature. An empty batch still runs the forward: it is a
    collective. The tokens of a `probe` ride along as one more sequence, whose logits cost no forward of their own."""
    device = batch.tokens.device
    response = batch.response_mask.nonzero().squeeze(1)
    riders = torch.tensor(probe or ([] if batch.num_tokens else [0]), dtype=torch.int64, device=device)
    places = torch.arange(len(riders), device=device)
    tokens, positions = torch.cat([batch.tokens, riders]), torch.cat([batch.positions, places])
    segment_ids = torch.cat([batch.segment_ids, torch.full_like(places, batch.num_sequences)])
    output = model(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        # A token is predicted at the position before it; of a probe every position is wanted.
        logits_to_keep=torch.cat([response - 1, batch.num_tokens + places[: len(probe)]]),
        segment_ids=segment_ids,
        positions=positions,
        padded_shape=(batch.num_sequences, int(batch.lengths.max()) if batch.num_sequences else 0),
        num_riders=len(riders),
    )
    kept, probe_logits = output.logits[0].float().split([len(response), len(probe)])
    logits = kept / temperature
    all_logprobs = torch.log_softmax(logits, dim=-1)
    chosen = all_logprobs.gather(1, batch.tokens[response].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    return TokenScores(chosen, entropy, probe_logits.detach().clone())  # a view would keep all of the logits
