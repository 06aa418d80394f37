"""Load a Hugging Face causal LM on a mesh: build it on the meta device, shard it with FSDP2, fill it from safetensors.

No rank ever holds the whole model, because each reads only the rows that it owns. Parameters are float32 masters. With
bfloat16, the forward and backward passes run in bfloat16, and gradients are reduced in float32. With LoRA, adapters are
the masters, and the weights under them are stored as they are computed with.
"""

import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rl.common.bars import BARS
from rl.config.schema import ConfigError
from rl.model import attention, rotary
from rl.model.activations import MAX_GATHERED_AT_ONCE
from rl.model.adapter_names import is_adapter
from rl.model.logprobs import hidden_size_of, patch_forward, patch_forward_to_score
from rl.model.lora import Adapters, initialize, inject
from rl.model.shape import tensor_files
from rl.model.shards import local_slices
from rl.watch.compilation import mark_compilation


@dataclass(frozen=True)
class Compute:
    """How layers are computed. These settings change only speed and memory."""

    compiled: bool = False
    recomputed: str = "none"  # as actor.recompute
    on_host: bool = False  # keep parameters and gradients in host memory; layers are on the device only to compute
    shares_prompts: bool = False  # several sequences of a micro-batch usually begin with the same prompt


PLAIN = Compute()


def load_model(
    folder: Path,
    mesh: DeviceMesh,
    device: torch.device,
    dtype: str,
    trainable: bool | Adapters,
    filled: bool = True,
    compute: Compute = PLAIN,
    as_critic: bool = False,
) -> nn.Module:
    """Build a sharded model. All of it is trainable, or nothing, or only the adapters that it gets and a critic's head.

    If `filled` is False, parameters and persistent buffers get no values, because a checkpoint will fill them. Adapters
    always have their first values.
    """
    attention.register()
    config = AutoConfig.from_pretrained(folder, **({"tie_word_embeddings": False} if as_critic else {}))
    name = attention.VARLEN if device.type == "cuda" and dtype == "bfloat16" else attention.RAGGED
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=name)
    model.shares_prompts = compute.shares_prompts
    rotary.replace(model)
    own_head = _give_value_head(model) if as_critic else ""
    if not as_critic:
        patch_forward_to_score(model, keeps_logits=compute.recomputed == "none")
    if isinstance(trainable, Adapters):
        inject(model, trainable.config, dtype, own_head)
    else:
        model.requires_grad_(trainable)
    _set_compute(model, compute)
    _turn_dropout_off(model)
    if device.type == "cuda":
        rotary.load_kernels()
    if name == attention.VARLEN:
        attention.check_kernel(device)
    mark_compilation()
    _shard(model, mesh, dtype, compute.on_host)
    model.to_empty(device="cpu" if compute.on_host else device)
    model.tie_weights()
    _place_buffers(model, device)
    if filled:
        _fill_from_files(model, folder, mesh, own_head)
    if isinstance(trainable, Adapters):
        initialize(model, trainable, mesh)
    return model


def _give_value_head(model: Any) -> str:
    """Replace the head by one with a single row. Return the name of its weight, which is in no file."""
    with torch.device("meta"):
        head = nn.Linear(hidden_size_of(model), 1, bias=False, dtype=torch.float32)
    model.set_output_embeddings(head)
    patch_forward(model)
    return next(name for name, parameter in model.named_parameters() if parameter is head.weight)


def stop_token_ids(folder: Path) -> list[int]:
    """Return the tokens that end a response, from generation_config.json or else config.json."""
    has_own = (folder / "generation_config.json").is_file()
    source = GenerationConfig.from_pretrained(folder) if has_own else AutoConfig.from_pretrained(folder)
    ids = getattr(source, "eos_token_id", None)
    if ids is None:
        raise ConfigError(
            f"{folder} names no eos_token_id in generation_config.json or config.json, so no response would end; add it"
        )
    return list(ids) if isinstance(ids, list) else [ids]


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, in order. FSDP puts its name before that of a class that it shards."""
    layer_classes = set(model._no_split_modules or ())  # type: ignore[arg-type]
    layers = [each for each in model.modules() if type(each).__name__.removeprefix("FSDP") in layer_classes]
    assert layers, f"{type(model).__name__} names no layer class in _no_split_modules"
    return layers


def _set_compute(model: Any, compute: Compute) -> None:
    """Set recomputation and compilation of layers. Compilation is inside the hooks of FSDP and of recomputation, so all
    layers share one graph."""
    layers: list[Any] = decoder_layers(model)
    assert compute.recomputed != "auto", "actor.recompute has not been derived"
    if compute.recomputed in ("selective", "full"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for index, layer in enumerate(layers):
            layer.gradient_checkpointing = compute.recomputed == "full" or index % 2 == 0
    if compute.compiled:
        for layer in layers:
            layer.forward = torch.compile(layer.forward, backend=_compile, dynamic=True)


def _compile(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a layer. Its backward pass computes again what takes no matrix product: the results of norms, and of the
    activation function times the gate. By default, torch keeps them, since matrix products read them. That would be 30
    to 50 % more memory for activations (rl/model/activations.py), and at most 2 % faster."""
    with functorch.patch(ban_recompute_materialized_backward=False):
        return lookup_backend("inductor")(graph, inputs)


def _turn_dropout_off(model: nn.Module) -> None:
    """Turn dropout off, as in an engine, whatever config.json says. transformers recomputes a layer only in training
    mode. So recomputed layers stay in training mode, and the modules inside them are in evaluation mode."""
    model.eval()
    for layer in decoder_layers(model):
        if getattr(layer, "gradient_checkpointing", False):
            layer.training = True
            for name, value in list(vars(layer).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(layer, name, 0.0)


def _shard(model: nn.Module, mesh: DeviceMesh, dtype: str, on_host: bool) -> None:
    policy = MixedPrecisionPolicy()
    if dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if on_host else OffloadPolicy()
    is_small = sum(parameter.numel() for parameter in model.parameters()) <= MAX_GATHERED_AT_ONCE
    apart = [] if is_small and not on_host else decoder_layers(model)
    layers = [fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload) for layer in apart]
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for layer, following in itertools.pairwise(layers):  # in backward passes FSDP prefetches by default
        layer.set_modules_to_forward_prefetch([following])


def _place_buffers(model: nn.Module, device: torch.device) -> None:
    """Put buffers on the device, even if parameters are in host memory. Buffers that are in no file (rotary
    frequencies) are copied from a fresh module of the same class, which computes them."""
    for name, module in model.named_modules():
        for buffer, value in module.named_buffers(recurse=False):
            setattr(module, buffer, value.to(device))
        computed = sorted(module._non_persistent_buffers_set)
        if computed:
            try:
                fresh = type(module)(module.config)
            except (AttributeError, TypeError) as error:
                raise ConfigError(
                    f"cannot recompute {', '.join(computed)} of {name} ({type(module).__name__}): {error}; this "
                    "architecture is not supported"
                ) from None
            for buffer in computed:
                setattr(module, buffer, getattr(fresh, buffer).to(device))


def _fill_from_files(model: nn.Module, folder: Path, mesh: DeviceMesh, own_head: str) -> None:
    """Fill this rank's slices from safetensors. A critic's head, which is in no file, starts at zero. Adapters are in
    none either, and are left alone."""
    files = tensor_files(folder)
    parts = {part.info.name: part for part in local_slices(model) if not is_adapter(part.info.name)}
    if own_head:
        parts.pop(own_head).data.zero_()
    missing = [name for name in parts if name not in files]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} tensors of {type(model).__name__}, the first of them {missing[0]}; the "
            "folder must hold safetensors of the architecture that its config.json names"
        )
    handles = {file: safe_open(folder / file, framework="pt") for file in set(files.values())}
    shard_axis = mesh.ndim - 1  # an axis for replicas may come before it
    with BARS.open("loading", sum(part.data.nbytes for part in parts.values()), "B") as count:
        for name, part in parts.items():
            source, info = handles[files[name]].get_slice(name), part.info
            if tuple(source.get_shape()) != info.shape:
                raise ConfigError(
                    f"{folder / files[name]}: {name} has the shape {source.get_shape()}, but config.json asks for "
                    f"{list(info.shape)}"
                )
            start, stop = info.rows(mesh.get_local_rank(shard_axis), mesh.size(shard_axis))
            if not info.sharded:
                part.data.copy_(handles[files[name]].get_tensor(name))
            elif start < stop:
                part.data.copy_(source[start:stop])
            count(part.data.nbytes)


def fill_with_noise(model: nn.Module, mesh: DeviceMesh) -> None:
    """Fill a model with random weights of the usual size, to try out a run. Replicas get equal weights. Adapters keep
    their first values."""
    for part in local_slices(model):
        if is_adapter(part.info.name):
            continue
        if len(part.info.shape) < 2:  # scales of norms, and biases, for which 1 does no harm
            part.data.fill_(1.0)
            continue
        shard = mesh.get_local_rank(mesh.ndim - 1) if part.info.sharded else 0
        generator = torch.Generator(part.data.device).manual_seed(zlib.crc32(f"{part.info.name} {shard}".encode()))
        part.data.normal_(0.0, 0.02, generator=generator)
