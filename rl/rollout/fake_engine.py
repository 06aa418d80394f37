"""An engine without a model, for fast tests.

A token and its logprob follow from the request's seed and the token's position in the sequence. So a response that is
cut and continued in another request is the same as an uncut one. Responses without a seed are random.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl.model.shards import TensorInfo
from rl.rollout.engine import Completion, Request
from rl.sync.layout import Destination, MemoryLayout, Region


class FakeEngine:
    name, notice, kv_bytes, kv_use = "fake", "", 0, None

    def __init__(self, max_num_seqs: int, stop_token_id: int | None, device: torch.device | None = None):
        """Build an engine. Without a stop token, every response is cut."""
        self.version = 0
        self.memory: dict[str, Tensor] = {}  # the weights that the sync writes; sampling ignores them
        assert max_num_seqs > 0, "rollout.max_num_seqs has not been derived"
        self._max_num_seqs, self._stop_token_id, self._device = max_num_seqs, stop_token_id, device
        self._vocabulary = [*range(1, 10), *([] if stop_token_id is None else [stop_token_id])]
        self._running: list[tuple[Request, float, Completion]] = []  # with the seed

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def add(self, requests: Sequence[Request]) -> None:
        assert self.version > 0, "got requests before the first weight sync; sync weights first"
        for one in requests:
            seed = random.Random().random() if one.seed is None else one.seed
            self._running.append((one, seed, Completion(one.id, [], [], is_cut=False)))

    def step(self) -> list[Completion]:
        ended = []
        for entry in self._running[: self._max_num_seqs]:
            request, seed, completion = entry
            source = random.Random(f"{seed}/{len(request.tokens) + len(completion.tokens)}")
            completion.tokens.append(source.choice(self._vocabulary))
            completion.logprobs.append(-source.random())
            stopped = completion.tokens[-1] == self._stop_token_id
            if stopped or len(completion.tokens) == request.max_tokens:
                ended.append(replace(completion, is_cut=not stopped))
                self._running.remove(entry)
        return ended

    def progress(self) -> dict[str, int]:
        return {request.id: len(completion.tokens) for request, _, completion in self._running}

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout:
        destinations = []
        for index, info in enumerate(tensors):
            self.memory[info.name] = torch.zeros(info.shape, dtype=info.torch_dtype, device=self._device)
            view = self.memory[info.name].view(1, -1)
            destinations.append(Destination(index, Region(0, 1, view.numel(), 0), view))
        return MemoryLayout(tensors, destinations)

    def begin_version(self) -> None:
        self.version = 0

    def confirm(self, version: int) -> None:
        self.version = version

    def probe(self, tokens: list[int]) -> None:
        return None

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass
