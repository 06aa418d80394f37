"""Bookkeeping of restarts: the number and the logs of this attempt, and whether attempts make progress."""

import math
import os
import sys
import time
from pathlib import Path

import psutil

from rl.common.processes import start_time
from rl.config.schema import ConfigError
from rl.watch.reports import AttemptHistory
from rl.watch.tee import next_attempt, remove_old_attempts
from rl.world.bootstrap import log_to
from rl.world.messages import waiting
from rl.world.sealed_store import SealedStore

MAX_BACK_OFF_S = 60.0


class Restarts:
    """Count attempts of one launch that make no progress, wait longer after each, and finally give up.

    Only rank 0 counts, by its own step: ranks that only serve are a step ahead, and nodes may share the folder.
    """

    def __init__(self, rank: int, local_rank: int):
        self._rank, self._is_first_on_node = rank, local_rank == 0
        self._history: AttemptHistory | None = None
        self._furthest_step: float = 0  # of earlier attempts, and the first of this one; infinite once it was exceeded
        self._has_begun = False
        self.attempt = 0  # number of this attempt among all of the run, once its log is open

    def open_history(self, folder: Path) -> None:
        if not self._is_first_on_node:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot make {folder}: {error}; give a folder that can be written") from None
        self._history = AttemptHistory(folder)
        self._history.forget_before(launch_time())

    def open_log(self, logs: Path, store: SealedStore) -> None:
        """Write this rank's output to a log. Rank 0 chooses the number of the attempt for all nodes."""
        if self._rank == 0:
            store.set("attempt", next_attempt(logs))
        self.attempt = store.get("attempt")
        try:
            log_to(logs / f"attempt_{self.attempt}" / f"rank_{self._rank}.log")
        except OSError as error:
            print(f"oneworld: rank {self._rank} has no log of its own: {error}", file=sys.stderr, flush=True)
        if self._is_first_on_node:
            remove_old_attempts(logs, self.attempt)

    def back_off(self, max_attempts: int) -> None:
        """Wait if earlier attempts made no progress. Raise after `max_attempts` of them in a row."""
        if self._rank != 0:  # the other ranks wait for rank 0 at the next meeting
            return
        assert self._history is not None
        count, self._furthest_step = self._history.count_attempt()
        if (before := count - 1) >= max_attempts:
            raise ConfigError(
                f"{before} attempts in a row got no further than those before (world.max_fruitless_attempts); their "
                "errors are above and in the logs of the other nodes: mend the cause and start again"
            )
        if before >= 2:
            wait_s = min(MAX_BACK_OFF_S, 2.0 ** (before - 2))
            print(f"oneworld: {before} attempts in a row got no further than those before; the next in {wait_s:g} s")
            with waiting(f"{wait_s:g} s to pass after {before} failed attempts"):
                time.sleep(wait_s)

    def reach(self, step: int) -> None:
        if not self._has_begun:
            self._has_begun, self._furthest_step = True, max(step, self._furthest_step)
        elif self._rank == 0 and self._history is not None and step > self._furthest_step:
            self._furthest_step = math.inf
            self._history.forget_attempts()

    def end_cleanly(self) -> None:
        if self._history is not None:
            self._history.forget()


def launcher_process() -> psutil.Process:
    """Return the process that lives through all attempts: launch/run_node.sh, torchrun's agent, or this process."""
    if (loop := int(os.environ.get("ONEWORLD_LAUNCHER", 0))) and psutil.pid_exists(loop):
        return psutil.Process(loop)
    return psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())


def launch_time() -> float:
    """Return when this launch began, by time.time(): what is older is of an earlier one."""
    return start_time(launcher_process().pid)
