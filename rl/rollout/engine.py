"""The interface of an engine, which samples tokens for the rollout service, and the choice of its implementation.

There are two: vLLM (rl/rollout/vllm), and an engine without a model for tests (fake_engine.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import Store

from rl.config.schema import Config
from rl.rollout.dispatch import Sampling
from rl.sync.weights import Receiver
from rl.watch.durations import DURATIONS
from rl.watch.heart import HEART
from rl.world.bootstrap import skip_imported_objects


@dataclass(frozen=True)
class Request:
    id: str
    tokens: list[int]  # the prompt, and what was sampled of the response in earlier rounds
    sampling: Sampling
    max_tokens: int  # maximum number of tokens to add
    seed: int | None  # None: the engine's own random generator decides
    noise: bytes = b""  # the `noise` of the completion that this request continues; empty: it starts a response
    cache_key: str = ""  # if set, entries of the prefix cache with this name are used whatever their version


@dataclass(frozen=True)
class Completion:
    id: str
    tokens: list[int]  # that were added, including the stop token
    logprobs: list[float]  # one per token, at the sampling temperature
    is_cut: bool  # ended at the request's limit of tokens
    noise: bytes = b""  # state of the random generator after the last token, if cut; empty if none is needed
    num_preemptions: int = 0  # how often the response was computed again because the KV cache was full
    num_cached_tokens: int = 0  # how many tokens of the request were found in the prefix cache


class Engine(Receiver, Protocol):
    """Sample completions. The methods of `Receiver` bring new weights."""

    name: str  # for display, such as "vllm 0.32.0"
    notice: str  # a warning for the user, or empty
    version: int  # version of the weights; 0 until one is confirmed

    kv_bytes: int  # size of the KV cache on this rank's GPU; 0 without a GPU

    @property
    def num_unfinished(self) -> int: ...

    @property
    def kv_use(self) -> float | None:
        """Return the share of the KV cache that is in use, or None if there is none."""

    def add(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> list[Completion]:
        """Decode one token for each running request. Return the completions that ended."""

    def progress(self) -> dict[str, int]:
        """Return the number of tokens that each unfinished request has got."""

    def sleep(self) -> None:
        """Free device memory for the learner of this rank. The next weights and requests allocate it again."""

    def close(self) -> None:
        """Shut down and destroy the process groups. No collective may follow on this rank."""


@dataclass(frozen=True)
class EngineSeat:
    """One rank's place in an engine."""

    name: str  # of the engine, unique in the run
    tp_rank: int
    tp_size: int
    store: Store
    device: torch.device
    sleeps: bool  # between batches a learner on this rank needs the memory
    stop_token_ids: list[int]  # if empty, all responses reach `max_tokens` of their requests


def import_engine(config: Config) -> None:
    """Import what an engine needs. This takes seconds, and is best done before there are objects with device memory:
    garbage collections never look at those that exist by then."""
    if config.rollout.engine == "fake":
        return
    with HEART.exceptional("importing vLLM"), DURATIONS.measure("build engine/import"):
        from rl.rollout.vllm.quick_import import quick_import

        with quick_import():
            import rl.rollout.vllm.build  # noqa: F401
    skip_imported_objects()


def build_engine(config: Config, model_folder: Path, seat: EngineSeat, failed: Engine | None = None) -> Engine:
    """Build an engine. If it replaces a `failed` one, that must not be used afterwards.

    A build is exceptional work: earlier ones do not tell how long compilation and graph capture take.
    """
    with HEART.exceptional("building the engine"):
        if config.rollout.engine == "fake":
            from rl.rollout.fake_engine import FakeEngine

            return FakeEngine(config.rollout.max_num_seqs, next(iter(seat.stop_token_ids), None), seat.device)
        from rl.rollout.vllm.build import VllmEngine, build  # here, because the import takes seconds

        assert failed is None or isinstance(failed, VllmEngine)
        return build(config, model_folder, seat, failed)
