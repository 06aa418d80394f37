"""Find the rank that the other silent ranks wait for, and describe the failure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl.common.text import format_ranks
from rl.watch.heart import Activity


@dataclass(frozen=True)
class Silence:
    """How long a rank has been silent, and how long it may be."""

    silent_s: float  # since its last heartbeat
    stage_s: float  # since it entered its stage
    limit_s: float = 0.0  # how long it may be silent
    frozen: str = ""  # why no thread of the process runs; empty if one does
    debugged: bool = False  # a person has the rank in a debugger, so there is no limit


@dataclass(frozen=True)
class Diagnosis:
    """What the stacks and collectives of a silent rank show. A file name is empty if there is no file."""

    in_collective: bool = False  # the main thread is in a call that needs other ranks
    is_pending: bool = False  # the device has unfinished collectives
    stacks: str = ""  # file with the stacks
    collectives: str = ""  # file that NCCL's flight recorder was asked to write


@dataclass(frozen=True)
class RankState:
    """What a watchdog knows about its rank."""

    rank: int
    host: str
    activity: Activity
    silence: Silence
    diagnosis: Diagnosis = Diagnosis()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RankState":
        """Build a state from what `asdict` returned."""
        parts = Activity(**values["activity"]), Silence(**values["silence"]), Diagnosis(**values["diagnosis"])
        return cls(values["rank"], values["host"], *parts)

    def row(self) -> dict[str, Any]:
        """Return all values in one flat dict, as status files hold them."""
        parts = asdict(self.activity) | asdict(self.silence) | asdict(self.diagnosis)
        return {"rank": self.rank, "host": self.host} | parts

    @property
    def waits_for_others(self) -> bool:
        """Return whether the rank waits for other ranks, not for its own threads or for a person in a debugger."""
        activity = self.activity
        return bool(activity.waits_for) and not activity.waits_for_itself and not self.silence.debugged

    @property
    def is_excused(self) -> bool:
        """Return whether the rank does exceptional work and is within its limit."""
        silence = self.silence
        return bool(self.activity.exceptional) and not silence.frozen and silence.silent_s < silence.limit_s


def find_culprit(states: Sequence[RankState]) -> RankState:
    """Return the rank that the others most probably wait for.

    These criteria are compared in order: the rank is frozen, it does not wait for others, its main thread is not in a
    collective, its device is not in a collective, it has the lowest step, it has been silent longest.
    """
    return min(
        states,
        key=lambda s: (
            not s.silence.frozen,
            s.waits_for_others,
            s.diagnosis.in_collective,
            s.diagnosis.is_pending,
            s.activity.step,
            -s.silence.silent_s,
            s.rank,
        ),
    )


def describe_silence(culprit: RankState) -> str:
    activity, silence = culprit.activity, culprit.silence
    how = f"{silence.frozen}; " if silence.frozen else ""
    on = f" on {activity.item}" if activity.item else ""
    on += f", {activity.exceptional}" if activity.exceptional else ""
    on += f", waiting for {activity.waits_for}" if activity.waits_for else ""
    return f"{how}silent for {silence.silent_s:.0f} s{on}, {silence.stage_s:.0f} s after the stage began"


def describe_others(states: Iterable[RankState]) -> list[str]:
    """Return one line for each group of ranks that are doing the same."""
    alike: dict[tuple[str, str, str], list[RankState]] = defaultdict(list)
    for state in states:
        activity = state.activity
        working = activity.exceptional or "working, or in a collective"
        doing = f"waiting for {activity.waits_for}" if activity.waits_for else working
        alike[activity.roles, activity.stage, "in a debugger" if state.silence.debugged else doing].append(state)
    lines = []
    for (roles, stage, doing), group in sorted(alike.items(), key=lambda pair: pair[1][0].rank):
        ranks = format_ranks([state.rank for state in group])
        seconds = max(state.silence.silent_s for state in group)
        lines.append(f"  {ranks} ({roles}): stage {stage}, {doing}, silent for up to {seconds:.0f} s")
    return lines
