"""The trainer of PPO's critic, on the actor mesh. The critic is a model with a head of one row."""

import torch
from torch import Tensor

from rl.algo.losses import value_loss
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.packing import cut_together, over_micro_batches
from rl.learner.sharded_trainer import ShardedModel, ShardedTrainer, TrainerSettings
from rl.model.logprobs import hidden_size_of, value_responses
from rl.model.shards import reshard
from rl.report.metrics import Measures


class CriticTrainer(ShardedTrainer):
    kind, metric, outputs = "critic", "critic", "values of the critic"

    def __init__(self, sharded: ShardedModel, config: Config):
        settings = TrainerSettings(config.critic.lr, config.critic_offload, config.critic_max_tokens)
        super().__init__(sharded, config, settings, lambda step: 1.0)
        self._clip, self._max_tokens = config.critic.clip, config.inference.max_tokens_per_micro_batch

    @torch.no_grad()
    def add_values(self, batch: Batch) -> Batch:
        """Return the batch with the critic's value before each response token. This is a collective."""
        micro_batches = cut_together(batch, self._max_tokens, hidden_size_of(self.model), self._pg)
        (values,) = over_micro_batches(batch, micro_batches, self._values, "values")
        reshard(self.model)
        return batch.replace(values=values)

    def _values(self, micro_batch: Batch) -> list[Tensor]:
        return [value_responses(self.model, micro_batch, self._device)]

    def _denominator(self, mini_batch: Batch) -> Tensor:
        return mini_batch.response_lengths.sum()

    def _accumulate(self, micro_batch: Batch, scale: float, measures: Measures) -> None:
        assert micro_batch.values is not None and micro_batch.returns is not None
        mask = micro_batch.loss_mask
        old_values, returns = self._move(micro_batch.values[mask]), self._move(micro_batch.returns[mask])
        (values,) = self._values(micro_batch)
        self._count_bad(values)
        loss, clipped = value_loss(values, old_values, returns, self._clip)
        (loss.sum() * scale).backward()
        count = mask.sum()
        measures.mean("critic/loss", loss.sum(), count)
        measures.mean("critic/clip_fraction", clipped.sum(), count)
        measures.mean("critic/value_mean", values.sum(), count)
