"""A few lines at the bottom of a terminal that other processes write to as well.

torchrun and all ranks of a node share one terminal, so nobody can collect their output and redraw it. Instead, the
terminal's scroll region is set to the rows above the view. Whatever a process prints scrolls there, and the view stays
where it is. To paint, one write saves the cursor, draws the lines and restores the cursor. The kernel keeps the bytes
of one write together, so output of others never lands in the middle of a frame.

Everything below the cursor belongs to the view, so erasing it removes the view. That also holds after the window was
resized: terminals move the cursor together with the text above it.
"""

from typing import NamedTuple

from rl.common.processes import read_stat

SAVE, RESTORE = "\x1b7", "\x1b8"  # the cursor, its colours and its state
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
DOWN = "\x1bD"  # to the next line, in the same column; the region scrolls at its end
PLAIN, ERASE_LINE, ERASE_BELOW = "\x1b[0m", "\x1b[K", "\x1b[J"
WHOLE_SCREEN = f"{SAVE}\x1b[r{RESTORE}"  # as the scroll region; setting one moves the cursor
NO_TERMINAL = -1  # instead of a process group
LEAST_ABOVE = 3  # rows that stay free for other output


class Size(NamedTuple):
    columns: int
    rows: int


class ViewFrame(NamedTuple):
    """Lines to show, drawn for a terminal of this size. They may hold colours, but no other control sequence."""

    lines: tuple[str, ...]
    size: Size


class Screen:
    """What the view occupies on a terminal. `update` returns the bytes that bring the terminal up to date."""

    def __init__(self) -> None:
        self._shown: ViewFrame | None = None

    def update(self, frame: ViewFrame | None, size: Size) -> bytes:
        """Show a frame on a terminal of this size. None, or a frame for another size, removes the view."""
        if frame is not None and (frame.size != size or len(frame.lines) + LEAST_ABOVE > size.rows):
            frame = None
        shown = self._shown
        if frame == shown:
            return b""
        self._shown = frame
        height = 0 if frame is None else len(frame.lines)
        text = ""
        if shown is not None and (frame is None or shown.size != size or len(shown.lines) != height):
            text += f"{WHOLE_SCREEN}{SAVE}{PLAIN}{ERASE_BELOW}{RESTORE}{SHOW_CURSOR}"
            shown = None
        if frame is not None:
            if shown is None:  # make room below the cursor
                text += DOWN * height + f"\x1b[{height}A"
                text += f"{SAVE}\x1b[1;{size.rows - height}r{RESTORE}"
            text += _draw(frame)
        return text.encode(errors="replace")


def _draw(frame: ViewFrame) -> str:
    first = frame.size.rows - len(frame.lines) + 1
    lines = (f"\x1b[{first + place};1H{PLAIN}{ERASE_LINE}{line}" for place, line in enumerate(frame.lines))
    return f"{SAVE}{HIDE_CURSOR}{NO_WRAP}{''.join(lines)}{PLAIN}{WRAP}{RESTORE}{SHOW_CURSOR}"


def find_terminal_owner(pid: int, parent: int) -> int:
    """Return the process whose job decides who has the terminal: the rank, or torchrun, which starts its ranks in
    sessions without a terminal."""
    return pid if _read_groups(pid)[1] != NO_TERMINAL else parent


def is_in_foreground(pid: int) -> bool:
    """Return whether a process may use its terminal. It may not after Ctrl-Z, in the background, or when it is gone."""
    group, terminal_group = _read_groups(pid)
    return terminal_group in (group, NO_TERMINAL) and group > 0


def _read_groups(pid: int) -> tuple[int, int]:
    """Return the process group of a process, and the one that its terminal is for. The first is 0 if it is gone."""
    try:
        fields = read_stat(pid)
    except OSError:
        return 0, NO_TERMINAL
    return int(fields[2]), int(fields[5])
