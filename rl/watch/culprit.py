"""What watchdogs know about their ranks, and which rank the other silent ranks wait for."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl.common.text import format_ranks
from rl.watch.heart import Activity


@dataclass(kw_only=True)
class RankState(Activity):
    """What a watchdog knows about its rank. Watchdogs send it as JSON, and status files hold it."""

    rank: int
    host: str
    silent_s: float  # since its last heartbeat
    stage_s: float  # since it entered its stage
    limit_s: float = 0.0  # how long it may be silent
    frozen: str = ""  # why no thread of the process runs; empty if one does
    debugged: bool = False  # a person has the rank in a debugger, so there is no limit
    # The rest is a diagnosis of a silent rank. A file name is empty if there is no file.
    in_collective: bool = False  # the main thread is in a call that needs other ranks
    is_pending: bool = False  # the device has unfinished collectives
    stacks: str = ""  # file with the stacks
    collectives: str = ""  # file that NCCL's flight recorder was asked to write

    @property
    def is_silent(self) -> bool:
        """Return whether the rank has been silent for too long. A wait for other ranks or for a debugger may last."""
        may_wait = self.debugged or (self.waits_for_others and not self.frozen)
        return not may_wait and self.silent_s > self.limit_s


def find_culprit(states: Sequence[RankState]) -> RankState:
    """Return the rank that the others most probably wait for.

    These criteria are compared in order: the rank is frozen, it does not wait for others, its main thread is not in a
    collective, its device is not in a collective, it has the lowest step, it has been silent longest.
    """

    def order(state: RankState) -> tuple[float, ...]:
        is_waiting = state.waits_for_others, state.in_collective, state.is_pending
        return (not state.frozen, *is_waiting, state.step, -state.silent_s, state.rank)

    return min(states, key=order)


def describe_silence(culprit: RankState) -> str:
    how = f"{culprit.frozen}; " if culprit.frozen else ""
    on = f" on {culprit.item}" if culprit.item else ""
    on += f", {culprit.exceptional}" if culprit.exceptional else ""
    on += f", waiting for {culprit.waits_for}" if culprit.waits_for else ""
    return f"{how}silent for {culprit.silent_s:.0f} s{on}, {culprit.stage_s:.0f} s after the stage began"


def describe_others(states: Iterable[RankState]) -> list[str]:
    """Return one line for each group of ranks that are doing the same."""
    alike: dict[tuple[str, str, str], list[RankState]] = defaultdict(list)
    for state in states:
        working = state.exceptional or "working, or in a collective"
        doing = f"waiting for {state.waits_for}" if state.waits_for else working
        alike[state.roles, state.stage, "in a debugger" if state.debugged else doing].append(state)
    lines = []
    for (roles, stage, doing), group in sorted(alike.items(), key=lambda pair: pair[1][0].rank):
        ranks = format_ranks([state.rank for state in group])
        seconds = max(state.silent_s for state in group)
        lines.append(f"  {ranks} ({roles}): stage {stage}, {doing}, silent for up to {seconds:.0f} s")
    return lines
