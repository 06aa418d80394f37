"""Connect all watchdogs to the board, the table of ranks that decides who failed.

This server runs in the watchdog of rank 0. The other watchdogs connect to it (rl/watch/board_client.py).
"""

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from rl.common.json_channel import JsonChannel
from rl.watch.board import BEAT_S, Board

BOARD_RANK = 0


class BoardServer:
    """The board, with connections to all other watchdogs."""

    def __init__(
        self,
        address: str,
        token: str,
        selector: selectors.BaseSelector,
        on_message: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
    ):
        """`on_message` receives the board's messages for rank 0's own watchdog. `say` prints a line."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.board = Board(self._tell, say)
        self._token, self._selector, self._on_message = token, selector, on_message
        self._peers: dict[int, JsonChannel] = {}
        self._authenticated_ranks: dict[JsonChannel, int] = {}  # peers that sent the token
        self._sent_at = 0.0
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def send(self, kind: str, **values: Any) -> None:
        """Send a message of rank 0's watchdog to the board."""
        self.board.handle(BOARD_RANK, {"kind": kind, **values})

    def tick(self) -> None:
        self.board.tick()
        now = time.monotonic()
        if now - self._sent_at >= BEAT_S:
            self._sent_at = now
            for peer in self._peers.values():
                peer.send("alive")

    def exclude_pause(self, seconds: float) -> None:
        self.board.exclude_pause(seconds)

    def may_end(self, is_settled: bool) -> bool:
        """Return whether this watchdog may exit. It exits last, because all others are connected to it.

        `is_settled`: its own rank is done or aborted.
        """
        return (is_settled or self.board.verdict is not None) and not self._peers

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        channel = JsonChannel(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(channel))

    def _read(self, channel: JsonChannel) -> None:
        for message in channel.receive():
            if channel in self._authenticated_ranks:
                self.board.handle(self._authenticated_ranks[channel], message)
            elif message.get("token") == self._token:
                self._authenticated_ranks[channel] = message["rank"]
                self._peers[message["rank"]] = channel
            else:
                channel.is_open = False
                break
        if not channel.is_open:
            self._selector.unregister(channel.connection)
            channel.connection.close()
            if (rank := self._authenticated_ranks.pop(channel, None)) is not None:
                self._peers.pop(rank, None)
                self.board.lost_connection(rank)

    def _tell(self, rank: int, kind: str, **values: Any) -> None:
        if rank == BOARD_RANK:
            self._on_message({"kind": kind, **values})
        elif rank in self._peers:
            self._peers[rank].send(kind, **values)
