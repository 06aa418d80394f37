"""The loop of a rank that serves others: it handles messages, and works on its tasks in between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl.world.messages import Letter, Message
from rl.world.world import World


class Service:
    """Handle messages of the given kinds. `name` is the stage that is timed and reported meanwhile."""

    name = "serve"
    kinds: tuple[type[Message], ...] = ()

    @property
    def busy(self) -> bool:
        return False

    @property
    def awaited(self) -> str:
        """Return in words what the service waits for now, for reports. Empty: nothing that a reader must know."""
        return ""

    def handle(self, letter: Letter[Any]) -> None:
        raise NotImplementedError

    def work(self) -> None:
        """Do one short piece of work, such as an engine step. Called repeatedly while `busy`."""
        raise NotImplementedError


def serve(world: World, services: Sequence[Service], until: Callable[[], bool]) -> None:
    """Run the services until `until` returns True. The rank waits in its mailbox, never inside a c10d call.

    While no service is busy, reports show what the rank waits for: the text of the first service that has one.
    """
    by_kind = {kind: service for service in services for kind in service.kinds}
    names = frozenset(kind.__name__ for kind in by_kind)
    while not until():
        busy = [service for service in services if service.busy]
        if busy:
            letter = world.mail.receive_within(0, *by_kind)
        else:
            awaited = next(filter(None, (service.awaited for service in services)), "")
            letter = world.mail.receive(*by_kind, awaited=awaited)
        if letter is not None:
            kind = type(letter.message)
            with world.stage(by_kind[kind].name, kind.__name__):
                while letter is not None:  # all of this kind that come next share the cost of entering the stage
                    by_kind[kind].handle(letter)
                    letter = None if until() else world.mail.receive_next(kind, names)
            continue
        for service in busy:
            with world.stage(service.name):
                service.work()


@dataclass(frozen=True)
class EndRun(Message):
    """Tell a rank that only serves that the run is over."""


class EndService(Service):
    """Record when `serve` should return, on ranks that only serve."""

    kinds = (EndRun,)
    ended = False

    def handle(self, letter: Letter[EndRun]) -> None:
        self.ended = True
