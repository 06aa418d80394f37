"""Mailboxes, worlds and checkpoint stores of several ranks, all in this process, over real sockets."""

import queue
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl.checkpoint.store import CheckpointStore
from rl.common.handshake import Listener, Refusals
from rl.common.json_channel import JsonChannel
from rl.world.messages import Letter, Mailbox, Message
from rl.world.sealed_store import SealedStore
from rl.world.world import World

HOST = "127.0.0.1"
KEY = b"a key of these tests"
WAIT_S = 10.0  # limit on waits for messages that must come


@contextmanager
def listening(key: bytes = KEY) -> Iterator[tuple[tuple[str, int], queue.SimpleQueue[socket.socket]]]:
    """Accept authenticated connections. Yield the address, and a queue of the connections."""
    accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    server = socket.create_server((HOST, 0))
    listener = Listener(server, key, lambda connection, host: accepted.put(connection), Refusals(lambda text: None))
    try:
        yield server.getsockname(), accepted
    finally:
        listener.close()


@contextmanager
def connected(count: int) -> Iterator[list[Mailbox]]:
    mails = [Mailbox(rank, HOST, KEY) for rank in range(count)]
    for mail in mails:
        mail.learn({other.rank: other.contact for other in mails})
    try:
        yield mails
    finally:
        for mail in mails:
            mail.close()


@contextmanager
def connected_worlds(count: int) -> Iterator[list[World]]:
    """Worlds of ranks on one node, each with a mailbox; nobody reads what they tell their watchdogs."""
    with connected(count) as mails:
        lines = [socket.socketpair() for _ in mails]
        store = SealedStore(dist.HashStore(), "0123456789")
        yield [
            World(mail, mail.rank, count, store, JsonChannel(ours))
            for mail, (ours, _) in zip(mails, lines, strict=True)
        ]
        for pair in lines:
            for end in pair:
                end.close()


@dataclass(frozen=True)
class Mark(Message):
    """Sent behind other messages: whoever has it has those too."""


@contextmanager
def stores_on(roots: Sequence[Path], sources: Sequence[Path] | None = None) -> Iterator[list[CheckpointStore]]:
    """Yield a store for each root, as if each were on its own node. Equal roots are a disk that nodes share."""
    places = sources or [None] * len(roots)
    with connected(len(roots)) as mails:
        stores = [CheckpointStore(mail, root, at, range(len(roots))) for mail, root, at in zip(mails, roots, places)]
        yield stores
        for store in stores:
            store.close()


def take(mail: Mailbox, *kinds: Any) -> Letter[Any]:
    letter = mail.receive_within(WAIT_S, *kinds)
    assert letter is not None, f"no {kinds} within {WAIT_S} s"
    return letter
