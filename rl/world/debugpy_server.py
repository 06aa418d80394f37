"""`breakpoint()` for VS Code: debugpy listens on the loopback interface until a client attaches.

Only the thread that reached `breakpoint()` stops, as with pdb. The other threads are not traced, so messages and
checkpoints continue. While a thread waits for a client or stands, the heartbeat says so. Then this rank, and ranks that
wait for it, are not reported as hung.

A client can run any code, and debugpy does not ask who it is. So connections of users other than the owner of this
process and root are refused.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rl.watch.heart import HEART

LOOPBACK = "127.0.0.1"
QUIET = "PYDEVD_DISABLE_FILE_VALIDATION"  # if it is 1, debugpy does not warn about Python's own modules
Event = dict[str, Any]


class DebugpyServer:
    """The debugpy of this process. It starts at the first breakpoint, because it slows Python code down.

    `on_change` is called with True when a thread stops, and with False when no thread stands or waits for a client.
    """

    def __init__(self, port: int, on_change: Callable[[bool], None]):
        self._wanted_port, self._on_change = port, on_change
        self.port = 0  # once it listens
        self._lock = threading.Lock()
        self._num_waiting = 0  # threads that wait for a client
        self._stopped: dict[int, Event] = {}  # of threads that stand, by debugpy's numbers of them
        self._traced: set[int] = set()  # idents of threads that have reached a breakpoint

    def listen(self) -> int:
        """Listen, unless it does already, and return the port. If the wanted one is taken, another one is used."""
        with self._lock:
            if not self.port:
                self._start(_bind(self._wanted_port))
            return self.port

    def stop_at(self, frame: FrameType) -> None:
        """Wait for a client. This thread then stops in `frame`, at the line after the current one."""
        import pydevd

        with self._client():
            options = {"trace_only_current_thread": True, "patch_multiprocessing": False, "notify_stdin": False}
            pydevd.settrace(suspend=True, stop_at_frame=frame, **options)

    def show_exception(self, error: BaseException) -> None:
        """Wait for a client, and stop where the exception was raised until the client continues."""
        import debugpy

        with self._client():
            debugpy.trigger_exception_handler(error)
        self._continue()  # also if the client did not want to see exceptions

    def _start(self, listener: socket.socket) -> None:
        """Start debugpy in this process, on a socket that is bound to its port."""
        is_chosen = QUIET in os.environ
        os.environ.setdefault(QUIET, "1")  # read by the imports
        import debugpy
        import debugpy.server.api  # makes pydevd importable, which is a part of it
        import pydevd

        if not is_chosen:
            del os.environ[QUIET]
        self._trace_this_thread_only()
        pydevd.create_server_socket = lambda host, port: listener
        self.port = listener.getsockname()[1]
        debugpy.listen((LOOPBACK, self.port), in_process_debug_adapter=True)
        threading.settrace(None)  # type: ignore[arg-type]  # threads that start later are not traced either
        pydevd.add_dap_messages_listener(self)

    def _trace_this_thread_only(self) -> None:
        """Let debugpy ignore all threads but those that have reached a breakpoint."""
        self._traced.add(threading.get_ident())
        for thread in threading.enumerate():
            if not getattr(thread, "is_pydev_daemon_thread", False):
                thread.pydev_do_not_trace = thread.ident not in self._traced  # type: ignore[attr-defined]

    @contextmanager
    def _client(self) -> Iterator[None]:
        """Wait for a client. The heartbeat names a debugger from now on, until the client lets this thread continue."""
        import debugpy

        self._trace_this_thread_only()
        with self._lock:
            self._num_waiting += 1
            HEART.open_debugger()
        try:
            debugpy.wait_for_client()
        finally:
            with self._lock:
                self._num_waiting -= 1
        yield

    # debugpy calls these two for each message, in threads of its own.

    def before_send(self, message: Event) -> None:
        if message.get("event") == "stopped":
            with self._lock:
                self._stopped[message["body"]["threadId"]] = message
                HEART.open_debugger()
            self._on_change(True)
        elif message.get("event") == "continued":
            body = message["body"]
            self._continue(None if body.get("allThreadsContinued") else body["threadId"])

    def after_receive(self, message: Event) -> None:
        if message.get("command") == "disconnect":  # debugpy lets all threads continue
            self._continue()
        elif message.get("command") == "configurationDone" and self._stopped:
            import pydevd

            for event in [*self._stopped.values()]:  # the last client is gone without a word; tell this one
                pydevd.send_json_message({"type": "event", "event": "stopped", "body": event["body"]})

    def _continue(self, thread: int | None = None) -> None:
        """Note that this thread continues, or that all do."""
        with self._lock:
            self._stopped = {number: event for number, event in self._stopped.items() if thread not in (None, number)}
            if self._stopped or self._num_waiting:
                return
            HEART.close_debugger()
        self._on_change(False)


class _OwnersListener(socket.socket):
    """A listener that accepts only connections of this process's owner and of root."""

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            connection, address = super().accept()
            if owner_of(connection) in (0, os.geteuid()):
                return connection, address
            connection.close()


def owner_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a TCP connection on this host, or -1 if it is not known."""
    ours, theirs = (_as_in_proc(*address) for address in (connection.getsockname(), connection.getpeername()))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *others = line.split()
        if (local, remote) == (theirs, ours):
            return int(others[4])
    return -1


def _as_in_proc(host: str, port: int) -> str:
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def _bind(port: int) -> socket.socket:
    """Return a socket that is bound to this port, or to a free one if it is taken."""
    listener = _OwnersListener(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except OSError:
        listener.bind((LOOPBACK, 0))
    return listener
