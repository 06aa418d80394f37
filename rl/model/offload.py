"""Tensors that change places between the device and host memory, while everything that refers to them stays valid.

Their storages are emptied and filled again: parameters, the views that FSDP keeps of them, and the optimizer's moments
are the same objects before and after, and at no time are there two copies on the device.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class Offload:
    """The storages of these tensors. Host memory is pinned, and kept from one time to the next."""

    def __init__(self, tensors: Iterable[Tensor]):
        self.is_away = False
        self._storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._is_on_gpu = any(storage.device.type == "cuda" for storage in self._storages.values())
        self._host = {
            key: torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._is_on_gpu)
            for key, storage in self._storages.items()
        }

    def leave(self) -> None:
        """To the host; their memory on the device is free when this returns."""
        for key, storage in self._storages.items():
            self._host[key].copy_(_bytes(storage), non_blocking=True)
        if self._is_on_gpu:
            torch.cuda.current_stream().synchronize()
        for storage in self._storages.values():
            if storage.resizable():  # not where numpy has looked at it, on a CPU
                storage.resize_(0)
        self.is_away = True

    def come_back(self) -> None:
        """What is done with the tensors next on this stream comes after."""
        for key, storage in self._storages.items():
            if not storage.nbytes():
                storage.resize_(self._host[key].nbytes)
            _bytes(storage).copy_(self._host[key], non_blocking=True)
        self.is_away = False

    def on_host(self, tensor: Tensor) -> Tensor:
        """One of the tensors as it lies in host memory."""
        whole = self._host[tensor.untyped_storage()._cdata].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
