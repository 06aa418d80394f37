"""The engine seam: what the rollout service asks of whatever samples tokens.

Two stand behind it: vLLM (vllm_engine.py) and a fake without a model for tests of the
plumbing.
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
    seed: int | None  # None: whatever comes next from the engine's generator
    top_p: float = 1.0
    top_k: int = 0  # 0: all


@dataclass(frozen=True)
class Completion:
    id: str
    tokens: list[int]  # the stop token included
    logprobs: list[float]  # at the sampling temperature, one a token
    truncated: bool
    num_preemptions: int = 0  # times that the engine ran out of KV cache for it, and computed it again


class Engine(Receiver, Protocol):
    """Samples, and takes weights as every receiver does."""

    name: str  # for people: 'vllm 0.32.0'
    notice: str  # what people should know about it; empty: nothing
    version: int  # of the weights it samples from; 0 while none is confirmed

    @property
    def num_unfinished(self) -> int: ...

    def add(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> list[Completion]:
        """Decodes one token for every running request; returns those that ended."""
        ...

    def sleep(self) -> None:
        """Frees the device for the learner of the same rank; the next version and the next requests take it back."""
        ...

    def close(self) -> None:
        """The end of the process group too: nothing collective may follow on this rank."""
        ...


@dataclass(frozen=True)
class EngineSeat:
    """Where one rank's part of an engine sits."""

    name: str  # unique in the run
    tp_rank: int
    tp_size: int
    store: Store
    device: torch.device
    shares_device: bool  # the learner of this rank wants the memory between batches
    stop_token_ids: list[int]  # none: responses go on to their limit
    deterministic: bool  # requests have seeds
