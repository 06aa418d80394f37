"""Mailboxes and checkpoint stores of several ranks, all in this process, over real sockets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rl.checkpoint.store import CheckpointStore
from rl.world.mail import Mail, Message

HOST = "127.0.0.1"
WAIT_S = 10.0  # for what must happen


@contextmanager
def connected(count: int) -> Iterator[list[Mail]]:
    mails = [Mail(rank, HOST, "token") for rank in range(count)]
    for mail in mails:
        mail.learn({other.rank: other.address for other in mails})
    try:
        yield mails
    finally:
        for mail in mails:
            mail.close()


@contextmanager
def stores_on(roots: Sequence[Path], sources: Sequence[Path] | None = None) -> Iterator[list[CheckpointStore]]:
    """A store for each root, as if each were on a node of its own; equal roots are a disk that nodes share."""
    places = sources or [None] * len(roots)
    with connected(len(roots)) as mails:
        yield [CheckpointStore(mail, root, place, range(len(roots))) for mail, root, place in zip(mails, roots, places)]


def take(mail: Mail, *kinds: str) -> Message:
    message = mail.receive(*kinds, timeout_s=WAIT_S)
    assert message is not None, f"no {kinds} within {WAIT_S} s"
    return message
