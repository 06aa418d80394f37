"""Copy a rank's tensors to host memory, and save and restore its random generators.

The copy is taken in the background, on its own stream, while the next rollouts are sampled. Nothing changes the policy
or its moments before the next update, which waits for the copy. Host memory is kept from save to save, so that page
faults and pinning are paid once.
"""

import base64
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl.model import host_memory
from rl.model.host_memory import HostBuffers
from rl.model.shards import LocalSlice
from rl.watch.heart import HEART


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at the end of a step. Its tensors are the learner's own until the host copy is taken."""

    step: int
    parts: Sequence[tuple[str, LocalSlice]]  # with their kind: model, or the name of a moment
    ready: torch.cuda.Event | None  # the copy waits for it
    rank_state: dict[str, Any]
    state: dict[str, Any]  # of the whole run
    steps_to_keep: frozenset[int]


class HostCopy:
    """Copies of this rank's tensors in host memory."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._buffers: HostBuffers | None = None

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after everything that this thread has enqueued on the device."""
        return torch.cuda.current_stream().record_event() if self._on_gpu else None

    def take(self, tensors: Sequence[Tensor], ready: torch.cuda.Event | None) -> list[list[Tensor]]:
        """Return each tensor's elements, flat and in pieces. They are valid until the next call."""
        sizes = [size for tensor in tensors for size in _piece_sizes(tensor)]
        if self._buffers is None or self._buffers.sizes != sizes:
            self._buffers = None  # free the old buffers before new ones are allocated
            self._buffers = HostBuffers(sizes, pinned=self._on_gpu)
        buffers, taken = iter(self._buffers), []
        with torch.cuda.stream(self._stream):  # does nothing without a GPU
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            for tensor in tensors:
                parts = tensor.reshape(-1).split([size // tensor.itemsize for size in _piece_sizes(tensor)])
                taken.append([self._copy(part, next(buffers)) for part in parts])
        if self._stream is not None:
            self._stream.synchronize()
            HEART.touch_background()
        return taken

    def _copy(self, part: Tensor, buffer: Tensor) -> Tensor:
        HEART.touch_background()
        return buffer.view(part.dtype).copy_(part, non_blocking=True)


def _piece_sizes(tensor: Tensor) -> list[int]:
    """Return the sizes in bytes of the pieces that a tensor is copied in. Each fits into a slab."""
    num_whole, rest = divmod(tensor.nbytes, host_memory.SLAB_BYTES)
    return [host_memory.SLAB_BYTES] * num_whole + [rest] * bool(rest)


def generator_states() -> dict[str, str]:
    """Return the states of this process's random generators as text."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    texts = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
    return texts | {"python": json.dumps(random.getstate())}


def restore_generators(states: dict[str, str]) -> None:
    def state(name: str) -> Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(states[name])), dtype=torch.uint8)

    torch.set_rng_state(state("torch"))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(state("cuda"))
    version, numbers, gauss = json.loads(states["python"])
    random.setstate((version, tuple(numbers), gauss))
