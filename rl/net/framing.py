"""Frames on stream sockets: the one format of messages between ranks, watchdogs and reward processes.

    prefix (magic, bytes of the head, bytes of the payload) | head | payload

`FrameReader` assembles frames without blocking. `Channel` adds a queue of unsent frames, for an owner that must not
block when it sends either. A sender that may block writes `pack(...)` and the payload with `sendall`.
"""

import math
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

PREFIX = struct.Struct("!4sIQ")  # magic, bytes of the head, bytes of the payload
MAGIC = b"1wld"
READ_BYTES = 1 << 16
MAX_READS = 16  # in one go, so that a peer that sends without end leaves other connections their turn

Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    head: bytearray
    payload: bytearray


def pack(head: Buffer, payload_length: int = 0) -> bytes:
    """Return the bytes that precede a payload of this length."""
    return PREFIX.pack(MAGIC, len(head), payload_length) + head


class FrameReader:
    """Assembles frames from a socket. Small frames are read together; a large head or payload is received straight
    into the buffer that the caller gets.

    `max_head_bytes` and `max_payload_bytes` may change between frames, for example after a handshake.
    """

    def __init__(self, connection: socket.socket, max_head_bytes: int, max_payload_bytes: int = 0):
        self.connection = connection
        self.max_head_bytes, self.max_payload_bytes = max_head_bytes, max_payload_bytes
        self._unread = bytearray()
        self._lengths: tuple[int, int] | None = None  # of the frame that is being assembled
        self._head: bytearray | None = None
        self._part: bytearray | None = None  # a large head or payload, of which `_filled` bytes have arrived
        self._filled = 0

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that have arrived. Never block, unless the socket has a timeout.

        Iterate to the end: the socket does not become readable again for frames that are buffered here. Raise
        ValueError for a frame that is not ours or breaks a limit, ConnectionError at the end of the stream, and any
        other OSError of the socket.
        """
        yield from self._buffered_frames()
        for _ in range(MAX_READS):
            try:
                has_more = self._receive(socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            yield from self._buffered_frames()
            if not has_more:
                return

    def wait_for_frame(self) -> Frame:
        """Return the next frame of a blocking socket. Raise like `frames`."""
        while (frame := self._next_frame()) is None:
            self._receive(0)
        return frame

    def _receive(self, flags: int) -> bool:
        """Read once. Return whether more may be there to read."""
        if self._part is not None:
            count = self.connection.recv_into(memoryview(self._part)[self._filled :], 0, flags)
            self._filled += count
        else:
            data = self.connection.recv(READ_BYTES, flags)
            self._unread += data
            count = len(data)
        if not count:
            raise ConnectionError("the peer closed the connection")
        return self._part is not None or count == READ_BYTES

    def _buffered_frames(self) -> Iterator[Frame]:
        while (frame := self._next_frame()) is not None:
            yield frame

    def _next_frame(self) -> Frame | None:
        """Return the next frame if it has arrived whole. A peer is to be authenticated here, before any of its bytes
        are interpreted by anything but the prefix."""
        if self._lengths is None:
            if len(self._unread) < PREFIX.size:
                return None
            magic, head_length, payload_length = PREFIX.unpack_from(self._unread)
            if magic != MAGIC or head_length > self.max_head_bytes or payload_length > self.max_payload_bytes:
                raise ValueError(
                    f"a frame begins with {magic!r}, a head of {head_length} bytes and a payload of {payload_length}; "
                    f"expected {MAGIC!r} and at most {self.max_head_bytes} and {self.max_payload_bytes} bytes"
                )
            del self._unread[: PREFIX.size]
            self._lengths = head_length, payload_length
        if self._head is None:
            self._head = self._take(self._lengths[0])
            if self._head is None:
                return None
        payload = self._take(self._lengths[1])
        if payload is None:
            return None
        frame = Frame(self._head, payload)
        self._lengths = self._head = None
        return frame

    def _take(self, length: int) -> bytearray | None:
        """Return the next `length` bytes, or None while some are missing. Many bytes are then received in place."""
        if self._part is None and length > max(len(self._unread), READ_BYTES):
            self._part, self._filled = bytearray(length), len(self._unread)
            self._part[: self._filled] = self._unread
            self._unread.clear()
        if self._part is not None:
            if self._filled < length:
                return None
            part, self._part = self._part, None
            return part
        if len(self._unread) < length:
            return None
        part = self._unread[:length]
        del self._unread[:length]
        return part


class Channel:
    """Sends and receives frames over a socket without blocking its owner.

    Errors do not raise: `is_open` turns False when the peer is gone or has sent something that is not a valid frame.
    """

    def __init__(
        self,
        connection: socket.socket,
        max_head_bytes: int,
        max_payload_bytes: int = 0,
        max_unsent_bytes: float = math.inf,
    ):
        """`max_unsent_bytes` bounds what is kept for a peer that does not read; further frames are dropped."""
        self.connection, self.is_open = connection, True
        self._reader = FrameReader(connection, max_head_bytes, max_payload_bytes)
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0

    @property
    def has_unsent(self) -> bool:
        return self.is_open and bool(self._unsent)

    def send_frame(self, head: bytes, payload: Buffer = b"") -> None:
        """Send what the socket takes now and queue the rest for `flush`."""
        if self.is_open and self._unsent_bytes < self._max_unsent_bytes:
            data = memoryview(b"".join((pack(head, len(payload)), payload)))
            self._unsent.append(data)
            self._unsent_bytes += len(data)
            self.flush()

    def flush(self) -> None:
        """Send as much of the queue as the socket takes now."""
        try:
            while self._unsent:
                sent = self.connection.send(self._unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                self._unsent_bytes -= sent
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def flush_within(self, timeout_s: float) -> None:
        """Send the queue, and wait up to `timeout_s` seconds for a peer that is slow to read."""
        deadline = time.monotonic() + timeout_s
        while self.has_unsent and (left := deadline - time.monotonic()) > 0:
            select.select([], [self.connection], [], left)
            self.flush()

    def receive_frames(self) -> list[Frame]:
        """Return the frames that have arrived. `is_open` says whether more may come."""
        received: list[Frame] = []
        try:
            for frame in self._reader.frames():
                received.append(frame)
        except (OSError, ValueError):
            self.is_open = False
        return received

    def close(self) -> None:
        self.is_open = False
        self.connection.close()
