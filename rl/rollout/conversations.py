"""What an engine's lead records of conversations: turns while they are sampled, and a Batch in messages and files.

Each turn is kept: the ids that the model has read, and what it wrote. A turn whose prompt begins with the whole turn
before it continues the same sequence. Otherwise it begins another sequence of the same sample.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl.data.batch import Batch
from rl.environments.protocol import Ended, Recorded
from rl.rollout.responses import Response, pad_noise

Record = dict[str, Any]  # of a carried conversation: what its tokens do not tell; plain data


@dataclass
class RecordedTurn:
    """One turn of the model."""

    prompt: list[int]
    response: Response = field(default_factory=Response)
    messages: list[dict[str, Any]] = field(default_factory=list)  # what was said since the turn before
    is_cut: bool = False  # it has ended, because it reached its own limit of tokens


@dataclass
class RecordedConversation:
    """The turns of one sample so far. After a round it has ended, or its last turn goes on in the next one."""

    turns: list[RecordedTurn] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)  # of the calls of tools
    is_ended: bool = False
    is_truncated: bool = False
    reward: float = 0.0
    num_new_tokens: int = 0  # that the model has written in this round

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the model has written."""
        return sum(len(turn.response.tokens) for turn in self.turns)

    @property
    def last_tokens(self) -> list[int]:
        """Return what the model has written in its last turn."""
        return self.turns[-1].response.tokens.tolist() if self.turns else []

    @property
    def record(self) -> Record:
        turns = [{"messages": turn.messages, "is_cut": turn.is_cut} for turn in self.turns]
        return {"turns": turns, "counts": self.counts}

    def history(self) -> list[Recorded]:
        """Return the turns for the conversation server. The last one goes on, so its tokens are left out."""
        last = len(self.turns) - 1
        return [
            Recorded(turn.prompt, turn.response.tokens.tolist() if index < last else [], turn.messages, turn.is_cut)
            for index, turn in enumerate(self.turns)
        ]

    def end(self, ended: Ended) -> None:
        self.is_ended, self.counts = True, ended.counts
        self.is_truncated = ended.ending in ("tokens", "context")


@dataclass
class Stretch:
    """A sequence to train on: consecutive turns of a conversation, each of which goes on from the one before."""

    tokens: list[int]
    num_prompt_tokens: int
    logprobs: list[float]
    versions: list[int]
    turns: list[int]  # number of the turn that sampled a token; -1 elsewhere
    noise: bytes = b""

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens that the model has not written."""
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)
        self.turns += [-1] * len(tokens)

    def write(self, number: int, response: Response) -> None:
        """Append what the model has written in a turn."""
        self.tokens += response.tokens
        self.logprobs += response.logprobs
        self.versions += response.versions
        self.turns += [number] * len(response.tokens)
        self.noise = response.noise


def stretches_of(conversation: RecordedConversation, prompt: list[int]) -> Iterator[Stretch]:
    """Yield the sequences of a conversation. One that has never begun is its prompt alone."""
    stretch = None
    for number, turn in enumerate(conversation.turns):
        if stretch is None or turn.prompt[: len(stretch.tokens)] != stretch.tokens:
            if stretch is not None:
                yield stretch
            stretch = Stretch([], len(turn.prompt), [], [], [])
        stretch.read(turn.prompt[len(stretch.tokens) :])
        stretch.write(number, turn.response)
    if stretch is None:
        stretch = Stretch([], len(prompt), [], [], [])
        stretch.read(prompt)
    yield stretch


def pack_conversations(prompt: list[int], position: int, conversations: Sequence[RecordedConversation]) -> Batch:
    """Return the ragged batch of one group, in the order of its samples, and of the stretches of each sample."""
    tokens, logprobs, versions, turns = array("q"), array("f"), array("i"), array("i")
    owners, stretches = [], []
    for sample, conversation in enumerate(conversations):
        for stretch in stretches_of(conversation, prompt):
            owners.append(sample)
            stretches.append(stretch)
            tokens.fromlist(stretch.tokens)
            logprobs.fromlist(stretch.logprobs)
            versions.fromlist(stretch.versions)
            turns.fromlist(stretch.turns)
    numbers = torch.frombuffer(turns, dtype=torch.int32)
    batch = Batch(
        tokens=torch.frombuffer(tokens, dtype=torch.int64),
        lengths=torch.tensor([len(each.tokens) for each in stretches], dtype=torch.int64),
        prompt_lengths=torch.tensor([each.num_prompt_tokens for each in stretches], dtype=torch.int64),
        loss_mask=numbers >= 0,
        versions=torch.frombuffer(versions, dtype=torch.int32),
        rollout_logprobs=torch.frombuffer(logprobs, dtype=torch.float32),
        rewards=torch.tensor([conversations[sample].reward for sample in owners], dtype=torch.float32),
        group_ids=torch.full((len(stretches),), position, dtype=torch.int64),
        truncated=torch.tensor([conversations[sample].is_truncated for sample in owners], dtype=torch.bool),
        turns=numbers,
        samples=torch.tensor(owners, dtype=torch.int64),
    )
    if all(conversation.is_ended for conversation in conversations):
        return batch
    ended = torch.tensor([conversations[sample].is_ended for sample in owners], dtype=torch.bool)
    noise = [b"" if conversations[sample].is_ended else each.noise for sample, each in zip(owners, stretches)]
    return batch.replace(ended=ended, noise=pad_noise(noise))


def unpack_conversations(batch: Batch, records: Sequence[Record | None]) -> list[RecordedConversation]:
    """Return the conversations of an unfinished group. `records` has an entry for each that goes on."""
    assert batch.turns is not None and batch.samples is not None and batch.ended is not None
    assert batch.noise is not None
    conversations = [RecordedConversation(counts=record["counts"] if record else {}) for record in records]
    starts, owners, noise = batch.cu_lengths.tolist(), batch.samples.tolist(), batch.noise.numpy()
    for index, sample in enumerate(owners):
        span = slice(starts[index], starts[index + 1])
        fields = (batch.tokens, batch.turns, batch.rollout_logprobs, batch.versions)
        tokens, numbers, logprobs, versions = (each[span].tolist() for each in fields)
        conversation = conversations[sample]
        conversation.is_ended, conversation.reward = bool(batch.ended[index]), float(batch.rewards[index])
        conversation.is_truncated = bool(batch.truncated[index])
        for begin, end in _runs(numbers):
            response = Response(tokens[begin:end], logprobs[begin:end], versions[begin:end], is_ended=True)
            conversation.turns.append(RecordedTurn(tokens[:begin], response))
        is_last, record = owners[index + 1 :][:1] != [sample], records[sample]
        if is_last and record is not None:
            if len(conversation.turns) < len(record["turns"]):  # the model has read this, but written nothing yet
                conversation.turns.append(RecordedTurn(tokens))
            else:
                conversation.turns[-1].response.noise = noise[index].tobytes()
            conversation.turns[-1].response.is_ended = False
    for conversation, record in zip(conversations, records, strict=True):
        for turn, known in zip(conversation.turns, record["turns"] if record else []):
            turn.messages, turn.is_cut = known["messages"], known["is_cut"]
    return conversations


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield where each turn begins and ends among the tokens."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[begin]:
            if numbers[begin] >= 0:
                yield begin, end
            begin = end
