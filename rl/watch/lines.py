"""JSON objects, one a line, over a socket that never blocks its owner."""

import json
import select
import socket
import time
from typing import Any

MAX_UNSENT = 4 << 20  # of a peer that does not read
MAX_LINE = 1 << 20


class Lines:
    def __init__(self, connection: socket.socket):
        self.connection, self.is_open = connection, True
        self._unread, self._unsent = b"", b""
        connection.setblocking(False)

    def send(self, kind: str, **values: Any) -> None:
        if self.is_open and len(self._unsent) < MAX_UNSENT:
            self._unsent += json.dumps({"kind": kind, **values}).encode() + b"\n"
            self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False

    def flush_within(self, timeout_s: float) -> None:
        """Waits for a peer that is slow to read."""
        deadline = time.monotonic() + timeout_s
        while self._unsent and self.is_open and (left := deadline - time.monotonic()) > 0:
            select.select([], [self.connection], [], left)
            self.flush()

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived in whole lines; `is_open` says whether more may come."""
        try:
            while True:
                part = self.connection.recv(1 << 16)
                if not part:
                    self.is_open = False
                    break
                self._unread += part
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        *lines, self._unread = self._unread.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(self._unread) > MAX_LINE or not all(isinstance(m, dict) and "kind" in m for m in messages):
            self.is_open = False  # a stranger
            return []
        return messages

    def close(self) -> None:
        self.is_open = False
        self.connection.close()
