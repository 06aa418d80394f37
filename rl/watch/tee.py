"""What a rank writes to its console also goes to a file of its own, whoever writes it: Python, C++ or a child.

A small process beside the rank reads what comes out of it, so that nothing is lost when the rank is killed. On a
terminal the rank still sees a terminal: lines that are written over stay what they are.

    rank, its children and its watchdog -> a pipe or a pseudo-terminal -> this process -> log, console
"""

import fcntl
import os
import queue
import select
import signal
import socket
import sys
import termios
import threading
import tty
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_EARLY = 4 << 20  # bytes that are kept until the run's folder is known
MAX_BEHIND = 16 << 20  # bytes that a slow disk has not taken yet; what comes then is not in the log
HANG_S = 5.0  # so long a disk may take nothing of what is left at the end
TICK_S = 1.0  # between two looks at the size of the terminal
STDOUT, STDERR = 1, 2


def start_tee() -> socket.socket:
    """Forks it; returns the line on which it is handed the log's file."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    is_one = os.path.sameopenfile(STDOUT, STDERR)  # then what goes to both stays in order
    channels = [_open(number) for number in ((STDOUT,) if is_one else (STDOUT, STDERR))]
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        for channel in channels:
            os.dup2(channel.writer, channel.console)
            os.close(channel.writer)
            os.close(channel.reader)
        if is_one:
            os.dup2(STDOUT, STDERR)
        return ours
    try:
        ours.close()
        os.setsid()  # what is meant for the rank's group is not meant for it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for channel in channels:
            os.close(channel.writer)
        _Tee(channels, theirs).run()
    finally:
        os._exit(0)


def write_log(line: socket.socket, path: Path) -> None:
    """From now on, and what came before. Raises OSError where the file cannot be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        socket.send_fds(line, [b"log"], [file])
    finally:
        os.close(file)


def next_attempt(logs: Path) -> int:
    """The number of the first attempt that has no folder yet."""
    numbers = [path.name.removeprefix("attempt_") for path in logs.glob("attempt_*")]
    return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)


@dataclass
class _Channel:
    """In place of the file descriptor `console` the rank gets `writer`."""

    console: int
    reader: int
    writer: int
    is_terminal: bool


def _open(console: int) -> _Channel:
    if not os.isatty(console):
        return _Channel(console, *os.pipe(), is_terminal=False)
    reader, writer = os.openpty()
    tty.setraw(writer)  # the console itself turns ends of lines into what it needs
    channel = _Channel(console, reader, writer, is_terminal=True)
    _copy_size(channel)
    return channel


def _copy_size(channel: _Channel) -> None:
    with suppress(OSError):  # of a terminal that is gone
        size = fcntl.ioctl(channel.console, termios.TIOCGWINSZ, b"\0" * 8)
        fcntl.ioctl(channel.reader, termios.TIOCSWINSZ, size)


class _Tee:
    def __init__(self, channels: list[_Channel], line: socket.socket):
        self._channels = {channel.reader: channel for channel in channels}
        self._line: socket.socket | None = line
        self._log: _Log | None = None
        self._early: bytes | None = b""  # None: it has been written, or will never be
        self._broken: set[int] = set()  # consoles that are gone

    def run(self) -> None:
        while self._channels:
            lines = [self._line] if self._line is not None else []
            sources: list[int | socket.socket] = [*self._channels, *lines]
            for source in select.select(sources, [], [], TICK_S)[0]:
                if isinstance(source, socket.socket):
                    self._take_log(source)
                else:
                    self._pass_on(self._channels[source])
            for channel in self._channels.values():
                if channel.is_terminal:
                    _copy_size(channel)
        if self._log is not None:
            self._log.finish()

    def _take_log(self, line: socket.socket) -> None:
        try:
            _, files, _, _ = socket.recv_fds(line, 16, 1)
        except OSError:
            files = []
        if files:
            self._log = _Log(files[0])
            self._log.write(self._early or b"")
        self._line = self._early = None

    def _pass_on(self, channel: _Channel) -> None:
        try:
            part = os.read(channel.reader, 1 << 16)
        except OSError:  # so a pseudo-terminal tells that nobody has it open any more
            part = b""
        if not part:
            del self._channels[channel.reader]
            return
        if self._early is not None:
            self._early = (self._early + part)[-MAX_EARLY:]
        if self._log is not None:
            self._log.write(part)
        if channel.console not in self._broken and not _write(channel.console, part):
            self._broken.add(channel.console)  # the log goes on


class _Log:
    """Written in a thread of its own: a disk that hangs, or is full, loses lines, and not the run or its console."""

    def __init__(self, file: int):
        self._file = file
        self._parts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._num_taken = self._num_written = 0  # bytes
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def write(self, part: bytes) -> None:
        if self._num_taken - self._num_written <= MAX_BEHIND:
            self._num_taken += len(part)
            self._parts.put(part)

    def finish(self) -> None:
        """When all is written, or the disk has taken nothing for a while."""
        self._parts.put(None)
        before = -1
        while self._thread.is_alive() and self._num_written > before:
            before = self._num_written
            self._thread.join(HANG_S)

    def _serve(self) -> None:
        while (part := self._parts.get()) is not None:
            _write(self._file, part)
            self._num_written += len(part)


def _write(file: int, part: bytes) -> bool:
    while part:
        try:
            part = part[os.write(file, part) :]
        except BlockingIOError:  # somebody made the console so
            select.select([], [file], [])
        except OSError:
            return False
    return True
