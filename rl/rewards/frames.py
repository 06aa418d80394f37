"""Numbered bodies over a socket that never blocks its owner."""

import socket
import struct
from collections import deque

HEAD = struct.Struct("!QI")  # number of the call, bytes of the body; 0 is for what is no call
READ_BYTES = 1 << 18
READS_AT_A_TIME = 16  # of one that writes without end, before the others get their turn


def frame(number: int, body: bytes) -> bytes:
    return HEAD.pack(number, len(body)) + body


class Frames:
    def __init__(self, connection: socket.socket, max_bytes: int):
        """A body of more than `max_bytes` closes the connection."""
        self.connection, self.is_open = connection, True
        self._max_bytes = max_bytes
        self._unread = bytearray()
        self._unsent: deque[memoryview] = deque()

    @property
    def has_unsent(self) -> bool:
        return self.is_open and bool(self._unsent)

    def send(self, number: int, body: bytes) -> None:
        self._unsent.append(memoryview(frame(number, body)))
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                sent = self.connection.send(self._unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                if sent < len(self._unsent[0]):
                    self._unsent[0] = self._unsent[0][sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def receive(self) -> list[tuple[int, bytes]]:
        """What has arrived in whole; `is_open` says whether more may come."""
        try:
            for _ in range(READS_AT_A_TIME):
                part = self.connection.recv(READ_BYTES, socket.MSG_DONTWAIT)
                if not part:
                    self.is_open = False
                    break
                self._unread += part
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        return self._whole_ones()

    def _whole_ones(self) -> list[tuple[int, bytes]]:
        frames, begin = [], 0
        while len(self._unread) - begin >= HEAD.size:
            number, size = HEAD.unpack_from(self._unread, begin)
            if size > self._max_bytes:
                self.is_open = False
                break
            end = begin + HEAD.size + size
            if len(self._unread) < end:
                break
            frames.append((number, bytes(self._unread[begin + HEAD.size : end])))
            begin = end
        del self._unread[:begin]
        return frames

    def close(self) -> None:
        self.is_open = False
        self.connection.close()
