"""Which of the silent ranks the others wait for, and how a failure is told."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rl.watch.heart import OWN
from rl.watch.text import format_ranks


@dataclass(frozen=True)
class Account:
    """What a watchdog says of its rank."""

    rank: int
    host: str
    roles: str
    stage: str
    step: int
    version: int
    item: str
    waits_for: str
    silent_s: float  # since its last beat
    stage_s: float  # in this stage
    limit_s: float = 0.0  # so long it may be silent
    frozen: str = ""  # why nothing in the process runs; empty: its I/O thread does
    debugged: bool = False  # it stands in a debugger, for as long as a person likes
    exceptional: str = ""  # what it does that may take as long as it likes up to the cap, such as a compilation
    in_collective: bool = False  # its main thread stands in a call that needs other ranks
    is_pending: bool = False  # its device has collectives to end
    stacks: str = ""  # the file that has them
    collectives: str = ""  # the file that NCCL's flight recorder was asked to write


def find_culprit(accounts: Sequence[Account]) -> Account:
    """A frozen process before one that runs, one that works before one that waits for others, one in its own code
    before one in a collective, and before one whose device is in one, the one that has got least far, and the one that
    has been silent longest."""
    return min(
        accounts,
        key=lambda a: (not a.frozen, waits_for_others(a), a.in_collective, a.is_pending, a.step, -a.silent_s, a.rank),
    )


def waits_for_others(account: Account) -> bool:
    """And not for what its own threads do, such as a checkpoint that is being written, nor for a person."""
    return bool(account.waits_for) and not account.waits_for.startswith(OWN) and not account.debugged


def is_excused(account: Account) -> bool:
    """Whether it does exceptional work, and has not done so for too long yet."""
    return bool(account.exceptional) and not account.frozen and account.silent_s < account.limit_s


def describe_silence(culprit: Account) -> str:
    how = f"{culprit.frozen}; " if culprit.frozen else ""
    on = f" on {culprit.item}" if culprit.item else ""
    on += f", {culprit.exceptional}" if culprit.exceptional else ""
    for_ = f", waiting for {culprit.waits_for}" if culprit.waits_for else ""
    return f"{how}silent for {culprit.silent_s:.0f} s{on}{for_}, {culprit.stage_s:.0f} s after the stage began"


def describe_others(accounts: Iterable[Account]) -> list[str]:
    """A line for each kind of rank: who stood where."""
    alike: dict[tuple[str, str, str], list[Account]] = defaultdict(list)
    for account in accounts:
        working = account.exceptional or "working, or in a collective"
        doing = f"waiting for {account.waits_for}" if account.waits_for else working
        alike[account.roles, account.stage, "in a debugger" if account.debugged else doing].append(account)
    lines = []
    for (roles, stage, doing), group in sorted(alike.items(), key=lambda pair: pair[1][0].rank):
        ranks = format_ranks([account.rank for account in group])
        seconds = max(account.silent_s for account in group)
        lines.append(f"  {ranks} ({roles}): stage {stage}, {doing}, silent for up to {seconds:.0f} s")
    return lines
