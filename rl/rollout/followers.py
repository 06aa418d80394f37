"""How the lead of an engine directs its followers, and why the ranks of an engine wait.

    lead --AddRequests, StepEngine, RebuildEngine--> followers: they make the same call
    lead --LeadWaits--> followers: the engine has nothing to do, for this reason

So a follower counts its waiting as its lead does, and between two calls as waiting for its lead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rl.rollout.engine import Request
from rl.watch.ledger import Awaited
from rl.world.messages import Mailbox, Message

Reason = Literal["scores", "tools", "weights", "work", "lead"]  # why a rank of an engine waits


@dataclass(frozen=True)
class AddRequests(Message):
    """Tell followers to give these requests to the engine."""

    requests: list[Request]


@dataclass(frozen=True)
class StepEngine(Message):
    """Tell followers to step the engine."""


@dataclass(frozen=True)
class RebuildEngine(Message):
    """Tell followers to replace the engine, which failed on all of its ranks."""


@dataclass(frozen=True)
class LeadWaits(Message):
    """Tell followers why the lead waits."""

    reason: Reason


Call = AddRequests | StepEngine | RebuildEngine
FROM_LEAD = (AddRequests, StepEngine, RebuildEngine, LeadWaits)


class Followers:
    """The followers of an engine, on its lead. `ranks` is empty on a follower, which only hears its lead."""

    def __init__(self, mail: Mailbox, ranks: Sequence[int]):
        self._mail, self._ranks = mail, ranks
        self.reason: Reason = "work"  # why the followers wait, as far as they know

    def call(self, call: Call) -> None:
        """Have the followers make a call."""
        self._send(call)

    def tell(self, reason: Reason) -> None:
        """Tell the followers why the lead waits, unless they know it."""
        if reason != self.reason:
            self._send(LeadWaits(reason))

    def hear(self, message: Call | LeadWaits) -> None:
        """Note on a follower what the lead has said."""
        self.reason = message.reason if isinstance(message, LeadWaits) else "lead"

    def _send(self, message: Call | LeadWaits) -> None:
        self.hear(message)
        for rank in self._ranks:
            self._mail.send(rank, message)


def describe_wait(reason: Reason, source: int) -> Awaited:
    """Return what a rank of an engine waits for. `source` is the rank from which its work comes."""
    match reason:
        case "scores":
            return Awaited("the scores of its responses", "reward")
        case "tools":
            return Awaited("the tools and environments of its conversations", "environment")
        case "weights":
            return Awaited("weights for its new engine", "actor")
        case "work":
            return Awaited(f"work from rank {source}", "actor")
        case "lead":
            return Awaited(f"the next call of rank {source}", "rollout")
