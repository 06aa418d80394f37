"""Recovery of a failed engine: if a step raises on all ranks of an engine, they replace the engine.

A follower tells the lead that its step failed. If all ranks failed, the lead has them rebuild the engine together.
Otherwise some rank is inside a step that cannot end, and the error ends the world. It also ends the world if it comes
from a device or a process group, because that rank cannot continue.
"""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl.rollout.engine import Engine
from rl.sync.weights import WeightSync
from rl.watch.heart import HEART
from rl.world.messages import Message
from rl.world.world import World

AGREE_S = 10.0  # timeout for all followers to report that they failed


@dataclass(frozen=True)
class EngineFailed(Message):
    """Tell the lead that a follower's engine step failed."""


class EngineHost:
    """Hold one rank's part of an engine, and rebuild it after a failure. The engine's first rank is its lead."""

    def __init__(self, world: World, ranks: tuple[int, ...], engine: Engine, rebuild: Callable[[Engine], Engine]):
        self.engine = engine
        self.sync: WeightSync | None = None  # set once it is built; it holds memory of the engine
        self.is_lead = world.rank == ranks[0]
        self.followers = ranks[1:] if self.is_lead else ()
        self._world, self._lead, self._rebuild = world, ranks[0], rebuild
        self._failure: Exception | None = None  # of the last step, on a follower

    def require_recoverable(self, error: Exception) -> None:
        """Raise the error again unless all ranks of the engine can continue. Called on the lead."""
        if breaks_rank(error):
            raise error
        deadline = time.monotonic() + AGREE_S
        for _ in self.followers:
            if self._world.mail.receive_within(max(0.0, deadline - time.monotonic()), EngineFailed) is None:
                raise error
        clear_frames(error)

    def replace(self) -> None:
        """Replace the failed engine by a new one. All ranks of the engine do this together."""
        self._failure = None
        if self.sync is not None:
            self.sync.remove_receiver(self.engine)
        self.engine = self._rebuild(self.engine)
        HEART.forget_shapes()  # every shape is new to this engine
        if self.sync is not None:
            self.sync.add_receiver(self.engine)

    def follow(self, step: Callable[[], object], stage: str) -> None:
        """Make a step on a follower. If it fails, tell the lead, and if the lead does not react, end the world."""
        if self._failure is not None:  # the lead's step did not fail
            raise self._failure
        try:
            step()
        except Exception as error:
            if breaks_rank(error):
                raise
            clear_frames(error)
            self._failure = error
            self._world.mail.send(self._lead, EngineFailed())
            timer = threading.Timer(AGREE_S, self._give_up, [error, stage, self._world.step])
            timer.daemon = True
            timer.start()

    def _give_up(self, error: Exception, stage: str, step: int) -> None:
        """End the world unless the engine was replaced: the lead is in a step that cannot end without this rank."""
        if self._failure is error:
            self._world.faults.fail_in_background(error, stage, step)


def clear_frames(error: BaseException | None) -> None:
    """Drop the local variables in the traceback of an error and of its causes. They keep the engine's memory alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def breaks_rank(error: BaseException | None) -> bool:
    """Return whether the device or a process group of this rank is unusable after this error."""
    if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
        return False
    words = ("cuda", "cudnn", "cublas", "triton error", "nccl", "gloo", "connection closed by peer")
    is_device = isinstance(error, torch.AcceleratorError | dist.DistError)
    is_told = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return is_device or is_told or breaks_rank(error.__cause__)
