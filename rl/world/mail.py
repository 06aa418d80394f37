"""Messages between ranks: small commands and packed payloads over plain TCP, beside torch.distributed.

    sender's thread --send--> socket --> receiver's I/O thread --> handler(kind), or the inbox --receive--> main thread

Why not c10d: a gloo send blocks until the other side enters the matching receive and cannot be polled, so an engine
would stop for a busy actor, and a rank would wait for work inside a c10d call. Here the I/O thread always drains, a
sender waits for the kernel alone, and the end of a peer's process closes its connection, which is noticed at once.

A frame is a fixed prefix, a JSON header and raw bytes; nothing is unpickled. A connection opens with the run's token,
which travels through the rendezvous store, so that a stranger's connection is dropped.
"""

import json
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl.watch.heart import HEART

PREFIX = struct.Struct("!4sIQ")  # magic, bytes of the header, bytes of the payload
MAGIC = b"1wld"
MAX_HEADER_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 60.0
SILENCE_S = 16


@dataclass(frozen=True)
class Message:
    source: int
    kind: str
    meta: dict[str, Any]
    payload: bytes | bytearray = b""


class PeerLost(ConnectionError):
    """A message could not be delivered because the other rank is gone or frozen."""


class Mail:
    """One rank's mailbox. `on` registers what the I/O thread does at once; everything else waits for `receive`."""

    def __init__(self, rank: int, host: str, token: str):
        self.rank = rank
        self.token = token
        self._inbox: deque[Message] = deque()
        self._arrived = threading.Condition()
        self._failure: BaseException | None = None
        self._handlers: dict[str, Callable[[Message], None]] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._outgoing: dict[int, socket.socket] = {}
        self._gone: set[int] = set()
        self._send_locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        self._on_lost: Callable[[int], None] = lambda rank: None
        self._closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._addresses[rank] = self.address
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._serve, name="mail", daemon=True)
        self._thread.start()

    def on(self, kind: str, handler: Callable[[Message], None]) -> None:
        """Messages of this kind are handled in the I/O thread, also while the main thread is busy."""
        with self._arrived:
            self._handlers[kind] = handler
            early = [message for message in self._inbox if message.kind == kind]
            self._inbox = deque(message for message in self._inbox if message.kind != kind)
        for message in early:
            handler(message)

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Called in the I/O thread with the rank of a peer whose connection ended."""
        self._on_lost = handler

    def watch(self, source: socket.socket, handler: Callable[[socket.socket], None]) -> None:
        """Lets the I/O thread also serve another socket."""
        self._selector.register(source, selectors.EVENT_READ, lambda: handler(source))

    def learn(self, addresses: dict[int, tuple[str, int]]) -> None:
        self._addresses.update(addresses)

    def send(
        self, rank: int, kind: str, meta: dict[str, Any] | None = None, payload: bytes | bytearray | memoryview = b""
    ) -> None:
        """Delivers in order per pair of ranks. Raises PeerLost when the other side does not take it in time."""
        if rank == self.rank:
            self._deliver(Message(rank, kind, meta or {}, bytes(payload)))
            return
        header = json.dumps([kind, meta or {}]).encode()
        with self._lock:
            lock = self._send_locks.setdefault(rank, threading.Lock())
        with lock:
            if rank in self._gone:
                raise PeerLost(f"could not send {kind!r} to rank {rank}: its connection has ended")
            try:
                connection = self._outgoing.get(rank) or self._connect(rank)
                connection.sendall(PREFIX.pack(MAGIC, len(header), len(payload)) + header)
                if payload:
                    connection.sendall(payload)
            except OSError as error:
                self._gone.add(rank)  # for good: the connection may hold half a frame
                raise PeerLost(
                    f"could not send {kind!r} to rank {rank} at {self._addresses.get(rank)}: {error}"
                ) from error

    def receive(self, *kinds: str, timeout_s: float | None = None) -> Message | None:
        """The oldest message of these kinds; None after `timeout_s`. Without a limit it waits as long as the world
        lives."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._arrived:
            while True:
                if self._failure is not None:
                    raise self._failure
                for index, message in enumerate(self._inbox):
                    if message.kind in kinds:
                        del self._inbox[index]
                        return message
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                with waiting(" or ".join(kinds) or "the others"):
                    self._arrived.wait(left)

    def fail(self, error: BaseException) -> None:
        """From now on `receive` raises this."""
        with self._arrived:
            self._failure = self._failure or error
            self._arrived.notify_all()

    def close(self) -> None:
        self._closing = True
        with self._lock:
            for connection in self._outgoing.values():
                connection.close()
        self._listener.close()

    def _connect(self, rank: int) -> socket.socket:
        connection = socket.create_connection(self._addresses[rank], timeout=CONNECT_TIMEOUT_S)
        _notice_silence(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_TIMEOUT_S)
        hello = json.dumps(["hello", {"token": self.token, "rank": self.rank}]).encode()
        connection.sendall(PREFIX.pack(MAGIC, len(hello), 0) + hello)
        self._outgoing[rank] = connection
        # Nobody answers on this connection: it becomes readable only when the peer is gone.
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._drop(connection, rank))
        return connection

    def _deliver(self, message: Message) -> None:
        with self._arrived:
            handler = self._handlers.get(message.kind)
            if handler is None:
                self._inbox.append(message)
                self._arrived.notify_all()
                return
        handler(message)

    def _serve(self) -> None:
        while not self._closing:
            HEART.touch_io()
            for selected, _ in self._selector.select(timeout=1.0):
                if self._closing:
                    return
                try:
                    selected.data()
                except (
                    Exception
                ) as error:  # a handler's failure must reach the main thread, and the thread must live on
                    self.fail(error)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer hung up before it was accepted
            return
        _notice_silence(connection)
        connection.setblocking(False)
        inbound = _Inbound(connection, self.token)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(inbound))

    def _read(self, inbound: "_Inbound") -> None:
        messages = inbound.messages()
        while True:
            try:
                message = next(messages, None)
            except (OSError, ValueError):
                return self._drop(inbound.connection, inbound.source)
            if message is None:
                return None
            self._deliver(message)  # outside the try: a handler's ValueError is no fault of the sender

    def _drop(self, connection: socket.socket, rank: int | None) -> None:
        self._selector.unregister(connection)
        connection.close()
        if rank is not None and not self._closing:
            self._gone.add(rank)
            self._on_lost(rank)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A main thread that waits here is not silent by its own fault."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    HEART.wait(what)
    try:
        yield
    finally:
        HEART.wait("")


def _notice_silence(connection: socket.socket) -> None:
    """A host that is cut off sends no end of connection; the kernel then ends it after about SILENCE_S."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, SILENCE_S // 8))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


class _Inbound:
    """Assembles frames from a connection that must not block."""

    def __init__(self, connection: socket.socket, token: str):
        self.connection = connection
        self.source: int | None = None
        self._token = token
        self._part, self._filled = bytearray(PREFIX.size), 0
        self._lengths: tuple[int, int] | None = None
        self._header: list | None = None

    def messages(self) -> Iterator[Message]:
        while True:
            try:
                count = self.connection.recv_into(memoryview(self._part)[self._filled :])
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionError("closed by the peer")
            self._filled += count
            while self._filled == len(self._part):
                message = self._advance()
                if message is not None:
                    yield message

    def _advance(self) -> Message | None:
        part = self._part
        if self._lengths is None:
            magic, header_bytes, payload_bytes = PREFIX.unpack(part)
            if magic != MAGIC or not 0 < header_bytes <= MAX_HEADER_BYTES or (self.source is None and payload_bytes):
                raise ValueError("not one of our frames")
            self._lengths = (header_bytes, payload_bytes)
            self._expect(header_bytes)
            return None
        if self._header is None:
            self._header = json.loads(part)
            if not isinstance(self._header, list) or len(self._header) != 2:
                raise ValueError("not one of our headers")
            self._expect(self._lengths[1])
            if self._lengths[1]:
                return None
            part = self._part
        kind, meta = self._header
        self._lengths = self._header = None
        self._expect(PREFIX.size)
        if self.source is None:
            if kind != "hello" or not isinstance(meta, dict) or meta.get("token") != self._token:
                raise ValueError("a connection without the run's token")
            self.source = meta["rank"]
            return None
        return Message(self.source, kind, meta, part)

    def _expect(self, num_bytes: int) -> None:
        self._part, self._filled = bytearray(num_bytes), 0
