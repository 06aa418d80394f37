"""Write to a console that may take no output for hours, for example after Ctrl-S, and keep the live view on it."""

import os
import threading
from collections import deque

from rl.common.text import format_bytes
from rl.common.waiting import wait_until_writable
from rl.watch.screen import Screen, Size, ViewFrame

MAX_UNSHOWN = 4 << 20  # bytes waiting for a console; further output is only logged


class ConsoleWriter(threading.Thread):
    """Write to a console in a thread, because the console may take nothing for hours. Then output is kept up to a
    bound, and only the newest frame is painted later. A console that is gone takes everything and shows nothing."""

    def __init__(self, file: int):
        super().__init__(daemon=True)
        self._file, self._is_gone = file, False
        self._screen = Screen()
        self._changed = threading.Condition()
        self._parts: deque[bytes] = deque()
        self._num_kept = self._num_lost = 0  # bytes
        self._frame: ViewFrame | None = None
        self._size = Size(0, 0)
        self._is_painted, self._is_ending = True, False
        self.start()

    def write(self, part: bytes) -> None:
        with self._changed:
            if self._num_kept > MAX_UNSHOWN:
                self._num_lost += len(part)
                return
            self._num_kept += len(part)
            self._parts.append(part)
            self._changed.notify()

    def show(self, frame: ViewFrame | None) -> None:
        """Show a frame, or repaint it if the terminal's size has changed."""
        size = _size_of(self._file) if frame is not None else self._size
        with self._changed:
            if (frame, size) != (self._frame, self._size):
                self._frame, self._size, self._is_painted = frame, size, False
                self._changed.notify()

    def finish(self) -> None:
        """Wait until the console has taken everything that is kept."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self.join()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._parts or not self._is_painted or self._is_ending)
                text, num_lost = b"".join(self._parts), self._num_lost
                self._parts.clear()
                self._num_lost = 0
                paint = b"" if self._is_painted else self._screen.update(self._frame, self._size)
                self._is_painted = True
                is_end = self._is_ending and not text and not paint
            if is_end:
                return
            if num_lost:
                why = "because this console took no output; the log has them"
                text += f"\noneworld: {format_bytes(num_lost)} are not shown, {why}\n".encode()
            for part in (text, paint):
                if part and not self._is_gone and not write_all(self._file, part):
                    self._is_gone = True
            with self._changed:
                self._num_kept = sum(map(len, self._parts))


def _size_of(console: int) -> Size:
    try:
        return Size(*os.get_terminal_size(console))
    except OSError:  # no terminal
        return Size(0, 0)


def write_all(file: int, part: bytes) -> bool:
    """Write to a file, and return False if it is gone."""
    while part:
        try:
            part = part[os.write(file, part) :]
        except BlockingIOError:  # another program made the console non-blocking
            wait_until_writable(file)
        except OSError:
            return False
    return True
