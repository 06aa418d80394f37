"""Device memory of an engine: its sleep while the learner of the same rank computes, and its end after a failure."""

import ctypes
import gc
import time

import torch
import vllm
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

LONG_COLLECTION_S = 0.02


class SleepingMemory:
    """Weights and KV cache of an engine, each of which can be asleep. All calls are made inside the engine's process
    group."""

    def __init__(self, llm: vllm.LLM):
        self._llm = llm
        self._asleep: set[str] = set()

    @property
    def has_weights(self) -> bool:
        return "weights" not in self._asleep

    def wake(self, part: str) -> None:
        """Allocate the memory of "weights" or "kv_cache" again, unless it is awake."""
        if part in self._asleep:
            self._llm.wake_up(tags=[part])
            self._asleep.discard(part)

    def sleep(self) -> None:
        """Free the memory. Nothing is kept, since the next sync brings new weights."""
        if self._asleep:  # the cache was not woken up, since nothing was sampled with these weights
            self._free_weights()
        else:
            self._llm.sleep(level=2)
        self._asleep = {"weights", "kv_cache"}

    def _free_weights(self) -> None:
        """Free the weights alone. vLLM 0.26 frees both or none, and would free the sleeping cache a second time."""
        pointers = CuMemAllocator.get_instance().pointer_to_data
        asleep = {address: data for address, data in pointers.items() if data.is_asleep}
        for address in asleep:
            del pointers[address]
        try:
            self._llm.collective_rpc("sleep", kwargs={"level": 2})
        finally:
            pointers.update(asleep)
        self._llm.llm_engine.engine_core.engine_core.model_executor.sleeping_tags.add("weights")


def free_abandoned_memory() -> None:
    """Free weights and KV cache of an engine that is gone.

    They lie in memory pools of vLLM's own. A pool keeps what tensors have left, and its end fails if vLLM has freed a
    part of it before. So the memory is given back as for a sleep. The pools themselves hold only addresses then, and
    stay until the process ends."""
    torch.cuda.synchronize()  # the last forward may still run
    allocator = CuMemAllocator.get_instance()
    for address in [address for address, data in allocator.pointer_to_data.items() if data.is_asleep]:
        del allocator.pointer_to_data[address]
    allocator.sleep(offload_tags=())
    allocator.pointer_to_data.clear()  # otherwise the next engine's sleep would free them again
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(allocator.allocator_and_pools.values())))
    allocator.allocator_and_pools.clear()
    _ROPE_DICT.clear()  # its tables lie in that memory, and the next engine would use them


def collect_garbage() -> None:
    """Collect garbage, and freeze what there is if that took long. vLLM collects whenever it sleeps, and walks through
    everything that the learner has compiled: a tenth of a second for nothing, since those objects stay."""
    start = time.perf_counter()
    gc.collect()
    if time.perf_counter() - start > LONG_COLLECTION_S:
        gc.freeze()
