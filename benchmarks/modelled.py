"""Engine, learner and rewards whose work only takes time, for benchmarks of everything between them.

They sleep, so that many ranks can share few cores. `Costs` says how long each piece of work takes.
"""

import heapq
import math
import random
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from rl.data.batch import Batch
from rl.learner.policy import PolicyTrainer
from rl.learner.scoring import Scorer
from rl.model.shards import TensorInfo
from rl.report.metrics import Measures
from rl.rewards.pool import RewardPool
from rl.rollout.engine import Completion, Request
from rl.rollout.service import Scored
from rl.sync.layout import MemoryLayout
from rl.world.world import World

NUM_PROMPTS_PER_RANK, NUM_SAMPLES = 8, 8
MEDIAN_OVER_MEAN = 0.659  # so that lognormal lengths with sigma 1 have this mean after they are cut at four times of it


@dataclass(frozen=True)
class Costs:
    """Modelled times, in seconds."""

    decode_step: float
    update_token: float
    prefill_token: float
    sync: float
    decode_sequence: float = 0.0  # of each sequence, besides the step's own time

    @staticmethod
    def like_a_real_step(step_s: float, mean: int, prompt: int) -> "Costs":
        decoding = mean * step_s
        update_token = 5.16 / 6.17 * decoding / (NUM_PROMPTS_PER_RANK * NUM_SAMPLES * (mean + prompt))
        return Costs(step_s, update_token, update_token / 3, 0.14 / 6.17 * decoding)

    def with_updates_of(self, seconds: float, num_tokens: float) -> "Costs":
        """Return the costs if an update with this number of tokens per actor takes so long."""
        return replace(self, update_token=seconds / num_tokens)

    def at_speed(self, speed: float) -> "Costs":
        """Return the costs of an engine that is this many times as fast."""
        times = {name: getattr(self, name) / speed for name in ("decode_step", "decode_sequence", "prefill_token")}
        return replace(self, **times)


class Clock:
    """Let modelled time pass, and add it up by its purpose."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._overslept = 0.0

    def spend(self, purpose: str, seconds: float) -> None:
        """Sleep. What one sleep takes too long is taken off the next, so that modelled times are exact on average."""
        started = time.perf_counter()
        time.sleep(max(0.0, seconds - self._overslept))
        self._overslept += time.perf_counter() - started - seconds
        self.spent[purpose] += seconds


class SleepingEngine:
    """An engine without a model. The seed of a request determines the length of its response."""

    name, notice, kv_bytes, kv_use = "modelled", "", 0, None

    def __init__(self, clock: Clock, costs: Costs, mean: int, prompt: int, max_num_seqs: int):
        self.version = 0
        self._clock, self.costs, self._median, self._prompt = clock, costs, MEDIAN_OVER_MEAN * mean, prompt
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Request] = deque()
        self._running: list[tuple[int, str, int, bool]] = []  # last step, request, number of tokens, is cut; a heap
        self._num_steps = 0

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def step(self) -> list[Completion]:
        num_prefilled = 0
        while self._waiting and len(self._running) < self._max_num_seqs:
            request = self._waiting.popleft()
            left = self._length(request) - (len(request.tokens) - self._prompt)
            count = min(left, request.max_tokens)
            heapq.heappush(self._running, (self._num_steps + count, request.id, count, left > count))
            num_prefilled += len(request.tokens)
        self._num_steps += 1
        decoding = self.costs.decode_step + len(self._running) * self.costs.decode_sequence
        self._clock.spend("engine", decoding + num_prefilled * self.costs.prefill_token)
        self._clock.spent["decode steps"] += 1
        self._clock.spent["decoded tokens"] += len(self._running)
        ended = []
        while self._running and self._running[0][0] == self._num_steps:
            _, name, count, is_cut = heapq.heappop(self._running)
            ended.append(Completion(name, [1] * count, [-1.0] * count, is_cut))
        return ended

    def progress(self) -> dict[str, int]:
        running = {name: count - (last - self._num_steps) for last, name, count, _ in self._running}
        return running | {request.id: 0 for request in self._waiting}

    def _length(self, request: Request) -> int:
        return max(1, round(self._median * math.exp(random.Random(request.seed).gauss(0, 1))))

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout:
        raise NotImplementedError("it has no weights")

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


class InstantRewards(RewardPool):
    """Score every response with 0 at once, without processes."""

    def __init__(self, world: World):
        self._world, self._collected = world, None

    def submit(self, key: Hashable, prompt: str, response: str, row: dict[str, Any], answer_of: str = "") -> None:
        assert isinstance(key, tuple)
        result = {"score": 0.0, "parts": {"none": 0.0}, "status": "ok", "answer": None, "failure": None}
        self._world.mail.send(self._world.rank, Scored(key, result))


class NoScores(Scorer):
    """Leave batches as they are: a single update needs no separate pass."""

    def score(self, batch: Batch, version: int) -> Batch:
        return batch


class SleepingLearner(PolicyTrainer):
    """A learner without a model, whose passes take modelled time. Like real ones, they are collectives."""

    kl_coef = 0.0

    def __init__(self, clock: Clock, costs: Costs, pg: dist.ProcessGroup):
        self._clock, self._costs, self._pg = clock, costs, pg

    def begin_update(self) -> None:
        pass

    def accumulate(self, part: Batch, measures: Measures, is_last: bool) -> None:
        dist.barrier(group=self._pg)
        self.train(part)

    def end_update(self, batch: Batch, measures: Measures) -> None:
        pass

    def train(self, part: Batch) -> None:
        self._clock.spend("update", part.num_tokens * self._costs.update_token)


class NoTokenizer:
    bos_token_id: int | None = None
    chat_template: Any = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: bool) -> str:
        return ""
