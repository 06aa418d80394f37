"""Write new weights into a vLLM model.

The engine starts with dummy weights. The first sync brings the real ones, so the sync is tested before the first token
is sampled. If the model computes only with its parameters, a sync writes into them directly, at the locations recorded
from vLLM's own loader. Otherwise a sync calls `reload_weights`, which also rebuilds repacked copies.
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
    """Return where each tensor goes in the model's parameters, or `reload` if that cannot be known. Call this while the
    engine's process group is the default group."""
    with set_current_vllm_config(llm.llm_engine.vllm_config):
        model = llm.collective_rpc(lambda worker: worker.model_runner.get_model())[0]
        try:
            reason = _reason_untraceable(model)
            if reason:
                raise Untraceable(reason)
            return trace(tensors, model, model.load_weights, device)
        except Untraceable as error:
            return OpaqueLoader(reload, str(error))


def reload_weights(llm: vllm.LLM, group: PrivateDefaultGroup, weights: Weights) -> None:
    """Pass all weights to vLLM's own loader."""

    def in_trainer_group() -> Weights:
        """Iterate over the weights with the trainer's default group in place, since the iterator runs collectives."""
        while True:
            with group.left():
                item = next(weights, None)
            if item is None:
                return
            yield item

    with group.entered(), set_current_vllm_config(llm.llm_engine.vllm_config):
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": in_trainer_group()})


def turn_off_packing() -> None:
    """Disable oneDNN packing of linear layers on CPUs. Otherwise a tied LM head would keep a stale packed copy after a
    reload."""
    import vllm._custom_ops as custom_ops

    custom_ops._supports_onednn = False


def _reason_untraceable(model: nn.Module) -> str:
    """Return why the model computes with more than its parameters, such as a repacked copy. Otherwise return ""."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
            return f"{name} may be repacked by {type(method).__name__}"
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            return f"{name} computes with a packed copy of its weight"
        if hasattr(module, "process_weights_after_loading") and type(module).__name__ != "Attention":
            return f"{name or 'the model'} ({type(module).__name__}) derives weights of its own"
    return ""
