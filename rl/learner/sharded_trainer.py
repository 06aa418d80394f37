"""Train a sharded model: slices of the training state, offloading, and optimizer steps over micro-batches.

A loss is a sum over tokens. It is divided once, by the denominator of the mini-batch over all ranks. So the result
depends neither on the number of ranks nor on the split into micro-batches. FSDP averages gradients over the mesh, and
the loss is multiplied by the size of the mesh to undo that.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl.config.schema import Config, Offload
from rl.data.batch import Batch
from rl.data.packing import cut_together, micro_batches_of, mini_batch_of
from rl.data.shared_prompts import repeated_prompts
from rl.learner.gradients import clip_gradients
from rl.learner.offload import Offloader
from rl.learner.optimizers import StatePart, build_optimizer, local
from rl.model.flops import ModelFlops
from rl.model.host_memory import to_device
from rl.model.load import decoder_layers
from rl.model.logprobs import hidden_size_of
from rl.model.lora import trained_slices
from rl.model.shards import LocalSlice, local_slices, named_parameters
from rl.report.metrics import Measures
from rl.watch.heart import HEART


@dataclass(frozen=True)
class ShardedModel:
    model: nn.Module
    pg: dist.ProcessGroup
    device: torch.device


@dataclass(frozen=True)
class TrainerSettings:
    """Settings that policy and critic may have of their own."""

    lr: float
    offload: Offload
    max_tokens: int  # of a micro-batch


class ShardedTrainer:
    kind = "model"  # name of the weights in a checkpoint
    metric = "optim"  # prefix of the metrics
    outputs = "logprobs of the policy"  # what the model computes, for error messages

    def __init__(
        self, sharded: ShardedModel, config: Config, settings: TrainerSettings, schedule: Callable[[int], float]
    ):
        self.model, self._pg, self._device = sharded.model, sharded.pg, sharded.device
        parameter = next(self.model.parameters())
        assert isinstance(parameter, DTensor)
        self._mesh = parameter.device_mesh  # [shard], or [replica, shard]
        self._parameters = list(self.model.parameters())  # shards; a gathered model shows whole parameters instead
        self._actor, self._algo = config.actor, config.algo
        # Number of infinite or NaN outputs, counted on the device and read once per optimizer step.
        self._num_bad_outputs = torch.zeros((), dtype=torch.int64, device=self._device)
        self._offloaders: dict[str, Offloader] = {}  # by kind of state; made at its first offload
        layers = decoder_layers(self.model)
        self._is_gathered_at_once = not any(isinstance(layer, FSDPModule) for layer in layers)
        self._layers = [(layer, [each for each in layer.parameters() if each.requires_grad]) for layer in layers]
        # Build the optimizer right after sharding. After a forward pass it would silently miss the root's parameters.
        in_layers = [parameter for layer in layers for parameter in layer.parameters()]
        self.optimizer = build_optimizer(self.model, in_layers, self._actor, self._device)
        self.num_updates = 0  # optimizer steps so far
        self._flops = ModelFlops.of(self.model)
        self._sizes: dict[bool, dict[str, int]] = {}  # without and with optimizer state; see `bytes_by_kind`
        assert settings.max_tokens and settings.offload != "auto", "settings of the trainer have not been derived"
        self._settings, self._schedule = settings, schedule

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def lr(self) -> float:
        return self._settings.lr * self._schedule(self.num_updates)

    @property
    def _prefix(self) -> str:
        return "" if self.kind == "model" else f"{self.kind}_"

    @property
    def _base_kind(self) -> str:
        """The kind of the weights under adapters. They never change, and are in no checkpoint."""
        return f"{self._prefix}base"

    @property
    def weight_kinds(self) -> tuple[str, str]:
        """The kinds of state that are weights. All others are moments."""
        return self.kind, self._base_kind

    def _moments(self, parameter: nn.Parameter) -> Iterator[tuple[str, StatePart]]:
        """Yield the optimizer's state of a parameter, by its kind in a checkpoint."""
        for of, part in self.optimizer.state_of(parameter).items():
            yield self._prefix + of, part

    def state_slices(self, with_moments: bool = True, with_frozen: bool = True) -> list[tuple[str, LocalSlice]]:
        """Return this rank's part of the training state as (kind, slice): parameters and buffers, then moments. Slices
        are views of the trained tensors, or of their host copies while a kind is offloaded. Without `with_frozen`, the
        weights under adapters are left out: a checkpoint does not hold them."""
        trained = {part.info.name for part in trained_slices(self.model)}
        parts = [
            (self.kind if part.info.name in trained else self._base_kind, part)
            for part in local_slices(self.model)
            if with_frozen or part.info.name in trained
        ]
        infos = {part.info.name: part.info for _, part in parts}
        for name, parameter in named_parameters(self.model) if with_moments else ():
            if parameter.requires_grad:
                for kind, moment in self._moments(parameter):
                    dtype = str(moment.data.dtype).removeprefix("torch.")
                    info = replace(infos[name], shape=moment.shape, dtype=dtype)
                    parts.append((kind, LocalSlice(info, moment.data)))
        for kind, offloader in self._offloaders.items():
            if offloader.is_offloaded:
                host = offloader.host_copy
                parts = [(of, LocalSlice(part.info, host(part.data)) if of == kind else part) for of, part in parts]
            elif with_moments:  # a weight sync runs while moments are copied to host memory
                offloader.wait()
        return parts

    def weight_slices(self) -> list[LocalSlice]:
        """Return this rank's part of the weights. It is in host memory while the weights are offloaded."""
        return [part for _, part in self.state_slices(with_moments=False)]

    @property
    def offloads(self) -> bool:
        """Whether some of the state is offloaded while an engine of the same rank uses the device."""
        return self._settings.offload in ("rollout", "moments")

    @property
    def is_short_of_memory(self) -> bool:
        """Whether some of the state is in host memory of a GPU's rank, for a while or, with `always`, at all times."""
        return self._settings.offload != "none" and self._device.type == "cuda"

    def start_offload(self) -> None:
        """Start to copy the moments to host memory; `offload` waits for it. Run no update in between."""
        for kind, offloader in self._offloaders.items():
            if kind not in self.weight_kinds:
                offloader.start_offload()

    def offload(self) -> None:
        """Move the state that is to be offloaded to host memory. The memory of everything else that the trainer has
        freed stays with torch's allocator: see `free_cached_memory`."""
        tensors: dict[str, list[Tensor]] = {}
        # Make no moments only to offload them. After the first update all trained parameters have moments.
        for kind, part in self.state_slices(with_moments=self.optimizer.has_state) if self.offloads else ():
            if kind not in self.weight_kinds or self._settings.offload != "moments":
                tensors.setdefault(kind, []).append(part.data)
        for kind, each in tensors.items():
            if kind not in self._offloaders:
                self._offloaders[kind] = Offloader(each, constant=kind == self._base_kind)
            self._offloaders[kind].offload()

    def reload(self) -> None:
        """Bring the weights back to the device. The moments follow shortly before an optimizer step."""
        offloaders = [self._offloaders[kind] for kind in self.weight_kinds if kind in self._offloaders]
        for offloader in offloaders:
            offloader.start_reload()
        for offloader in offloaders:
            offloader.wait()

    def bytes_by_kind(self) -> dict[str, int]:
        """Return the sizes of this rank's weights, gradients and optimizer state, during an optimizer step. What is in
        host memory at all times counts as 0. There is no optimizer state before the first step."""
        has_state = self.optimizer.has_state
        if has_state not in self._sizes:
            tensors: dict[str, list[Tensor]] = {"weights": [part.data for part in local_slices(self.model)]}
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            tensors["gradients"] = [local(parameter.detach()) for parameter in trained]
            moments = (self._moments(parameter) for parameter in trained if has_state)
            tensors["optimizer"] = [part.data for parts in moments for _, part in parts]
            self._sizes[has_state] = {
                kind: sum(each.nbytes for each in found if each.device.type == self._device.type)
                for kind, found in tensors.items()
            }
        return self._sizes[has_state]

    def bytes_present(self) -> int:
        """Return how many of these bytes are on the device now, before or after an optimizer step."""
        sizes = self.bytes_by_kind()
        moments = [each for kind, each in self._offloaders.items() if kind not in self.weight_kinds]
        is_offloaded = any(each.is_offloaded for each in moments)
        has_gradients = any(parameter.grad is not None for parameter in self._parameters)
        return sizes["weights"] + has_gradients * sizes["gradients"] + (not is_offloaded) * sizes["optimizer"]

    def restore_schedule(self, num_updates: int) -> None:
        """Continue after this number of optimizer steps, with the learning rate and schedule of this run."""
        self.num_updates = num_updates
        self.optimizer.set_step(num_updates)

    def update(self, batch: Batch, num_prompts: int, measures: Measures) -> None:
        """Run algo.num_epochs epochs of optimizer steps, one for each mini-batch. A mini-batch holds whole groups of
        consecutive prompts. Masked responses are left out."""
        count, positions = self._algo.num_mini_batches, batch.group_ids.tolist()
        kept = batch.trained_sequences(self._algo.mask_truncated)
        for _ in range(self._algo.num_epochs):
            for index in range(count):
                sequences = [s for s in kept if mini_batch_of(positions[s], num_prompts, count) == index]
                self._optimizer_step(batch.select(sequences), measures)

    def _optimizer_step(self, mini_batch: Batch, measures: Measures) -> None:
        micro_batches = self._cut(mini_batch)
        denominator = self._total_denominator(mini_batch)
        scale = dist.get_world_size(self._pg) / max(denominator.item(), 1.0)
        self._run_passes(mini_batch, micro_batches, scale, measures)
        self._step(mini_batch, denominator, measures)

    def _cut(self, batch: Batch) -> list[list[int]]:
        return cut_together(batch, self._settings.max_tokens, hidden_size_of(self.model), self._pg)

    def _total_denominator(self, mini_batch: Batch) -> Tensor:
        """Return the denominator of the loss over all ranks."""
        denominator = self._denominator(mini_batch).to(torch.float64)
        with HEART.in_collective("actor"):
            dist.all_reduce(denominator, group=self._pg)
        return denominator

    def _run_passes(
        self, batch: Batch, micro_batches: list[list[int]], scale: float, measures: Measures, is_end: bool = True
    ) -> None:
        """Run the forward and backward passes of these micro-batches, whose losses are multiplied by `scale`. With
        `is_end`, an optimizer step follows the last one."""
        for number, micro_batch in enumerate(micro_batches_of(batch, micro_batches, self.kind)):
            is_last = is_end and number + 1 == len(micro_batches)
            self._set_reduction(is_last)
            with self._reloading_moments() if is_last else nullcontext():
                self._accumulate(micro_batch, scale, measures)
            repeated = repeated_prompts(micro_batch).tolist()
            measures.sum("perf/update_tflop", self._flops.of_update(micro_batch.lengths.tolist(), repeated) / 1e12)

    def _step(self, mini_batch: Batch, denominator: Tensor, measures: Measures) -> None:
        """Check the gradients of a mini-batch, clip them, and run the optimizer."""
        for offloader in self._offloaders.values():
            offloader.start_reload()
        self._check(mini_batch, measures)
        norm = clip_gradients(self.model, self._actor.max_grad_norm, self._mesh).to(self._device)
        norm_value, num_bad = torch.stack([norm.double(), self._num_bad_outputs.double()]).tolist()
        if num_bad:
            raise FloatingPointError(
                f"{num_bad:.0f} {self.outputs} are not finite: its weights or activations have overflowed. Resume from "
                "an earlier checkpoint with a lower learning rate"
            )
        is_finite = math.isfinite(norm_value)  # the norm, and so the decision, is equal on all ranks
        is_first = dist.get_rank(self._pg) == 0  # the only rank that counts
        measures.sum(f"{self.metric}/skipped_steps", float(is_first and not is_finite))
        measures.mean(f"{self.metric}/grad_norm", torch.where(torch.isfinite(norm), norm, 0.0), float(is_finite))
        measures.mean(f"{self.metric}/lr", self.lr, 1)
        for offloader in self._offloaders.values():
            offloader.wait()
        if denominator and is_finite:  # even without tokens the optimizer would move the weights, by its momentum
            self.optimizer.step(self.lr)
            self.num_updates += 1
        self.optimizer.zero_grad()

    @contextmanager
    def _reloading_moments(self) -> Iterator[None]:
        """Reload a layer's moments as soon as its backward pass has freed its activations, so that the device never
        holds both. The copies run in parallel with the backward passes of the preceding layers."""
        offloaders = {kind: each for kind, each in self._offloaders.items() if kind not in self.weight_kinds}

        def start_reload(parameters: list[nn.Parameter], gradient: Tensor) -> None:
            moments = [moment for parameter in parameters for moment in self._moments(parameter)]
            for kind, offloader in offloaders.items():
                offloader.start_reload(part.data for of, part in moments if of == kind)

        def before_forward(parameters: list[nn.Parameter], layer: Any, inputs: Any, options: dict[str, Any]) -> None:
            for value in (*inputs, *options.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(partial(start_reload, parameters))  # the last gradient that a layer computes
                    return

        with ExitStack() as stack:
            for layer, parameters in self._layers if any(each.is_offloaded for each in offloaders.values()) else ():
                hook = partial(before_forward, parameters)
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _set_reduction(self, is_last: bool) -> None:
        """Reduce gradients only after the last micro-batch where this needs no extra memory: on a rank that holds the
        whole model, and between the replicas of a shard. Between shards, gradients are reduced after each micro-batch.
        A small model stays gathered until the last micro-batch."""
        assert isinstance(self.model, FSDPModule)
        if self._is_gathered_at_once:  # the weights are the same in all micro-batches of an optimizer step
            self.model.set_reshard_after_backward(is_last, recurse=False)
        if self._settings.offload == "always":  # FSDP moves gradients to host memory only once they are reduced
            return
        recurse = not self._is_gathered_at_once  # walking over all modules takes milliseconds
        if self._mesh.size(self._mesh.ndim - 1) == 1:
            self.model.set_requires_gradient_sync(is_last, recurse=recurse)
        elif self._mesh.ndim == 2:
            self.model.set_requires_all_reduce(is_last, recurse=recurse)

    def _denominator(self, mini_batch: Batch) -> Tensor:
        """Return this rank's term of the denominator of the loss."""
        raise NotImplementedError

    def _accumulate(self, micro_batch: Batch, scale: float, measures: Measures) -> None:
        """Run the forward and backward pass of a micro-batch. An empty one takes part with a loss of 0."""
        raise NotImplementedError

    def _count_bad(self, outputs: Tensor) -> None:
        self._num_bad_outputs = self._num_bad_outputs + (~torch.isfinite(outputs.detach())).sum()

    def _check(self, mini_batch: Batch, measures: Measures) -> None:
        """Check a mini-batch before its optimizer step."""

    def _move(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self._device)


def lr_schedule(name: str, warmup_steps: int, num_steps: int) -> Callable[[int], float]:
    """Return a function from the optimizer step, counted from 0, to the factor on the learning rate."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
        return {"constant": 1.0, "linear": 1.0 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[name]

    return factor
