"""The ragged batch: rollouts concatenated as flat tokens, without padding, in host memory.

A batch has T tokens in S sequences. Fields of shape [T] have a value per token, fields of shape [S] one per sequence.
The logprob at position t is that of tokens[t] given the tokens before it in the same sequence. Lengths say
which tokens belong to a response. Token ids never do, because the EOS token may also be the pad token.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [T] int64, prompt and response
    lengths: Tensor  # [S] int64, number of tokens of each sequence
    prompt_lengths: Tensor  # [S] int64
    versions: Tensor  # [T] int32, version of the weights that sampled the token; -1 in prompts
    rollout_logprobs: Tensor  # [T] float32, by the engine; 0 in prompts
    rewards: Tensor  # [S] float32
    group_ids: Tensor  # [S] int64, position of the prompt in its batch of the prompt stream
    truncated: Tensor  # [S] bool, whether the token limit cut the response
    old_logprobs: Tensor | None = None  # [T] float32, by the policy before this batch's first update
    ref_logprobs: Tensor | None = None  # [T] float32, by the reference policy
    certainty: Tensor | None = None  # [T] float32, self-certainty of the policy at the token; 0 in prompts
    values: Tensor | None = None  # [T] float32, by the critic before this batch's first update; 0 in prompts
    advantages: Tensor | None = None  # [T] float32; 0 in prompts
    returns: Tensor | None = None  # [T] float32, targets of the critic; 0 in prompts

    @property
    def num_sequences(self) -> int:
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def cu_lengths(self) -> Tensor:
        """Return [S + 1]: the start of each sequence, and the end of the last."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def segment_ids(self) -> Tensor:
        """Return [T]: the index of each token's sequence."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths)

    @property
    def positions(self) -> Tensor:
        """Return [T]: the position of each token in its sequence."""
        return torch.arange(self.num_tokens) - torch.repeat_interleave(self.cu_lengths[:-1], self.lengths)

    @property
    def response_mask(self) -> Tensor:
        """Return [T] bool: whether the token belongs to a response."""
        return self.positions >= torch.repeat_interleave(self.prompt_lengths, self.lengths)

    @property
    def response_lengths(self) -> Tensor:
        return self.lengths - self.prompt_lengths

    @property
    def response_segment_ids(self) -> Tensor:
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.response_lengths)

    def response_spans(self) -> list[tuple[int, int]]:
        """Return the start and the end of each response among the tokens."""
        ends = self.lengths.cumsum(0)
        return list(zip((ends - self.response_lengths).tolist(), ends.tolist()))

    def trained_sequences(self, mask_truncated: bool) -> list[int]:
        """Return the indices of the sequences to learn from: all, or with `mask_truncated` those not truncated."""
        return (~self.truncated).nonzero().flatten().tolist() if mask_truncated else list(range(self.num_sequences))

    def at_responses(self, values: Tensor) -> Tensor:
        """Scatter values of the response tokens to [T], with 0 in prompts."""
        mask = self.response_mask
        assert len(values) == mask.sum(), f"{len(values)} values for {mask.sum()} response tokens"
        return values.new_zeros(self.num_tokens).masked_scatter(mask, values)

    def at_sequences(self, sequences: Sequence[int], values: Tensor) -> Tensor:
        """Scatter values of the tokens of these sequences to [T], with 0 elsewhere."""
        return values.new_zeros(self.num_tokens).index_copy(0, self.token_indices(sequences), values)

    def token_indices(self, sequences: Sequence[int]) -> Tensor:
        """Return the indices of these sequences' tokens in the batch."""
        starts = self.cu_lengths.tolist()
        spans = [torch.arange(starts[sequence], starts[sequence + 1]) for sequence in sequences]
        return torch.cat([torch.empty(0, dtype=torch.int64), *spans])

    def select(self, sequences: Sequence[int]) -> "Batch":
        """Return a batch of these sequences, in this order."""
        rows, tokens = torch.tensor(list(sequences), dtype=torch.int64), self.token_indices(sequences)
        tensors = self._tensors().items()
        return Batch(**{name: value[rows if name in SEQUENCE_FIELDS else tokens] for name, value in tensors})

    def replace(self, **changes: Tensor) -> "Batch":
        return dataclasses.replace(self, **changes)

    def to_bytes(self) -> bytes:
        """Return the batch as the bytes of a safetensors file."""
        return safetensors.torch.save({name: value.contiguous() for name, value in self._tensors().items()})

    @staticmethod
    def from_bytes(data: bytes | bytearray) -> "Batch":
        return Batch(**safetensors.torch.load(bytes(data)))

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        parts = [batch._tensors() for batch in batches] or [empty_batch()._tensors()]
        return Batch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def _tensors(self) -> dict[str, Tensor]:
        named = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if value is not None}


SEQUENCE_FIELDS = ("lengths", "prompt_lengths", "rewards", "group_ids", "truncated")


def empty_batch() -> Batch:
    integers, floats = torch.empty(0, dtype=torch.int64), torch.empty(0)
    return Batch(integers, integers, integers, integers.int(), floats, floats, integers, integers.bool())
