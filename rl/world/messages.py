"""Messages between ranks: typed dataclasses and packed payloads over plain TCP, beside torch.distributed.

    sender's thread --send--> socket --> receiver's I/O thread --> handler, or the inbox --receive--> main thread

Why not c10d: a gloo send blocks until the other side enters the matching receive, and it cannot be polled. An engine
would stop for a busy actor, and a rank would wait for work inside a c10d call. Here the I/O thread always reads, and a
sender waits for the kernel alone. When a process ends, its connections close, and its peers notice at once.

A frame holds the name of the message class, its fields in msgpack, and raw bytes; nothing is unpickled. A connection
opens with the run's token, which ranks get from the rendezvous store. Connections without it are dropped.
"""

import re
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from rl.common.framing import Frame, FrameReader, pack
from rl.watch.heart import HEART

MAX_HELLO_BYTES = 1 << 10
MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES = 64 << 20, 1 << 62
CONNECT_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 60.0
SILENCE_S = 16


class Message:
    """Base class of everything that ranks send. Subclasses are frozen dataclasses; the class name is the kind."""

    awaited: ClassVar[str] = ""  # what a rank waits for, in words; empty: those of the class name


M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Hello(Message):
    """Open a connection."""

    token: str
    rank: int


@dataclass(frozen=True)
class Letter(Generic[M]):
    """A message that arrived, with its sender and its raw bytes."""

    source: int
    message: M
    payload: bytes | bytearray = b""


@dataclass(frozen=True)
class _Arrival:
    """A message whose fields are not decoded yet."""

    source: int
    kind: str
    fields: msgspec.Raw | Message  # the message itself where a rank wrote to itself
    payload: bytes | bytearray

    def decode(self, kind: type[M]) -> Letter[M]:
        if isinstance(self.fields, kind):
            return Letter(self.source, self.fields, self.payload)
        assert isinstance(self.fields, msgspec.Raw)
        try:
            return Letter(self.source, msgspec.msgpack.decode(self.fields, type=kind), self.payload)
        except msgspec.MsgspecError as error:
            raise ValueError(f"rank {self.source} sent a {self.kind} that cannot be read: {error}") from error


class PeerLost(ConnectionError):
    """A message could not be delivered because the other rank is gone or frozen."""


class Mailbox:
    """One rank's mailbox. The I/O thread handles the kinds given to `on` at once; the others wait for `receive`."""

    def __init__(self, rank: int, host: str, token: str):
        self.rank = rank
        self.token = token
        self._inbox: deque[_Arrival] = deque()
        self._arrived = threading.Condition(threading.RLock())
        self._failure: BaseException | None = None
        self._handlers: dict[str, Callable[[_Arrival], None]] = {}
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

    def on(self, kind: type[M], handler: Callable[[Letter[M]], Any]) -> None:
        """Handle messages of this kind in the I/O thread, also while the main thread is busy."""
        name = kind.__name__
        with self._arrived:
            self._handlers[name] = lambda arrival: handler(arrival.decode(kind))
            early = [arrival for arrival in self._inbox if arrival.kind == name]
            self._inbox = deque(arrival for arrival in self._inbox if arrival.kind != name)
        for arrival in early:
            self._handlers[name](arrival)

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Call the handler in the I/O thread with the rank of a peer whose connection ended."""
        self._on_lost = handler

    def watch(self, source: socket.socket, handler: Callable[[socket.socket], None]) -> None:
        """Let the I/O thread serve another socket too."""
        self._selector.register(source, selectors.EVENT_READ, lambda: handler(source))

    def learn(self, addresses: dict[int, tuple[str, int]]) -> None:
        self._addresses.update(addresses)

    def send(self, rank: int, message: Message, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send a message. Messages of a pair of ranks arrive in order.

        Raise PeerLost when the other side does not accept it in time.
        """
        kind = type(message).__name__
        if rank == self.rank:
            self._deliver(_Arrival(rank, kind, message, bytes(payload)))
            return
        head = msgspec.msgpack.encode((kind, message))
        with self._lock:
            lock = self._send_locks.setdefault(rank, threading.Lock())
        with lock:
            if rank in self._gone:
                raise PeerLost(f"could not send {kind!r} to rank {rank}: its connection has ended")
            try:
                connection = self._outgoing.get(rank) or self._connect(rank)
                connection.sendall(pack(head, len(payload)))
                if payload:
                    connection.sendall(payload)
            except OSError as error:
                self._gone.add(rank)  # for good: the connection may hold half a frame
                raise PeerLost(
                    f"could not send {kind!r} to rank {rank} at {self._addresses.get(rank)}: {error}"
                ) from error

    def receive(self, *kinds: type[M]) -> Letter[M]:
        """Wait for the oldest message of these kinds, as long as the world lives."""
        letter = self._take(kinds, None)
        assert letter is not None
        return letter

    def receive_within(self, timeout_s: float, *kinds: type[M]) -> Letter[M] | None:
        """Wait for the oldest message of these kinds; return None after the timeout."""
        return self._take(kinds, timeout_s)

    def check(self) -> None:
        """Raise the error that ended the world, if one did."""
        with self._arrived:
            if self._failure is not None:
                raise self._failure

    def _take(self, kinds: Sequence[type[M]], timeout_s: float | None) -> Letter[M] | None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        by_name = {kind.__name__: kind for kind in kinds}
        with self._arrived:
            while True:
                self.check()
                for index, arrived in enumerate(self._inbox):
                    if arrived.kind in by_name:
                        del self._inbox[index]
                        return arrived.decode(by_name[arrived.kind])
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                with waiting(" or ".join(map(_words, kinds))):
                    self._arrived.wait(left)

    def fail(self, error: BaseException) -> None:
        """Make `receive` and `check` raise this error from now on."""
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
        hello = Hello(self.token, self.rank)
        connection.sendall(pack(msgspec.msgpack.encode((Hello.__name__, hello))))
        self._outgoing[rank] = connection
        # Nobody answers on this connection: it becomes readable only when the peer is gone.
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._drop(connection, rank))
        return connection

    def _deliver(self, arrived: _Arrival) -> None:
        with self._arrived:
            handler = self._handlers.get(arrived.kind)
            if handler is None:
                self._inbox.append(arrived)
                self._arrived.notify_all()
                return
        handler(arrived)

    def _serve(self) -> None:
        while not self._closing:
            HEART.touch_io()
            for selected, _ in self._selector.select(timeout=1.0):
                if self._closing:
                    return
                try:
                    selected.data()
                except Exception as error:  # must reach the main thread, and this thread must live on
                    self.fail(error)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer hung up before it was accepted
            return
        _notice_silence(connection)
        peer = _Connection(FrameReader(connection, MAX_HELLO_BYTES))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))

    def _read(self, peer: "_Connection") -> None:
        frames = peer.reader.frames()
        while True:
            try:
                frame = next(frames, None)
                arrived = None if frame is None else peer.open_frame(frame, self.token)
            except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
                return self._drop(peer.reader.connection, peer.rank)
            if frame is None:
                return None
            if arrived is not None:
                try:
                    self._deliver(arrived)
                except Exception as error:  # of a handler: the frames behind this one are still to be delivered
                    self.fail(error)

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


def _words(kind: type[Message]) -> str:
    """Return what a rank waits for, in words: EngineFailed -> engine failed."""
    return kind.awaited or re.sub("(?<!^)([A-Z])", r" \1", kind.__name__).lower()


class _Connection:
    """The receiving end of a connection; `rank` is None until the peer has shown the run's token."""

    def __init__(self, reader: FrameReader):
        self.reader = reader
        self.rank: int | None = None

    def open_frame(self, frame: Frame, token: str) -> _Arrival | None:
        """Return the message in a frame; None for the frame that opens a connection."""
        kind, fields = msgspec.msgpack.decode(frame.head, type=tuple[str, msgspec.Raw])
        if self.rank is not None:
            return _Arrival(self.rank, kind, fields, frame.payload)
        hello = msgspec.msgpack.decode(fields, type=Hello)
        if kind != Hello.__name__ or hello.token != token:
            raise ValueError("a connection without the run's token")
        self.rank = hello.rank
        self.reader.max_head_bytes, self.reader.max_payload_bytes = MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES
        return None
