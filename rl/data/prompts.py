"""The prompt stream: rows of a jsonl file in an order that depends on the seed and the epoch alone.

A position in the stream is all there is to save: position // number of rows is the epoch, and each epoch is a
permutation of its own. Batch k is the interval [k * n, (k + 1) * n) of the stream, whoever samples it and whenever.
"""

import hashlib
import json
import random
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import xxhash

from rl.config import ConfigError, DataConfig, resolve_path


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


@dataclass(frozen=True)
class Prompt:
    id: int  # row in the file
    epoch: int
    text: str
    answer: str
    tokens: list[int]
    row: dict[str, Any] = field(default_factory=dict)  # as it stands in the file, for rewards

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def sample_seed(run_seed: int, epoch: int, prompt_id: int, sample_index: int) -> int:
    """A sample's seed never depends on a rank, a step or a time, so neither do its tokens."""
    digest = hashlib.blake2b(f"{run_seed}/{epoch}/{prompt_id}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def read_prompts(path: str, data: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    file = resolve_path(path)
    if not file.is_file():
        raise ConfigError(
            f"no prompts at {path}; data.train and data.eval are jsonl files with the fields {data.prompt_key!r} and "
            f"{data.answer_key!r}"
        )
    prompts: list[Prompt] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            prompts.append(_read_row(file, number, line, len(prompts), data, tokenizer))
    if not prompts:
        raise ConfigError(f"{file} holds no prompts; it needs at least one line")
    return prompts


def _read_row(file: Path, number: int, line: str, row_id: int, data: DataConfig, tokenizer: Tokenizer) -> Prompt:
    try:
        row = json.loads(line)
        text, answer = row[data.prompt_key], row[data.answer_key]
        if text is None or answer is None:
            raise KeyError
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}, line {number} is not JSON ({error}); each line is one object") from None
    except (KeyError, TypeError):
        raise ConfigError(
            f"{file}, line {number} has no field {data.prompt_key!r} or {data.answer_key!r}; got {line[:80]!r}: set "
            "data.prompt_key and data.answer_key to the names in the file"
        ) from None
    if data.chat_template:
        conversation = [{"role": "user", "content": str(text)}]
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.encode(str(text), add_special_tokens=False)
    if not 0 < len(tokens) <= data.max_prompt_tokens:
        raise ConfigError(
            f"{file}, line {number} has {len(tokens)} tokens; a prompt has 1 to data.max_prompt_tokens = "
            f"{data.max_prompt_tokens}: raise the limit or drop the row"
        )
    return Prompt(row_id, 0, str(text), str(answer), tokens, row)


class PromptStream:
    def __init__(self, prompts: list[Prompt], seed: int):
        self.position = 0
        self._prompts, self._seed = prompts, seed
        self._epoch, self._order = -1, list(range(len(prompts)))

    @cached_property
    def digest(self) -> str:
        """Of all rows: a position means nothing in other data."""
        hasher = xxhash.xxh3_64(str(self._seed).encode())
        for prompt in self._prompts:
            hasher.update(f"\0{prompt.text}\0{prompt.answer}".encode())
        return hasher.hexdigest()

    def take(self, count: int) -> list[Prompt]:
        taken = [self._at(self.position + offset) for offset in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return replace(self._prompts[self._order[place]], epoch=epoch)
