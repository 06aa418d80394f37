"""Train on the first parts of a batch while the engines still sample the others (actor.overlap).

A part is some groups of each actor. It is scored, gets its advantages, and goes forward and backward. Only its loss is
not divided by the denominator, which needs the whole batch. So the gradients of all parts are divided at the end, and
one optimizer step follows:

    groups arrive --> parts 0, 1, ... are trained on --> the batch is whole --> the last part --> step

The parts depend on lengths alone (rl/rollout/parts.py), and are trained on in order. So the result does not depend on
how many of them were trained on early.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from rl.algo.choose import OwnAdvantage
from rl.config.schema import AlgoConfig, Config
from rl.data.batch import Batch
from rl.learner.credit import assign_credit
from rl.learner.policy import PolicyTrainer
from rl.learner.scoring import PendingScores, Scorer
from rl.report.metrics import Measures
from rl.watch.heart import HEART

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


class OverlappedUpdate:
    """The update of one step, on an actor. All actors train on the same parts; this actor's share may be empty."""

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
        self._groups: dict[int, PendingScores] = {}  # that have arrived and are in no part, by position
        self._trained: list[Batch] = []  # this actor's shares of the parts, with scores
        self._last = Batch.concat([])  # its share of the last part
        self._num_early_tokens = 0

    def add(self, position: int, group: Batch) -> None:
        """Take a group when it arrives. The inference ranks, if there are any, begin to score it now."""
        self._groups[position] = self._scorer.start(group, self._version)

    def take(self, positions: Sequence[int]) -> dict[int, Batch]:
        """Give away those of these groups that have arrived here, by place in `positions`. They have the scores of the
        inference ranks, if there are any."""
        arrived = {place: position for place, position in enumerate(positions) if position in self._groups}
        return {place: self._scorer.take(self._groups.pop(position)) for place, position in arrived.items()}

    def train(self, groups: Sequence[Batch], is_early: bool) -> None:
        """Train on this actor's groups of the next part. This is a collective, and another part must follow it."""
        if not self._trained:
            self._learner.begin_update()
        part = self._scorer.finish(Batch.concat(groups), self._version)
        self._trained.append(part)
        self._num_early_tokens += part.num_tokens if is_early else 0
        config = self._config
        algo, longest, kl_coef = config.algo, config.rollout.max_new_tokens, self._learner.kl_coef
        # The metrics of credit assignment are those of the whole batch, which gets its advantages later.
        part = assign_credit(part, algo, longest, kl_coef, self._pg, Measures(), self._own)
        self._learner.accumulate(part, self._measures, is_last=False)

    def wait_scored(self) -> None:
        """Wait until no inference rank computes for any actor. This is a collective."""
        self._scorer.wait()
        with HEART.in_collective("actor"):
            dist.all_reduce(torch.zeros(1), group=self._pg)

    def add_last(self, groups: Sequence[Batch]) -> Batch:
        """Take this actor's groups of the last part. Return its groups of all parts, without scores."""
        self._last = Batch.concat(groups)
        scores = self._config.algo.fields_to_score
        return Batch.concat([part.without(scores) for part in (*self._trained, self._last)])

    def score_rest(self, batch: Batch) -> Batch:
        """Score the last part, and return the whole batch with scores. This is a collective. `batch` is what `add_last`
        has returned."""
        self._last = self._scorer.finish(self._last, self._version)
        scored = Batch.concat([*self._trained, self._last])
        assert torch.equal(scored.tokens, batch.tokens) and torch.equal(scored.group_ids, batch.group_ids)
        return scored

    def end(self, batch: Batch, measures: Measures) -> None:
        """Train on the last part, and make the optimizer step. This is a collective. `batch` is what `score_rest` has
        returned, with advantages."""
        if not self._trained:
            self._learner.begin_update()
        measures.include(self._measures)
        last = range(batch.num_sequences - self._last.num_sequences, batch.num_sequences)
        self._learner.accumulate(batch.select(last), measures, is_last=True)
        self._learner.end_update(batch, measures)
        measures.mean("perf/overlap", self._num_early_tokens, batch.num_tokens)
