"""An engine without a model, for tests of many ranks or of milliseconds: tokens and logprobs follow from the seed
alone."""

import random
from collections.abc import Sequence

from rl.rollout.engine import Completion, Request
from rl.sync.weights import Weights


class FakeEngine:
    name = "fake"

    def __init__(self, max_num_seqs: int, stop_token_id: int):
        self.version = 0
        self.loaded: dict[str, float] = {}  # sum of each tensor of the last load, for tests
        self._max_num_seqs, self._stop_token_id = max_num_seqs, stop_token_id
        self._running: list[tuple[Request, random.Random, Completion]] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def add(self, requests: Sequence[Request]) -> None:
        assert self.version > 0, "sampling before the first weight sync"
        for request in requests:
            self._running.append((request, random.Random(request.seed), Completion(request.id, [], [], False)))

    def step(self) -> list[Completion]:
        ended = []
        for entry in self._running[: self._max_num_seqs]:
            request, source, completion = entry
            completion.tokens.append(source.choice([*range(1, 10), self._stop_token_id]))
            completion.logprobs.append(-source.random())
            stopped = completion.tokens[-1] == self._stop_token_id
            if stopped or len(completion.tokens) == request.max_new_tokens:
                ended.append(Completion(completion.id, completion.tokens, completion.logprobs, not stopped))
                self._running.remove(entry)
        return ended

    def load(self, weights: Weights, version: int) -> None:
        self.loaded = {name: float(tensor.double().sum()) for name, tensor in weights}
        self.version = version

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass
