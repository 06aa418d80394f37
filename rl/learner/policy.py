"""The trainer of the policy, on the actor mesh. An update takes a batch, changes the weights and adds metrics."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.algo.choose import Loss
from rl.algo.correction import importance_weights
from rl.algo.kl import adapt_kl_coef, kl_penalty
from rl.algo.losses import token_weights
from rl.algo.mismatch import check_mismatch
from rl.config.schema import Config
from rl.data.batch import Batch, empty_batch
from rl.learner.sharded_trainer import ShardedModel, ShardedTrainer, TrainerSettings, lr_schedule
from rl.model.head import Reference, Scores
from rl.model.logprobs import reference_of_responses, score_responses
from rl.model.shards import reshard
from rl.report.describe import measure_mismatch
from rl.report.metrics import Measures


class PolicyTrainer(ShardedTrainer):
    def __init__(
        self,
        sharded: ShardedModel,
        config: Config,
        num_optimizer_steps: int,
        probe_tokens: Sequence[int] = (),
        reference: Callable[[], nn.Module] | None = None,
    ):
        """`num_optimizer_steps` is the total of the run, which the learning rate schedule needs. `reference` returns
        the reference model, which only a KL over the whole vocabulary needs. It is first called in the first update.
        So an engine on the same device is built before the reference model is loaded.

        A checkpoint holds its policy's logits of the probe tokens. They come from the first forward pass of the next
        update. Every update includes the probe tokens, so saving a checkpoint does not change the numerics of training.
        """
        schedule = lr_schedule(config.actor.lr_schedule, config.actor.warmup_steps, num_optimizer_steps)
        actor = config.actor
        settings = TrainerSettings(actor.lr, actor.offload, actor.max_tokens_per_micro_batch)
        super().__init__(sharded, config, settings, schedule)
        self._rollout, self._reference = config.rollout, reference
        self.kl_coef = config.algo.kl_coef  # adapted during the run if algo.kl_target is set
        self.probe_tokens = probe_tokens
        self.probe_logits: Tensor | None = None  # [probe, vocabulary] float32, from before the last update
        self._is_probe_due = False
        self._num_updates_before = 0  # optimizer steps before the present batch
        self._loss = Loss(config.algo)
        self._num_nan_losses = torch.zeros((), dtype=torch.int64, device=self._device)  # read once per optimizer step

    def run_probe(self) -> None:
        """Run a forward pass for the probe alone, in a step without an update. This is a collective."""
        self._is_probe_due = True
        with torch.no_grad():
            self._score(empty_batch(), None)
        reshard(self.model)

    def restore_kl_coef(self, kl_coef: float) -> None:
        """Continue with a checkpoint's adapted KL coefficient. Without algo.kl_target, keep this run's algo.kl_coef."""
        if self._algo.kl_target:
            self.kl_coef = kl_coef

    def adapt(self, kl: float, num_sequences: int) -> None:
        """Adapt the KL coefficient to a step's mean KL per token between policy and reference."""
        if self._algo.kl_target and math.isfinite(kl):
            self.kl_coef = adapt_kl_coef(self.kl_coef, kl, self._algo.kl_target, num_sequences)

    def update(self, batch: Batch, num_prompts: int, measures: Measures) -> None:
        """Update the policy. A batch without old logprobs gets a single optimizer step. Its forward pass computes
        them, with the same weights that sampled the batch. If algo.old_logprobs is rollout, every step takes the
        logprobs that the engine recorded, whether the batch has old logprobs or not."""
        algo = self._algo
        assert batch.old_logprobs is not None or algo.has_recorded_ratio or algo.num_mini_batches * algo.num_epochs == 1
        self.begin_update()
        super().update(batch, num_prompts, measures)

    def begin_update(self) -> None:
        """Begin an update: its first forward pass includes the probe. `update` calls this. Otherwise `accumulate`
        follows for each part of the batch, and then `end_update`."""
        self._is_probe_due, self._num_updates_before = True, self.num_updates

    def accumulate(self, part: Batch, measures: Measures, is_last: bool) -> None:
        """Add the gradients of a part of the batch. This is a collective. `is_last` is True for the last part only.

        The loss is not divided by its denominator, which is known only when the whole batch is.
        """
        kept = part.select(part.trained_sequences(self._algo.mask_truncated))
        self._run_passes(kept, self._cut(kept), dist.get_world_size(self._pg), measures, is_last)

    def end_update(self, batch: Batch, measures: Measures) -> None:
        """Divide the gradients of all parts by the denominator of the batch, and make the optimizer step."""
        kept = batch.select(batch.trained_sequences(self._algo.mask_truncated))
        denominator = self._total_denominator(kept)
        scale = 1 / max(denominator.item(), 1.0)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        self._step(kept, denominator, measures)

    def _score(self, micro_batch: Batch, reference: Reference | None) -> Scores:
        probe = self.probe_tokens if self._is_probe_due else ()
        self._is_probe_due = False
        scores = score_responses(self.model, micro_batch, self._rollout.temperature, self._device, probe, reference)
        if probe:
            self.probe_logits = scores.probe_logits
        return scores

    def _denominator(self, mini_batch: Batch) -> Tensor:
        return self._weights(mini_batch)[1]

    def _weights(self, batch: Batch) -> tuple[Tensor, Tensor]:
        segments, longest = batch.response_segment_ids, self._rollout.max_new_tokens
        return token_weights(self._algo.loss_norm, batch.response_lengths, segments, longest)

    def _measures_mismatch(self, part: Batch) -> bool:
        """Return whether a forward pass measures the mismatch. Its weights must be those from before the update."""
        return part.old_logprobs is None and self.num_updates == self._num_updates_before

    def _check(self, mini_batch: Batch, measures: Measures) -> None:
        if self._measures_mismatch(mini_batch):
            mismatch = measures.reduce(self._pg, "policy/mismatch_kl")
            check_mismatch(mismatch.get("policy/mismatch_kl", 0.0), self._rollout.max_mismatch_kl)
        if self._loss.is_own and (num_bad := int(self._num_nan_losses)):
            raise FloatingPointError(
                f"algo.loss: {self._loss.spec} returned NaN for {num_bad} of {int(mini_batch.loss_mask.sum())} "
                "tokens; every loss must be a number. Check divisions, logarithms and 0 x infinity: exp(89) is "
                "infinite in float32"
            )

    def _accumulate(self, micro_batch: Batch, scale: float, measures: Measures) -> None:
        assert micro_batch.advantages is not None
        mask, algo = micro_batch.loss_mask, self._algo
        count, (weights, denominator) = mask.sum(), self._weights(micro_batch)
        scores = self._score(micro_batch, self._reference_of(micro_batch))
        self._count_bad(scores.logprobs + scores.reference_kl)
        rollout_logprobs = self._move(micro_batch.rollout_logprobs[mask])
        lags = None if micro_batch.lags is None else self._move(micro_batch.lags[mask])
        if self._measures_mismatch(micro_batch):
            measure_mismatch(measures, scores.logprobs, rollout_logprobs, lags)
        if algo.has_recorded_ratio:
            old_logprobs = rollout_logprobs
        elif micro_batch.old_logprobs is None:
            old_logprobs = scores.logprobs.detach()
        else:
            old_logprobs = self._move(micro_batch.old_logprobs[mask])
        if lags is not None and algo.correction == "none":  # nothing else corrects for older weights
            old_logprobs = torch.where(lags > 0, rollout_logprobs, old_logprobs)
        advantages = self._move(micro_batch.advantages[mask])
        segments, lengths = self._move(micro_batch.response_segment_ids), self._move(micro_batch.response_lengths)
        if algo.correction != "none":
            limit = algo.correction_limit
            correction = importance_weights(old_logprobs, rollout_logprobs, segments, lengths, algo.correction, limit)
            # Every built-in loss scales with its advantage, for factors >= 0. So these weights scale the loss, and a
            # token of weight 0 has a loss of 0, however large its ratio is.
            advantages = advantages * correction.weights
            measures.mean("policy/correction_mean", correction.weights.sum(), count)  # near 1 if the logprobs agree
            measures.mean("policy/correction_cut", correction.cut.sum(), count)  # near 0 if they agree
        policy = self._loss(
            new_logprobs=scores.logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
            advantages=advantages,
            segment_ids=segments,
            lengths=lengths,
        )
        loss = policy.loss
        if self._loss.is_own:  # not of a token whose logprob is infinite, which `_count_bad` counts
            self._num_nan_losses += (torch.isnan(loss) & torch.isfinite(scores.logprobs)).sum()
        weights = self._move(weights)
        measures.mean("loss/policy", (loss * weights).sum(), denominator)
        if algo.has_kl_in_loss:
            reference_kl = self._kl(micro_batch, scores)
            loss = loss + self.kl_coef * reference_kl
            measures.mean("loss/kl", reference_kl.sum(), count)
        if algo.entropy_coef:
            loss = loss - algo.entropy_coef * scores.entropy
        ((loss * weights).sum() * scale).backward()
        measures.sum("policy/tokens", count)
        measures.mean("policy/clip_fraction", policy.clipped.sum(), count)
        kl = kl_penalty(old_logprobs.double(), scores.logprobs.detach().double(), "k3")  # its terms nearly cancel
        measures.mean("policy/kl_old_new", kl.sum(), count)
        measures.mean("policy/entropy", scores.entropy.sum(), count)

    def _step(self, mini_batch: Batch, denominator: Tensor, measures: Measures) -> None:
        if self._reference is not None:  # before an engine needs the memory, and on all actors alike
            reshard(self._reference())
        super()._step(mini_batch, denominator, measures)

    def _reference_of(self, micro_batch: Batch) -> Reference | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return reference_of_responses(self._reference(), micro_batch, self._rollout.temperature, self._device)

    def _kl(self, micro_batch: Batch, scores: Scores) -> Tensor:
        if self._algo.kl_estimator == "full":
            return scores.reference_kl
        assert micro_batch.ref_logprobs is not None
        ref_logprobs = self._move(micro_batch.ref_logprobs[micro_batch.loss_mask])
        return kl_penalty(scores.logprobs, ref_logprobs, self._algo.kl_estimator)
