"""A batch of random tokens with given lengths, for benchmarks of the learner."""

import torch
from torch import Tensor

from rl.data.batch import Batch, batch_of_responses


def random_batch(lengths: Tensor, prompt_lengths: Tensor, vocab: int, num_samples: int = 1) -> Batch:
    """Return a batch in which `num_samples` sequences after each other begin with the same prompt."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_sequences = int(lengths.sum()), len(lengths)
    tokens = torch.randint(0, vocab, (num_tokens,), generator=generator)
    parts = tokens.split(lengths.tolist())
    for number, (part, size) in enumerate(zip(parts, prompt_lengths.tolist(), strict=True)):
        part[:size] = parts[number - number % num_samples][:size]
    return batch_of_responses(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
        rewards=torch.zeros(num_sequences),
        group_ids=torch.arange(num_sequences) // num_samples,
        truncated=torch.zeros(num_sequences, dtype=torch.bool),
        advantages=torch.randn(num_sequences, generator=generator).repeat_interleave(lengths),
    )
