"""The prompts that sequences of a batch share, which a forward pass computes only once.

The samples of a group begin with the same prompt, and the model computes the same for it in all of them: a token
depends on what comes before it. So a pass has one row for each token of a prompt, and attention lets every sample see
it. Gradients of all samples add up there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rl.data.batch import Batch, span_indices


class Rows(NamedTuple):
    """The rows of a forward pass. Those of a sequence follow each other."""

    tokens: Tensor  # [N] token of the batch that is computed in each row
    of_tokens: Tensor  # [T] row of each token
    lengths: list[int]  # number of rows of each sequence; what it shares with an earlier one is not among them


def first_with_prompt(batch: Batch) -> list[int]:
    """Return for each sequence the first one with the same prompt."""
    tokens, found = batch.tokens.numpy(), dict[bytes, int]()
    spans = zip(batch.cu_lengths.tolist(), batch.prompt_lengths.tolist())
    return [found.setdefault(tokens[start : start + size].tobytes(), s) for s, (start, size) in enumerate(spans)]


def repeated_prompts(batch: Batch) -> Tensor:
    """Return [S]: the number of tokens at the beginning of each sequence that an earlier one has too."""
    return _repeated(batch, torch.tensor(first_with_prompt(batch), dtype=torch.int64))


def _repeated(batch: Batch, firsts: Tensor) -> Tensor:
    return batch.prompt_lengths * (firsts != torch.arange(batch.num_sequences))


def rows_of(batch: Batch) -> Rows:
    firsts = torch.tensor(first_with_prompt(batch), dtype=torch.int64)
    repeated, starts = _repeated(batch, firsts), batch.cu_lengths[:-1]
    lengths = batch.lengths - repeated
    tokens = span_indices(starts + repeated, lengths)
    of_tokens = torch.empty(batch.num_tokens, dtype=torch.int64)
    of_tokens[tokens] = torch.arange(len(tokens))
    of_tokens[span_indices(starts, repeated)] = of_tokens[span_indices(starts[firsts], repeated)]
    return Rows(tokens, of_tokens, lengths.tolist())
