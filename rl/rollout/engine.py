"""The interface between the rollout service and whatever samples tokens.

There are two implementations: vLLM (rl/rollout/vllm) and an engine without a model for tests (fake_engine.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import Store

from rl.sync.weights import Receiver


@dataclass(frozen=True)
class Request:
    id: str
    tokens: list[int]
    temperature: float  # 0: greedy
    max_new_tokens: int
    seed: int | None  # None: the engine's own random generator decides
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit


@dataclass(frozen=True)
class Completion:
    id: str
    tokens: list[int]  # with the stop token
    logprobs: list[float]  # one per token, at the sampling temperature
    truncated: bool
    num_preemptions: int = 0  # how often the engine ran out of KV cache and had to compute the response again


class Engine(Receiver, Protocol):
    """Samples completions, and receives weights as every receiver does."""

    name: str  # to be shown, such as "vllm 0.32.0"
    notice: str  # a warning for the user, or empty
    version: int  # version of the weights it samples from; 0 while none is confirmed

    @property
    def num_unfinished(self) -> int: ...

    def add(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> list[Completion]:
        """Decode one token for every running request, and return the completions that ended."""
        ...

    def sleep(self) -> None:
        """Free the device for the learner of the same rank. The next version and the next requests take it back."""
        ...

    def close(self) -> None:
        """Shut down, and end the process groups: no collective may follow on this rank."""
        ...


@dataclass(frozen=True)
class EngineSeat:
    """The place of one rank's part of an engine: its name, its tensor-parallel rank and its device."""

    name: str  # of the engine, unique in the run
    tp_rank: int
    tp_size: int
    store: Store
    device: torch.device
    shares_device: bool  # the learner of this rank needs the memory between batches
    stop_token_ids: list[int]  # if empty, responses go on to their limit
