"""Frames on stream sockets: the format of all messages between ranks, watchdogs and reward processes.

    prefix (magic, bytes of the head, bytes of the payload) | head | payload

`FrameReader` assembles frames without blocking. `Channel` adds a queue of unsent frames, so that sending does not block
either. A sender that may block calls `sendall` with `pack(...)` and then with the payload.
"""

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from typing import NamedTuple

from rl.common.waiting import wait_until_writable

PREFIX = struct.Struct("!4sIQ")  # magic, bytes of the head, bytes of the payload
MAGIC = b"1wld"
READ_BYTES = 1 << 16
GROWTH = 64 << 20  # bytes; the memory of a payload is at most this, or twice what has arrived if that is more
MAX_READS = 16  # per call of `frames`, so that a fast sender does not starve other connections

Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    head: bytearray
    payload: bytearray


def pack(head: Buffer, payload_length: int = 0) -> bytes:
    """Return the bytes that precede a payload of this length."""
    return PREFIX.pack(MAGIC, len(head), payload_length) + head


class FrameReader:
    """Assemble frames from a socket. The limits may change between frames, for example after a handshake."""

    def __init__(self, connection: socket.socket, max_head_bytes: int, max_payload_bytes: int = 0):
        self.connection = connection
        self.max_head_bytes, self.max_payload_bytes = max_head_bytes, max_payload_bytes
        self._unread, self._begin = bytearray(), 0  # bytes before `_begin` were returned as frames
        self._large: Frame | None = None  # its payload is incomplete; `_missing` is the unfilled part of its memory
        self._missing, self._num_unallocated = memoryview(b""), 0

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that have arrived. Never block, unless the socket has a timeout.

        Always iterate to the end, because the socket does not become readable again for frames that are buffered here.
        Raise ValueError for a wrong prefix or a frame above a limit, and OSError at the end of the stream.
        """
        num_reads, has_more = 0, True
        with suppress(BlockingIOError):
            while True:
                while (frame := self._next_frame()) is not None:
                    yield frame
                if not has_more or num_reads == MAX_READS:
                    return
                has_more = self._receive(socket.MSG_DONTWAIT)
                num_reads += 1

    def wait_for_frame(self) -> Frame:
        """Return the next frame of a blocking socket. Raise like `frames`."""
        while (frame := self._next_frame()) is None:
            self._receive(0)
        return frame

    def _receive(self, flags: int) -> bool:
        """Read once. Return whether there may be more to read."""
        if self._missing:
            count = self.connection.recv_into(self._missing, 0, flags)
            self._missing = self._missing[count:]
            if not self._missing and self._num_unallocated:
                self._grow()
            has_more = True
        else:
            data = self.connection.recv(READ_BYTES, flags)
            del self._unread[: self._begin]
            self._begin = 0
            self._unread += data
            count = len(data)
            has_more = count == READ_BYTES
        if not count:
            raise ConnectionError("the peer closed the connection")
        return has_more

    def _next_frame(self) -> Frame | None:
        """Return the next frame if all of it has arrived. Only the prefix is interpreted here."""
        unread, begin = self._unread, self._begin + PREFIX.size
        if self._missing:
            return None
        if self._large is not None:
            frame, self._large, self._missing = self._large, None, memoryview(b"")  # let go of the payload
            return frame
        if len(unread) < begin:
            return None
        magic, head_length, payload_length = PREFIX.unpack_from(unread, self._begin)
        if magic != MAGIC or head_length > self.max_head_bytes or payload_length > self.max_payload_bytes:
            raise ValueError(
                f"a frame begins with {magic!r}, a head of {head_length} bytes and a payload of {payload_length}; "
                f"expected {MAGIC!r} and at most {self.max_head_bytes} and {self.max_payload_bytes} bytes"
            )
        middle = begin + head_length
        end = middle + payload_length
        if end <= len(unread):
            self._begin = end
            return Frame(unread[begin:middle], unread[middle:end])
        if middle <= len(unread) and payload_length > READ_BYTES:  # receive the rest without a copy
            allocated = min(payload_length, GROWTH)
            self._large, self._begin = Frame(unread[begin:middle], bytearray(allocated)), len(unread)
            self._missing, self._num_unallocated = memoryview(self._large.payload), payload_length - allocated
            self._missing[: len(unread) - middle] = unread[middle:]
            self._missing = self._missing[len(unread) - middle :]
        return None

    def _grow(self) -> None:
        """Double the memory of a large payload. Its announced length may be wrong, so it is not allocated at once."""
        assert self._large is not None
        payload, self._missing = self._large.payload, memoryview(b"")  # memory in a view cannot grow
        filled = len(payload)
        payload += bytes(min(filled, self._num_unallocated))
        self._num_unallocated -= len(payload) - filled
        self._missing = memoryview(payload)[filled:]


class Channel(FrameReader):
    """Send and receive without blocking.

    If the peer is gone or sends an invalid frame, nothing is raised, but `is_open` turns False.
    """

    def __init__(
        self, connection: socket.socket, max_head_bytes: int, max_payload_bytes: int = 0, max_unsent_bytes: float = inf
    ):
        """`max_unsent_bytes` limits the queue for a peer that does not read. Further frames are dropped."""
        super().__init__(connection, max_head_bytes, max_payload_bytes)
        self.is_open = True
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent = bytearray()

    @property
    def has_unsent(self) -> bool:
        return self.is_open and bool(self._unsent)

    def send_frame(self, head: bytes, payload: Buffer = b"") -> None:
        """Send what the socket accepts now, and queue the rest for `flush`."""
        self.queue_frame(head, payload)
        self.flush()

    def queue_frame(self, head: bytes, payload: Buffer = b"") -> None:
        """Queue a frame for `flush`, which sends many frames at the cost of one."""
        if self.is_open and len(self._unsent) < self._max_unsent_bytes:
            self._unsent += pack(head, len(payload))
            self._unsent += payload

    def flush(self) -> None:
        """Send as much of the queue as the socket accepts now."""
        try:
            while self._unsent:
                sent = self.connection.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def flush_within(self, timeout_s: float) -> None:
        """Send the queue. Wait up to `timeout_s` seconds for a slow peer."""
        deadline = time.monotonic() + timeout_s
        while self.has_unsent and (left := deadline - time.monotonic()) > 0:
            wait_until_writable(self.connection, left)
            self.flush()

    def receive_frames(self) -> list[Frame]:
        """Return the frames that have arrived. `is_open` says whether more may come."""
        received: list[Frame] = []
        try:
            for frame in self.frames():
                received.append(frame)
        except (OSError, ValueError):
            self.is_open = False
        return received

    def close(self) -> None:
        self.is_open = False
        self.connection.close()
