"""Why a world ended: the reports of its ranks, which of them explains the others, what the next attempt remembers."""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rl.watch.files import write_atomically

# What may end a world, the best explanation first: after a loss agents terminate the rest and connections break.
CAUSES = ("interrupt", "fatal", "error", "lost", "stopped", "silent", "terminated", "connection")


@dataclass(frozen=True)
class Report:
    """One rank's account of its end."""

    rank: int
    roles: str
    host: str
    stage: str
    step: int
    error: str
    trace: str
    cause: str  # one of CAUSES

    @property
    def order(self) -> int:
        return CAUSES.index(self.cause)

    def text(self) -> str:
        place = f"rank {self.rank} ({self.roles}) on {self.host}, stage {self.stage}, step {self.step}"
        if self.cause == "interrupt":
            return f"oneworld: interrupted at step {self.step}, stage {self.stage}" + (self.error and f": {self.error}")
        if self.cause == "stopped":
            return f"oneworld: stopped at step {self.step}, stage {self.stage}: {self.error}"
        if self.cause == "fatal":
            return f"oneworld: {self.error}"
        return f"oneworld: {place}: {self.error}" + (f"\n{self.trace.rstrip()}" if self.trace else "")

    def signature(self) -> dict[str, object]:
        """What makes two errors the same one; messages differ in addresses, sizes and process ids."""
        return {"step": self.step, "stage": self.stage, "error": self.error.partition(":")[0]}


class Memory:
    """What stays in the run's folder between attempts of one launch. Each node has one: disks may be private."""

    def __init__(self, folder: Path):
        self._fatal, self._last_error = folder / "FATAL", folder / "last_error.json"
        self._attempts = folder / "attempts.json"

    def forget_before(self, launched_at: float) -> None:
        """What earlier launches left, not earlier attempts; torchrun's restart count differs between nodes."""
        for file in (self._fatal, self._last_error, self._attempts):
            if file.exists() and file.stat().st_mtime < launched_at:
                file.unlink()

    def is_repeated(self, report: Report) -> bool:
        """The same error at the same step as in the attempt before: another restart would meet it again."""
        if report.cause not in ("error", "connection"):
            return False
        now = report.signature()
        try:
            before = json.loads(self._last_error.read_text()) if self._last_error.exists() else None
            write_atomically(self._last_error, json.dumps(now))
        except (OSError, ValueError) as error:
            print(f"oneworld: cannot remember this error for the next attempt: {error}", file=sys.stderr, flush=True)
            return False
        return before == now

    def count_attempt(self) -> tuple[int, int]:
        """How many there were in a row that got no further than those before, this one included; and the step at which
        the furthest of them ended."""
        count, furthest = self._read_attempts()
        self._write_attempts(count + 1, furthest)
        return count + 1, furthest

    def note_end(self, step: int) -> None:
        """At which rank 0 was."""
        count, furthest = self._read_attempts()
        self._write_attempts(count, max(step, furthest))

    def forget_attempts(self) -> None:
        """This one got further."""
        self._write_attempts(0, 0)

    def _read_attempts(self) -> tuple[int, int]:
        try:
            count, furthest = json.loads(self._attempts.read_text())
        except (OSError, ValueError):  # none yet, or torn
            return 0, 0
        return count, furthest

    def _write_attempts(self, count: int, furthest: int) -> None:
        with suppress(OSError):
            write_atomically(self._attempts, json.dumps([count, furthest]))

    def write_fatal(self, text: str) -> None:
        try:
            write_atomically(self._fatal, (text + "\n").encode(errors="replace"))
        except OSError as error:
            print(f"oneworld: cannot write {self._fatal}: {error}", file=sys.stderr, flush=True)

    def forget(self) -> None:
        """After a clean end."""
        with suppress(OSError):
            self._attempts.unlink(missing_ok=True)
            self._last_error.unlink(missing_ok=True)
