"""The responses of a group: as arrays while an engine samples them, and as a Batch in messages and files.

Between two rounds, a carried group passes through both forms. Arrays are copied as memory then, not value by value.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rl.data.batch import Batch
from rl.rollout.engine import Completion


@dataclass(init=False)
class Response:
    """A response so far. After a round it has ended, or continues from `noise` in the next one."""

    tokens: "array[int]"  # Python 3.11 cannot evaluate this type
    logprobs: "array[float]"
    versions: "array[int]"
    noise: bytes  # see Completion
    is_ended: bool
    is_truncated: bool
    reward: float  # once it has ended and was scored

    def __init__(
        self,
        tokens: Iterable[int] | bytes = (),  # bytes: the values as they lie in memory
        logprobs: Iterable[float] | bytes = (),
        versions: Iterable[int] | bytes = (),
        noise: bytes = b"",
        is_ended: bool = False,
        is_truncated: bool = False,
        reward: float = 0.0,
    ):
        self.tokens, self.logprobs, self.versions = array("q", tokens), array("f", logprobs), array("i", versions)
        self.noise, self.is_ended, self.is_truncated, self.reward = noise, is_ended, is_truncated, reward

    def add(self, completion: Completion, version: int) -> None:
        """Add what an engine has sampled."""
        self.tokens.fromlist(completion.tokens)
        self.logprobs.fromlist(completion.logprobs)
        self.versions += array("i", [version]) * len(completion.tokens)
        self.noise = completion.noise

    def append(self, completion: Completion, version: int, max_new_tokens: int, length: int | None = None) -> None:
        """Append what an engine has sampled. The response has ended unless only the limit of the round cut it.

        With a `length`, it ends at that many tokens, as if the last one were a stop token.
        """
        self.add(completion, version)
        self.is_truncated = completion.is_cut and len(self.tokens) >= max_new_tokens
        is_complete = len(self.tokens) >= (max_new_tokens if length is None else length)
        self.is_ended = is_complete or not completion.is_cut
        self.noise = b"" if self.is_ended else self.noise


def pack_group(prompt: list[int], position: int, responses: Sequence[Response]) -> Batch:
    """Return the ragged batch of one group, in the order of its samples."""
    tokens, logprobs, versions, loss_mask = array("q"), array("f"), array("i"), bytearray()
    num_before = len(prompt)
    before = array("q", prompt), array("f", [0.0]) * num_before, array("i", [-1]) * num_before
    for response in responses:
        tokens += before[0]
        tokens += response.tokens
        logprobs += before[1]
        logprobs += response.logprobs
        versions += before[2]
        versions += response.versions
        loss_mask += bytes(num_before) + b"\1" * len(response.tokens)
    count = len(responses)
    batch = Batch(
        tokens=torch.frombuffer(tokens, dtype=torch.int64),
        lengths=torch.tensor([num_before + len(each.tokens) for each in responses], dtype=torch.int64),
        prompt_lengths=torch.full((count,), num_before, dtype=torch.int64),
        loss_mask=torch.frombuffer(loss_mask, dtype=torch.bool),
        versions=torch.frombuffer(versions, dtype=torch.int32),
        rollout_logprobs=torch.frombuffer(logprobs, dtype=torch.float32),
        rewards=torch.tensor([each.reward for each in responses], dtype=torch.float32),
        group_ids=torch.full((count,), position, dtype=torch.int64),
        truncated=torch.tensor([each.is_truncated for each in responses], dtype=torch.bool),
    )
    ended = torch.tensor([each.is_ended for each in responses], dtype=torch.bool)
    if ended.all():
        return batch
    return batch.replace(ended=ended, noise=pad_noise([each.noise for each in responses]))


def pad_noise(noise: Sequence[bytes]) -> torch.Tensor:
    """Return the states of random generators as a table. Some are empty; all others have the same size."""
    size = max(map(len, noise))
    states = bytearray(b"".join(each.ljust(size, b"\0") for each in noise))
    table = torch.frombuffer(states, dtype=torch.uint8) if states else torch.empty(0, dtype=torch.uint8)
    return table.view(len(noise), size)


def unpack_group(batch: Batch) -> list[Response]:
    """Return the responses of an unfinished group."""
    assert batch.ended is not None and batch.noise is not None
    fields = [each.numpy() for each in (batch.tokens, batch.rollout_logprobs, batch.versions)]
    ended, truncated, rewards = (each.tolist() for each in (batch.ended, batch.truncated, batch.rewards))
    noise, responses = batch.noise.numpy(), []
    for index, (first, end) in enumerate(batch.response_spans()):
        state = b"" if ended[index] else noise[index].tobytes()
        tokens, logprobs, versions = (each[first:end].tobytes() for each in fields)
        rest = (ended[index], truncated[index], rewards[index])
        responses.append(Response(tokens, logprobs, versions, state, *rest))
    return responses
