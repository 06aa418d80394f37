"""Train on the first groups of a batch while the engines still sample the others (actor.overlap).

An actor cuts its groups, in stream order, into parts of at most actor.max_tokens_per_micro_batch tokens. A part is
scored, gets its advantages, and goes forward and backward. Only its loss is not divided by the denominator, which
needs the whole batch. So the gradients of all parts are divided at the end, and one optimizer step follows.

    groups arrive --> parts 0, 1, ... are trained on --> the batch is whole --> the parts that are left --> step

The cuts depend on the lengths of the groups alone, and parts are trained on in order. So the result does not depend on
how many of them were trained on early. rl/rollout/overlap.py decides when the actors train on the next part.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from rl.algo.choose import OwnAdvantage
from rl.config.schema import AlgoConfig, Config
from rl.data.batch import Batch
from rl.data.packing import cut_in_order
from rl.learner.credit import assign_credit
from rl.learner.policy import PolicyTrainer
from rl.learner.scoring import PendingScores, Scorer
from rl.report.metrics import Measures

STANDARDIZED = ("reinforce_pp", "reinforce_pp_baseline", "gae")  # built-in advantages with statistics of the batch


def why_overlap_waits(algo: AlgoConfig, own: OwnAdvantage | None) -> str:
    """Say why an update cannot begin before its batch is whole. Return an empty text if it can."""
    num_steps = algo.num_mini_batches * algo.num_epochs
    if algo.advantage in STANDARDIZED or (own is not None and own.is_standardized):
        reason = f"algo.advantage={algo.advantage} standardizes the advantages over it"
    elif num_steps > 1:
        reason = f"its {num_steps} optimizer steps (algo.num_mini_batches x algo.num_epochs) need old logprobs first"
    else:
        return ""
    return f"actor.overlap=true changes nothing in this run: every update waits for its whole batch, because {reason}"


class Readiness(NamedTuple):
    num_parts: int  # parts that an actor could train on, including those that it has trained on
    is_done: bool  # the actor has all of its groups, and no further parts


class OverlappedUpdate:
    """The update of one step, on an actor. All actors train on the same number of parts; some parts may be empty."""

    def __init__(
        self,
        learner: PolicyTrainer,
        scorer: Scorer,
        config: Config,
        pg: dist.ProcessGroup,  # of the actors
        own_advantage: OwnAdvantage | None = None,
    ):
        self._learner, self._scorer, self._config, self._pg, self._own = learner, scorer, config, pg, own_advantage
        self.open(version=0)

    def open(self, version: int) -> None:
        """Begin a step. Its groups are sampled from this version of the weights."""
        self._version, self._measures = version, Measures()
        self._positions: list[int] | None = None  # of this actor's groups, in stream order
        self._groups: dict[int, PendingScores] = {}  # that have arrived, by position
        self._scored: list[Batch] = []  # the first parts; all of them, once `score_rest` was called
        self.num_trained = 0  # parts that were trained on before the stage `update`

    def expect(self, positions: Sequence[int]) -> None:
        """Learn the positions of this actor's groups."""
        self._positions = sorted(positions)

    def add(self, position: int, group: Batch) -> None:
        """Take a group when it arrives. The inference ranks, if there are any, begin to score it now."""
        self._groups[position] = self._scorer.start(group, self._version)

    @property
    def readiness(self) -> Readiness:
        is_done = self._positions is not None and len(self._groups) == len(self._positions)
        num_parts = len(self._parts())
        return Readiness(num_parts if is_done else max(0, num_parts - 1), is_done)

    def train_next(self) -> None:
        """Train on the next part, which is empty if this actor has no more groups. This is a collective, and another
        part must follow it."""
        if not self.num_trained:
            self._learner.begin_update()
        self._score_next()
        config = self._config
        algo, longest, kl_coef = config.algo, config.rollout.max_new_tokens, self._learner.kl_coef
        # The metrics of credit assignment are those of the whole batch, which gets its advantages later.
        part = assign_credit(self._scored[-1], algo, longest, kl_coef, self._pg, Measures(), self._own)
        self._learner.accumulate(part, self._measures, is_last=False)
        self.num_trained += 1

    def wait_scored(self) -> None:
        """Wait until no inference rank computes for any actor. This is a collective."""
        self._scorer.wait()
        dist.all_reduce(torch.zeros(1), group=self._pg)

    def score_rest(self, batch: Batch) -> Batch:
        """Score the parts that `train_next` has not scored, and return this actor's whole batch with scores. `batch` is
        the same without scores. This is a collective."""
        count = torch.tensor([len(self._parts())])
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self._pg)
        while len(self._scored) < count:
            self._score_next()
        scored = Batch.concat(self._scored)
        assert torch.equal(scored.tokens, batch.tokens) and torch.equal(scored.group_ids, batch.group_ids)
        return scored

    def end(self, batch: Batch, measures: Measures) -> None:
        """Train on the parts that are left, and make the optimizer step. This is a collective. `batch` is what
        `score_rest` has returned, with advantages."""
        if not self.num_trained:
            self._learner.begin_update()
        measures.include(self._measures)
        ends = [0, *accumulate(part.num_sequences for part in self._scored)]
        for number, (start, end) in enumerate(pairwise(ends)):
            if number >= self.num_trained:
                is_last = number + 1 == len(self._scored)
                self._learner.accumulate(batch.select(range(start, end)), measures, is_last)
        self._learner.end_update(batch, measures)
        num_early_tokens = sum(part.num_tokens for part in self._scored[: self.num_trained])
        measures.mean("perf/overlap", num_early_tokens, batch.num_tokens)

    def _parts(self) -> list[list[int]]:
        """Return the positions of each part, as far as the groups have arrived. The last part may still grow."""
        sizes = []
        for position in self._positions or ():
            if position not in self._groups:
                break
            sizes.append(self._groups[position].batch.num_tokens)
        ends = [0, *accumulate(cut_in_order(sizes, self._config.actor.max_tokens_per_micro_batch))]
        return [(self._positions or [])[start:end] for start, end in pairwise(ends)]

    def _score_next(self) -> None:
        number, parts = len(self._scored), self._parts()
        positions = parts[number] if number < len(parts) else ()
        self._scored.append(self._scorer.finish([self._groups[position] for position in positions], self._version))
