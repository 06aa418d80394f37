"""Signals: SIGUSR1 saves a checkpoint. SIGTERM and Ctrl-C save one and stop. A second Ctrl-C stops at once.

A Python signal handler runs in the main thread, which may be inside a C call that does not return. So the handlers do
nothing, and the I/O thread reads the signal numbers from a wakeup socket.
"""

import signal
import socket
import threading
from contextlib import suppress

from rl.world.faults import FaultReporter
from rl.world.messages import Mailbox, PeerLost
from rl.world.orders import Action, Order

STOP_S = 25.0  # limit for a checkpoint after SIGTERM; torchrun kills its workers after 30 s


class Signals:
    """Turn the signals of one rank into orders for the leader."""

    def __init__(self, mail: Mailbox, faults: FaultReporter):
        self._mail, self._faults = mail, faults
        self._leader: int | None = None
        self._is_interrupted = False

    def send_orders_to(self, leader: int) -> None:
        """Send orders to the leader from now on. Before that, SIGTERM and Ctrl-C end the world at once."""
        self._leader = leader

    def listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # Python lets no other thread set handlers
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # Before the handlers, which do nothing: a signal that arrived in between would be lost.
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: None)
        self._mail.watch(reader, self._read)

    def _read(self, source: socket.socket) -> None:
        received = source.recv(64)
        if self._faults.is_over():
            return
        is_interrupt, is_end = signal.SIGINT in received, signal.SIGTERM in received
        if (self._is_interrupted and (is_interrupt or is_end)) or (is_interrupt and self._leader is None):
            self._faults.end_world("interrupt", "")  # torchrun turns a second Ctrl-C into SIGTERM
        elif is_interrupt:
            self._is_interrupted = True
            self._faults.announce_interrupt()
            self._stop("SIGINT")
        elif is_end and self._leader is None:
            self._faults.end_world("terminated", "told to end by SIGTERM")
        elif is_end:
            self._stop("SIGTERM")
        elif signal.SIGUSR1 in received:
            self._send("save")

    def _stop(self, name: str) -> None:
        late = f"told to end by {name}, and the checkpoint was not committed within {STOP_S:g} s"
        timer = threading.Timer(STOP_S, self._faults.end_world, ["terminated", late])
        timer.daemon = True
        timer.start()
        self._send("stop")

    def _send(self, action: Action) -> None:
        """Send in another thread: a checkpoint may occupy the connection, but the I/O thread must keep reading."""
        threading.Thread(target=self._send_now, args=[self._leader, Order(action)], daemon=True).start()

    def _send_now(self, leader: int | None, order: Order) -> None:
        with suppress(PeerLost):  # the leader's watchdog reports its failure
            if leader is not None:
                self._mail.send(leader, order)
