"""What signals ask of a rank: SIGUSR1 to save, SIGTERM to save and stop, Ctrl-C likewise, a second one to stop now.

A handler runs in the main thread, which may be inside a C call that does not return. So handlers do nothing, and the
I/O thread reads which signal came.
"""

import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from rl.world.mail import Mail, PeerLost

STOP_S = 25.0  # for saving after a SIGTERM; torchrun kills its workers 30 s after it


class Signals:
    """Of one rank. `end` ends the world for a cause, with a text; `say_interrupted` tells that a Ctrl-C came first."""

    def __init__(self, mail: Mail, end: Callable[[str, str], None], say_interrupted: Callable[[], None]):
        self.order_taker: int | None = None  # the rank that is told what is wanted; None: nobody can do it yet
        self.is_over = False  # the world ends already
        self._mail, self._end, self._say_interrupted = mail, end, say_interrupted
        self._is_interrupted = False

    def listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():  # no other thread may
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)  # before handlers, which would swallow one
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: None)
        self._mail.watch(reader, self._read)

    def _read(self, source: socket.socket) -> None:
        received = source.recv(64)
        if self.is_over:
            return
        is_interrupt, is_end = signal.SIGINT in received, signal.SIGTERM in received
        if (self._is_interrupted and (is_interrupt or is_end)) or (is_interrupt and self.order_taker is None):
            self._end("interrupt", "")  # of a second Ctrl-C torchrun makes a SIGTERM
        elif is_interrupt:
            self._is_interrupted = True
            self._say_interrupted()
            self._stop("SIGINT")
        elif is_end:
            if self.order_taker is None:
                self._end("terminated", "told to end by SIGTERM")
            else:
                self._stop("SIGTERM")
        elif signal.SIGUSR1 in received and self.order_taker is not None:
            self._send("save", self.order_taker)

    def _stop(self, name: str) -> None:
        assert self.order_taker is not None
        late = f"told to end by {name}, and the checkpoint was not committed within {STOP_S:g} s"
        timer = threading.Timer(STOP_S, self._end, ["terminated", late])
        timer.daemon = True
        timer.start()
        self._send("stop", self.order_taker)

    def _send(self, order: str, taker: int) -> None:
        """In a thread of its own: the connection may be busy with a checkpoint, and the I/O thread must drain."""

        def send() -> None:
            with suppress(PeerLost):  # which its watchdog reports
                self._mail.send(taker, "order", {"order": order})

        threading.Thread(target=send, daemon=True).start()
