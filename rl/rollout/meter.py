"""Measure the steps of an engine, on its lead. Each step is counted once, for three readers:

    EngineMeter --take_times--> Pull --> Dispatcher: the speeds of engines, which share out the work (speeds.py)
                --take_use----> Pull --> Dispatcher: metrics of engines (use.py)
                --take_costs--> ledger of the rank --> accounting.jsonl: costs for tools/suggest_placement.py

The first two are read with every pull of tasks, the third when a weight sync begins.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from rl.rollout.engine import Completion, Engine
from rl.rollout.speeds import StepTimes
from rl.rollout.use import EngineUse
from rl.watch.heart import size_class

MIN_SEQUENCES = 8  # smaller decode steps count as steps of this size
MAX_OVER_MEDIAN = 4.0  # longer decode steps, such as one that compiles, count as this many times the median


@dataclass(frozen=True)
class EngineStep:
    """What is known about one step of an engine."""

    num_sequences: int  # before the step
    seconds: float  # in the engine
    cost_s: float  # since the end of the step before: what is done with its responses delays this one
    is_decode: bool  # neither this step nor the one before it has read prompts
    num_prompt_tokens: int = 0  # that were added before the step
    num_tokens: int = 0  # of the responses that ended
    kv_use: float | None = None  # share of the KV cache in use after the step; None: there is none
    kv_bytes: int = 0


class EngineMeter:
    """Add up the steps of an engine."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._ended_at: float | None = None  # when the last step ended; None: the engine had nothing left to do
        self._is_decoding = False  # whether the last step read no prompts
        self._decode_s: defaultdict[int, list[float]] = defaultdict(list)  # by size class of the sequences
        self._use = EngineUse()
        self._decode, self._prefill = [0.0] * 5, [0.0] * 4

    def measure(self, step: Callable[[], list[Completion]], engine: Engine, num_prompt_tokens: int) -> list[Completion]:
        """Run a step of the engine, add it, and return its completions. A step that raises is not counted."""
        num_sequences, started_at = engine.num_unfinished, self._clock()
        before, self._ended_at = self._ended_at, None
        ended = step()
        now = self._clock()
        if engine.num_unfinished:
            self._ended_at = now
        # An engine that schedules asynchronously waits for the prompts of a step in the next one.
        was_decoding, self._is_decoding = self._is_decoding, not num_prompt_tokens
        self.add(
            EngineStep(
                num_sequences,
                now - started_at,
                now - (started_at if before is None else before),
                was_decoding and self._is_decoding,
                num_prompt_tokens,
                sum(len(done.tokens) for done in ended),
                engine.kv_use,
                engine.kv_bytes,
            )
        )
        return ended

    def add(self, step: EngineStep) -> None:
        count, cost_s = step.num_sequences, step.cost_s
        if step.is_decode:
            self._decode_s[size_class(count, MIN_SEQUENCES)].append(step.seconds)
            self._decode = _added(self._decode, 1.0, count, count**2, cost_s, count * cost_s)
        else:
            self._prefill = _added(self._prefill, 1.0, count, cost_s, step.num_prompt_tokens)
        share = -1.0 if step.kv_use is None else step.kv_use
        self._use += EngineUse(step.num_tokens, step.seconds, step.seconds * max(0.0, share), share, step.kv_bytes)

    def take_times(self) -> StepTimes:
        """Return the times of the decode steps since the last call."""
        taken: StepTimes = []
        for size, seconds in self._decode_s.items():
            limit = MAX_OVER_MEDIAN * statistics.median(seconds)
            taken.append((size, len(seconds), sum(min(each, limit) for each in seconds)))
        self._decode_s.clear()
        return taken

    def take_use(self) -> EngineUse:
        """Return what the engine did since the last call."""
        taken, self._use = self._use, EngineUse()
        return taken

    def take_costs(self) -> dict[str, list[float]]:
        """Return sums over the steps since the last call. A line can be fitted to those of decode steps, which take a
        fixed time, and a time for each sequence. A step that reads prompts takes longer.

        `decode`: steps n, sum of sequences x, of x², of seconds t, and of xt. `prefill`: steps, sequences, seconds, and
        tokens that were read. A kind without steps is left out.
        """
        taken = {"decode": self._decode, "prefill": self._prefill}
        self._decode, self._prefill = [0.0] * 5, [0.0] * 4
        return {name: sums for name, sums in taken.items() if sums[0]}


def _added(sums: list[float], *terms: float) -> list[float]:
    return [total + term for total, term in zip(sums, terms, strict=True)]
