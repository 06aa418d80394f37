"""Connect all watchdogs to the board, the table of ranks that decides who failed.

The watchdog of rank 0 has a `BoardServer` with the board itself. The other watchdogs connect to it by `BoardClient`.
"""

import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rl.common.json_channel import JsonChannel
from rl.watch.board import BEAT_S, CUT_S, Board

BOARD_RANK = 0
Selector = selectors.BaseSelector
OnMessage = Callable[[dict[str, Any]], None]
OnText = Callable[[str], None]


class BoardServer:
    """The board, with connections to all other watchdogs."""

    def __init__(self, address: str, token: str, selector: Selector, on_message: OnMessage, say: OnText):
        """`on_message` receives the board's messages for rank 0's own watchdog. `say` prints a line."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.board = Board(self._tell, say)
        self._token, self._selector, self._on_message = token, selector, on_message
        self._peers: dict[int, JsonChannel] = {}  # by rank; only those that sent the token
        self._sent_at = 0.0
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def send(self, kind: str, **values: Any) -> None:
        self.board.handle(BOARD_RANK, {"kind": kind, **values})

    def tick(self) -> None:
        self.board.tick()
        now = time.monotonic()
        if now - self._sent_at >= BEAT_S:
            self._sent_at = now
            for peer in self._peers.values():
                peer.send("alive")

    def exclude_pause(self, seconds: float) -> None:
        """Do not count the last `seconds`, in which this process did not run."""
        self.board.exclude_pause(seconds)

    def may_end(self, is_settled: bool) -> bool:
        """Return whether this watchdog, whose own rank may be settled, may exit. It exits after all others."""
        return (is_settled or self.board.verdict is not None) and not self._peers

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        handler = partial(self._read, JsonChannel(connection), None)
        self._selector.register(connection, selectors.EVENT_READ, handler)

    def _read(self, channel: JsonChannel, rank: int | None) -> None:
        """Handle messages of a peer. `rank` is None until the peer has sent the token."""
        for message in channel.receive():
            if rank is not None:
                self.board.handle(rank, message)
            elif message.get("token") == self._token:
                rank = int(message["rank"])
                self._peers[rank] = channel
                self._selector.modify(channel.connection, selectors.EVENT_READ, partial(self._read, channel, rank))
            else:
                channel.is_open = False
                break
        if not channel.is_open:
            self._selector.unregister(channel.connection)
            channel.close()
            if rank is not None:
                self._peers.pop(rank, None)
                self.board.lose(rank, "its process and its watchdog are gone")

    def _tell(self, rank: int, kind: str, **values: Any) -> None:
        if rank == BOARD_RANK:
            self._on_message({"kind": kind, **values})
        elif rank in self._peers:
            self._peers[rank].send(kind, **values)


class BoardClient:
    """One watchdog's connection to the board."""

    def __init__(self, address: tuple[str, int], selector: Selector, on_message: OnMessage, on_lost: OnText):
        """Connect, or raise OSError. `on_lost` receives the reason when the connection is lost later."""
        self._heard_at = time.monotonic()
        self._channel = JsonChannel(socket.create_connection(address, timeout=CUT_S))
        self.send = self._channel.send
        self._selector, self._on_message, self._on_lost = selector, on_message, on_lost
        selector.register(self._channel.connection, selectors.EVENT_READ, self._read)

    def tick(self) -> None:
        self._channel.flush()
        unheard_s = time.monotonic() - self._heard_at
        if unheard_s > CUT_S:
            self._on_lost(f"has not been heard of for {unheard_s:.0f} s: its host is down or cut off")

    def exclude_pause(self, seconds: float) -> None:
        self._heard_at += seconds

    def may_end(self, is_settled: bool) -> bool:
        return is_settled

    def _read(self) -> None:
        for message in self._channel.receive():
            self._heard_at = time.monotonic()
            self._on_message(message)
        if not self._channel.is_open:
            self._selector.unregister(self._channel.connection)
            self._on_lost("is gone: its process ended, or its host was cut off")
