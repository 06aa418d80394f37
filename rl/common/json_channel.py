"""JSON messages over a socket, sent and received without blocking."""

import json
import socket
from typing import Any

from rl.common.framing import Channel

MAX_UNSENT = 4 << 20  # bytes kept for a peer that does not read
MAX_MESSAGE = 1 << 20  # bytes


class JsonChannel(Channel):
    """A connection whose messages are JSON objects, each with a `kind`."""

    def __init__(self, connection: socket.socket):
        super().__init__(connection, max_head_bytes=MAX_MESSAGE, max_unsent_bytes=MAX_UNSENT)
        connection.setblocking(False)

    def send(self, kind: str, **values: Any) -> None:
        """Send a message. Drop it if MAX_UNSENT bytes wait for the peer already."""
        self.send_frame(json.dumps({"kind": kind, **values}).encode())

    def receive(self) -> list[dict[str, Any]]:
        try:
            messages = [json.loads(frame.head) for frame in self.receive_frames()]
        except (ValueError, RecursionError):
            messages = [None]
        if not all(isinstance(message, dict) and "kind" in message for message in messages):
            self.is_open = False  # the peer is not one of our processes
            return []
        return messages
