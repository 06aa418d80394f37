"""Copy a rank's tensors to host memory, and save and restore its random generators.

The copy runs in the background, on its own CUDA stream, while the next rollouts are sampled. Only the next update
changes the policy and its optimizer moments, and that update waits for the copy. The host buffers are kept between
saves, so page faults and pinning cost time only once.
"""

import base64
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.model.host_memory import HostBuffers
from rl.model.shards import LocalSlice
from rl.watch.heart import HEART

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class Snapshot:
    """One rank's state at the end of a step. Its tensors share the learner's memory, which the next update changes."""

    step: int
    parts: Sequence[tuple[str, LocalSlice]]  # (kind, slice); the kind is model, critic, or an optimizer moment
    rank_state: dict[str, Any]  # of this rank
    state: dict[str, Any]  # of the whole run
    steps_to_keep: frozenset[int]
    write_groups: Callable[[], bytes] | None = None  # returns a file of this rank's sampled groups


class HostCopier:
    """Copy this rank's tensors to host buffers that are kept between saves."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: HostBuffers | None = None

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event after all work that this thread has enqueued on the GPU. Return None on a CPU."""
        return torch.cuda.current_stream().record_event() if self._stream is not None else None

    def copy(self, tensors: Sequence[Tensor], ready: torch.cuda.Event | None) -> list[list[Tensor]]:
        """Copy the tensors to host memory after `ready`. Return flat pieces of each, valid until the next call."""
        sizes = [size for tensor in tensors for size in _piece_sizes(tensor)]
        if self._buffers is None or self._buffers.sizes != sizes:
            self._buffers = None  # free the old buffers before new ones are allocated
            self._buffers = HostBuffers(sizes, pinned=self._stream is not None)
        buffers, copies = iter(self._buffers), list[list[Tensor]]()
        with torch.cuda.stream(self._stream):  # does nothing without a GPU
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            for tensor in tensors:
                parts = tensor.reshape(-1).split([size // tensor.itemsize for size in _piece_sizes(tensor)])
                copies.append([])
                for part, buffer in zip(parts, buffers):
                    HEART.touch_background()
                    copies[-1].append(buffer.view(part.dtype).copy_(part, non_blocking=True))
        if self._stream is not None:
            self._stream.synchronize()
            HEART.touch_background()
        return copies


def _piece_sizes(tensor: Tensor) -> list[int]:
    """Return the sizes in bytes of the pieces in which a tensor is copied: small, to fill slabs well."""
    num_whole, rest = divmod(tensor.nbytes, PIECE_BYTES)
    return [PIECE_BYTES] * num_whole + [rest] * bool(rest)


def get_rng_states() -> dict[str, str]:
    """Return the states of this process's random generators as text."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    texts = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
    state: Any = np.random.get_state()  # vLLM draws seeds of requests from this generator
    name, numbers, *others = state
    return texts | {"python": json.dumps(random.getstate()), "numpy": json.dumps([name, numbers.tolist(), *others])}


def set_rng_states(states: dict[str, str]) -> None:
    def state(name: str) -> Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(states[name])), dtype=torch.uint8)

    torch.set_rng_state(state("torch"))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(state("cuda"))
    version, numbers, gauss = json.loads(states["python"])
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states:  # older checkpoints have none
        np.random.set_state(tuple(json.loads(states["numpy"])))
