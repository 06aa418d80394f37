"""The board's connections, in the watchdog of rank 0. All other watchdogs connect to it (rl/watch/board_client.py)."""

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from rl.common.json_channel import JsonChannel
from rl.watch.board import BEAT_S, Board

RANK = 0


class BoardServer:
    def __init__(
        self,
        address: str,
        token: str,
        selector: selectors.BaseSelector,
        on_order: Callable[[dict[str, Any]], None],
        say: Callable[[str], None],
    ):
        """`on_order` gets the board's messages to the watchdog that it lives in."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.board = Board(self._tell, say)
        self._token, self._selector, self._on_order = token, selector, on_order
        self._peers: dict[int, JsonChannel] = {}
        self._ranks: dict[JsonChannel, int] = {}  # of peers that have shown the token
        self._sent_at = 0.0
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def send(self, kind: str, **values: Any) -> None:
        """Send a message of rank 0's watchdog to the board."""
        self.board.handle(RANK, {"kind": kind, **values})

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
        """Whether this watchdog may end, which it does after all others."""
        return (is_settled or self.board.verdict is not None) and not self._peers

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        line = JsonChannel(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(line))

    def _read(self, line: JsonChannel) -> None:
        for message in line.receive():
            if line in self._ranks:
                self.board.handle(self._ranks[line], message)
            elif message.get("token") == self._token:
                self._ranks[line] = message["rank"]
                self._peers[message["rank"]] = line
            else:
                line.is_open = False
                break
        if not line.is_open:
            self._selector.unregister(line.connection)
            line.connection.close()
            if (rank := self._ranks.pop(line, None)) is not None:
                self._peers.pop(rank, None)
                self.board.lost_connection(rank)

    def _tell(self, rank: int, kind: str, **values: Any) -> None:
        if rank == RANK:
            self._on_order({"kind": kind, **values})
        elif rank in self._peers:
            self._peers[rank].send(kind, **values)
