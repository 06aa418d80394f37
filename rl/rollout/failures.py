"""Show failures of the reward functions on the leader, and end the run if no sample can be scored.

    engine's lead --ScoredGroup--> owner of the group --CallsFailed--> FailureLog, on the leader --> console

An owner sends the failures of a group before its `Collected`. So the leader knows all of them when a batch is complete.
"""

import sys
import threading
from collections import Counter
from dataclasses import dataclass

from rl.common.text import count_of
from rl.rewards.failure import RewardFailure
from rl.rewards.totals import Totals, count_samples
from rl.watch.reports import ServiceUnavailable
from rl.world.messages import Letter, Mailbox, Message

MAX_KINDS = 20  # messages per attempt


@dataclass(frozen=True)
class CallsFailed(Message):
    """Tell the leader which calls of the reward functions failed, one entry per sample of a group."""

    failures: list[RewardFailure]


class FailureLog:
    """Count failures, and print the first of each kind: a function, an exception's type and a line of code."""

    def __init__(self, mail: Mailbox, all_failed: type[Exception] | None):
        """`all_failed` is what `check` raises to end the run, or None if the run always continues."""
        self._all_failed = all_failed
        self._lock = threading.Lock()
        self._first: dict[tuple[str, str, str], RewardFailure] = {}
        self._counts = Counter[tuple[str, str, str]]()
        self._num_samples = self._num_failed = 0
        # Samples, and failed ones, of the kinds of batches that may still end the run.
        self._unchecked: dict[str, tuple[int, int]] = {"evaluation": (0, 0), "step": (0, 0)}
        mail.on(CallsFailed, self._on_failed)

    def check(self, totals: Totals, step: int, is_training: bool, num_expected: int) -> None:
        """Count the samples of a round. Raise an error if the attempt's first `num_expected` samples failed, or all of
        an evaluation before them. Several rounds may pass until so many responses have ended."""
        num_samples, num_failed = count_samples(totals)
        self._num_samples += num_samples
        self._num_failed += num_failed
        name = "step" if is_training else "evaluation"
        if name not in self._unchecked or not num_samples:
            return
        before = self._unchecked[name]
        num_samples, num_failed = before[0] + num_samples, before[1] + num_failed
        if num_failed < num_samples:
            del self._unchecked[name]
            self._unchecked.pop("evaluation", None)
            return
        self._unchecked[name] = (num_samples, num_failed)
        if self._all_failed and num_samples >= num_expected:
            batch = count_of(num_samples, "sample") + (f" of step {step}" if is_training else " of the evaluation")
            clause = ", so there is nothing to learn from" if is_training else ""
            raise self._all_failed(self._explain(f"none of the {batch} could be scored{clause}"))

    def summarize(self) -> None:
        """Print how many calls failed in this attempt, and how many of each kind."""
        if not self._num_failed:
            return
        kinds = [f"{count} x {self._name(kind)}" for kind, count in self._counts.most_common(MAX_KINDS)]
        failed = f"{self._num_failed} of {count_of(self._num_samples, 'sample')}"
        print(f"oneworld: the reward functions failed for {failed}: {', '.join(kinds)}", flush=True)

    def _on_failed(self, letter: Letter[CallsFailed]) -> None:
        with self._lock:
            for failure in letter.message.failures:
                self._counts[failure.kind] += 1
                if failure.kind not in self._first:
                    self._first[failure.kind] = failure
                    self._show(failure)

    def _show(self, failure: RewardFailure) -> None:
        if len(self._first) > MAX_KINDS:
            return
        metric = "reward/timeouts" if failure.error in ("timeout", "crash") else "reward/errors"
        text = f"{failure}. The sample scores 0. More failures of this kind are only counted, in {metric}"
        if len(self._first) == MAX_KINDS:
            text += f". This is the last message about reward functions, because there were {MAX_KINDS} kinds"
        print(f"oneworld: {text}", file=sys.stderr, flush=True)

    def _name(self, kind: tuple[str, str, str]) -> str:
        failure = self._first[kind]
        return f"{failure.function}: {failure.error}" + (failure.place and f" at {failure.place}")

    def _explain(self, what: str) -> str:
        kind, count = self._counts.most_common(1)[0]
        failure, others = self._first[kind], len(self._counts) - 1
        besides = f", besides {count_of(others, 'other kind')} of failures" if others else ""
        text = (
            f"reward.function: {what}. In {count_of(count, 'case')}{besides}, {failure}. What to change: "
            f"{failure.remedy}. `train.py --plan` checks it in seconds. To run in spite of this, set "
            "reward.stop_if_all_fail=false"
        )
        if self._all_failed is ServiceUnavailable:
            text += ". The run was resumed, so the cause may be temporary, and a restart tries again"
        return text
