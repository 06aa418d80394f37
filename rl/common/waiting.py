"""Wait for sockets and pipes. Unlike select.select, this works with more than 1024 open files."""

import select
from collections.abc import Iterable
from typing import Protocol


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Source = int | HasDescriptor


def wait_until_readable(sources: Iterable[Source], timeout_s: float) -> set[int]:
    """Wait until there is something to read, or an end. Return the descriptors for which this is true."""
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * timeout_s)}


def wait_until_writable(source: Source, timeout_s: float | None = None) -> None:
    poll = select.poll()
    poll.register(source, select.POLLOUT)
    poll.poll(None if timeout_s is None else 1000 * timeout_s)
