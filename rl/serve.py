"""What a rank does while others drive: it answers messages, and works on what it has been given in between."""

from collections.abc import Callable, Sequence
from typing import Protocol

from rl.mail import Mail, Message


class Service(Protocol):
    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the messages it answers."""
        ...

    @property
    def busy(self) -> bool: ...

    def handle(self, message: Message) -> None: ...

    def work(self) -> None:
        """One short piece of work, such as an engine step; called while busy."""
        ...


def serve(mail: Mail, services: Sequence[Service], until: Callable[[], bool]) -> None:
    """Waits in the mailbox, never inside a c10d call; a lost peer ends the wait."""
    by_kind = {kind: service for service in services for kind in service.kinds}
    while not until():
        busy = [service for service in services if service.busy]
        message = mail.receive(*by_kind, timeout_s=0 if busy else None)
        if message is not None:
            by_kind[message.kind].handle(message)
            continue
        for service in busy:
            service.work()


class EndService:
    """Ends `serve` on ranks that only serve."""

    kinds = ("end",)
    busy = False

    def __init__(self) -> None:
        self.ended = False

    def handle(self, message: Message) -> None:
        self.ended = True

    def work(self) -> None:
        raise AssertionError("never busy")
