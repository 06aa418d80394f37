"""This rank's roles, step and stage, which error reports, heartbeats and metrics show."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch.profiler import record_function

from rl.watch.durations import DURATIONS
from rl.watch.heart import HEART
from rl.watch.reports import Cause, Report
from rl.world.restarts import Restarts


class Progress:
    """Track the step and the stage of this rank, and measure how long each stage takes."""

    def __init__(self, rank: int, restarts: Restarts):
        self.rank = rank
        self.roles = "no role yet"
        self.step = 0
        self.seconds: dict[str, float] = {}  # by stage, since the last `take_seconds`
        self._restarts = restarts
        self._stage = "start"
        self._failed_stage: str | None = None

    def set_roles(self, roles: str) -> None:
        self.roles = roles
        HEART.describe(roles=roles)

    def begin_step(self, step: int) -> None:
        self._restarts.reach(step)
        self.step = step
        HEART.describe(step=step)

    @contextmanager
    def stage(self, name: str, item: str = "") -> Iterator[None]:
        """Time a stage, and name it in the report of any error that leaves it. `item` is what it works on."""
        outer, self._stage = self._stage, name
        HEART.enter(name, item)
        is_counted = outer in ("start", "step")  # a nested stage counts as part of its outer stage
        started = time.perf_counter()
        try:
            with record_function(f"stage {name}") if is_counted else nullcontext():  # shown in profiles
                yield
        except BaseException:
            self._failed_stage = self._failed_stage or name
            raise
        finally:
            if is_counted:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            self._stage = outer
            HEART.enter(outer)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds of all stages, and those of other parts of the work, since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken | DURATIONS.take()

    def report(self, cause: Cause, error: str, trace: str = "", failed: bool = False) -> Report:
        """Build a report of this rank. `failed` means that it names the stage which an exception left first."""
        stage = self._failed_stage if failed and self._failed_stage else self._stage
        return Report(self.rank, self.roles, socket.gethostname(), stage, self.step, error, trace, cause)
