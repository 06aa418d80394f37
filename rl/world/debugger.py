"""`breakpoint()` on a rank: pdb on a socket in the run's folder. A person attaches with tools/debug.py.

With debug.debugpy_port, it is debugpy instead, for editors such as VS Code: rl/world/debugpy_server.py.

Ranks have no terminal of their own. All ranks of a node share torchrun's, which may be on another host. While a
debugger is open, the heartbeat says so. Then this rank, and ranks that wait for it, are not reported as hung.

A person who attaches can run any code. So the socket lies in a folder that only the owner of the process can access,
and connections of users other than the owner and root are refused.
"""

import io
import json
import os
import pdb
import socket
import stat
import struct
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType, TracebackType
from typing import IO, Any, cast

from rl.common.files import write_atomically
from rl.watch.heart import HEART
from rl.world.debugpy_server import LOOPBACK, DebugpyServer

MAX_PATH = 100  # bytes; the kernel's limit for the path of a socket is 107
MAX_UNSEEN = 1 << 16  # characters of earlier output that are shown to a person who attaches
MAX_LINE = 1 << 16  # bytes that a person can type before a newline
CREDENTIALS = struct.Struct("iII")  # process, user and group of a peer
REFUSAL = b"refused: only the owner of this process and root can attach\n"
ASKS = "\x05"  # sent before a line is read; the text before it is the prompt


class Debugger:
    """The debugger of one rank. `announce` prints a line about the rank to the console."""

    def __init__(self, rank: int, announce: Callable[[str], None]):
        self._rank, self._announce = rank, announce
        self._folder: Path | None = None  # of the run, once it is known
        self._peer_timeout_s: float | None = None
        self._lock = threading.Lock()
        self.terminal = Terminal()
        self._debugpy: DebugpyServer | None = None  # instead of pdb
        self._sign: dict[str, Any] = {}  # of debugpy

    def install(self) -> None:
        sys.breakpointhook = self._break

    def begin_run(self, folder: Path, peer_timeout_s: float | None, debugpy_port: int = 0) -> None:
        """Put sockets into the run's folder. Other ranks wait for this one as long as `peer_timeout_s`, or forever.
        With a port, use debugpy: rank R listens on the R-th port after it."""
        self._folder, self._peer_timeout_s = folder, peer_timeout_s
        if debugpy_port:
            self._debugpy = DebugpyServer(debugpy_port + self._rank, self._show_sign)

    def _break(self, *args: Any, **kwargs: Any) -> None:
        frame = sys._getframe(1)
        if self._debugpy is None:
            _RemotePdb(self).set_trace(frame)
        else:
            self._open_debugpy(self._debugpy, _place(frame, None))
            self._debugpy.stop_at(frame)

    def post_mortem(self, error: BaseException) -> None:
        if self._debugpy is not None:
            self._open_debugpy(self._debugpy, _place(None, error.__traceback__))
            with suppress(Exception):  # only the original error is reported
                self._debugpy.show_exception(error)
            return
        debugger = _RemotePdb(self)
        debugger.message(f"{type(error).__name__}: {error}")
        debugger.reset()
        with suppress(BaseException):  # only the original error is reported
            debugger.interaction(None, error.__traceback__)
        self.close()

    def open(self, place: str) -> "Terminal":
        """Return the terminal, which then listens. `place` is the line of code at which the rank has stopped."""
        with self._lock:
            if not self.terminal.is_open:
                command = self.terminal.open(self._folder, self._rank, place)
                self._announce_stop(place, f"to debug it type there: {command}")
            return self.terminal

    def _open_debugpy(self, server: DebugpyServer, place: str) -> None:
        """Let debugpy listen, and tell people and tools/debug.py where."""
        port = server.listen()
        self.install()  # debugpy has put its own hook in place
        self._sign = {"host": socket.gethostname(), "pid": os.getpid(), "port": str(port), "place": place}
        self._show_sign(True)
        self._announce_stop(place, f"attach a debugpy client there: {LOOPBACK}:{port}")

    def _show_sign(self, is_open: bool) -> None:
        """Write the file of debugpy for tools/debug.py, or remove it."""
        with self._lock:
            folder = None if self._folder is None else _make_private(self._folder.resolve() / "debug")
            if folder is not None:
                path = folder / f"rank_{self._rank}.json"
                write_atomically(path, json.dumps(self._sign)) if is_open else path.unlink(missing_ok=True)

    def _announce_stop(self, place: str, remedy: str) -> None:
        text = f"stands at {place}; {remedy}"
        if self._peer_timeout_s is not None:
            text += f" (ranks that wait for it give up after {self._peer_timeout_s:g} s; debug.breakpoints=true"
            text += " lets them wait)"
        self._announce(text)

    def close(self) -> None:
        with self._lock:
            self.terminal.shut()
            self.terminal = Terminal()


class _RemotePdb(pdb.Pdb):
    """A pdb that opens its terminal when it stops."""

    def __init__(self, owner: Debugger):
        self._owner = owner
        stream = cast(IO[str], owner.terminal)
        super().__init__(stdin=stream, stdout=stream, nosigint=True)  # rl/world/signals.py handles SIGINT

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:  # type: ignore[override]
        HEART.open_debugger()
        try:
            self.stdin = self.stdout = cast(IO[str], self._owner.open(_place(frame, traceback)))
            super().interaction(frame, traceback)
        finally:
            HEART.close_debugger()

    def set_continue(self) -> None:
        super().set_continue()
        if not self.breaks:  # without breakpoints, this debugger is never entered again
            self._owner.close()

    def set_quit(self) -> None:
        super().set_quit()
        self._owner.close()

    def do_interact(self, arg: str) -> None:
        self.error("interact needs a terminal of its own; type statements here, with ! before names that are commands")


def _place(frame: FrameType | None, traceback: TracebackType | None) -> str:
    inner, line = next(walk_stack(frame)) if traceback is None else [*walk_tb(traceback)][-1]
    return f"{inner.f_code.co_filename}:{line}"


class Terminal(io.TextIOBase):
    """The stream of pdb: a socket that one person at a time can attach to. The next one sees the latest output."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._lines: IO[bytes] = io.BytesIO()  # of the connection
        self._files: list[Path] = []  # removed at the end
        self._unseen = ""

    @property
    def is_open(self) -> bool:
        return self._listener is not None

    def open(self, folder: Path | None, rank: int, place: str) -> str:
        """Listen, and return the command that attaches to this terminal."""
        own_folder = None if folder is None else _make_private(folder.resolve() / "debug")
        listener = _listen(own_folder, f"rank_{rank}.sock")
        path = Path(listener.getsockname())
        self._files = [path] if path.parent == own_folder else [path, path.parent]
        if own_folder is not None:
            sign = {"host": socket.gethostname(), "pid": os.getpid(), "socket": str(path), "place": place}
            self._files.append(own_folder / f"rank_{rank}.json")
            write_atomically(self._files[-1], json.dumps(sign))
        self._listener = listener  # only now: nobody would find a terminal without its file
        return f"python tools/debug.py {path if own_folder is None else f'{folder} --rank {rank}'}"

    def write(self, text: str) -> int:
        self._unseen = (self._unseen + text)[-MAX_UNSEEN:]
        self._send(text)
        return len(text)

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        """Return the next line that a person types. Wait until somebody attaches."""
        while True:
            if self._connection is None:
                self._connection = self._accept()
                self._lines = self._connection.makefile("rb")
                self._send(self._unseen)
            self._send(ASKS)
            line = b""
            with suppress(OSError):
                line = self._lines.readline(MAX_LINE)
            if line.endswith(b"\n"):
                self._unseen = ""
                return line.decode(errors="replace")
            self._hang_up()  # the person has detached, or typed a line that is too long

    def _accept(self) -> socket.socket:
        """Return the next connection of somebody who may attach. Refuse the others at once, so that nobody waits."""
        assert self._listener is not None
        while True:
            connection, _ = self._listener.accept()
            if user_of(connection) in (0, os.geteuid()):
                return connection
            with connection, suppress(OSError):
                connection.send(REFUSAL, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _send(self, text: str) -> None:
        try:
            if self._connection is not None:
                self._connection.sendall(text.encode(errors="replace"))
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        connection, self._connection, self._lines = self._connection, None, io.BytesIO()
        if connection is not None:
            connection.close()  # not `_lines`: its `close` would wait for another thread that reads from it

    def shut(self) -> None:
        self._hang_up()
        if self._listener is not None:
            self._listener.close()
        for path in self._files:
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(credentials)[1])


def _make_private(folder: Path) -> Path | None:
    """Return the folder after only its owner can access it, or None if it belongs to somebody else."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():  # not a symlink, either
            folder.chmod(0o700)
            return folder
    return None


def _listen(folder: Path | None, name: str) -> socket.socket:
    """Listen in the run's folder, or in a temporary one if its path is too long or its file system has no sockets."""
    if folder is not None and len(os.fsencode(folder / name)) <= MAX_PATH:
        with suppress(OSError):
            return _bind(folder / name)
    return _bind(Path(tempfile.mkdtemp(prefix="oneworld-")) / name)


def _bind(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # a killed process may have left one
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener
