"""Copy a rank's console output to its log, whether Python, C++ or a child process writes it.

A small process beside the rank reads the output, so that nothing is lost when the rank is killed. If the console is a
terminal, the rank gets a pseudo-terminal instead of a pipe, so progress bars keep working. A console that takes no
output, for example after Ctrl-S, does not hold up the rank. Lines are passed on as a whole, because all ranks of a node
share a console.

Logs are bounded: when one has MAX_LOG bytes, it gets the suffix .1, replaces an older file of that name, and a new one
begins. The logs of the newest MAX_ATTEMPTS attempts are kept.

On the leader, the process also keeps the live view on the terminal (screen.py), and removes it when the rank ends.
"""

import fcntl
import json
import os
import queue
import shutil
import socket
import sys
import termios
import threading
import time
import tty
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rl.common.waiting import wait_until_readable
from rl.watch.console import ConsoleWriter, write_all
from rl.watch.parent import leave_rank
from rl.watch.screen import Size, ViewFrame, find_terminal_owner, is_in_foreground

MAX_EARLY = 4 << 20  # bytes kept until the run's folder is known
MAX_BEHIND = 16 << 20  # bytes waiting for a slow disk; further output is not logged
MAX_LOG = 32 << 20  # bytes of a log before it is moved aside
MAX_ATTEMPTS = 50  # attempts whose logs are kept
HANG_S = 5.0  # without progress of the disk, after which the rest of the log is given up
MESSAGE = b"oneworld: "  # begins our messages
TICK_S = 1.0  # between two checks of the terminal's size
VIEW_TICK_S = 0.25  # the same while there is a view
HOLD_S = 0.2  # for the rest of a line: Python may write a line and its end separately, and other ranks in between
MAX_HELD = 1 << 16  # bytes
MAX_PACKET = 1 << 17  # bytes of a message from the rank
STDOUT, STDERR = 1, 2


class TeeLink:
    """The rank's connection to its tee. No call waits for the terminal or a disk."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def write_log(self, path: Path) -> None:
        """Write all output to a file, including earlier output. Raise OSError if the file cannot be created."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            socket.send_fds(self._connection, [os.fsencode(path.absolute())], [file])
        finally:
            os.close(file)

    def show(self, frame: ViewFrame | None) -> None:
        """Show a frame at the bottom of the terminal from now on, or remove it. Ignore this without a terminal."""
        self._send("show", frame)

    def log(self, text: str) -> None:
        """Write a text to the log only."""
        self._send("note", text)

    def _send(self, kind: str, value: object) -> None:
        packet = json.dumps([kind, value]).encode()
        if len(packet) > MAX_PACKET:  # the tee would read a part of it
            return
        with suppress(OSError):  # the tee is gone, or too busy for something that is not needed
            self._connection.send(packet, socket.MSG_DONTWAIT)


def start_tee() -> TeeLink:
    """Fork the process that copies output."""
    sys.stdout.flush()
    sys.stderr.flush()
    is_one = os.path.sameopenfile(STDOUT, STDERR)  # then both share one stream, which keeps their order
    streams = [_open(number) for number in ((STDOUT,) if is_one else (STDOUT, STDERR))]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = find_terminal_owner(os.getpid(), os.getppid())
    if os.fork():
        os.register_at_fork(after_in_child=ours.close)  # so that the tee notices the end of the rank at once
        theirs.close()
        for stream in streams:
            os.dup2(stream.writer, stream.console)
            os.close(stream.writer)
            os.close(stream.reader)
        if is_one:
            os.dup2(STDOUT, STDERR)
        return TeeLink(ours)
    try:
        ours.close()
        leave_rank()
        for stream in streams:
            os.close(stream.writer)
        _Tee(streams, theirs, owner).run()
    finally:
        os._exit(0)


def next_attempt(logs: Path) -> int:
    return 1 + max(_attempts(logs), default=0)


def remove_old_attempts(logs: Path, attempt: int) -> None:
    """Remove the logs of all but the newest MAX_ATTEMPTS attempts, of which `attempt` is the last."""
    for number, folder in _attempts(logs).items():
        if number <= attempt - MAX_ATTEMPTS:
            shutil.rmtree(folder, ignore_errors=True)


def _attempts(logs: Path) -> dict[int, Path]:
    """Return the folders of attempts by number."""
    found = {path.name.removeprefix("attempt_"): path for path in logs.glob("attempt_*")}
    return {int(number): path for number, path in found.items() if number.isdecimal()}


class _Stream(NamedTuple):
    """An output stream of the rank. `writer` replaces the file descriptor `console` in the rank."""

    console: int
    reader: int
    writer: int


def _open(console: int) -> _Stream:
    if not os.isatty(console):
        return _Stream(console, *os.pipe())
    stream = _Stream(console, *os.openpty())
    tty.setraw(stream.writer)  # the real terminal translates line ends
    _copy_size(stream)
    return stream


def _copy_size(stream: _Stream) -> None:
    with suppress(OSError):  # the terminal may be gone, or this may be a pipe
        size = fcntl.ioctl(stream.console, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(stream.reader, termios.TIOCSWINSZ, size)


class _Tee:
    def __init__(self, streams: list[_Stream], connection: socket.socket, owner: int):
        """`owner` is the process whose job has the terminal."""
        self._streams = {stream.reader: stream for stream in streams}
        self._consoles = {stream.console: ConsoleWriter(stream.console) for stream in streams}
        self._connections = [connection]  # until the rank ends
        self._owner = owner
        self._log: _Log | None = None
        self._early: bytes | None = b""  # output before the log is known; None afterwards
        self._frame: ViewFrame | None = None  # the newest one, whether it is shown or not
        self._unfinished: set[int] = set()  # terminals whose last line has no end yet, such as a line of progress
        self._held: dict[int, bytes] = {}  # the beginning of a line, by console
        self._held_until = 0.0

    def run(self) -> None:
        while self._streams:
            tick_s = HOLD_S if self._held else TICK_S if self._frame is None else VIEW_TICK_S
            ready = wait_until_readable([*self._streams, *self._connections], tick_s)
            for connection in [each for each in self._connections if each.fileno() in ready]:
                self._read_rank(connection)
            for stream in [stream for reader, stream in self._streams.items() if reader in ready]:
                self._pass_on(stream)
            if self._held and time.monotonic() >= self._held_until:
                self._release()
            for stream in self._streams.values():
                _copy_size(stream)
            if self._frame is not None:
                self._consoles[STDOUT].show(self._frame if is_in_foreground(self._owner) else None)
        self._release()
        for console in self._consoles.values():
            console.show(None)
            console.finish()
        if self._log is not None:
            self._log.finish()

    def _read_rank(self, connection: socket.socket) -> None:
        try:
            packet, files, _, _ = socket.recv_fds(connection, MAX_PACKET, 1)
        except OSError:
            packet, files = b"", []
        if files:
            self._log = _Log(files[0], packet)
            self._log.write(self._early or b"")
            self._early = None
        elif packet:
            self._obey(*json.loads(packet))
        else:  # the rank has ended
            self._connections, self._early = [], None
            self._obey("show", None)

    def _obey(self, kind: str, value: Any) -> None:
        if kind == "note":
            self._keep(value.encode(errors="replace"))
            return
        self._frame = None if value is None else ViewFrame(tuple(value[0]), Size(*value[1]))
        if self._frame is None:
            self._consoles[STDOUT].show(None)

    def _pass_on(self, stream: _Stream) -> None:
        try:
            part = os.read(stream.reader, 1 << 16)
        except OSError:  # the pseudo-terminal has no writer any more
            part = b""
        if not part:
            del self._streams[stream.reader]
            return
        part = self._end_line(stream.console, part)
        self._keep(part)
        before = self._held.pop(stream.console, b"")
        lines, end, rest = (before + part).rpartition(b"\n")
        if len(rest) > MAX_HELD:
            lines, end, rest = lines + end, rest, b""
        if end:
            self._consoles[stream.console].write(lines + end)
        if rest:
            self._held[stream.console] = rest
            if end or not before:  # a line that grows, such as a bar, is held no longer than another
                self._held_until = time.monotonic() + HOLD_S

    def _release(self) -> None:
        """Show lines that have no end, such as a line of progress."""
        for console, part in self._held.items():
            self._consoles[console].write(part)
        self._held = {}

    def _keep(self, part: bytes) -> None:
        """Write to the log, or remember it for the log."""
        if self._early is not None:
            self._early = (self._early + part)[-MAX_EARLY:]
        if self._log is not None:
            self._log.write(part)

    def _end_line(self, console: int, part: bytes) -> bytes:
        """Return the output with a line of its own for a message that follows an unfinished line."""
        if console in self._unfinished and part.startswith(MESSAGE):
            part = b"\n" + part
        self._unfinished.discard(console)
        if os.isatty(console) and not part.endswith(b"\n"):
            self._unfinished.add(console)
        return part


class _Log(threading.Thread):
    """Write the log in a thread. If the disk hangs or is full, log lines are lost, but the run and console go on."""

    def __init__(self, file: int, path: bytes):
        super().__init__(daemon=True)
        self._file, self._path, self._num_bytes = file, path, os.fstat(file).st_size
        self._parts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_taken = self._num_written = 0  # bytes
        self.start()

    def write(self, part: bytes) -> None:
        if self._num_taken - self._num_written <= MAX_BEHIND:
            self._num_taken += len(part)
            self._parts.put(part)

    def finish(self) -> None:
        """Wait until everything is written, or until the disk has made no progress for HANG_S."""
        self._parts.put(None)
        before = -1
        while self.is_alive() and self._num_written > before:
            before = self._num_written
            self.join(HANG_S)

    def run(self) -> None:
        while (part := self._parts.get()) is not None:
            write_all(self._file, part)
            self._num_written += len(part)
            self._num_bytes += len(part)
            if self._num_bytes >= MAX_LOG:
                self._begin_anew()

    def _begin_anew(self) -> None:
        """Move the file aside, and begin another one. If that fails, the next MAX_LOG bytes go to the same file."""
        self._num_bytes = 0
        with suppress(OSError):
            os.replace(self._path, self._path + b".1")
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.close(self._file)
            self._file = file
