"""What a rank does while others drive: it answers messages, and works on what it has been given in between."""

from collections.abc import Callable, Sequence

from rl.world.mail import Message
from rl.world.world import World


class Service:
    """Answers messages of its kinds; the name is the stage in which it does so."""

    name = "serve"
    kinds: tuple[str, ...] = ()

    @property
    def busy(self) -> bool:
        return False

    def handle(self, message: Message) -> None:
        raise NotImplementedError

    def work(self) -> None:
        """One short piece of work, such as an engine step; called while busy."""
        raise NotImplementedError


def serve(world: World, services: Sequence[Service], until: Callable[[], bool]) -> None:
    """Waits in the mailbox, never inside a c10d call; a lost peer ends the wait."""
    by_kind = {kind: service for service in services for kind in service.kinds}
    while not until():
        busy = [service for service in services if service.busy]
        message = world.mail.receive(*by_kind, timeout_s=0 if busy else None)
        if message is not None:
            service = by_kind[message.kind]
            with world.stage(service.name, message.kind):
                service.handle(message)
            continue
        for service in busy:
            with world.stage(service.name):
                service.work()


class EndService(Service):
    """Ends `serve` on ranks that only serve."""

    kinds = ("end",)

    def __init__(self) -> None:
        self.ended = False

    def handle(self, message: Message) -> None:
        self.ended = True
