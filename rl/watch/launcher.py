"""torchrun's agent, as a watchdog sees it: it can be told to stop, else it starts a rank that fails again for ever."""

import os
import signal
from contextlib import suppress
from pathlib import Path

EARLY = "oneworld.early"  # marks a start that ended before the ranks had met


class Launcher:
    def __init__(self, pid: int):
        """0: there is none."""
        self._pid = pid
        self._attempt = attempt_folder()

    def stop(self) -> None:
        """The launcher's loop (launch/run_node.sh) must know that torchrun's end was ordered."""
        with suppress(OSError):
            if file := os.environ.get("ONEWORLD_STOP_FILE"):
                Path(file).touch()
        with suppress(ProcessLookupError):
            if self._pid:
                os.kill(self._pid, signal.SIGTERM)

    def forget_early_deaths(self) -> None:
        """The ranks have met."""
        for mark in self._marks():
            with suppress(OSError):
                mark.unlink()

    def count_early_death(self) -> int:
        """How many starts on this node have ended before the ranks had met, since they last did; 0 where another rank
        has counted this one."""
        if not self._pid or self._attempt is None:
            return 0
        with suppress(OSError):
            (self._attempt / EARLY).touch(exist_ok=False)
            return len(self._marks())
        return 0

    def _marks(self) -> list[Path]:
        return list(self._attempt.parent.glob(f"attempt_*/{EARLY}")) if self._attempt is not None else []


def attempt_folder() -> Path | None:
    """Of this start, in the agent's own folder, which lives as long as it does."""
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # FOLDER/attempt_N/LOCAL_RANK/error.json
    return error_file.parents[1] if len(error_file.parents) > 3 else None
