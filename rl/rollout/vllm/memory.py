"""Free an engine's device memory: while the learner of the same rank computes, and after a failure."""

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import vllm
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

LONG_COLLECTION_S = 0.02  # seconds; objects are frozen after a garbage collection that takes longer


def free_weights(llm: vllm.LLM) -> None:
    """Free the weights while the KV cache is asleep. The sleep of vLLM 0.26 would free the cache a second time."""
    pointers = CuMemAllocator.get_instance().pointer_to_data
    asleep = {address: data for address, data in pointers.items() if data.is_asleep}
    for address in asleep:
        del pointers[address]
    try:
        llm.collective_rpc("sleep", kwargs={"level": 2})
    finally:
        pointers.update(asleep)
    llm.llm_engine.engine_core.engine_core.model_executor.sleeping_tags.add("weights")


def free_abandoned_memory() -> None:
    """Free the weights and the KV cache of an engine that was deleted.

    They are in vLLM's memory pools, which keep their memory after the tensors are deleted. Destroying a pool fails if
    vLLM has already freed part of it. So we put the memory to sleep instead. We keep the pools, which now hold only
    addresses, until the process ends."""
    torch.cuda.synchronize()  # the last forward pass may still run
    allocator = CuMemAllocator.get_instance()
    for address in [address for address, data in allocator.pointer_to_data.items() if data.is_asleep]:
        del allocator.pointer_to_data[address]
    allocator.sleep(offload_tags=())
    allocator.pointer_to_data.clear()  # otherwise the next engine's sleep would free the memory a second time
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(allocator.allocator_and_pools.values())))
    allocator.allocator_and_pools.clear()
    _ROPE_DICT.clear()  # its tables are in the freed memory; without this the next engine would use them


def collect_garbage() -> None:
    """Collect garbage. If that took long, freeze the remaining objects, so that later collections skip them: 0.1 s
    would go to the learner's compiled code, which is never freed. vLLM collects at every sleep, and Python at times."""
    start = time.perf_counter()
    gc.collect()
    if time.perf_counter() - start > LONG_COLLECTION_S:
        gc.freeze()


@contextmanager
def no_collections() -> Iterator[None]:
    """Let vLLM's calls of the garbage collector do nothing. When an engine shuts down, vLLM unfreezes all objects and
    collects twice. That takes over a second for the objects of the imports, and the process is about to end anyway."""
    usual = gc.collect, gc.unfreeze
    gc.collect, gc.unfreeze = lambda generation=2: 0, lambda: None
    try:
        yield
    finally:
        gc.collect, gc.unfreeze = usual
