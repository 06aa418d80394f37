"""The prompt stream: rows in an order that depends on the seed and the epoch alone.

A position in the stream is all there is to save: position // number of rows is the epoch, and each epoch is a
permutation of its own. Batch k is the interval [k * n, (k + 1) * n) of the stream, whoever samples it and whenever.
Parts with weights are interleaved by a fixed schedule, and each goes through epochs of its own.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import floor
from typing import Any, NamedTuple, Protocol

import xxhash


class Tokenizer(Protocol):
    bos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True)
class Prompt:
    id: int  # row among those of all files
    epoch: int
    text: str
    answer: str
    tokens: list[int]
    row: dict[str, Any] = field(default_factory=dict)  # all columns, for rewards

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sample_seed(run_seed: int, epoch: int, prompt_id: int, sample_index: int) -> int:
    """A sample's seed never depends on a rank, a step or a time, so neither do its tokens."""
    digest = hashlib.blake2b(f"{run_seed}/{epoch}/{prompt_id}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Part(NamedTuple):
    """Rows of a stream that follow one another, with a share of it."""

    num_rows: int
    weight: Fraction


class PromptStream:
    def __init__(self, prompts: Sequence[Prompt], seed: int, parts: Sequence[Part] = ()):
        """Without parts all rows are shuffled together."""
        self.position = 0
        self._prompts, self._seed = prompts, seed
        self._parts = parts or [Part(len(prompts), Fraction(1))]
        assert sum(part.num_rows for part in self._parts) == len(prompts)
        self._firsts = [sum(part.num_rows for part in self._parts[:index]) for index in range(len(self._parts))]
        self._orders: list[tuple[int, list[int]]] = [(-1, [])] * len(self._parts)  # of each part: epoch, order

    def __len__(self) -> int:
        """Positions of one epoch; where parts are mixed, some of its prompts may come twice and others not."""
        return len(self._prompts)

    @cached_property
    def digest(self) -> str:
        """Of all rows and their shares: a position means nothing in other data."""
        hasher = xxhash.xxh3_64(str(self._seed).encode())
        for prompt in self._prompts:
            hasher.update(f"\0{prompt.text}\0{prompt.answer}".encode())
        total = sum(part.weight for part in self._parts)
        for part in self._parts if len(self._parts) > 1 else ():
            hasher.update(f"\0{part.num_rows}\0{part.weight / total}".encode())
        return hasher.hexdigest()

    def take(self, count: int) -> list[Prompt]:
        taken = [self._at(self.position + offset) for offset in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> Prompt:
        index, place = part_at(position, [part.weight for part in self._parts])
        epoch, place = divmod(place, self._parts[index].num_rows)
        if epoch != self._orders[index][0]:
            order = list(range(self._parts[index].num_rows))
            name = f"{index}/{epoch}" if len(self._parts) > 1 else str(epoch)
            random.Random(f"{self._seed}/{name}").shuffle(order)
            self._orders[index] = (epoch, order)
        return replace(self._prompts[self._firsts[index] + self._orders[index][1][place]], epoch=epoch)


def part_at(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Which part this position takes from, and how often the part was taken from before.

    The k-th prompt of a part with weight w is due at (k + 1/2) / w, and the stream is all parts in the order of these
    times. So every stretch of it holds the parts in proportion, up to a prompt or two, and a position needs no history:
    just before the time position / total weight all but a few of the prompts are counted at once.
    """
    time = max(Fraction(0), (position - Fraction(len(weights), 2)) / sum(weights))
    taken = [floor(time * weight + Fraction(1, 2)) for weight in weights]
    index = 0
    for _ in range(position + 1 - sum(taken)):
        index = min(range(len(weights)), key=lambda part: (taken[part] + Fraction(1, 2)) / weights[part])
        taken[index] += 1
    return index, taken[index] - 1
