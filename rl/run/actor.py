"""What an actor rank drives the loop with: every stage of an iteration is one call here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from rl.checkpoint.checkpoints import Checkpoints
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.prompts import PromptStream, Tokenizer
from rl.evaluation.evaluation import Evaluation
from rl.learner.credit import assign_credit
from rl.learner.critic import Critic
from rl.learner.policy import Learner
from rl.learner.scoring import Scorer
from rl.report.describe import check_finite
from rl.report.metrics import Measures, MetricsWriter
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import Sampling
from rl.rollout.sample import DynamicSampling, Sampled, sample
from rl.sync.weights import WeightSync


@dataclass
class Actor:
    """`stream` and `writer` are the leader's."""

    config: Config
    learner: Learner
    critic: Critic | None
    scorer: Scorer
    rollouts: Rollouts
    sync: WeightSync
    checkpoints: Checkpoints
    step: int  # that the run goes on from; 0: it starts from the model
    is_evaluated: bool  # whether that step was, where it had to be
    pg: dist.ProcessGroup
    folder: Path  # of the run
    tokenizer: Tokenizer
    evaluation: Evaluation | None  # where any is asked for
    stream: PromptStream | None = None
    writer: MetricsWriter | None = None

    @property
    def sampling(self) -> Sampling:
        rollout = self.config.rollout
        return Sampling(
            rollout.num_samples_per_prompt, rollout.temperature, rollout.max_new_tokens, rollout.top_p, rollout.top_k
        )

    def sample(self, version: int, measures: Measures) -> Sampled:
        """The next batch, from this version."""
        algo = self.config.algo
        dynamic = DynamicSampling(algo.max_sampling_rounds, algo.mask_truncated) if algo.dynamic_sampling else None
        num_prompts = self.config.train.num_prompts_per_step
        return sample(self.rollouts, self.stream, num_prompts, dynamic, self.sampling, version, self.pg, measures)

    def score(self, batch: Batch, version: int) -> Batch:
        """Add logprobs of policy and reference, and the critic's values, where anything needs them."""
        batch = self.scorer.score(batch, version)
        batch = batch if self.critic is None else self.critic.judge(batch)
        check_finite(batch)
        return batch

    def assign_credit(self, batch: Batch, measures: Measures) -> Batch:
        config = self.config
        longest, kl_coef = config.rollout.max_new_tokens, self.learner.kl_coef
        return assign_credit(batch, config.algo, longest, kl_coef, self.pg, measures)

    def update(self, batch: Batch, step: int, num_prompts: int, measures: Measures) -> None:
        """A critic learns first alone, if it is to warm up."""
        if self.critic is not None:
            self.critic.update(batch, num_prompts, measures)
            if step <= self.config.critic.warmup_steps:
                self.learner.run_probe()
                return
        self.learner.update(batch, num_prompts, measures)

    def adapt(self, values: Mapping[str, float], num_prompts: int) -> dict[str, float]:
        """Adapt the KL coefficient to what an update measured, and warn if the policy collapses into certainty. Return
        what else is worth a curve."""
        algo, found = self.config.algo, {}
        if not values.get("policy/tokens"):  # only the critic learnt, or every response was masked
            return {}
        if algo.kl_target:
            kl = values["reward/kl" if algo.has_kl_in_reward else "loss/kl"]
            self.learner.adapt(kl, num_prompts * self.config.rollout.num_samples_per_prompt)
            found["policy/kl_coef"] = self.learner.kl_coef
        if algo.certainty_coef:
            is_collapsed = values["policy/entropy"] < algo.collapse_entropy
            found["policy/is_collapsed"] = float(is_collapsed)
            if is_collapsed and self.writer is not None:
                print(
                    f"oneworld: the policy collapses: its entropy per token is {values['policy/entropy']:.2g}, below "
                    f"algo.collapse_entropy = {algo.collapse_entropy:g}, with self-certainty as a reward; look at the "
                    "samples, and lower algo.certainty_coef or actor.lr",
                    flush=True,
                )
        return found

    def publish(self) -> int:
        """Brings the next version of the weights to all engines; returns its number."""
        for trainer in self._trainers:
            trainer.start_leaving()  # after the update's metrics have been read, which copies would delay
        return self.sync.publish()

    def give_device_to_engine(self) -> None:
        """Where this rank hosts one. What leaves the device must have been copied, if a checkpoint is under way."""
        if self.rollouts.hosts_engine:
            if self.learner.offloads:
                self.checkpoints.wait_copied()
            self.scorer.release_device()
            for trainer in self._trainers:
                trainer.release_device()

    def give_device_to_learner(self) -> None:
        self.rollouts.release_device()
        self.scorer.take_device()
        for trainer in self._trainers:
            trainer.take_device()

    @property
    def _trainers(self) -> list[Learner | Critic]:
        return [self.learner] if self.critic is None else [self.learner, self.critic]
