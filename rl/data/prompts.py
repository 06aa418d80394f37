"""The prompt stream: rows in an order that depends only on the seed and the epoch.

The position alone decides which prompt comes there, no matter who samples it and when. The epoch is position // number
of rows, and each epoch has its own permutation. Sources with weights are interleaved by a fixed schedule, and each of
them has its own epochs.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import floor
from typing import Any, NamedTuple, Protocol

import xxhash


class Tokenizer(Protocol):
    bos_token_id: int | None
    chat_template: Any  # None if the model has none

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str: ...


def decode_all(tokenizer: Tokenizer, sequences: list[list[int]]) -> list[str]:
    """Return the text of each sequence, without special tokens, as `Tokenizer.decode` does.

    Most tokenizers of transformers only call the package tokenizers, which decodes many sequences on all cores.
    """
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None or not _only_calls(tokenizer, inner):
        return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in sequences]
    return list(inner.decode_batch(sequences, skip_special_tokens=True))


def _only_calls(tokenizer: Any, inner: Any) -> bool:
    """Return whether `tokenizer` adds nothing to the texts of the tokenizer inside it, such as a removal of spaces."""
    is_plain = type(tokenizer)._decode.__module__ == "transformers.tokenization_utils_tokenizers"
    force = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    keeps_spaces = not tokenizer.clean_up_tokenization_spaces or (type(inner.model).__name__ == "BPE" and not force)
    return is_plain and keeps_spaces


@dataclass(frozen=True)
class Prompt:
    id: int  # number of the row among the rows of all files
    epoch: int
    text: str
    answer: str
    tokens: list[int]  # empty if the prompts were read without a tokenizer
    row: dict[str, Any] = field(default_factory=dict)  # all columns, for rewards
    place: str = ""  # file and line of the row, for messages
    number: int = -1  # place in the prompt stream, counted from the start of the run; -1: not from the stream


def sample_seed(run_seed: int, epoch: int, prompt_id: int, sample_index: int) -> int:
    """Return the seed of a sample. It does not depend on a rank, a step or the time, so neither do the tokens."""
    digest = hashlib.blake2b(f"{run_seed}/{epoch}/{prompt_id}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn of the sample that has this seed."""
    digest = hashlib.blake2b(f"{seed}/turn {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class WeightedSource(NamedTuple):
    num_rows: int  # consecutive rows of one file or folder
    weight: Fraction  # share of the stream, relative to the weights of the other sources


class PromptStream:
    """An endless stream of prompts. Without sources, all rows are shuffled together."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, sources: Sequence[WeightedSource] = ()):
        self.prompts, self._seed = prompts, seed
        self.sources = sources or [WeightedSource(len(prompts), Fraction(1))]
        *self._starts, end = accumulate((source.num_rows for source in self.sources), initial=0)
        assert end == len(prompts)
        self._orders: list[dict[int, list[int]]] = [{} for _ in self.sources]  # of each source, by epoch

    def __len__(self) -> int:
        """Return the length of an epoch. With several sources, an epoch may repeat some prompts and omit others."""
        return len(self.prompts)

    @cached_property
    def digest(self) -> str:
        """Return a digest of all rows and weights. A saved position is valid only for the same digest."""
        hasher = xxhash.xxh3_64(str(self._seed).encode())
        for prompt in self.prompts:
            hasher.update(f"\0{prompt.text}\0{prompt.answer}".encode())
        total = sum(source.weight for source in self.sources)
        for source in self.sources if len(self.sources) > 1 else ():
            hasher.update(f"\0{source.num_rows}\0{source.weight / total}".encode())
        return hasher.hexdigest()

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position."""
        weights = [source.weight for source in self.sources]
        index, count = source_at(position, weights) if len(weights) > 1 else (0, position)
        epoch, place = divmod(count, self.sources[index].num_rows)
        row = self._starts[index] + self._order(index, epoch)[place]
        return replace(self.prompts[row], epoch=epoch, number=position)

    def _order(self, index: int, epoch: int) -> list[int]:
        """Return the order of the rows of a source in an epoch. The last two are kept, because a round may continue
        prompts of the epoch before."""
        orders = self._orders[index]
        if epoch not in orders:
            order = list(range(self.sources[index].num_rows))
            name = f"{index}/{epoch}" if len(self.sources) > 1 else str(epoch)
            random.Random(f"{self._seed}/{name}").shuffle(order)
            if len(orders) == 2:
                del orders[next(iter(orders))]
            orders[epoch] = order
        return orders[epoch]


def source_at(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Return the index of the source at this position, and how many of its prompts come before.

    The k-th prompt of a source with weight w is due at (k + 1/2) / w, and the stream is ordered by these times. So
    every interval holds the sources in proportion, up to a prompt or two. No history is needed. With n sources, at the
    time (position - n/2) / total weight, at most `position` prompts are due and fewer than n of them are missing.
    The loop adds the missing ones, and then the prompt at the position.
    """
    time = max(Fraction(0), (position - Fraction(len(weights), 2)) / sum(weights))
    taken = [floor(time * weight + Fraction(1, 2)) for weight in weights]
    index = 0
    for _ in range(position + 1 - sum(taken)):
        index = min(range(len(weights)), key=lambda each: (taken[each] + Fraction(1, 2)) / weights[each])
        taken[index] += 1
    return index, taken[index] - 1
