"""The rank's side of a server process: the rank sends frames, and a thread reads what comes back."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rl.common.framing import Channel, pack
from rl.common.waiting import wait_until_readable
from rl.rewards.launch import ServerProcess

CLOSE_S = 6.0  # time limit for the thread and the server to end


class ServerLink:
    """The connection to a server. Subclasses say what they wait for, and take the frames that arrive."""

    name = ""  # of the server
    max_head_bytes, max_payload_bytes = 0, (1 << 32) - 1  # of a frame that arrives

    def __init__(self, server: ServerProcess, limit_s: float, fail: Callable[[BaseException], None]):
        """The server counts as hung if it is quiet for `limit_s` seconds while something is under way. `fail` is called
        in the thread, with the reason why nothing more will arrive."""
        self._server, self._limit_s, self._fail = server, limit_s, fail
        self._is_closing, self._changed_at = False, time.monotonic()
        self._thread: threading.Thread | None = None

    def _start(self) -> None:
        """Read from now on."""
        self._thread = threading.Thread(target=self._read, name=self.name, daemon=True)
        self._thread.start()

    def _under_way(self) -> str:
        """Return in words what the server works on. Empty: nothing."""
        raise NotImplementedError

    def _take(self, head: bytes, body: bytearray) -> None:
        """Take a frame. Called in the thread."""
        raise NotImplementedError

    def _end(self, error: BaseException) -> None:
        """Tell those who wait for the server to be ready that it will not be. Called in the thread."""
        raise NotImplementedError

    def close(self) -> None:
        """End the server. What is under way is not delivered."""
        self._is_closing = True
        with suppress(OSError):
            self._server.connection.shutdown(socket.SHUT_RDWR)
        if self._thread:
            self._thread.join(CLOSE_S)
        self._server.connection.close()
        self._server.process.wait(CLOSE_S)

    def _send_frame(self, head: bytes, body: bytes) -> None:
        self._send_frames(pack(head, len(body)) + body)

    def _send_frames(self, frames: bytes | bytearray) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the reading thread reports it
            self._server.connection.sendall(frames)

    def _read(self) -> None:
        channel = Channel(self._server.connection, self.max_head_bytes, self.max_payload_bytes)
        try:
            while channel.is_open and not self._is_closing:
                self._wait()
                for head, body in channel.receive_frames():
                    self._take(bytes(head), body)
            if not self._is_closing:
                code = self._server.process.wait(CLOSE_S)
                raise RuntimeError(f"the {self.name} of this rank has ended with exit code {code}")
        except BaseException as error:
            self._end(error)
            with suppress(OSError):
                self._server.connection.shutdown(socket.SHUT_RDWR)  # the main thread may be blocked in `sendall`
            self._fail(error)

    def _wait(self) -> None:
        """Wait for data. Raise RuntimeError if something is under way and nothing arrives within the time limit."""
        while not wait_until_readable([self._server.connection], self._limit_s):
            under_way = self._under_way()
            if under_way and time.monotonic() - self._changed_at > self._limit_s:
                raise RuntimeError(
                    f"the {self.name} of this rank (process {self._server.process.pid}) has said nothing for "
                    f"{self._limit_s:.0f} s, with {under_way} under way"
                )
