"""What people are shown of a rank: files in its node's run folder, which tools/status.py reads."""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.watch.files import write_atomically
from rl.watch.process import RankProcess

WRITE_S = 1.0  # for a disk to take what is written last


class Status:
    def __init__(self, process: RankProcess):
        self.about: dict[str, Any] = {}
        self._process = process
        self._seen_at, self._seen_tokens = time.monotonic(), 0
        self._writer: threading.Thread | None = None

    def look(self, tokens: int) -> dict[str, Any]:
        """What beats do not tell, after `tokens` sampled so far: the rate is that since the look before."""
        now = time.monotonic()
        rate = (tokens - self._seen_tokens) / max(now - self._seen_at, 0.1)
        self._seen_at, self._seen_tokens = now, tokens
        process = self._process
        self.about = {"pid": process.pid, "tokens_per_s": round(rate), "memory_mb": process.memory_mb}
        return self.about

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def start_writing(self, folder: Path, files: dict[str, dict[str, Any]]) -> None:
        """Beside the watchdog's loop: a disk may take its time."""
        self._writer = threading.Thread(target=write, args=[folder / "status", files], daemon=True)
        self._writer.start()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.join(WRITE_S)


def write(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """What cannot be written is not worth a failure."""
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        for name, value in files.items():
            write_atomically(folder / f"{name}.json", json.dumps(value))
