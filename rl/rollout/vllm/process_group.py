"""The private default process group of an engine, and the shared memory of its ranks.

vLLM builds its groups over the whole default group of torch.distributed, which hangs if only some ranks host engines.
So each engine gets a private default group that contains only its tensor-parallel ranks. It is swapped in for every
call of vLLM. At all other times, the trainer's default group is in place. If vLLM reads weights from an iterator that
runs the trainer's collectives, the trainer's group is swapped back in for each item. The counter that names new groups
is swapped too. Otherwise later groups of the trainer would have different names on different ranks.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed.distributed_c10d as c10d
from vllm.distributed.parallel_state import get_tp_group

from rl.rollout.engine import EngineSeat


class PrivateDefaultGroup:
    """A default process group for one engine, which `entered` swaps in and `left` swaps out."""

    def __init__(self, seat: EngineSeat):
        self._group: c10d.ProcessGroup | None = None
        self._count = 1_000_000  # the counter for names of new groups; far above the trainer's counter
        numbers = {"RANK": seat.tp_rank, "WORLD_SIZE": seat.tp_size, "LOCAL_RANK": seat.device.index or 0}
        self._environment = {name: str(number) for name, number in numbers.items()}
        backend = "cpu:gloo,cuda:nccl" if seat.device.type == "cuda" else "gloo"
        excepthook = sys.excepthook  # init_process_group wraps it
        with self.entered():
            store = c10d.PrefixStore(f"vllm/{seat.name}", seat.store)
            c10d.init_process_group(backend, store=store, rank=seat.tp_rank, world_size=seat.tp_size)
        sys.excepthook = excepthook

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    left = entered  # inside `entered`, a second swap restores the trainer's group

    def _swap(self) -> None:
        world = c10d._world
        self._group, world.default_pg = world.default_pg, self._group
        self._count, world.group_count = world.group_count, self._count
        for name, value in self._environment.items():
            self._environment[name], os.environ[name] = os.environ[name], value


def unlink_shared_memory(seat: EngineSeat) -> None:
    """Unlink the engine's shared memory after all of its ranks have mapped it. Then the system frees it when the last
    rank ends, even after a crash."""
    for segment in Path("/dev/shm").glob(f"{seat.name}-*"):
        segment.unlink(missing_ok=True)
    queue = get_tp_group().mq_broadcaster  # its segment has a name that Python chose
    if queue is not None and queue.buffer.is_creator:
        queue.buffer.shared_memory.unlink()
        queue.buffer.is_creator = False  # the creator would unlink it again
