"""Orders: actions that all actors take at the same place in the loop, after a signal, the loss of an engine, or because
a health rule ends the run."""

from dataclasses import dataclass
from typing import Literal

from rl.world.messages import Message

Action = Literal["save", "stop", "publish again", "save and fail", "fail"]


@dataclass(frozen=True)
class Order(Message):
    """Ask the leader to pass an action on to every actor (rl/rollout/orders.py)."""

    action: Action
