"""The object with which an actor rank drives the training loop."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from rl.algo.choose import OwnAdvantage
from rl.algo.mismatch import check_mismatch
from rl.checkpoint.checkpoints import Checkpoints
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.evaluation.evaluation import Evaluation, is_evaluation_due
from rl.learner.credit import assign_credit
from rl.learner.critic import CriticTrainer
from rl.learner.memory import MemoryMeter
from rl.learner.offload import free_cached_memory
from rl.learner.overlap import OverlappedUpdate
from rl.learner.policy import PolicyTrainer
from rl.learner.scoring import Scorer
from rl.report.describe import check_finite, describe
from rl.report.metrics import Measures
from rl.rollout.sampler import Sampler
from rl.run.reporter import Reporter
from rl.sync.weights import WeightSync


@dataclass(frozen=True)
class Actor:
    """The parts of an actor rank, and one method per stage of the loop."""

    config: Config
    learner: PolicyTrainer
    critic: CriticTrainer | None
    scorer: Scorer
    sampler: Sampler
    sync: WeightSync
    checkpoints: Checkpoints
    evaluation: Evaluation | None  # None: never evaluate, or leave it to the phase rollout
    reporter: Reporter
    start_step: int = 0  # the last finished step when the run starts or resumes
    last_step: int = 0  # the last step of this command
    is_evaluated: bool = False  # the evaluation of start_step is done
    own_advantage: OwnAdvantage | None = None  # None: algo.advantage is built in
    overlap: OverlappedUpdate | None = None  # None: no group is trained on before the batch is whole

    @cached_property
    def memory(self) -> MemoryMeter:
        return MemoryMeter(self.trainers, is_on=not self.config.debug.dry_run)  # which shows the peak of the whole step

    @property
    def trainers(self) -> list[PolicyTrainer | CriticTrainer]:
        return [self.learner] if self.critic is None else [self.learner, self.critic]

    def score(self, batch: Batch, version: int) -> Batch:
        """Add logprobs of the policy and the reference, and values of the critic, if something needs them."""
        batch = self.scorer.score(batch, version) if self.overlap is None else self.overlap.score_rest(batch)
        batch = batch if self.critic is None else self.critic.add_values(batch)
        check_finite(batch)
        return batch

    def describe(self, batch: Batch) -> dict[str, float]:
        """Return the metrics of the whole batch. Raise if engine and learner disagree about the logprobs."""
        values = describe(batch, self.config.environment.is_set).reduce(self.sampler.pg)
        check_mismatch(values.get("policy/mismatch_kl", 0.0), self.config.rollout.max_mismatch_kl)
        return values

    def assign_credit(self, batch: Batch, measures: Measures) -> Batch:
        """Compute the advantage of each token from the rewards."""
        algo, longest, kl_coef = self.config.algo, self.config.rollout.max_new_tokens, self.learner.kl_coef
        return assign_credit(batch, algo, longest, kl_coef, self.sampler.pg, measures, self.own_advantage)

    def update(self, batch: Batch, step: int, num_prompts: int, measures: Measures) -> None:
        """Train on the batch: first the critic, then the policy unless the critic is still warming up."""
        self.checkpoints.begin_update()
        self.memory.begin()
        if self.critic is not None:
            self.critic.update(batch, num_prompts, measures)
        if self.critic is not None and step <= self.config.critic.warmup_steps:
            self.learner.run_probe()
        elif self.overlap is None:
            self.learner.update(batch, num_prompts, measures)
        else:
            self.overlap.end(batch, measures)
        self.memory.end(measures)

    def adapt(self, values: Mapping[str, float], num_prompts: int) -> dict[str, float]:
        """Adapt the KL coefficient if algo.kl_target is set, and return it as a metric."""
        algo = self.config.algo
        if not algo.kl_target or not values.get("policy/tokens"):  # 0 if only the critic was trained, or all was masked
            return {}
        kl = values["reward/kl" if algo.has_kl_in_reward else "loss/kl"]
        self.learner.adapt(kl, num_prompts * self.config.rollout.num_samples_per_prompt)
        return {"policy/kl_coef": self.learner.kl_coef}

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the weights after this step are to be evaluated, by this command or in the phase rollout."""
        return is_evaluation_due(self.config, step)

    def publish(self, step: int) -> int:
        """Send the weights to all engines as the next version, which `step` samples from. Return the version."""
        self._free_cached_memory()  # which an engine of this rank needs for its weights
        for trainer in self.trainers:
            trainer.start_offload()  # only now, since the copies would delay the metrics of the update
        return self.sync.publish(step, self.give_device_to_engine)

    def give_device_to_engine(self) -> None:
        """Offload the trainers if this rank hosts an engine. First wait for a pending copy of a checkpoint."""
        if self.sampler.rollouts.service is not None:
            if any(trainer.offloads for trainer in self.trainers):
                self.checkpoints.wait_copied()
            for part in (self.scorer, *self.trainers):
                part.offload()
            self._free_cached_memory()

    def _free_cached_memory(self) -> None:
        if self.sampler.rollouts.service is not None and self.config.rollout.sleep != "never":
            free_cached_memory(self.learner.device)

    def give_device_to_learner(self) -> None:
        if self.sampler.rollouts.service is not None:
            self.sampler.rollouts.service.engine.sleep()
        for part in (self.scorer, *self.trainers):
            part.reload()
