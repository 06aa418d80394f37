"""A batch of random tokens with given lengths, one group each, for benchmarks of the learner."""

import torch
from torch import Tensor

from rl.data.batch import Batch, batch_of_responses


def random_batch(lengths: Tensor, prompt_lengths: Tensor, vocab: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    num_tokens, num_sequences = int(lengths.sum()), len(lengths)
    return batch_of_responses(
        tokens=torch.randint(0, vocab, (num_tokens,), generator=generator),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
        rewards=torch.zeros(num_sequences),
        group_ids=torch.arange(num_sequences),
        truncated=torch.zeros(num_sequences, dtype=torch.bool),
        advantages=torch.randn(num_sequences, generator=generator).repeat_interleave(lengths),
    )
