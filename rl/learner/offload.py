"""Move tensors between the device and host memory, while everything that refers to them stays valid.

Their storages are emptied and filled again. Parameters, the views that FSDP keeps of them, and the optimizer's moments
are the same objects before and after, and the device never holds two copies. On a GPU the copies run on a stream of
their own, beside other computation.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rl.model.host_memory import HostBuffers


class Offloader:
    """Moves the storages of some tensors to host buffers, which it keeps, and back."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        devices = {storage.device for storage in self._storages.values() if storage.device.type == "cuda"}
        self._stream = torch.cuda.Stream(devices.pop()) if devices else None
        sizes = [storage.nbytes() for storage in self._storages.values()]
        self._host = dict(zip(self._storages, HostBuffers(sizes, pinned=self._stream is not None), strict=True))
        self._offloaded: set[int] = set()
        self._is_copied = False  # or being copied, on the stream

    @property
    def is_offloaded(self) -> bool:
        """Whether any of the tensors is in host memory only."""
        return bool(self._offloaded)

    def start_offload(self) -> None:
        """Start the copy to host memory. Until `offload` the tensors can be read, but nothing may write to them."""
        if self.is_offloaded:
            return
        with self._after_current_stream():
            for key, storage in self._storages.items():
                self._host[key].copy_(_bytes(storage), non_blocking=True)
        self._is_copied = True

    def offload(self) -> None:
        """Copy the tensors to host memory and free their memory on the device."""
        if self.is_offloaded:
            return
        if not self._is_copied:
            self.start_offload()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).synchronize()  # it may be reading them
            self._stream.synchronize()
        for storage in self._storages.values():
            if storage.resizable():  # on a CPU not every storage is, such as one that numpy shares
                storage.resize_(0)
        self._offloaded, self._is_copied = set(self._storages), False

    def start_reload(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Start the copy of these tensors, or of all, back to the device. Call `wait` before they are used."""
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
        """Let the current stream wait for the copies that were started; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return a view of one of the tensors in host memory."""
        whole = self._host[tensor.untyped_storage()._cdata].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())

    @contextmanager
    def _after_current_stream(self) -> Iterator[None]:
        """Run copies on our stream, after what the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):  # does nothing without a GPU
            yield


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
