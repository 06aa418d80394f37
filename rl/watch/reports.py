"""Why a world ended: the reports of its ranks, and what the next attempt must know about them."""

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rl.common.files import write_atomically

# Causes of a world's end, the best explanation first. For example, a lost rank breaks connections of other ranks.
Cause = Literal["interrupt", "fatal", "error", "unavailable", "lost", "stopped", "silent", "terminated", "connection"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
NOT_SAVED = "steps after the newest checkpoint are not saved"
TOLD_TO_END: tuple[Cause, ...] = ("interrupt", "stopped", "terminated")  # by a signal; the launcher ends or restarts


class ServiceUnavailable(RuntimeError):
    """A service outside the world, such as the hub, failed for now. A restart may help, also the second time."""


class UnhealthyRun(RuntimeError):
    """A health rule has ended the run. A restart would not help."""


@dataclass(frozen=True)
class Report:
    """One rank's report of its failure."""

    rank: int
    roles: str
    host: str
    stage: str
    step: int
    error: str
    trace: str
    cause: Cause

    @property
    def order(self) -> int:
        return CAUSES.index(self.cause)

    def describe_end(self, is_final: bool) -> str:
        """Say in one line how the world ended, for tools/status.py. `is_final` means that nothing restarts it."""
        at, error = f"at step {self.step}", self.error.partition("\n")[0]
        after = (error and f": {error}") + "; not restarted" * is_final
        if self.cause == "interrupt":
            return f"ended by Ctrl-C {at}" + (error and f": {error}")
        if self.cause in ("stopped", "terminated"):
            return f"{'stopped' if self.cause == 'stopped' else 'ended'} by a signal {at}{after}"
        if self.cause == "fatal":
            return f"ended {at}{after}"
        return f"rank {self.rank} {'was lost' if self.cause == 'lost' else 'failed'} {at}{after}"

    def text(self) -> str:
        if self.cause in ("interrupt", "stopped"):
            how = "interrupted" if self.cause == "interrupt" else "stopped"
            saved = self.error or (NOT_SAVED if self.step else "")
            return f"oneworld: {how} at step {self.step}, stage {self.stage}" + (saved and f": {saved}")
        if self.cause == "fatal":
            return f"oneworld: {self.error}"
        place = f"rank {self.rank} ({self.roles}) on {self.host}, stage {self.stage}, step {self.step}"
        return f"oneworld: {place}: {self.error}" + (f"\n{self.trace.rstrip()}" if self.trace else "")

    def describe_repetition(self) -> str:
        error = self.error.partition("\n")[0]
        return f"rank {self.rank} failed again in stage {self.stage} of step {self.step}: {error}"

    def signature(self) -> dict[str, object]:
        """Return what identifies an error. Its message is left out, because addresses and sizes in it may differ."""
        return {"step": self.step, "stage": self.stage, "error": self.error.partition(":")[0]}


class AttemptHistory:
    """Files that tell an attempt about earlier ones of its launch, on each node because nodes may not share a disk."""

    def __init__(self, folder: Path):
        self._fatal, self._last_error = folder / "FATAL", folder / "last_error.json"
        self._attempts = folder / "attempts.json"  # attempts without progress, and the furthest step they reached

    def forget_before(self, launched_at: float) -> None:
        """Remove the files of earlier launches. torchrun's restart count, which differs between nodes, is no help."""
        for file in (self._fatal, self._last_error, self._attempts):
            if file.exists() and file.stat().st_mtime < launched_at:
                file.unlink()

    def is_repeated(self, report: Report) -> bool:
        """Return whether the previous attempt ended with the same error at the same step. Record this error."""
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
        """Count this attempt. Return the attempts in a row without progress, with this one, and their furthest step."""
        count, furthest = self._read_attempts()
        self._write_attempts(count + 1, furthest)
        return count + 1, furthest

    def note_end(self, step: int) -> None:
        count, furthest = self._read_attempts()
        self._write_attempts(count, max(step, furthest))

    def forget_attempts(self) -> None:
        self._write_attempts(0, 0)

    def _read_attempts(self) -> tuple[int, int]:
        try:
            count, furthest = json.loads(self._attempts.read_text())
        except (OSError, ValueError):  # the file is missing or damaged
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
        """Remove the files after a normal end, which no other attempt follows."""
        with suppress(OSError):
            self._attempts.unlink(missing_ok=True)
            self._last_error.unlink(missing_ok=True)
