"""New weights for a vLLM model.

Weights start as dummies and arrive with the first sync, which thereby proves its path before the first token. Where
the parameters are all that the model computes with, a sync writes into them directly, along the record of vLLM's
own loader. Otherwise it goes through `reload_weights`, which repacks.
"""

from collections.abc import Callable, Sequence

import torch
import vllm
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rl.model.shards import TensorInfo
from rl.rollout.vllm.process_group import PrivateDefaultGroup
from rl.sync.layout import MemoryLayout, OpaqueLoader, Untraceable, Weights, trace


def find_memory_layout(
    llm: vllm.LLM, tensors: Sequence[TensorInfo], device: torch.device, reload: Callable[[Weights], None]
) -> MemoryLayout | OpaqueLoader:
    """Return where each tensor goes in the model's parameters, or `reload` if that cannot be known. The engine's
    process group is entered."""
    with set_current_vllm_config(llm.llm_engine.vllm_config):
        model = llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
        try:
            reason = _find_other_copies(model)
            if reason:
                raise Untraceable(reason)
            return trace(tensors, model, model.load_weights, device)
        except Untraceable as error:
            return OpaqueLoader(reload, str(error))


def reload_weights(llm: vllm.LLM, group: PrivateDefaultGroup, weights: Weights) -> None:
    """Pass all weights to vLLM's own loader."""

    def outside() -> Weights:
        """Run the iterator's body with the trainer's default group in place."""
        while True:
            with group.left():
                item = next(weights, None)
            if item is None:
                return
            yield item

    with group.entered(), set_current_vllm_config(llm.llm_engine.vllm_config):
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": outside()})


def turn_off_packing() -> None:
    """Keep vLLM from packing linear layers for oneDNN on CPUs: a tied head keeps its packed copy after a reload."""
    import vllm._custom_ops as custom_ops

    custom_ops._supports_onednn = False


def _find_other_copies(model: nn.Module) -> str:
    """Return why the parameters are not all that the model computes with (a repacked copy, for example), or ""."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return f"{name} may be repacked by {type(method).__name__}"
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            return f"{name} computes with a packed copy of its weight"
        if hasattr(module, "process_weights_after_loading") and type(module).__name__ != "Attention":
            return f"{name or 'the model'} ({type(module).__name__}) derives weights of its own"
    return ""
