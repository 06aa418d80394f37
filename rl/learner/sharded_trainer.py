"""A sharded model under AdamW: its state by slices, where it lies, and optimizer steps over micro-batches.

Losses are sums; the division by the mini-batch's own denominator, over all ranks, happens once, so the result depends
neither on the number of ranks nor on the split into micro-batches. FSDP averages gradients over the mesh, which the
factor `mesh size` undoes.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rl.config.schema import ActorConfig, AlgoConfig
from rl.data.batch import Batch
from rl.data.micro_batches import cut_together, micro_batches_of
from rl.data.packing import mini_batch_of
from rl.learner.offload import Offloader
from rl.model.host_memory import to_device
from rl.model.logprobs import hidden_size_of
from rl.model.shards import LocalSlice, local_slices, reshard
from rl.report.metrics import Measures

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, by its own names


@dataclass(frozen=True)
class ShardedModel:
    """A model whose parameters are sharded over the ranks of a process group."""

    model: nn.Module
    pg: dist.ProcessGroup
    device: torch.device


class ShardedTrainer:
    kind = "model"  # of its weights in a checkpoint
    metric = "optim"  # prefix of what an optimizer step measures
    outputs = "logprobs of the policy"
    remedy = " or set algo.dual_clip"  # of gradients that are not finite, beside a lower learning rate

    def __init__(
        self,
        sharded: ShardedModel,
        actor: ActorConfig,
        algo: AlgoConfig,
        lr: float,
        schedule: Callable[[int], float],
    ):
        self.model, self._pg, self._device = sharded.model, sharded.pg, sharded.device
        parameter = next(self.model.parameters())
        assert isinstance(parameter, DTensor)
        self._mesh = parameter.device_mesh  # [shard], or [replica, shard]
        self._actor, self._algo = actor, algo
        # Right after sharding: an optimizer made after a forward would miss the root's parameters without a word.
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=lr,
            betas=(actor.beta1, actor.beta2),
            eps=actor.eps,
            weight_decay=actor.weight_decay,
            fused=self._device.type == "cuda" or None,  # also where actor.offload keeps them in host memory
        )
        # Outputs of forward passes that were infinite or NaN: counted on the device, read once an optimizer step.
        self._num_bad_outputs = torch.zeros((), dtype=torch.int64, device=self._device)
        self._rests: dict[str, Offloader] = {}  # by kind of state, once it has left the device to an engine
        _, *layers = (module for module in self.model.modules() if isinstance(module, FSDPModule))  # without the root
        self._layers = [(layer, _trained(layer)) for layer in layers]  # with what the optimizer knows them by
        self._schedule = schedule
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, schedule)

    @property
    def num_updates(self) -> int:
        """Optimizer steps so far."""
        return self._scheduler.last_epoch

    def _moment_kind(self, moment: str) -> str:
        return moment if self.kind == "model" else f"{self.kind}_{moment}"

    def state_slices(self) -> list[tuple[str, LocalSlice]]:
        """This rank's part of all that training changes, by kind: parameters (the float32 masters) and buffers, then
        the moments. Views of the memory that is trained, or of the host's while it lies there."""
        parts = [(self.kind, part) for part in local_slices(self.model)]
        infos = {part.info.name: part.info for _, part in parts}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                state = self._moments(parameter)
                parts += [(self._moment_kind(of), LocalSlice(infos[name], _local(state[of]))) for of in MOMENTS]
        for kind, rest in self._rests.items():
            if rest.is_offloaded:
                parts = [
                    (of, LocalSlice(part.info, rest.host_copy(part.data)) if of == kind else part) for of, part in parts
                ]
            else:
                rest.wait()
        return parts

    def weight_slices(self) -> Iterator[LocalSlice]:
        """Of the weights alone, where they lie now."""
        for part in local_slices(self.model):
            yield LocalSlice(part.info, self._rests[self.kind].host_copy(part.data)) if self.is_offloaded else part

    @property
    def offloads(self) -> bool:
        """Whether it, or a part of it, leaves the device to an engine of the same rank."""
        return self._actor.offload in ("rollout", "moments")

    @property
    def is_offloaded(self) -> bool:
        """The weights are in host memory: nothing can be computed."""
        return self.kind in self._rests and self._rests[self.kind].is_offloaded

    def start_offload(self) -> None:
        """What `offload` will wait for and no other rank needs; nothing is updated until then."""
        for kind, rest in self._rests.items():
            if kind != self.kind:
                rest.start_offload()

    def offload(self) -> None:
        """For an engine of this rank: what only the update needed, and what actor.offload says."""
        reshard(self.model)  # a probe leaves a part of it gathered
        for kind, tensors in self._state_so_far().items() if self.offloads else ():
            if kind == self.kind and self._actor.offload == "moments":
                continue
            if kind not in self._rests:
                self._rests[kind] = Offloader(tensors)
            self._rests[kind].offload()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the allocator keeps what was freed otherwise

    def reload(self) -> None:
        """The weights; moments come when an optimizer step is near."""
        if self.kind in self._rests:
            self._rests[self.kind].start_reload()
            self._rests[self.kind].wait()

    def restore_schedule(self, num_updates: int) -> None:
        """As after so many optimizer steps; learning rate and schedule are this run's own."""
        self._scheduler.last_epoch = num_updates
        rates = [base * self._schedule(num_updates) for base in self._scheduler.base_lrs]
        self._scheduler._last_lr = rates
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter in self._optimizer.param_groups[0]["params"]:
            self._moments(parameter)["step"].fill_(num_updates)

    def _state_so_far(self) -> dict[str, list[Tensor]]:
        """By kind; without moments before the first update, so that none are made only to leave. Then of all, also of
        parameters that had no gradient yet."""
        tensors = {self.kind: [part.data for part in local_slices(self.model)]}
        trained = _trained(self.model) if self._optimizer.state else []
        states = [self._moments(parameter) for parameter in trained]
        return tensors | {self._moment_kind(of): [_local(state[of]) for state in states] for of in MOMENTS if states}

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW makes them at its first step; a checkpoint may need them before."""
        state = self._optimizer.state[parameter]
        if not state:
            where = parameter.device if self._optimizer.defaults["fused"] else None
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device=where)
            state |= {of: torch.zeros_like(parameter.detach()) for of in MOMENTS}
        return state

    def update(self, batch: Batch, num_prompts: int, measures: Measures) -> None:
        """Run epochs of optimizer steps over mini-batches, which are runs of whole groups in stream order. Masked
        responses are in none of them."""
        count, positions = self._algo.num_mini_batches, batch.group_ids.tolist()
        kept = batch.trained_sequences(self._algo.mask_truncated)
        for _ in range(self._algo.num_epochs):
            for index in range(count):
                sequences = [s for s in kept if mini_batch_of(positions[s], num_prompts, count) == index]
                self._optimizer_step(batch.select(sequences), measures)

    def _optimizer_step(self, mini_batch: Batch, measures: Measures) -> None:
        max_tokens = self._actor.max_tokens_per_micro_batch
        micro_batches = cut_together(mini_batch, max_tokens, hidden_size_of(self.model), self._pg)
        denominator = self._denominator(mini_batch).to(torch.float64)
        dist.all_reduce(denominator, group=self._pg)
        scale = dist.get_world_size(self._pg) / max(denominator.item(), 1.0)
        for number, micro_batch in enumerate(micro_batches_of(mini_batch, micro_batches, self.kind)):
            is_last = number + 1 == len(micro_batches)
            self._set_reduction(is_last)
            with self._moments_returning() if is_last else nullcontext():
                self._accumulate(micro_batch, scale, measures)
        for rest in self._rests.values():
            rest.start_reload()
        self._check(mini_batch, measures)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._actor.max_grad_norm)
        norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).to(self._device)  # 0.0 without gradients
        norm_value, num_bad = torch.stack([norm.double(), self._num_bad_outputs.double()]).tolist()
        if num_bad:
            raise FloatingPointError(
                f"{num_bad:.0f} {self.outputs} are not finite: its weights or activations have overflowed. Go on from "
                "an earlier checkpoint with a lower learning rate"
            )
        is_finite = math.isfinite(norm_value)  # the same on every rank, as the norm is
        self._count_skipped(not is_finite, norm_value, measures)
        measures.mean(f"{self.metric}/grad_norm", torch.where(torch.isfinite(norm), norm, 0.0), float(is_finite))
        measures.mean(f"{self.metric}/lr", self._scheduler.get_last_lr()[0], 1)
        for rest in self._rests.values():
            rest.wait()
        if denominator and is_finite:  # without anything to learn from AdamW would still move by its momentum
            self._optimizer.step()
            self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _count_skipped(self, is_skipped: bool, norm: float, measures: Measures) -> None:
        """Count an optimizer step that a gradient with infinities or NaNs would have spoilt. The first rank counts."""
        is_first = dist.get_rank(self._pg) == 0
        measures.sum(f"{self.metric}/skipped_steps", float(is_skipped and is_first))
        if is_skipped and is_first:
            print(
                f"oneworld: the gradient norm of the {self.kind} is {norm} after {self.num_updates} optimizer steps, "
                f"so the next one is skipped and counted in {self.metric}/skipped_steps. If this repeats, lower its "
                f"learning rate{self.remedy}.",
                flush=True,
            )

    @contextmanager
    def _moments_returning(self) -> Iterator[None]:
        """Those of a layer when its backward pass has freed its activations, so that the two are never there
        together; beside the backward passes of the layers before it."""
        rests = {of: self._rests[kind] for of in MOMENTS if (kind := self._moment_kind(of)) in self._rests}

        def start_reload(parameters: list[nn.Parameter], gradient: Tensor) -> None:
            for of, rest in rests.items():
                rest.start_reload(_local(self._moments(parameter)[of]) for parameter in parameters)

        def before_forward(
            parameters: list[nn.Parameter], layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
        ) -> None:
            for value in (*inputs, *options.values()):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(partial(start_reload, parameters))  # the last gradient that a layer computes
                    return

        layers = self._layers if any(rest.is_offloaded for rest in rests.values()) else ()
        handles = [
            layer.register_forward_pre_hook(partial(before_forward, parameters), with_kwargs=True)
            for layer, parameters in layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _set_reduction(self, is_last: bool) -> None:
        """Gradients of micro-batches add up first where their sum takes no more room: on a rank that has the whole
        model, and of one shard before its replicas exchange them. Over shards each is reduced at once."""
        assert isinstance(self.model, FSDPModule)
        if self._actor.offload == "always":  # FSDP brings them to host memory when it has reduced them
            return
        if self._mesh.size(self._mesh.ndim - 1) == 1:
            self.model.set_requires_gradient_sync(is_last)
        elif self._mesh.ndim == 2:
            self.model.set_requires_all_reduce(is_last)

    def _denominator(self, mini_batch: Batch) -> Tensor:
        """This rank's part of what the sum of losses is divided by."""
        raise NotImplementedError

    def _accumulate(self, micro_batch: Batch, scale: float, measures: Measures) -> None:
        """Forward and backward of one micro-batch; an empty one takes part with a loss of 0."""
        raise NotImplementedError

    def _count_bad(self, outputs: Tensor) -> None:
        self._num_bad_outputs = self._num_bad_outputs + (~torch.isfinite(outputs.detach())).sum()

    def _check(self, mini_batch: Batch, measures: Measures) -> None:
        """Before the optimizer steps."""

    def _move(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self._device)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lr_schedule(name: str, warmup_steps: int, num_steps: int) -> Callable[[int], float]:
    """The factor on the learning rate at each optimizer step, counted from 0."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
        return {"constant": 1.0, "linear": 1.0 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[name]

    return factor
