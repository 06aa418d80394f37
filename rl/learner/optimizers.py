"""The optimizers that actor.optimizer names, and the state that each keeps for a parameter.

Parameters are sharded by rows, and each part of a parameter's state is sharded by the same rows. An update does not
depend on the number of shards: AdamW and SGD treat every element alone, 8-bit AdamW quantizes blocks that lie within a
row, and Muon gathers each matrix. So a checkpoint can be resumed at any number of ranks, with the same result.
"""

import importlib.util
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl.config.schema import ActorConfig, ConfigError, Optimizer
from rl.model.shards import TensorInfo, gather_rows

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's own names
MAX_BLOCK, MIN_BLOCK = 256, 64  # elements that share a scale in 8-bit AdamW
MIN_QUANTIZED = 4096  # elements; smaller parameters keep float32 moments, as in torchao


def check_optimizer(name: Optimizer) -> None:
    """Raise ConfigError if this installation lacks the optimizer."""
    if name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            "actor.optimizer: got adamw_8bit, which needs torchao, and it is not installed here; run `pip install "
            "torchao` in the environment of every actor, or set actor.optimizer=adamw"
        )
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"actor.optimizer: got muon, but torch {torch.__version__} has no torch.optim.Muon; install torch 2.9 or "
            "newer, or set actor.optimizer=adamw"
        )


class StatePart(NamedTuple):
    """One tensor of the state of a parameter. Its first dimension is that of the parameter."""

    shape: tuple[int, ...]  # of the whole tensor
    data: Tensor  # this rank's rows


class ModelOptimizer:
    """Base class. The state of a parameter exists after `state_of` or the first step.

    torch's optimizer gets this rank's rows as plain tensors. They share the memory of the parameters, and every element
    gets the same update. With distributed tensors, it would spend most of a step of a small model on dispatching them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._rows = {parameter: local(parameter.detach()) for parameter in parameters}
        self.inner: Any = None  # torch's optimizer of these rows; set by subclasses

    @property
    def has_state(self) -> bool:
        return bool(self.inner.state)

    def state_of(self, parameter: nn.Parameter) -> dict[str, StatePart]:
        """Return the state of a parameter by kind. Make it if there is none, because a checkpoint may need it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for parameter, rows in self._rows.items():
            assert local(parameter).data_ptr() == rows.data_ptr(), "FSDP has moved a parameter"
            rows.grad = None if parameter.grad is None else local(parameter.grad)
        self._set_lr(lr)
        self.inner.step()

    def _set_lr(self, lr: float) -> None:
        self.inner.param_groups[0]["lr"] = lr

    def set_step(self, num_steps: int) -> None:
        """Continue after this number of steps."""

    def zero_grad(self) -> None:
        for parameter, rows in self._rows.items():
            parameter.grad = rows.grad = None


class AdamW(ModelOptimizer):
    def __init__(self, parameters: Sequence[nn.Parameter], config: ActorConfig, on_gpu: bool):
        super().__init__(parameters)
        group = {"params": [*self._rows.values()]}  # may be empty: Muon may have all parameters
        betas, decay = (config.beta1, config.beta2), config.weight_decay
        # Ranks with a GPU use fused kernels also for parameters that are kept in host memory. On a CPU, fused kernels
        # round some elements differently in small shards, and `foreach` makes another tensor of each parameter's size.
        kernels = {"fused": True} if on_gpu else {}
        self.inner = torch.optim.AdamW([group], 0.0, betas, config.eps, decay, **kernels)

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        rows = self._rows[parameter]
        state = self.inner.state[rows]
        if not state:
            where = rows.device if self.inner.defaults["fused"] else None
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device=where)
            state |= {of: torch.zeros_like(rows) for of in MOMENTS}
        return state

    def state_of(self, parameter: nn.Parameter) -> dict[str, StatePart]:
        state = self._state(parameter)
        return {of: StatePart(tuple(parameter.shape), state[of]) for of in MOMENTS}

    def set_step(self, num_steps: int) -> None:
        for parameter in self._rows:
            self._state(parameter)["step"].fill_(num_steps)


class SGD(ModelOptimizer):
    def __init__(self, parameters: Sequence[nn.Parameter], config: ActorConfig):
        super().__init__(parameters)
        self._has_momentum, decay = config.beta1 > 0, config.weight_decay
        # By default, torch would copy all gradients at once on GPUs, to add the weight decay.
        self.inner = torch.optim.SGD([*self._rows.values()], 0.0, config.beta1, weight_decay=decay, foreach=False)

    def state_of(self, parameter: nn.Parameter) -> dict[str, StatePart]:
        if not self._has_momentum:
            return {}
        rows = self._rows[parameter]
        state = self.inner.state[rows]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(rows)
        return {"momentum": StatePart(tuple(parameter.shape), state["momentum_buffer"])}


class AdamW8bit(ModelOptimizer):
    """torchao's AdamW with moments of 8 bits. Its rows are plain tensors also because blocks are then ours to choose:
    torchao lets them cross rows, and then neither result nor checkpoint would fit another number of ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: ActorConfig):
        from torchao.optim import AdamW8bit as Optimizer8bit
        from torchao.optim.subclass_8bit import OptimState8bit

        super().__init__(parameters)
        self._quantized_zeros = OptimState8bit.zeros
        self._parts: dict[nn.Parameter, dict[str, StatePart]] = {}
        betas, decay = (config.beta1, config.beta2), config.weight_decay
        self.inner = Optimizer8bit([*self._rows.values()], 0.0, betas, config.eps, decay)

    def _state(self, parameter: nn.Parameter) -> dict[str, Any]:
        rows = self._rows[parameter]
        state = self.inner.state[rows]
        if not state:
            block = block_size(tuple(parameter.shape))
            state["step"] = torch.tensor(0.0)
            for of in MOMENTS:
                state[of] = torch.zeros_like(rows)
                if block and rows.numel():
                    signed = of == "exp_avg"
                    state[of] = self._quantized_zeros(rows.shape, signed, block, rows.device, rows.dtype)
        return state

    def state_of(self, parameter: nn.Parameter) -> dict[str, StatePart]:
        if parameter not in self._parts:  # always the same tensors, which may be offloaded
            self._parts[parameter] = self._make_parts(parameter)
        return self._parts[parameter]

    def _make_parts(self, parameter: nn.Parameter) -> dict[str, StatePart]:
        state, shape = self._state(parameter), tuple(parameter.shape)
        block = block_size(shape)
        if not block:
            return {of: StatePart(shape, state[of]) for of in MOMENTS}
        num_scales, parts = torch.Size(shape[1:]).numel() // block, dict[str, StatePart]()
        for of in MOMENTS:
            is_empty = not state[of].numel()
            codes = state[of].to(torch.uint8) if is_empty else state[of].codes
            scales = state[of].view(-1) if is_empty else state[of].scale
            parts[f"{of}_codes"] = StatePart(shape, codes)
            parts[f"{of}_scales"] = StatePart((shape[0], num_scales), scales.view(-1, num_scales))
        return parts

    def step(self, lr: float) -> None:
        for parameter, rows in self._rows.items():
            if not rows.numel():
                parameter.grad = None  # torchao cannot quantize nothing
            elif parameter.grad is not None:
                self._state(parameter)
        super().step(lr)

    def _set_lr(self, lr: float) -> None:
        self.inner.param_groups[0]["lr"].fill_(lr)

    def set_step(self, num_steps: int) -> None:
        for parameter in self._rows:
            self._state(parameter)["step"].fill_(num_steps)


def block_size(shape: tuple[int, ...]) -> int:
    """Return how many elements of a row share a scale in 8-bit AdamW, or 0 if a parameter keeps float32 moments."""
    row = torch.Size(shape[1:]).numel()
    block = min(MAX_BLOCK, row & -row)  # the largest power of two that divides a row
    return block if len(shape) > 1 and block >= MIN_BLOCK and shape[0] * row >= MIN_QUANTIZED else 0


class Muon(ModelOptimizer):
    """Muon for the matrices of the layers, and AdamW for everything else: embeddings, heads, norms and biases.

    Muon makes the update of a matrix orthogonal, which needs the whole matrix. torch.optim.Muon would compute on
    shards too, but in bfloat16, so that the weights depend on the number of shards. We gather the matrix first, and
    every rank then runs the same computation and keeps its own rows.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], others: AdamW, config: ActorConfig, device: torch.device):
        super().__init__(())  # `others` has the rows of all parameters but the matrices
        self.inner = others.inner
        self._matrices, self._others, self._device = dict.fromkeys(matrices), others, device
        self._momentum, self._weight_decay = config.beta1, config.weight_decay
        self._buffers: dict[nn.Parameter, Tensor] = {}  # this rank's rows

    @property
    def has_state(self) -> bool:
        return super().has_state or bool(self._buffers)

    def _buffer(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._buffers:
            self._buffers[parameter] = torch.zeros_like(local(parameter.detach()))
        return self._buffers[parameter]

    def state_of(self, parameter: nn.Parameter) -> dict[str, StatePart]:
        if parameter not in self._matrices:
            return self._others.state_of(parameter)
        return {"momentum": StatePart(tuple(parameter.shape), self._buffer(parameter))}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        self._others.step(lr)
        for parameter in self._matrices:
            if parameter.grad is None:
                continue
            rows, gradient, buffer = local(parameter.detach()), local(parameter.grad), self._buffer(parameter)
            buffer.lerp_(gradient, 1 - self._momentum)
            update = orthogonal_update(gradient.lerp(buffer, self._momentum), parameter, lr, self._device)
            rows.mul_(1 - lr * self._weight_decay).add_(update.to(rows.device))

    def set_step(self, num_steps: int) -> None:
        self._others.set_step(num_steps)

    def zero_grad(self) -> None:
        self._others.zero_grad()
        for parameter in self._matrices:
            parameter.grad = None


def orthogonal_update(rows: Tensor, parameter: nn.Parameter, lr: float, device: torch.device) -> Tensor:
    """Return this rank's rows of what Muon adds to a matrix. `rows` are those of its momentum. This is a collective of
    the ranks that share the matrix.

    Muon computes in bfloat16, so the rows travel in bfloat16. torch.optim.Muon then makes one step of a matrix of
    zeros, which leaves the update in it. Its learning rate is scaled so that it suits AdamW too.
    """
    assert isinstance(parameter, DTensor)
    mesh, shape = parameter.device_mesh, parameter.shape
    whole = nn.Parameter(torch.zeros(shape, device=device))
    whole.grad = gather_rows(rows.to(torch.bfloat16), parameter, device).float()
    torch.optim.Muon([whole], lr, 0.0, 0.0, nesterov=False, adjust_lr_fn="match_rms_adamw").step()
    info, axis = TensorInfo("", tuple(shape), "float32", sharded=True), mesh.ndim - 1  # one for replicas may precede it
    first, end = info.rows(mesh.get_local_rank(axis), mesh.size(axis))
    return whole.detach()[first:end]


def build_optimizer(
    model: nn.Module, in_layers: Collection[nn.Parameter], config: ActorConfig, device: torch.device
) -> ModelOptimizer:
    """Build the optimizer of a sharded model, right after sharding. `in_layers` are the parameters of its layers.
    Frozen parameters get no state."""
    check_optimizer(config.optimizer)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.optimizer == "sgd":
        return SGD(parameters, config)
    if config.optimizer == "adamw_8bit":
        return AdamW8bit(parameters, config)
    if config.optimizer == "muon":
        chosen = set(in_layers)
        matrices = [each for each in parameters if each in chosen and each.ndim == 2]
        others = [each for each in parameters if each not in chosen or each.ndim != 2]
        return Muon(matrices, AdamW(others, config, device.type == "cuda"), config, device)
    return AdamW(parameters, config, device.type == "cuda")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
