"""Stop torchrun's agent from a watchdog. Otherwise the agent would restart a rank that always fails."""

import os
import signal
from contextlib import suppress
from pathlib import Path

EARLY = "oneworld.early"  # marks a start that ended before the ranks had met


class Launcher:
    """Stop the agent, and count starts that ended before the ranks had met."""

    def __init__(self, pid: int):
        """`pid` is the agent's process id, or 0 without torchrun."""
        self._pid = pid
        self._attempt = attempt_folder()

    def stop(self) -> None:
        """Stop torchrun, and tell the loop in launch/run_node.sh not to start it again."""
        with suppress(OSError):
            if file := os.environ.get("ONEWORLD_STOP_FILE"):
                Path(file).touch()
        with suppress(ProcessLookupError):
            if self._pid:
                os.kill(self._pid, signal.SIGTERM)

    def forget_early_deaths(self) -> None:
        """Reset the count of early deaths, because the ranks have met now."""
        for mark in self._marks():
            with suppress(OSError):
                mark.unlink()

    def count_early_death(self) -> int:
        """Return how many starts in a row on this node ended before the ranks had met.

        Return 0 if another rank has counted this start already.
        """
        if not self._pid or self._attempt is None:
            return 0
        with suppress(OSError):
            (self._attempt / EARLY).touch(exist_ok=False)
            return len(self._marks())
        return 0

    def _marks(self) -> list[Path]:
        return list(self._attempt.parent.glob(f"attempt_*/{EARLY}")) if self._attempt is not None else []


def attempt_folder() -> Path | None:
    """Return the folder of this start. It lies in the agent's folder, which lives as long as the agent."""
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # FOLDER/attempt_N/LOCAL_RANK/error.json
    return error_file.parents[1] if len(error_file.parents) > 3 else None
