"""Replace an engine after a step that failed on all of its ranks.

A follower tells the lead that its step failed. If the step failed on all ranks, they rebuild the engine together.
If it failed on only some, the others are stuck in the step, and the error ends the world. An error of a device or a
process group also ends the world, because that rank cannot continue.

The new engine gets the version of the failed one. Either the actors publish it again, or, if they already train the
next version, another engine gives its weights (rl/sync/donation.py).
"""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rl.rollout.engine import Engine
from rl.sync.donation import WeightDonation
from rl.sync.weights import WeightSync
from rl.watch.heart import HEART
from rl.watch.ledger import Awaited
from rl.world.messages import Message
from rl.world.world import World

AGREE_S = 10.0  # time limit for all ranks of an engine to report the failure


@dataclass(frozen=True)
class EngineFailed(Message):
    """Tell the lead that a follower's engine step failed."""

    awaited = Awaited("reports of the failed engine's other ranks", "rollout")


@dataclass(frozen=True)
class EngineRebuilt(Message):
    """Tell the leader that an engine failed and was rebuilt. Its lead sends this."""

    engine: str  # such as "vllm 0.32.0"
    step: int
    reason: str
    num_groups: int  # unfinished ones, which are sampled again
    seconds: float  # that the rebuild took


class EngineHost:
    """Hold one rank's part of an engine, and rebuild it after a failure. The engine's first rank is its lead."""

    def __init__(self, world: World, ranks: tuple[int, ...], engine: Engine, rebuild: Callable[[Engine], Engine]):
        self.engine = engine
        self.sync: WeightSync | None = None  # set once it is built; it refers to the engine's memory
        self.donation: WeightDonation | None = None  # None: the actors publish the version again
        self.is_lead = world.rank == ranks[0]
        self.followers = ranks[1:] if self.is_lead else ()
        self.lead, self._world, self._rebuild = ranks[0], world, rebuild
        self._failure: Exception | None = None  # of the last step; only on followers

    def require_recoverable(self, error: Exception) -> None:
        """Raise the error again unless the step failed on all ranks and all can continue. Called on the lead."""
        if breaks_rank(error):
            raise error
        deadline = time.monotonic() + AGREE_S
        for _ in self.followers:
            if self._world.mail.receive_within(max(0.0, deadline - time.monotonic()), EngineFailed) is None:
                raise error
        if self.donation is not None:
            self.donation.require_possible(error)
        clear_frames(error)

    def replace(self) -> None:
        """Replace the failed engine. All of its ranks call this together. With a `donation`, the new engine then takes
        the version of the failed one from another engine."""
        self._failure, version = None, self.engine.version
        if self.donation is not None:
            self.donation.release()
        if self.sync is not None:
            self.sync.remove_receiver(self.engine)
        self.engine = self._rebuild(self.engine)
        HEART.forget_shapes()  # every shape is new to this engine
        if self.sync is not None:
            self.sync.add_receiver(self.engine)
        if self.donation is not None:
            self.donation.begin(version)

    def follow(self, step: Callable[[], object], stage: str) -> None:
        """Run a step on a follower. If it fails, tell the lead. If the lead does not react, end the world."""
        if self._failure is not None:  # the lead continues, so its own step did not fail
            raise self._failure
        try:
            step()
        except Exception as error:
            if breaks_rank(error):
                raise
            clear_frames(error)
            self._failure = error
            self._world.mail.send(self.lead, EngineFailed())
            timer = threading.Timer(AGREE_S, self._give_up, [error, stage, self._world.step])
            timer.daemon = True
            timer.start()

    def _give_up(self, error: Exception, stage: str, step: int) -> None:
        """End the world unless the engine was replaced. The lead is stuck in a step that needs this rank."""
        if self._failure is error:
            self._world.faults.fail_in_background(error, stage, step)


def clear_frames(error: BaseException | None) -> None:
    """Drop the local variables in the tracebacks of an error and its causes. They would keep the engine in memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def breaks_rank(error: BaseException | None) -> bool:
    """Return whether the device or a process group of this rank is unusable after this error."""
    if not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
        return False
    words = ("cuda", "cudnn", "cublas", "triton error", "nccl", "gloo", "connection closed by peer")
    is_fatal_type = isinstance(error, torch.AcceleratorError | dist.DistError)
    has_fatal_word = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    return is_fatal_type or has_fatal_word or breaks_rank(error.__cause__)
