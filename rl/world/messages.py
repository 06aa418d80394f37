"""Messages between ranks: typed dataclasses and raw payloads over plain TCP, independent of torch.distributed.

    sender's thread --send--> socket --> receiver's I/O thread --> handler, or the inbox --receive--> main thread

c10d is not used, because a gloo send blocks until the other side enters the matching receive, and cannot be polled.
Here the I/O thread always reads, so a sender waits only for the network. When a process ends, its peers notice.

A frame holds the name of the message class, its fields in msgpack, and raw bytes. Only those who know the run's secret
can connect (rl/common/handshake.py). The first frame of a connection has the sender's rank and the password of that
rank. All ranks know the digest of each password, so nobody else can send messages as that rank. If a later frame cannot
be read, the world ends with an error that names the sender.
"""

import hashlib
import hmac
import json
import re
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from rl.common.framing import Frame, FrameReader, pack
from rl.common.handshake import Listener, Refusals, connect
from rl.watch.heart import HEART
from rl.watch.ledger import NETWORK, Awaited

MAX_HELLO_BYTES = 1 << 10
MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES = 64 << 20, 1 << 40
MSGPACK_BYTES = (0xC4, 0xC5, 0xC6)  # the first byte of a byte string in msgpack
UNREADABLE = (ValueError, msgspec.MsgspecError, RecursionError)  # errors of decoding a frame that is no message
SEND_TIMEOUT_S = 60.0  # limit for a send or a connect; a busy peer may take long
FOREVER_S = 1e9  # threading accepts no infinity
SILENCE_S = 16  # the kernel closes a connection after its host has not answered for this time


class Message:
    """Base class of all messages. Subclasses are frozen dataclasses. The name of the class is the message's kind."""

    # How reports name what a receiver waits for; default: the class name in words. An `Awaited` text also has a role.
    awaited: ClassVar[str] = ""
    kinds: ClassVar[set[str]] = set()  # names of all subclasses

    def __init_subclass__(cls) -> None:
        Message.kinds.add(cls.__name__)


M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Contact:
    """Where a rank receives messages, and the digest of the password with which it proves who it is."""

    host: str
    port: int
    digest: str


@dataclass(frozen=True)
class Hello(Message):
    """Identify the sender in the first frame of a connection."""

    rank: int
    password: str


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
        except UNREADABLE as error:
            raise ValueError(f"rank {self.source} sent a {self.kind} that cannot be read: {error}") from error
        return Letter(self.source, message, self.payload)


class PeerLost(ConnectionError):
    """A message could not be delivered because the other rank is gone or frozen."""


class Mailbox:
    """One rank's mailbox. Its I/O thread calls the handlers set by `on`. Other messages wait for `receive`."""

    def __init__(self, rank: int, host: str, key: bytes):
        """`key` is the same for all ranks of this world, and secret."""
        self.rank = rank
        self._inbox: list[_Arrival] = []
        self._arrived = threading.Condition(threading.RLock())
        self._failure: BaseException | None = None
        self._handlers: dict[str, Callable[[_Arrival], None]] = {}
        self._key, self._password = key, secrets.token_hex(16)
        self._contacts: dict[int, Contact] = {}
        self._early: list[tuple[socket.socket, str]] = []  # accepted before the contacts were known
        self._outgoing: dict[int, socket.socket] = {}
        self._gone: set[int] = set()
        self._send_locks: dict[int, threading.Lock] = {}
        self._on_lost: Callable[[int], None] = lambda rank: None
        self._closing = False
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=1024)
        self._refusals = Refusals(lambda text: print(text, file=sys.stderr, flush=True))
        self._listener = Listener(server, key, self._admit, self._refusals)
        self.contact = Contact(host, server.getsockname()[1], _digest(self._password))
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

    def learn(self, contacts: dict[int, Contact]) -> None:
        """Learn how to reach and to recognize all ranks. Until then, messages from other ranks are not read."""
        with self._arrived:
            self._contacts, early = contacts, self._early
        for connection, host in early:
            self._admit(connection, host)

    def send(self, rank: int, message: Message, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send a message. Messages to one rank arrive in order. Raise PeerLost if it does not accept one in time."""
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
                _send_all(connection, pack(head, len(payload)), rank)
                if payload:
                    _send_all(connection, payload, rank)
            except OSError as error:
                self._gone.add(rank)  # never retry, because half a frame may have been sent
                to = self._contacts[rank]
                raise PeerLost(f"could not send {kind!r} to rank {rank} at {to.host}:{to.port}: {error}") from error

    def receive(self, *kinds: type[M], awaited: str = "") -> Letter[M]:
        """Wait for a message of these kinds and return the oldest. Raise the error that ends the world, if one does.

        Reports say that the rank waits for `awaited`. By default the kinds say what that is.
        """
        letter = self.receive_within(FOREVER_S, *kinds, awaited=awaited)
        assert letter is not None
        return letter

    def receive_within(self, timeout_s: float, *kinds: type[M], awaited: str = "") -> Letter[M] | None:
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
                with waiting(awaited or _describe_wait(kinds)):
                    self._arrived.wait(left)

    def receive_next(self, kind: type[M], among: Container[str]) -> Letter[M] | None:
        """Return the oldest of the messages whose kind is named in `among`, if it is of this kind. Never wait."""
        with self._arrived:
            self.check()
            for index, arrived in enumerate(self._inbox):
                if arrived.kind in among:
                    if arrived.kind != kind.__name__:
                        return None
                    del self._inbox[index]
                    return arrived.decode(kind)
        return None

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
        contact = self._contacts[rank]
        with waiting(Awaited(f"rank {rank} to accept a connection", NETWORK)):
            connection = connect((contact.host, contact.port), self._key, SEND_TIMEOUT_S)
        _notice_silence(connection)
        connection.settimeout(SEND_TIMEOUT_S)
        connection.sendall(pack(_encode(Hello.__name__, Hello(self.rank, self._password))))
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

    def _admit(self, connection: socket.socket, host: str) -> None:
        """Start to read messages from a peer that knows the secret. Called in the listener's thread."""
        with self._arrived:
            if not self._contacts:
                self._early.append((connection, host))
                return
        _notice_silence(connection)
        peer = _Peer(connection, host)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(peer))

    def _read(self, peer: "_Peer") -> None:
        try:
            for frame in peer.frames():
                if (arrived := peer.open_frame(frame, self._contacts)) is not None:
                    try:
                        self._deliver(arrived)
                    except Exception as error:  # from a handler; the following frames must still be delivered
                        self.fail(error)
        except OSError:
            self._drop(peer.connection, peer.rank)
        except UNREADABLE as error:
            if peer.rank is None:
                self._refusals.add(peer.host, "it knows the run's secret, but does not prove which rank it is")
            else:
                self.fail(ValueError(f"rank {peer.rank} sent bytes that are no message: {error}"))
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


def _send_all(connection: socket.socket, data: bytes | bytearray | memoryview, rank: int) -> None:
    """Send to a rank. If it does not read at once, because it is frozen or cut off, announce that we wait for it."""
    view, sent = memoryview(data), 0
    with suppress(BlockingIOError):
        sent = connection.send(view, socket.MSG_DONTWAIT)
    if sent < len(view):
        with waiting(Awaited(f"rank {rank} to read a message", NETWORK)):
            connection.sendall(view[sent:])


def _notice_silence(connection: socket.socket) -> None:
    """Let the kernel close the connection about SILENCE_S after the other host was cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, SILENCE_S // 8))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def _describe_wait(kinds: tuple[type[Message], ...]) -> str:
    """Return what a receiver of these kinds waits for."""
    return _words(kinds[0]) if len(kinds) == 1 else " or ".join(map(_words, kinds))


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
    """The receiving end of a connection. `rank` is None until the peer has proved which rank it is."""

    def __init__(self, connection: socket.socket, host: str):
        super().__init__(connection, MAX_HELLO_BYTES)
        self.host = host
        self.rank: int | None = None

    def open_frame(self, frame: Frame, contacts: dict[int, Contact]) -> _Arrival | None:
        """Return the message in a frame, or None for the first frame of a connection."""
        kind, fields = msgspec.msgpack.decode(frame.head, type=tuple[str, msgspec.Raw])
        if self.rank is not None:
            if kind not in Message.kinds:
                raise ValueError(f"unknown kind {kind[:100]!r}")
            return _Arrival(self.rank, kind, fields, frame.payload)
        hello = msgspec.msgpack.decode(fields, type=Hello)
        contact = contacts.get(hello.rank)
        if contact is None or not hmac.compare_digest(_digest(hello.password), contact.digest):
            raise ValueError(f"wrong password of rank {hello.rank}")
        self.rank = hello.rank
        self.max_head_bytes, self.max_payload_bytes = MAX_HEAD_BYTES, MAX_PAYLOAD_BYTES
        return None


def _digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
