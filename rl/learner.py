"""The policy on the actor mesh and its optimizer: one batch in, new weights and metrics out.

Losses are sums; the division by the number of response tokens of the whole mini-batch, over all ranks, happens once,
so the result depends neither on the number of ranks nor on the split into micro-batches. FSDP averages gradients over
the mesh, which the factor `mesh size` undoes.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl.algo.kl import kl_penalty
from rl.algo.losses import clipped_ratio
from rl.algo.mismatch import check_mismatch, mismatch_kl
from rl.config import ActorConfig, AlgoConfig, RolloutConfig
from rl.data.batch import Batch, empty_batch
from rl.data.micro_batches import cut_together
from rl.data.packing import mini_batch_of
from rl.metrics import Measures
from rl.model.attention import to_device
from rl.model.logprobs import TokenScores, hidden_size_of, score_responses
from rl.model.offload import Offload
from rl.shards import LocalSlice, local_slices, reshard
from rl.watch.heart import HEART

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, by its own names


class Learner:
    def __init__(
        self,
        model: nn.Module,
        pg: dist.ProcessGroup,
        device: torch.device,
        actor: ActorConfig,
        algo: AlgoConfig,
        rollout: RolloutConfig,
        num_optimizer_steps: int,
    ):
        self.model = model
        self._pg, self._device, self._actor, self._algo, self._rollout = pg, device, actor, algo, rollout
        # Right after sharding: an optimizer made after a forward would miss the root's parameters without a word.
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=actor.lr,
            betas=(actor.beta1, actor.beta2),
            eps=actor.eps,
            weight_decay=actor.weight_decay,
            fused=device.type == "cuda" or None,  # also where actor.offload keeps them in host memory
        )
        # They ride along with every update's first forward. So a checkpoint costs no forward of its own, and whether
        # one was saved changes no rounding.
        self.probe_tokens: Sequence[int] = ()
        self.probe_logits: Tensor | None = None  # [probe, vocabulary] float32, by the policy before the last update
        self._is_probe_due = False
        self._rests: dict[str, Offload] = {}  # by kind of state, once it has left the device to an engine
        self._schedule = lr_schedule(actor.lr_schedule, actor.warmup_steps, num_optimizer_steps)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._schedule)

    @property
    def num_updates(self) -> int:
        """Optimizer steps so far."""
        return self._scheduler.last_epoch

    def state_slices(self) -> list[tuple[str, LocalSlice]]:
        """This rank's part of all that training changes, by kind: `model` for parameters (the float32 masters) and
        buffers, else the moment's name. Views of the memory that is trained, or of the host's while it lies there."""
        parts = [("model", part) for part in local_slices(self.model)]
        infos = {part.info.name: part.info for _, part in parts}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                moments = self._moments(parameter)
                parts += [(kind, LocalSlice(infos[name], _local(moments[kind]))) for kind in MOMENTS]
        for kind, rest in self._rests.items():
            if rest.is_away:
                parts = [
                    (of, LocalSlice(part.info, rest.on_host(part.data)) if of == kind else part) for of, part in parts
                ]
            else:
                rest.wait()
        return parts

    def weight_slices(self) -> Iterator[LocalSlice]:
        """Of the policy alone, where they lie now."""
        for part in local_slices(self.model):
            yield LocalSlice(part.info, self._rests["model"].on_host(part.data)) if self.is_away else part

    @property
    def offloads(self) -> bool:
        """Whether it leaves the device to an engine of the same rank."""
        return self._actor.offload == "rollout"

    @property
    def is_away(self) -> bool:
        """In host memory: nothing can be computed."""
        return any(rest.is_away for rest in self._rests.values())

    def start_leaving(self) -> None:
        """What `release_device` will wait for and no other rank needs; nothing is updated until then."""
        for kind in MOMENTS:
            if kind in self._rests:
                self._rests[kind].start_leaving()

    def release_device(self) -> None:
        """For an engine of this rank: what only the update needed; with actor.offload=rollout everything."""
        reshard(self.model)  # a probe leaves a part of it gathered
        if self.offloads and not self.is_away:
            for kind, tensors in self._state_so_far().items():
                if kind not in self._rests:
                    self._rests[kind] = Offload(tensors)
                self._rests[kind].leave()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the allocator keeps what was freed otherwise

    def take_device(self) -> None:
        """Weights first; moments come while the first forward passes run."""
        for kind, rest in self._rests.items():
            rest.come_back()
            if kind == "model":
                rest.wait()

    def run_probe(self) -> None:
        """A forward for the probe alone, where no update follows; on every rank, since it is a collective."""
        self._is_probe_due = True
        with torch.no_grad():
            self._score(empty_batch())
        reshard(self.model)

    def _score(self, micro_batch: Batch) -> TokenScores:
        probe = self.probe_tokens if self._is_probe_due else ()
        self._is_probe_due = False
        scores = score_responses(self.model, micro_batch, self._rollout.temperature, self._device, probe)
        if probe:
            self.probe_logits = scores.probe_logits
        return scores

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
        """By kind; without moments before the first update, so that none are made only to leave."""
        tensors = {"model": [part.data for part in local_slices(self.model)]}
        states = self._optimizer.state.values()
        return tensors | ({kind: [_local(state[kind]) for state in states] for kind in MOMENTS} if states else {})

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW makes them at its first step; a checkpoint may need them before."""
        state = self._optimizer.state[parameter]
        if not state:
            where = parameter.device if self._optimizer.defaults["fused"] else None
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device=where)
            state |= {kind: torch.zeros_like(parameter.detach()) for kind in MOMENTS}
        return state

    def update(self, batch: Batch, num_prompts: int, measures: Measures) -> None:
        """Epochs of optimizer steps over mini-batches, which are runs of whole groups in stream order. A batch without
        old logprobs was sampled by this very policy and takes one step: its own forward gives them."""
        self._is_probe_due = True
        count = self._algo.num_mini_batches
        assert batch.old_logprobs is not None or count * self._algo.num_epochs == 1
        mini_batch_of_sequence = [mini_batch_of(position, num_prompts, count) for position in batch.group_ids.tolist()]
        for _ in range(self._algo.num_epochs):
            for index in range(count):
                sequences = [s for s, mini_batch in enumerate(mini_batch_of_sequence) if mini_batch == index]
                self._optimizer_step(batch.select(sequences), measures)

    def _optimizer_step(self, mini_batch: Batch, measures: Measures) -> None:
        max_tokens = self._actor.max_tokens_per_micro_batch
        micro_batches = cut_together(mini_batch, max_tokens, hidden_size_of(self.model), self._pg)
        total_tokens = mini_batch.response_lengths.sum()
        dist.all_reduce(total_tokens, group=self._pg)
        scale = dist.get_world_size(self._pg) / int(total_tokens)
        for number, sequences in enumerate(micro_batches):
            HEART.beat(f"micro-batch {number + 1} of {len(micro_batches)}")
            self._accumulate(mini_batch.select(sequences), scale, measures)
        if mini_batch.old_logprobs is None:
            mismatch = measures.reduce(self._pg, "policy/mismatch_kl")
            check_mismatch(mismatch["policy/mismatch_kl"], self._rollout.max_mismatch_kl)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._actor.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if not torch.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm.item()}; lower actor.lr, or look at the batch's logprobs and rewards"
            )
        measures.mean("optim/grad_norm", norm, 1)
        measures.mean("optim/lr", self._scheduler.get_last_lr()[0], 1)
        for rest in self._rests.values():
            rest.wait()
        self._optimizer.step()
        self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _accumulate(self, micro_batch: Batch, scale: float, measures: Measures) -> None:
        """Forward and backward of one micro-batch; an empty one takes part with a loss of 0."""
        assert micro_batch.advantages is not None
        mask = micro_batch.response_mask
        count = mask.sum()
        scores = self._score(micro_batch)
        advantages = self._move(torch.repeat_interleave(micro_batch.advantages, micro_batch.response_lengths))
        if micro_batch.old_logprobs is None:
            old_logprobs = scores.logprobs.detach()
            rollout_logprobs = self._move(micro_batch.rollout_logprobs[mask])
            measures.mean("policy/mismatch_kl", mismatch_kl(old_logprobs, rollout_logprobs), count)
        else:
            old_logprobs = self._move(micro_batch.old_logprobs[mask])
        policy = clipped_ratio(scores.logprobs, old_logprobs, advantages, self._algo.clip_low, self._algo.clip_high)
        policy_sum = loss_sum = policy.loss.sum()
        if self._algo.kl_coef:
            assert micro_batch.ref_logprobs is not None
            ref_logprobs = self._move(micro_batch.ref_logprobs[mask])
            kl_sum = kl_penalty(scores.logprobs, ref_logprobs, self._algo.kl_estimator).sum()
            loss_sum = loss_sum + self._algo.kl_coef * kl_sum
            measures.mean("loss/kl", kl_sum, count)
        (loss_sum * scale).backward()
        measures.mean("loss/policy", policy_sum, count)
        measures.mean("policy/clip_fraction", policy.clipped.sum(), count)
        measures.mean("policy/entropy", scores.entropy.sum(), count)

    def _move(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self._device)


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
