"""Accept connections only from processes that know the run's secret. Neither side parses bytes before a proof.

    listener -> client    NONCE random bytes
    client -> listener    NONCE random bytes, then a proof: an HMAC of both nonces
    listener -> client    a proof of its own

Every length is fixed, so nothing that a stranger sends is parsed. A `Listener` has a thread of its own for this, so
strangers delay nobody. It also answers while the threads that handle messages are busy. So two ranks that connect to
each other at the same time do not wait for each other. After the handshake, bytes are neither signed nor encrypted
(docs/security.md).
"""

import hmac
import os
import random
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from rl.common.text import count_of

SECRET = "ONEWORLD_SECRET"
MIN_SECRET = 16  # characters
NONCE = 32  # bytes
PROOF = 32  # bytes
HANDSHAKE_S = 10.0  # a connection without a proof is closed after this time
MAX_PENDING = 512  # connections without a proof, or a quarter of the files that may be open; the oldest go first
MAX_PENDING_OF_HOST = 128
MAX_TRIES, RETRY_S = 10, 0.1  # of a client whose connection is closed; the longest wait between two tries
WRONG_SECRET = f"its listener does not know this run's secret, or refuses ours: set the same {SECRET} on every node"
NO_PROOF = f"no proof that it knows the run's secret; if it is a node of this run, set the same {SECRET} there"

Address = tuple[str, int]
OnConnection = Callable[[socket.socket, str], None]


class Untrusted(ConnectionError):
    """The other side did not prove that it knows the secret."""


def check_secret() -> str:
    """Return what is wrong with the secret in the environment, or an empty string. There may be none."""
    length = len(os.environ.get(SECRET, ""))
    if 0 < length < MIN_SECRET:
        return f"{SECRET} has {length} characters, too few to be secret; give at least {MIN_SECRET} (docs/security.md)"
    return ""


def derive_key(purpose: str, world: str = "") -> bytes:
    """Return a key for one purpose in one world. Without ONEWORLD_SECRET, it is only as secret as `world`."""
    return hmac.digest(os.environ.get(SECRET, "").encode(), f"{purpose}\0{world}".encode(), "sha256")


def connect(address: Address, key: bytes, timeout_s: float) -> socket.socket:
    """Connect to a `Listener` and authenticate both sides. Raise OSError; it is Untrusted if a proof is refused."""
    deadline = time.monotonic() + timeout_s
    for _ in range(MAX_TRIES):
        connection = socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic()))
        try:
            if _authenticate(connection, key, deadline):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
        except BaseException:
            connection.close()
            raise
        connection.close()
        # A listener that strangers flood closes the oldest connections, and ours may be among them.
        time.sleep(RETRY_S * random.random())
    raise Untrusted(WRONG_SECRET)


def _authenticate(connection: socket.socket, key: bytes, deadline: float) -> bool:
    """Exchange proofs. Return False if the listener closes the connection. Raise Untrusted if its proof is wrong."""
    if len(theirs := _receive(connection, NONCE, deadline)) < NONCE:
        return False
    ours = secrets.token_bytes(NONCE)
    connection.sendall(ours + _proof(key, b"client", theirs + ours))
    if len(answer := _receive(connection, PROOF, deadline)) < PROOF:
        return False
    if not hmac.compare_digest(answer, _proof(key, b"listener", theirs + ours)):
        raise Untrusted(WRONG_SECRET)
    return True


def _receive(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Return `count` bytes, or fewer if the peer closes the connection."""
    data = b""
    while len(data) < count:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        with suppress(ConnectionError):
            if part := connection.recv(count - len(data)):
                data += part
                continue
        break
    return data


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, side + nonces, "sha256")


class _PendingConnection:
    """A connection whose proof has not arrived yet."""

    def __init__(self, connection: socket.socket, host: str):
        self.connection, self.host = connection, host
        self.nonce, self.received = secrets.token_bytes(NONCE), b""
        self.deadline = time.monotonic() + HANDSHAKE_S


class Refusals:
    """Count refused connections by host and reason. Print a line for the first, the tenth, the hundredth and so on."""

    def __init__(self, say: Callable[[str], None]):
        self._say, self._counts = say, Counter[tuple[str, str]]()

    def add(self, host: str, why: str) -> None:
        key = (host if len(self._counts) < MAX_PENDING else "other hosts", why)
        self._counts[key] += 1
        if str(count := self._counts[key]).strip("0") == "1":
            with suppress(OSError, ValueError):  # the console may be gone, and a stranger must not end the listener
                self._say(f"oneworld: refused {count_of(count, 'connection')} from {key[0]}: {why}")


class Listener:
    """Accept connections on a server socket. Pass each peer that knows the key to `on_connection`, with its host.

    `on_connection` is called in the listener's thread with a blocking socket, and must return quickly.
    """

    def __init__(self, server: socket.socket, key: bytes, on_connection: OnConnection, refusals: Refusals):
        self._server, self._key, self._on_connection, self._refusals = server, key, on_connection, refusals
        self._pending: dict[socket.socket, _PendingConnection] = {}  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._is_closing = False
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # -1 if there is none
        self._max_pending = min(MAX_PENDING, max(1, limit // 4)) if limit > 0 else MAX_PENDING
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="listener", daemon=True).start()

    def close(self) -> None:
        self._is_closing = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the sockets

    def _serve(self) -> None:
        while not self._is_closing:
            for selected, _ in self._selector.select(timeout=1.0):
                if selected.fileobj is self._server:
                    self._accept()
                elif (pending := self._pending.get(selected.fileobj)) is not None:  # type: ignore[call-overload]
                    self._read(pending)
            now = time.monotonic()
            for late in [each for each in self._pending.values() if each.deadline < now]:
                self._refuse(late)
        for pending in self._pending.values():
            pending.connection.close()
        self._server.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, address = self._server.accept()
        except OSError:  # the client has left, the server socket is closed, or no file descriptor is free
            if not self._is_closing:
                time.sleep(0.01)
            return
        new = _PendingConnection(connection, address[0].removeprefix("::ffff:"))
        of_host = [each for each in self._pending.values() if each.host == new.host]
        if len(of_host) >= MAX_PENDING_OF_HOST or len(self._pending) >= self._max_pending:
            oldest = of_host[0] if len(of_host) >= MAX_PENDING_OF_HOST else next(iter(self._pending.values()))
            self._read(oldest)  # its proof may have arrived
            if oldest.connection in self._pending:
                self._refuse(oldest)
        connection.setblocking(False)
        self._pending[connection] = new
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(new.nonce)
        except OSError:
            self._refuse(new)

    def _read(self, pending: _PendingConnection) -> None:
        try:
            part = pending.connection.recv(NONCE + PROOF - len(pending.received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        pending.received += part
        if part and len(pending.received) < NONCE + PROOF:
            return
        nonces = pending.nonce + pending.received[:NONCE]
        if not hmac.compare_digest(pending.received[NONCE:], _proof(self._key, b"client", nonces)):
            self._refuse(pending)
            return
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)
        try:
            pending.connection.send(_proof(self._key, b"listener", nonces))  # 32 bytes always fit
            pending.connection.setblocking(True)
            self._on_connection(pending.connection, pending.host)
        except OSError:
            pending.connection.close()

    def _refuse(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection]
        pending.connection.close()
        self._refusals.add(pending.host, NO_PROOF)
