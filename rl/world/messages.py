"""Messages between ranks: typed dataclasses and raw payloads over plain TCP, independent of torch.distributed.

    sender's thread --send--> socket --> receiver's I/O thread --> handler, or the inbox --receive--> main thread

c10d is not used, because a gloo send blocks until the other side enters the matching receive, and it cannot be polled.
Here the I/O thread always reads, so a sender waits only for the kernel. When a process ends, its peers notice.

A frame holds the name of the message class, its fields in msgpack, and raw bytes. The first frame of a connection holds
the run's token, which ranks get from the rendezvous store. Connections without it are dropped.
"""

import json
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from rl.common.framing import Frame, FrameReader, pack
from rl.watch.heart import HEART

MAX_HELLO_BYTES = 1 << 10
MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES = 64 << 20, 1 << 62
MSGPACK_BYTES = (0xC4, 0xC5, 0xC6)  # the first byte of bytes in msgpack
CONNECT_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 60.0
FOREVER_S = 1e9  # threading accepts no infinity
SILENCE_S = 16  # after which the kernel closes a connection to a host that does not answer


class Message:
    """Base class of all messages. Subclasses are frozen dataclasses. The name of the class is the message's kind."""

    awaited: ClassVar[str] = ""  # how reports name what a receiver waits for; default: the class name in words


M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Hello(Message):
    """Identify the sender in the first frame of a connection."""

    token: str
    rank: int


@dataclass(frozen=True)
class Letter(Generic[M]):
    """A received message, with its sender and its payload."""

    source: int
    message: M
    payload: bytes | bytearray = b""


@dataclass(frozen=True)
class _Arrival:
    """A message whose fields are not decoded yet."""

    source: int
    kind: str
    fields: msgspec.Raw | Message  # the message itself if a rank sent it to itself
    payload: bytes | bytearray

    def decode(self, kind: type[M]) -> Letter[M]:
        if isinstance(self.fields, kind):
            return Letter(self.source, self.fields, self.payload)
        assert isinstance(self.fields, msgspec.Raw)
        try:
            if memoryview(self.fields)[0] in MSGPACK_BYTES:  # JSON; see `_encode`
                message = msgspec.convert(json.loads(msgspec.msgpack.decode(self.fields, type=bytes)), kind)
            else:
                message = msgspec.msgpack.decode(self.fields, type=kind)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"rank {self.source} sent a {self.kind} that cannot be read: {error}") from error
        return Letter(self.source, message, self.payload)


class PeerLost(ConnectionError):
    """A message could not be delivered because the other rank is gone or frozen."""


class Mailbox:
    """One rank's mailbox. Its I/O thread calls the handlers set by `on`. Other messages wait for `receive`."""

    def __init__(self, rank: int, host: str, token: str):
        self.rank = rank
        self.token = token
        self._inbox: list[_Arrival] = []
        self._arrived = threading.Condition(threading.RLock())
        self._failure: BaseException | None = None
        self._handlers: dict[str, Callable[[_Arrival], None]] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._outgoing: dict[int, socket.socket] = {}
        self._gone: set[int] = set()
        self._send_locks: dict[int, threading.Lock] = {}
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
        """Handle messages of this kind in the I/O thread, even while the main thread is busy."""
        name = kind.__name__
        with self._arrived:
            self._handlers[name] = lambda arrival: handler(arrival.decode(kind))
            early = [arrival for arrival in self._inbox if arrival.kind == name]
            self._inbox = [arrival for arrival in self._inbox if arrival.kind != name]
        for arrival in early:
            self._handlers[name](arrival)

    def on_lost(self, handler: Callable[[int], None]) -> None:
        """Call `handler` in the I/O thread with the rank of each peer whose connection ends."""
        self._on_lost = handler

    def watch(self, source: socket.socket, handler: Callable[[socket.socket], None]) -> None:
        """Call `handler` in the I/O thread whenever this socket is readable."""
        self._selector.register(source, selectors.EVENT_READ, lambda: handler(source))

    def learn(self, addresses: dict[int, tuple[str, int]]) -> None:
        self._addresses.update(addresses)

    def send(self, rank: int, message: Message, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send a message, in order. Raise PeerLost if the other side does not accept it in time."""
        kind = type(message).__name__
        if rank == self.rank:
            self._deliver(_Arrival(rank, kind, message, bytes(payload)))
            return
        head = _encode(kind, message)
        with self._send_locks.setdefault(rank, threading.Lock()):
            if rank in self._gone:
                raise PeerLost(f"could not send {kind!r} to rank {rank}: its connection has ended")
            try:
                connection = self._outgoing.get(rank) or self._connect(rank)
                connection.sendall(pack(head, len(payload)))
                if payload:
                    connection.sendall(payload)
            except OSError as error:
                self._gone.add(rank)  # never retry, because half a frame may have been sent
                address = self._addresses.get(rank)
                raise PeerLost(f"could not send {kind!r} to rank {rank} at {address}: {error}") from error

    def receive(self, *kinds: type[M]) -> Letter[M]:
        """Wait for a message of these kinds and return the oldest. Raise the error that ends the world, if one does."""
        letter = self.receive_within(FOREVER_S, *kinds)
        assert letter is not None
        return letter

    def receive_within(self, timeout_s: float, *kinds: type[M]) -> Letter[M] | None:
        """Do the same as `receive`, but return None after the timeout."""
        deadline = time.monotonic() + timeout_s
        by_name = {kind.__name__: kind for kind in kinds}
        with self._arrived:
            while True:
                self.check()
                for index, arrived in enumerate(self._inbox):
                    if arrived.kind in by_name:
                        del self._inbox[index]
                        return arrived.decode(by_name[arrived.kind])
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                with waiting(" or ".join(map(_words, kinds))):
                    self._arrived.wait(left)

    def check(self) -> None:
        """Raise the error that ended the world, if one did."""
        if self._failure is not None:
            raise self._failure

    def fail(self, error: BaseException) -> None:
        """Make `receive` and `check` raise this error from now on."""
        with self._arrived:
            self._failure = self._failure or error
            self._arrived.notify_all()

    def close(self) -> None:
        self._closing = True
        for connection in [*self._outgoing.values()]:
            connection.close()
        self._listener.close()

    def _connect(self, rank: int) -> socket.socket:
        connection = socket.create_connection(self._addresses[rank], timeout=CONNECT_TIMEOUT_S)
        _notice_silence(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SEND_TIMEOUT_S)
        connection.sendall(pack(_encode(Hello.__name__, Hello(self.token, self.rank))))
        self._outgoing[rank] = connection
        # The peer never sends on this connection, so it becomes readable only when the peer is gone.
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
                except Exception as error:  # pass it to the main thread, and keep this thread alive
                    self.fail(error)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the peer closed the connection first
            return
        _notice_silence(connection)
        peer = _Peer(connection, MAX_HELLO_BYTES)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))

    def _read(self, peer: "_Peer") -> None:
        try:
            for frame in peer.frames():
                if (arrived := peer.open_frame(frame, self.token)) is not None:
                    try:
                        self._deliver(arrived)
                    except Exception as error:  # of a handler; the following frames must still be delivered
                        self.fail(error)
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
            self._drop(peer.connection, peer.rank)

    def _drop(self, connection: socket.socket, rank: int | None) -> None:
        self._selector.unregister(connection)
        connection.close()
        if rank is not None and not self._closing:
            self._gone.add(rank)
            self._on_lost(rank)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Announce in the heartbeat that the main thread waits, so that the watchdog does not report it as silent."""
    announce = HEART.wait if threading.current_thread() is threading.main_thread() else lambda what: None
    announce(what)
    try:
        yield
    finally:
        announce("")


def _notice_silence(connection: socket.socket) -> None:
    """Let the kernel close the connection about SILENCE_S after the other host was cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, SILENCE_S // 8))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def _words(kind: type[Message]) -> str:
    """Return what a receiver of this kind waits for, in words: EngineFailed -> engine failed."""
    return kind.awaited or re.sub("(?<!^)([A-Z])", r" \1", kind.__name__).lower()


def _encode(kind: str, message: Message) -> bytes:
    """Return the head of a frame. Fields that msgpack cannot hold travel as JSON inside it."""
    try:
        return msgspec.msgpack.encode((kind, message))
    except (OverflowError, UnicodeEncodeError):  # integers beyond 64 bits, or half a surrogate pair, in users' data
        return msgspec.msgpack.encode((kind, json.dumps(asdict(message)).encode()))  # type: ignore[call-overload]


class _Peer(FrameReader):
    """The receiving end of a connection. `rank` is None until the peer has sent the run's token."""

    rank: int | None = None

    def open_frame(self, frame: Frame, token: str) -> _Arrival | None:
        """Return the message in a frame, or None for the first frame of a connection."""
        kind, fields = msgspec.msgpack.decode(frame.head, type=tuple[str, msgspec.Raw])
        if self.rank is not None:
            return _Arrival(self.rank, kind, fields, frame.payload)
        hello = msgspec.msgpack.decode(fields, type=Hello)
        if kind != Hello.__name__ or hello.token != token:
            raise ValueError("a connection without the run's token")
        self.rank = hello.rank
        self.max_head_bytes, self.max_payload_bytes = MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES
        return None
