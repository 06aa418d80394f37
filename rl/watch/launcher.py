"""torchrun's agent, as a watchdog sees it: it can be told to stop, else it starts a rank that fails again for ever."""

import os
import signal
from contextlib import suppress
from pathlib import Path


class Launcher:
    def __init__(self, pid: int):
        """0: there is none."""
        self._pid = pid
        self._starts = starts_file()

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
        if self._starts is not None:
            with suppress(OSError):
                self._starts.unlink(missing_ok=True)

    def count_early_death(self) -> int:
        """How many starts in a row have ended before the ranks had met; by the first rank of a node, 0 on others."""
        if not self._pid or self._starts is None or os.environ.get("LOCAL_RANK") != "0":
            return 0
        with suppress(OSError, ValueError):
            count = int(self._starts.read_text()) + 1 if self._starts.exists() else 1
            self._starts.write_text(str(count))
            return count
        return 0


def starts_file() -> Path | None:
    """In the agent's own folder, which lives as long as it does: how many starts in a row never joined."""
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # FOLDER/attempt_N/LOCAL_RANK/error.json
    return error_file.parents[2] / "oneworld.starts" if len(error_file.parents) > 3 else None
