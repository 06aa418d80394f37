"""Recovery of an engine: when its step raises, all of its ranks replace it, if every one of them can go on.

A rank cannot go on after an error of its device or of a process group. A follower tells the lead that its step failed.
The lead decides: if all ranks failed, they rebuild the engine together; if not, some rank is inside a step that cannot
end, and the error ends the world.
"""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from rl.rollout.engine import Engine
from rl.watch.heart import HEART
from rl.world.messages import Message
from rl.world.world import World

AGREE_S = 10.0  # for all ranks of an engine to report that they failed


@dataclass(frozen=True)
class EngineFailed(Message):
    """Tell the lead that a follower's engine step failed."""


class EngineUser(Protocol):
    """Whatever holds memory of the engine."""

    def remove_receiver(self, receiver: Engine) -> None: ...

    def add_receiver(self, receiver: Engine) -> None: ...


class EngineHost:
    """One rank's part of an engine, which is rebuilt when it fails. `ranks` are the engine's, the lead first."""

    def __init__(self, world: World, ranks: tuple[int, ...], engine: Engine, rebuild: Callable[[Engine], Engine]):
        self.engine = engine
        self.lead = ranks[0]
        self.is_lead = world.rank == self.lead
        self.followers = ranks[1:] if self.is_lead else ()
        self._world, self._rebuild = world, rebuild
        self._users: list[EngineUser] = []
        self._failure: Exception | None = None  # of a follower's last step
        self._timer: threading.Timer | None = None

    def add_user(self, user: EngineUser) -> None:
        """Tell this user before an engine is replaced, and afterwards."""
        self._users.append(user)

    def require_recoverable(self, error: Exception) -> None:
        """Raise the error if this rank or another one of the engine cannot go on. Called on the lead."""
        if breaks_rank(error) or not self._have_followers_failed():
            raise error
        clear_frames(error)

    def replace(self) -> None:
        """Build another engine in the place of the failed one. All ranks of the engine do so together."""
        if self._timer is not None:
            self._timer.cancel()
        self._failure = None
        for user in self._users:
            user.remove_receiver(self.engine)
        self.engine = self._rebuild(self.engine)
        HEART.forget_shapes()  # all are new to this engine
        for user in self._users:
            user.add_receiver(self.engine)

    def check_follower(self) -> None:
        """Raise the last failure of this follower: the lead goes on, so its own step did not fail."""
        if self._failure is not None:
            raise self._failure

    def report_failure(self, error: Exception, stage: str) -> None:
        """Tell the lead that this follower's step failed. If the lead does not react, the error ends the world."""
        if breaks_rank(error):
            raise error
        clear_frames(error)
        self._failure = error
        self._world.mail.send(self.lead, EngineFailed())
        self._timer = threading.Timer(AGREE_S, self._give_up, [stage, self._world.step])
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self, stage: str, step: int) -> None:
        """End the world: the lead is inside a step that cannot end without this rank."""
        if self._failure is not None:
            self._world.faults.fail_in_background(self._failure, stage, step)

    def _have_followers_failed(self) -> bool:
        deadline = time.monotonic() + AGREE_S
        for _ in self.followers:
            if self._world.mail.receive_within(max(0.0, deadline - time.monotonic()), EngineFailed) is None:
                return False
        return True


def clear_frames(error: BaseException | None) -> None:
    """Drop the local variables of an error and of its causes: they hold the engine's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def breaks_rank(error: Exception) -> bool:
    """Whether the device or a process group of this rank cannot be trusted after this error."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    words = ("cuda", "cudnn", "cublas", "triton error", "nccl", "gloo", "connection closed by peer")
    is_device = isinstance(error, torch.AcceleratorError | dist.DistError)
    is_told = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)
    cause = error.__cause__
    return is_device or is_told or (isinstance(cause, Exception) and breaks_rank(cause))
