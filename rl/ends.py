"""Why a world ended: the reports of its ranks, which of them explains the others, what the next attempt remembers."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from rl.config import ConfigError

# What may end a world, the best explanation first: after a loss agents terminate the rest and connections break.
CAUSES = ("interrupt", "fatal", "error", "stopped", "lost", "terminated", "connection")


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
            return f"oneworld: interrupted at step {self.step}, stage {self.stage}"
        if self.cause == "stopped":
            return f"oneworld: stopped at step {self.step}, stage {self.stage}: {self.error}"
        if self.cause == "fatal":
            return f"oneworld: {self.error}"
        return f"oneworld: {place}: {self.error}" + (f"\n{self.trace.rstrip()}" if self.trace else "")

    def signature(self) -> dict[str, object]:
        """What makes two errors the same one; messages differ in addresses, sizes and process ids."""
        return {"step": self.step, "stage": self.stage, "error": self.error.partition(":")[0]}


def launcher_process() -> psutil.Process:
    """torchrun's agent, which lives through restarts; this process where there is none."""
    return psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())


class Memory:
    """What stays in the run's folder between attempts. Each node's first rank keeps one: disks may be private."""

    def __init__(self, folder: Path):
        self._fatal, self._last_error = folder / "FATAL", folder / "last_error.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot make {folder}: {error}; give a folder that can be written") from None
        for file in (self._fatal, self._last_error):
            # Of an earlier launch, not of an earlier attempt; torchrun's restart count differs between nodes.
            if file.exists() and file.stat().st_mtime < launcher_process().create_time():
                file.unlink()

    def is_repeated(self, report: Report) -> bool:
        """The same error at the same step as in the attempt before: another restart would meet it again."""
        if report.cause not in ("error", "connection"):
            return False
        now = report.signature()
        try:
            before = json.loads(self._last_error.read_text()) if self._last_error.exists() else None
            self._last_error.write_text(json.dumps(now))
        except (OSError, ValueError) as error:
            print(f"oneworld: cannot remember this error for the next attempt: {error}", file=sys.stderr, flush=True)
            return False
        return before == now

    def write_fatal(self, text: str) -> None:
        try:
            self._fatal.write_text(text + "\n")
        except OSError as error:
            print(f"oneworld: cannot write {self._fatal}: {error}", file=sys.stderr, flush=True)

    def forget(self) -> None:
        """After a clean end."""
        self._last_error.unlink(missing_ok=True)
