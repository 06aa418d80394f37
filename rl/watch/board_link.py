"""Connect all watchdogs to the board, the table of ranks that decides who failed.

The watchdog of rank 0 has a `BoardServer` with the board itself. The other watchdogs connect with a `BoardClient`.
"""

import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rl.common.handshake import Address, Listener, Refusals, connect
from rl.common.json_channel import JsonChannel
from rl.watch.board import BEAT_S, BOARD_RANK, CUT_S, Board

Selector = selectors.BaseSelector
OnMessage = Callable[[dict[str, Any]], None]
OnText = Callable[[str], None]


class BoardServer:
    """The board, with connections to all other watchdogs."""

    def __init__(
        self, address: str, key: bytes, num_ranks: int, selector: Selector, on_message: OnMessage, say: OnText
    ):
        """`on_message` receives the board's messages for rank 0's own watchdog. `say` prints a line."""
        self.board = Board(self._tell, say)
        self._num_ranks, self._selector, self._on_message = num_ranks, selector, on_message
        self._peers: dict[int, JsonChannel] = {}  # by rank
        self._sent_at = 0.0
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family, backlog=1024)
        self.port: int = server.getsockname()[1]
        self._refusals = Refusals(say)
        self._listener = Listener(server, key, self._admit, self._refusals)

    def send(self, kind: str, **values: Any) -> None:
        self.board.handle(BOARD_RANK, {"kind": kind, **values})

    def tick(self) -> None:
        self.board.tick()
        now = time.monotonic()
        if now - self._sent_at >= BEAT_S:
            self._sent_at = now
            self.board.share_usage()
            self.board.share_activities()
            for peer in self._peers.values():
                peer.send("alive")

    def exclude_pause(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence, because this process did not run."""
        self.board.exclude_pause(seconds)

    def may_end(self, is_settled: bool) -> bool:
        """Return whether this watchdog may exit: after its rank settled or the board decided, and after all others."""
        return (is_settled or self.board.verdict is not None) and not self._peers

    def _admit(self, connection: socket.socket, host: str) -> None:
        """Read from a watchdog that knows the secret. Called in the listener's thread."""
        handler = partial(self._read, JsonChannel(connection), host, None)
        self._selector.register(connection, selectors.EVENT_READ, handler)

    def _read(self, channel: JsonChannel, host: str, rank: int | None) -> None:
        """Handle messages from a peer. `rank` is None until the peer has named the rank that it watches."""
        for message in channel.receive():
            if rank is None and (rank := self._greet(message)) is not None:
                self._peers[rank] = channel
                handler = partial(self._read, channel, host, rank)
                self._selector.modify(channel.connection, selectors.EVENT_READ, handler)
            elif rank is None or not self._handle(rank, message):
                channel.is_open = False
                break
        if not channel.is_open:
            self._selector.unregister(channel.connection)
            channel.close()
            if rank is None:
                self._refusals.add(host, "it knows the run's secret, but names no rank whose watchdog is missing")
            else:
                self._peers.pop(rank, None)
                self.board.lose(rank, "its process and its watchdog are gone")

    def _greet(self, message: dict[str, Any]) -> int | None:
        """Return the rank that a new watchdog names. Return None if there is no such rank or it has a watchdog."""
        rank = message.get("rank")
        is_free = type(rank) is int and 0 < rank < self._num_ranks and rank not in self.board.entries
        return rank if is_free and rank not in self._peers else None

    def _handle(self, rank: int, message: dict[str, Any]) -> bool:
        """Pass a message to the board. If it cannot be read, report the rank as lost and return False."""
        try:
            if "report" in message and message["report"]["rank"] != rank:
                raise ValueError(f"a report of rank {message['report']['rank']}")
            self.board.handle(rank, message)
        except (KeyError, TypeError, ValueError) as error:
            text = f"its watchdog sent a message that cannot be read ({type(error).__name__}: {error})"
            self.board.lose(rank, text)
            return False
        return True

    def _tell(self, rank: int, kind: str, **values: Any) -> None:
        if rank == BOARD_RANK:
            self._on_message({"kind": kind, **values})
        elif rank in self._peers:
            self._peers[rank].send(kind, **values)


class BoardClient:
    """One watchdog's connection to the board."""

    def __init__(self, address: Address, key: bytes, selector: Selector, on_message: OnMessage, on_lost: OnText):
        """Connect, or raise OSError. `on_lost` receives the reason when the connection is lost later."""
        self._heard_at = time.monotonic()
        self._channel = JsonChannel(connect(address, key, CUT_S))
        self.send = self._channel.send
        self.own_host: str = self._channel.connection.getsockname()[0]  # the address on the route to the board
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
