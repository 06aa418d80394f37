"""The ragged batch: rollouts laid end to end as flat tokens, never padded.

T tokens of S sequences. Fields of shape [T] speak of tokens, fields of shape [S] of sequences. A logprob at position
t is the logprob of tokens[t] given what precedes it in its own sequence. Which tokens are trained on follows from the
lengths, never from token ids: an EOS may also be the pad token.
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
    lengths: Tensor  # [S] int64, tokens of each sequence
    prompt_lengths: Tensor  # [S] int64
    versions: Tensor  # [T] int32, weight version that sampled the token; -1 in prompts
    rollout_logprobs: Tensor  # [T] float32, the engine's; 0 in prompts
    rewards: Tensor  # [S] float32
    group_ids: Tensor  # [S] int64, place of the prompt in its batch of the prompt stream
    truncated: Tensor  # [S] bool, cut at the token limit
    old_logprobs: Tensor | None = None  # [T] float32, the policy's before this batch's first update
    ref_logprobs: Tensor | None = None  # [T] float32
    certainty: Tensor | None = None  # [T] float32, the policy's self-certainty where it chose the token; 0 in prompts
    values: Tensor | None = None  # [T] float32, the critic's before this batch's first update; 0 in prompts
    advantages: Tensor | None = None  # [T] float32; 0 in prompts
    returns: Tensor | None = None  # [T] float32, what the critic learns; 0 in prompts

    @property
    def num_sequences(self) -> int:
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def cu_lengths(self) -> Tensor:
        """[S + 1]: where each sequence starts, and the end of the last."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def segment_ids(self) -> Tensor:
        """[T]: the sequence of each token."""
        return torch.repeat_interleave(torch.arange(self.num_sequences, device=self.lengths.device), self.lengths)

    @property
    def positions(self) -> Tensor:
        """[T]: the place of each token in its sequence."""
        starts = torch.repeat_interleave(self.cu_lengths[:-1], self.lengths)
        return torch.arange(self.num_tokens, device=self.tokens.device) - starts

    @property
    def response_mask(self) -> Tensor:
        """[T] bool: the tokens that the policy chose."""
        return self.positions >= torch.repeat_interleave(self.prompt_lengths, self.lengths)

    @property
    def response_lengths(self) -> Tensor:
        return self.lengths - self.prompt_lengths

    def at_responses(self, values: Tensor) -> Tensor:
        """[T] from one value a response token, laid end to end: 0 in prompts."""
        spread = values.new_zeros(self.num_tokens)
        spread[self.response_mask] = values
        return spread

    @property
    def response_segment_ids(self) -> Tensor:
        """The sequence of each response token, laid end to end."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.response_lengths)

    def response_spans(self) -> list[tuple[int, int]]:
        """[S]: where each response begins and ends among the tokens."""
        ends = self.lengths.cumsum(0)
        return list(zip((ends - self.response_lengths).tolist(), ends.tolist()))

    def trained_sequences(self, mask_truncated: bool) -> list[int]:
        """Return the sequences that are learnt from: with `mask_truncated` those that were not cut."""
        return (~self.truncated).nonzero().flatten().tolist() if mask_truncated else list(range(self.num_sequences))

    def at_sequences(self, sequences: Sequence[int], values: Tensor) -> Tensor:
        """Return [T] from the values of these sequences' tokens, laid end to end: 0 in all others."""
        spread = values.new_zeros(self.num_tokens)
        spread[self._tokens_of(sequences)] = values
        return spread

    def _tokens_of(self, sequences: Sequence[int]) -> Tensor:
        """Return the places of these sequences' tokens."""
        cu_lengths = self.cu_lengths.tolist()
        spans = [torch.arange(cu_lengths[s], cu_lengths[s + 1]) for s in sequences]
        index = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)
        return index.to(self.tokens.device)

    def select(self, sequences: Sequence[int]) -> "Batch":
        """These sequences, in this order."""
        index = torch.as_tensor(list(sequences), dtype=torch.int64, device=self.lengths.device)
        token_index = self._tokens_of(sequences)
        picked = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if value is not None:
                picked[entry.name] = value[token_index if entry.name in TOKEN_FIELDS else index]
        return Batch(**picked)

    def replace(self, **changes: Tensor) -> "Batch":
        return dataclasses.replace(self, **changes)

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: value.to(device) for name, value in self._tensors().items()})

    def to_bytes(self) -> bytes:
        """Self-describing: the bytes of a safetensors file."""
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


TOKEN_FIELDS = (
    "tokens",
    "versions",
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "certainty",
    "values",
    "advantages",
    "returns",
)


def empty_batch() -> Batch:
    def none(dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype)

    return Batch(
        tokens=none(torch.int64),
        lengths=none(torch.int64),
        prompt_lengths=none(torch.int64),
        versions=none(torch.int32),
        rollout_logprobs=none(torch.float32),
        rewards=none(torch.float32),
        group_ids=none(torch.int64),
        truncated=none(torch.bool),
    )
