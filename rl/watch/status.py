"""Write a rank's status files to the run folder of its node. tools/status.py shows them."""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.common.files import write_atomically
from rl.watch.process import RankProcess

WRITE_S = 1.0  # limit for the last write


class StatusWriter:
    """Sample the rank's process, and write status files in the background."""

    def __init__(self, process: RankProcess):
        self.about: dict[str, Any] = {}
        self._process = process
        self._sampled_at, self._sampled_tokens = time.monotonic(), 0
        self._writer: threading.Thread | None = None

    def sample(self, tokens: int) -> dict[str, Any]:
        """Return the process id, the token rate since the last call, and the memory. `tokens` is the total so far."""
        now = time.monotonic()
        rate = (tokens - self._sampled_tokens) / max(now - self._sampled_at, 0.1)
        self._sampled_at, self._sampled_tokens = now, tokens
        process = self._process
        self.about = {"pid": process.pid, "tokens_per_s": round(rate), "memory_mb": process.memory_mb}
        return self.about

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def start_writing(self, folder: Path, files: dict[str, dict[str, Any]]) -> None:
        """Write the files in a thread, because the disk may be slow."""
        self._writer = threading.Thread(target=write, args=[folder / "status", files], daemon=True)
        self._writer.start()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join(WRITE_S)


def write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write a JSON file for each name. A file that cannot be written is skipped."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        for name, value in files.items():
            write_atomically(folder / f"{name}.json", json.dumps(value))
