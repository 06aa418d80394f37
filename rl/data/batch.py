"""The ragged batch: rollouts concatenated as flat tokens, without padding, in host memory.

A batch has T tokens in S sequences. Fields of shape [T] have a value per token, fields of shape [S] one per sequence.
The logprob at position t is that of tokens[t] given the tokens before it in the same sequence. `loss_mask` says
which tokens the policy has sampled. Only these are trained on, and "elsewhere" means all others. Token ids never tell,
because the EOS token may also be the pad token.

In a run with environments, a sample is a conversation, and it may have several sequences: one for each stretch in which
the chat template rewrote nothing. They follow each other in the order in which they were sampled, and have the same
group_id, sample, reward, `truncated` and `ended`. In other runs every sequence is a conversation of its own.

A batch in a message is the bytes of a safetensors file, whose metadata name its format: see `FORMAT`. Files hold groups
instead: see rl/data/group_file.py.
"""

import dataclasses
import json
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

FORMAT = "oneworld rollouts 2"  # changing the fields of `Batch` needs another number


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [T] int64, prompt and response
    lengths: Tensor  # [S] int64, number of tokens of each sequence
    prompt_lengths: Tensor  # [S] int64
    loss_mask: Tensor  # [T] bool, whether the policy has sampled the token
    versions: Tensor  # [T] int32, version of the weights that sampled the token; -1 elsewhere
    rollout_logprobs: Tensor  # [T] float32, by the engine; 0 elsewhere
    rewards: Tensor  # [S] float32
    group_ids: Tensor  # [S] int64, position of the prompt in its batch of the prompt stream
    truncated: Tensor  # [S] bool, whether max_new_tokens cut the response
    turns: Tensor | None = None  # [T] int32, turn that sampled the token, counted from 0; -1 elsewhere
    samples: Tensor | None = None  # [S] int64, sample of the group, counted from 0; None: each sequence is a sample
    ended: Tensor | None = None  # [S] bool, whether the response has ended; None: all have
    noise: Tensor | None = None  # [S, n] uint8, state of each response's random generator; None if all have ended
    lags: Tensor | None = None  # [T] int32, number of updates since the token's version; None: 0 everywhere
    old_logprobs: Tensor | None = None  # [T] float32, by the policy before this batch's first update
    ref_logprobs: Tensor | None = None  # [T] float32, by the reference policy
    certainty: Tensor | None = None  # [T] float32, self-certainty of the policy at the token; 0 elsewhere
    values: Tensor | None = None  # [T] float32, by the critic before this batch's first update; 0 elsewhere
    advantages: Tensor | None = None  # [T] float32; 0 elsewhere
    returns: Tensor | None = None  # [T] float32, targets of the critic; 0 elsewhere

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
    def response_lengths(self) -> Tensor:
        """Return [S]: the number of tokens of each sequence that the policy has sampled."""
        # Faster than `index_add_`. A float32 counts exactly up to 16 million. Its checks would refuse an empty batch.
        return torch.segment_reduce(self.loss_mask.float(), "sum", lengths=self.lengths, unsafe=True).long()

    @property
    def response_segment_ids(self) -> Tensor:
        """Return the sequence of each token that the policy has sampled."""
        return self.segment_ids[self.loss_mask]

    @property
    def starts_conversation(self) -> Tensor:
        """Return [S] bool: whether a sequence is the first of its conversation."""
        starts = torch.ones(self.num_sequences, dtype=torch.bool)
        if self.samples is not None and self.num_sequences:
            names = self.group_ids * (self.samples.max() + 1) + self.samples
            starts[1:] = names[1:] != names[:-1]
            assert starts.sum() == len(names.unique()), "the sequences of a conversation must follow each other"
        return starts

    @property
    def num_conversations(self) -> int:
        return int(self.starts_conversation.sum())

    @property
    def conversation_ids(self) -> Tensor:
        """Return [S]: the index of each sequence's conversation."""
        return self.starts_conversation.cumsum(0) - 1

    @property
    def response_conversation_ids(self) -> Tensor:
        """Return the conversation of each token that the policy has sampled."""
        return self.conversation_ids[self.response_segment_ids]

    @property
    def conversation_lengths(self) -> Tensor:
        """Return the number of tokens that the policy has sampled in each conversation."""
        return self.sum_conversations(self.response_lengths)

    def sum_conversations(self, values: Tensor) -> Tensor:
        """Sum values of sequences over the sequences of each conversation."""
        return values.new_zeros(self.num_conversations).index_add_(0, self.conversation_ids, values)

    def response_spans(self) -> list[tuple[int, int]]:
        """Return the start and the end of what follows each prompt among the tokens."""
        ends = self.lengths.cumsum(0)
        return list(zip((ends - self.lengths + self.prompt_lengths).tolist(), ends.tolist()))

    def trained_sequences(self, mask_truncated: bool) -> list[int]:
        """Return the indices of the sequences to learn from: all, or with `mask_truncated` those not truncated."""
        return (~self.truncated).nonzero().flatten().tolist() if mask_truncated else list(range(self.num_sequences))

    def at_responses(self, values: Tensor) -> Tensor:
        """Scatter values of the tokens in `loss_mask` to [T], with 0 elsewhere."""
        mask = self.loss_mask
        assert len(values) == mask.sum(), f"{len(values)} values for {mask.sum()} response tokens"
        return values.new_zeros(self.num_tokens).masked_scatter(mask, values)

    def at_sequences(self, sequences: Sequence[int], values: Tensor) -> Tensor:
        """Scatter values of the tokens of these sequences to [T], with 0 elsewhere."""
        return values.new_zeros(self.num_tokens).index_copy(0, self.token_indices(sequences), values)

    def token_indices(self, sequences: Sequence[int]) -> Tensor:
        """Return the indices of these sequences' tokens in the batch."""
        rows = torch.tensor(list(sequences), dtype=torch.int64)
        return span_indices(self.cu_lengths[rows], self.lengths[rows])

    def select(self, sequences: Sequence[int]) -> "Batch":
        """Return a batch of these sequences, in this order."""
        rows, tokens = torch.tensor(list(sequences), dtype=torch.int64), self.token_indices(sequences)
        tensors = self.tensors().items()
        return Batch(**{name: value[rows if name in SEQUENCE_FIELDS else tokens] for name, value in tensors})

    def replace(self, **changes: Tensor) -> "Batch":
        return dataclasses.replace(self, **changes)

    def without(self, names: Collection[str]) -> "Batch":
        """Return the batch without these optional fields."""
        return Batch(**{name: value for name, value in self.tensors().items() if name not in names})

    def to_bytes(self) -> bytes:
        """Return the batch as the bytes of a safetensors file: the same as `safetensors.torch.save` returns, which
        takes three times as long for the few tokens of a group."""
        tensors = self.tensors()
        header: dict[str, Any] = {"__metadata__": {"format": FORMAT}}
        parts, end = list[bytes](), 0
        for name in sorted(tensors, key=lambda name: (DTYPES.index(tensors[name].dtype), name)):
            value = tensors[name]
            parts.append(value.numpy().tobytes())
            place = [end, end := end + len(parts[-1])]
            header[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": [*value.shape], "data_offsets": place}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return b"".join([struct.pack("<Q", len(text)), text, *parts])

    @staticmethod
    def from_bytes(data: bytes | bytearray) -> "Batch":
        """Return the batch in the bytes of a safetensors file. Raise ValueError if it has another format."""
        if (found := read_metadata(data).get("format")) != FORMAT:
            raise ValueError(f"got rollouts of the format {found!r}, but this program reads {FORMAT!r}")
        return Batch(**safetensors.torch.load(bytes(data)))

    @staticmethod
    def concat(batches: Sequence["Batch"]) -> "Batch":
        """Concatenate batches with the same fields. Those without sequences may lack optional ones."""
        filled = [batch for batch in batches if batch.num_sequences] or [*batches[:1], empty_batch()][:1]
        parts = [batch.tensors() for batch in filled]
        return Batch(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are present, by name."""
        named = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if value is not None}


# Types of fields, and their names in a file, in the order in which safetensors writes them.
DTYPE_NAMES = {torch.int64: "I64", torch.float32: "F32", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
DTYPES = list(DTYPE_NAMES)
SEQUENCE_FIELDS = ("lengths", "prompt_lengths", "rewards", "group_ids", "truncated", "samples", "ended", "noise")


def span_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the indices of spans that begin at `starts`, one span after the other."""
    places = torch.arange(sum(lengths.tolist()))  # not lengths.sum(), whose value would count as a wait for a device
    return places + torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)


def read_metadata(data: bytes | bytearray) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raise ValueError if its header is damaged, even on purpose."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        metadata = json.loads(bytes(data[8 : 8 + length])).get("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata must be texts")
    except (struct.error, ValueError, AttributeError, RecursionError) as error:
        raise ValueError("this is not a safetensors file, or its header is damaged") from error
    return metadata


def empty_batch() -> Batch:
    integers, floats = torch.empty(0, dtype=torch.int64), torch.empty(0)
    return Batch(
        tokens=integers,
        lengths=integers,
        prompt_lengths=integers,
        loss_mask=integers.bool(),
        versions=integers.int(),
        rollout_logprobs=floats,
        rewards=floats,
        group_ids=integers,
        truncated=integers.bool(),
    )


def batch_of_responses(*, lengths: Tensor, prompt_lengths: Tensor, **fields: Tensor) -> Batch:
    """Return a batch of sequences that are a prompt and then a response. All tokens of a response are trained on."""
    spans = torch.stack([prompt_lengths, lengths - prompt_lengths], 1).flatten()
    loss_mask = torch.repeat_interleave(torch.tensor([False, True]).repeat(len(lengths)), spans)
    return Batch(lengths=lengths, prompt_lengths=prompt_lengths, loss_mask=loss_mask, **fields)
