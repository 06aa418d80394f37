"""A terminal that a test can look at: a pane of tmux, which interprets control sequences as terminals do."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.launcher import ROOT

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Pane:
    """A pane that runs a shell in the repository. Leaving `with` ends its server and everything in it."""

    def __init__(self, folder: Path, columns: int, rows: int, environment: Mapping[str, str] | None = None):
        self._socket = folder / "tmux"
        size = ["-x", str(columns), "-y", str(rows)]
        shell = ["env", "PS1=$ ", "bash", "--norc", "--noprofile"]
        extra = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR")}
        environment = extra | {"LC_ALL": "C.UTF-8"} | dict(environment or {})
        settings = folder / "tmux.conf"
        settings.write_text("set -g status off\nset -g history-limit 100000\n")
        command = ["tmux", "-S", str(self._socket), "-f", str(settings), "new-session", "-d", *size, *shell]
        subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=30)

    def __enter__(self) -> "Pane":
        return self

    def __exit__(self, *error: object) -> None:
        self._run("kill-server")

    def type(self, text: str) -> None:
        """Type a line and Enter."""
        self._run("send-keys", "-l", text)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    @property
    def screen(self) -> list[str]:
        """The lines that are visible now, without spaces at their ends."""
        return self._run("capture-pane", "-p").split("\n")[:-1]

    @property
    def everything(self) -> list[str]:
        """All lines, also those above the screen. Wrapped lines are joined."""
        return [line.rstrip() for line in self._run("capture-pane", "-p", "-J", "-S", "-").split("\n")]

    def ask(self, name: str) -> str:
        """Return a variable of tmux, such as cursor_flag."""
        return self._run("display-message", "-p", f"#{{{name}}}").strip()

    def wait(self, condition: Callable[[list[str]], object], what: str, timeout_s: float = 60) -> list[str]:
        """Wait until the screen fulfils a condition, and return it."""
        deadline = time.monotonic() + timeout_s
        while not condition(screen := self.screen):
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s:\n" + "\n".join(screen)
            time.sleep(0.1)
        return screen

    def is_in_order(self) -> bool:
        """Return whether the cursor is visible and the whole screen scrolls."""
        height = int(self.ask("pane_height"))
        region = int(self.ask("scroll_region_upper")), int(self.ask("scroll_region_lower"))
        return self.ask("cursor_flag") == "1" and region == (0, height - 1)

    def _run(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
