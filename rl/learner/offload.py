"""Tensors that change places between the device and host memory, while everything that refers to them stays valid.

Their storages are emptied and filled again: parameters, the views that FSDP keeps of them, and the optimizer's moments
are the same objects before and after, and at no time are there two copies on the device. On a GPU the copies run on a
stream of their own, beside whatever else is computed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from rl.model.host_memory import HostBuffers


class Offloader:
    """The storages of these tensors. Host memory is pinned, and kept from one time to the next."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        devices = {storage.device for storage in self._storages.values() if storage.device.type == "cuda"}
        self._stream = torch.cuda.Stream(devices.pop()) if devices else None
        sizes = [storage.nbytes() for storage in self._storages.values()]
        self._host = dict(zip(self._storages, HostBuffers(sizes, pinned=self._stream is not None), strict=True))
        self._away: set[int] = set()
        self._is_copied = False  # or being copied, on the stream

    @property
    def is_offloaded(self) -> bool:
        """Any of them."""
        return bool(self._away)

    def start_offload(self) -> None:
        """To the host, in the order of what the current stream has done so far; until `leave` nothing writes to them.
        They can still be read."""
        if self.is_offloaded:
            return
        self._follow()
        with torch.cuda.stream(self._stream):  # does nothing without a GPU
            for key, storage in self._storages.items():
                self._host[key].copy_(_bytes(storage), non_blocking=True)
        self._is_copied = True

    def offload(self) -> None:
        """Their memory on the device is free when this returns."""
        if self.is_offloaded:
            return
        if not self._is_copied:
            self.start_offload()
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).synchronize()  # which may be reading them
            self._stream.synchronize()
        for storage in self._storages.values():
            if storage.resizable():  # not where numpy has looked at it, on a CPU
                storage.resize_(0)
        self._away, self._is_copied = set(self._storages), False

    def start_reload(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Starts, of these or of all; whoever uses them next calls `wait` first."""
        keys = set(self._away) if tensors is None else {tensor.untyped_storage()._cdata for tensor in tensors}
        storages = {key: self._storages[key] for key in keys & self._away}
        if not storages:
            return
        for key, storage in storages.items():
            if not storage.nbytes():
                storage.resize_(self._host[key].nbytes)
        self._follow()
        with torch.cuda.stream(self._stream):
            for key, storage in storages.items():
                _bytes(storage).copy_(self._host[key], non_blocking=True)
        self._away -= keys

    def wait(self) -> None:
        """What the current stream does next comes after what was copied so far; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def host_copy(self, tensor: Tensor) -> Tensor:
        """One of the tensors as it lies in host memory."""
        whole = self._host[tensor.untyped_storage()._cdata].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())

    def _follow(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
