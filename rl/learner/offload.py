"""Move tensors between the device and host memory, while all references to them stay valid.

An offload empties the storages of the tensors, and a reload fills them again. Parameters, the views that FSDP keeps of
them, and the optimizer's moments stay the same objects, and the device never holds two copies. On a GPU the copies run
on a separate stream, in parallel with other computation.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl.model.host_memory import HostBuffers

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SHORT_OF_MEMORY = "expandable_segments:True,pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
WITHOUT_PAGES = "expandable_segments:False"  # torch sets everything that is not named to its default


class Offloader:
    """Moves the storages of some tensors to host memory and back. The host buffers are allocated once. Tensors that are
    `constant` are copied to host memory only once, by the first offload."""

    def __init__(self, tensors: Iterable[Tensor], constant: bool = False):
        self._is_constant = constant
        self._storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        devices = {storage.device for storage in self._storages.values() if storage.device.type == "cuda"}
        self._stream = torch.cuda.Stream(devices.pop()) if devices else None
        sizes = [storage.nbytes() for storage in self._storages.values()]
        self._host = dict(zip(self._storages, HostBuffers(sizes, pinned=self._stream is not None), strict=True))
        self._offloaded: set[int] = set()
        self._is_copied = False  # whether the copy to host memory is done, or at least queued on the stream

    @property
    def is_offloaded(self) -> bool:
        return bool(self._offloaded)

    def start_offload(self) -> None:
        """Start the copy to host memory. Until `offload` is called, the tensors may be read but not written."""
        if self.is_offloaded or (self._is_constant and self._is_copied):
            return
        with self._after_current_stream():
            for key, storage in self._storages.items():
                self._host[key].copy_(_bytes(storage), non_blocking=True)
        self._is_copied = True

    def offload(self) -> None:
        """Copy the tensors to host memory, unless `start_offload` has done so. Free their memory on the device."""
        if self.is_offloaded:
            return
        if not self._is_copied:
            self.start_offload()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).synchronize()  # it may still be reading the tensors
            self._stream.synchronize()
        for storage in self._storages.values():
            if storage.resizable():  # some CPU storages are not, for example one that is shared with numpy
                storage.resize_(0)
        self._offloaded, self._is_copied = set(self._storages), self._is_constant

    def start_reload(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Start to copy these tensors, or all, back to the device. Call `wait` before they are used."""
        keys = set(self._offloaded) if tensors is None else {tensor.untyped_storage()._cdata for tensor in tensors}
        storages = {key: self._storages[key] for key in keys & self._offloaded}
        if not storages:
            return
        for key, storage in storages.items():
            if not storage.nbytes():
                storage.resize_(self._host[key].nbytes)
        with self._after_current_stream():
            for key, storage in storages.items():
                _bytes(storage).copy_(self._host[key], non_blocking=True)
        self._offloaded -= keys

    def wait(self) -> None:
        """Make the current stream wait for the copies that were started. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return the host copy of one of the tensors, as a view with its shape and strides."""
        whole = self._host[tensor.untyped_storage()._cdata].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())

    @contextmanager
    def _after_current_stream(self) -> Iterator[None]:
        """Run copies on our stream, after everything that is queued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):  # has no effect if the stream is None
            yield


def free_cached_memory(device: torch.device) -> None:
    """Give memory that torch's allocator keeps for later back to the device, where an engine needs it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def avoid_fragments() -> None:
    """Let torch's allocator map memory in pages from now on, and pin host memory with several threads.

    Without pages, it cannot use the gaps that layers leave between blocks of other sizes. With 7 B parameters, these
    were 17 of 139 GiB. Pinning 61 GB with one thread took 40 s. Settings of the user's own are left alone.

    Actors with an engine call this if policy or critic are offloaded, and before they are. That includes `always`: its
    activations and gathered layers share the GPU with an engine in the cases in which memory is shortest.
    """
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        _set_allocator(SHORT_OF_MEMORY)


@contextmanager
def without_pages() -> Iterator[None]:
    """Undo `avoid_fragments` while an engine is built. vLLM's all-reduce exports the memory of CUDA graphs to the other
    processes of the engine. CUDA cannot export memory in pages, and vLLM then ends the process."""
    if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != SHORT_OF_MEMORY:
        yield
        return
    _set_allocator(WITHOUT_PAGES)
    try:
        yield
    finally:
        _set_allocator(SHORT_OF_MEMORY)


def _set_allocator(settings: str) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
    torch._C._accelerator_setAllocatorSettings(settings)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
