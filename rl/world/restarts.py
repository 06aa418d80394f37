"""Bookkeeping of restarts: the number and the logs of this attempt, and whether attempts get any further."""

import os
import sys
import time
from pathlib import Path

import psutil
import torch.distributed as dist

from rl.config.schema import ConfigError
from rl.watch.heart import HEART
from rl.watch.reports import AttemptHistory
from rl.watch.tee import next_attempt
from rl.world.bootstrap import log_to

MAX_BACK_OFF_S = 60.0


class Restarts:
    """Count attempts of one launch that make no progress, wait longer after each, and give up in the end.

    Each node's first rank keeps the node's memory. Rank 0 decides for all by how far it got itself: ranks that only
    serve are a step ahead of those that train, and nodes may share the folder.
    """

    def __init__(self, rank: int, local_rank: int):
        self._rank, self._is_first_on_node = rank, local_rank == 0
        self._memory: AttemptHistory | None = None
        self._first_step = 0
        self._furthest_step = 0  # of earlier attempts
        self._has_got_further = False

    def open_memory(self, folder: Path) -> None:
        """Read what earlier attempts of the same launch left in the run's folder."""
        if not self._is_first_on_node:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"run.dir: cannot make {folder}: {error}; give a folder that can be written") from None
        self._memory = AttemptHistory(folder)
        self._memory.forget_before(launcher_process().create_time())

    def open_log(self, logs: Path, store: dist.Store) -> None:
        """Write this rank's output to a log. An attempt has the same number on all nodes, whatever their disks hold."""
        if self._rank == 0:
            store.set("attempt", str(next_attempt(logs)))
        number = int(store.get("attempt"))
        try:
            log_to(logs / f"attempt_{number}" / f"rank_{self._rank}.log")
        except OSError as error:
            print(f"oneworld: rank {self._rank} has no log of its own: {error}", file=sys.stderr, flush=True)

    def back_off(self, max_attempts: int) -> None:
        """Wait before an attempt that follows fruitless ones, and raise after `max_attempts` of them in a row."""
        if self._rank != 0:  # nodes may share the folder; the other ranks wait where all meet
            return
        assert self._memory is not None
        count, self._furthest_step = self._memory.count_attempt()
        before = count - 1
        if before >= max_attempts:
            raise ConfigError(
                f"{before} attempts in a row got no further than those before (world.max_fruitless_attempts); their "
                "errors are above and in the logs of the other nodes: mend the cause and start again"
            )
        if before >= 2:
            wait_s = min(MAX_BACK_OFF_S, 2.0 ** (before - 2))
            print(f"oneworld: {before} attempts in a row got no further than those before; the next in {wait_s:g} s")
            HEART.wait(f"{wait_s:g} s to pass after {before} failed attempts")
            time.sleep(wait_s)
            HEART.wait("")

    def reach(self, step: int) -> None:
        """Forget fruitless attempts once this one gets further than they did."""
        self._first_step = self._first_step or step
        if self._rank != 0 or self._memory is None or self._has_got_further:
            return
        if step > max(self._first_step, self._furthest_step):
            self._has_got_further = True
            self._memory.forget_attempts()

    def end_cleanly(self) -> None:
        if self._memory is not None:
            self._memory.forget()


def launcher_process() -> psutil.Process:
    """Return the process that lives through all attempts of a launch.

    It is the loop of launch/run_node.sh, or torchrun's agent, or this process where there is neither.
    """
    if (loop := int(os.environ.get("ONEWORLD_LAUNCHER", 0))) and psutil.pid_exists(loop):
        return psutil.Process(loop)
    return psutil.Process(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
