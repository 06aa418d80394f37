"""The board: a table of all ranks that decides who failed. It lives in the watchdog of rank 0, so it survives rank 0.

Watchdogs send heartbeats, and reports of exceptions, deaths and silence. After the first report, the board collects
others for a moment: a broken connection may arrive before the exception that caused it. Then it prints which rank
failed, and what the others did, and tells every watchdog to end its rank.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from rl.common.files import run_within_wait
from rl.common.text import format_ranks
from rl.watch.activities import summarize_activities
from rl.watch.culprit import RankState, describe_others, describe_silence, find_culprit
from rl.watch.reports import CAUSES, TOLD_TO_END, AttemptHistory, Cause, Report
from rl.watch.usage import measurements

COLLECT_S = 0.7  # to collect further reports after the first
MAX_COLLECT_S = 3.0  # the same while only consequences are reported, such as broken connections
BOARD_RANK = 0  # the rank whose watchdog has the board
DIAGNOSIS_S = 3.0  # limit for watchdogs to write the stacks and collectives of their ranks
BEAT_S = 1.0  # between two heartbeats of a watchdog, and between two messages of the board to it
CUT_S = 10.0  # without a message, after which a host counts as lost; shorter pauses are normal
TICK_S = 0.2
FATAL = "oneworld: fatal, will not be restarted"
DEADLOCK_S = 600.0  # with every rank waiting for another; a slow disk may hold them up for less


@dataclass
class Entry:
    """A rank in the table."""

    state: RankState
    heard_at: float
    about: dict[str, int] = field(default_factory=dict)  # process id, memory, tokens per second, GPU: for status files
    is_done: bool = False  # the rank ended normally
    is_gone: bool = False
    is_diagnosed: bool = False  # since the board last asked for a diagnosis


class Board:
    """Collect what watchdogs report about their ranks, and decide which rank failed."""

    def __init__(self, tell: Callable[..., None], say: Callable[[str], None]):
        """`tell(rank, kind, **values)` sends a message to a rank's watchdog. `say` prints a line."""
        self.entries: dict[int, Entry] = {}
        self.verdict: dict[str, Any] | None = None
        self.history: AttemptHistory | None = None  # of earlier attempts, once the run's folder is known
        self._tell, self._say = tell, say
        self._reports: list[Report] = []
        self._first_at = 0.0
        self._decide_at: float | None = None
        self._is_diagnosing = False
        self._interrupt: Report | None = None  # a Ctrl-C, which explains most failures that follow it
        self._collector: int | None = None  # the rank that collects measurements of GPUs: the leader
        self._viewer: int | None = None  # the rank that shows what all ranks are doing: the leader, on a terminal
        self._deputies: dict[int, tuple[str, int]] = {}  # addresses by rank, see deputies.py

    def handle(self, rank: int, message: dict[str, Any]) -> None:
        kind, now = message.pop("kind"), time.monotonic()
        entry = self.entries.get(rank)
        if kind == "beat":
            state, about = _read_state(rank, message), msgspec.convert(message["about"], dict[str, int])
            if entry is None:
                entry = self.entries[rank] = Entry(state, now)
                if self.verdict is not None:  # the rank joined after the verdict was sent
                    self._tell(rank, "abort", **self.verdict)
            entry.heard_at, entry.about = now, about
            if not (self._is_diagnosing and entry.is_diagnosed):  # a diagnosis says more
                entry.state = state
        elif entry is None:
            return
        elif kind == "report":
            self.report(msgspec.convert(message["report"], Report))
        elif kind == "interrupting":
            self._interrupt = msgspec.convert(message["report"], Report)
        elif kind == "died":
            self.lose(rank, msgspec.convert(message["how"], str))
        elif kind == "silent":
            self._start_diagnosis(rank)
        elif kind == "diagnosis":
            entry.state, entry.is_diagnosed, entry.heard_at = _read_state(rank, message), True, now
        elif kind == "done":
            entry.is_done = True
        elif kind == "collect_usage":
            self._collector = rank
        elif kind == "collect_activities":
            self._viewer = rank
        elif kind == "rewards":
            first, last = msgspec.convert((message["first"], message["last"]), tuple[float, float])
            for teller in (BOARD_RANK, *self._deputies):
                self._tell(teller, "rewards", first=first, last=last)
        elif kind == "deputy":
            self._deputies[rank] = msgspec.convert((message["host"], message["port"]), tuple[str, int])
            rows = [[other, *address] for other, address in self._deputies.items()]
            for deputy in self._deputies:
                self._tell(deputy, "deputies", rows=rows)

    def report(self, report: Report) -> None:
        now = time.monotonic()
        self._first_at = self._first_at if self._reports else now
        self._reports.append(report)
        self._decide_at = self._decide_at or now + COLLECT_S

    def exclude_pause(self, seconds: float) -> None:
        """Do not count the last `seconds`, in which this process did not run."""
        for entry in self.entries.values():
            entry.heard_at += seconds

    def tick(self) -> None:
        """Look for lost hosts and for deadlocks. Decide when the reports are collected."""
        now = time.monotonic()
        for rank, entry in self.entries.items():
            if now - entry.heard_at > CUT_S:
                self.lose(rank, f"no word from its host for {now - entry.heard_at:.0f} s: it is down or cut off")
        working = [entry.state for entry in self.entries.values() if not entry.is_done]
        if working and all(s.waits_for_others and not s.debugged and s.silent_s > DEADLOCK_S for s in working):
            self._start_diagnosis(min(state.rank for state in working))
        is_complete = all(entry.is_diagnosed or entry.is_gone for entry in self.entries.values())
        if self._decide_at is not None and (now >= self._decide_at or (self._is_diagnosing and is_complete)):
            are_echoes = all(report.cause in ("connection", "terminated") for report in self._reports)
            if are_echoes and now < self._first_at + MAX_COLLECT_S:
                self._decide_at = now + TICK_S
            else:
                self._decide()

    def share_usage(self) -> None:
        """Send the newest measurements of all ranks to the rank that collects them."""
        rows = measurements({rank: entry.about for rank, entry in self.entries.items()})
        if self._collector is not None and rows:
            self._tell(self._collector, "usage", rows=rows)

    def share_activities(self) -> None:
        """Send what all ranks are doing to the rank that shows it."""
        if self._viewer is not None:
            self._tell(self._viewer, "activities", rows=summarize_activities(self.table()))

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each rank, as status files hold them."""
        now = time.monotonic()
        return [
            asdict(entry.state) | entry.about | {"heard_s_ago": round(now - entry.heard_at, 1), "done": entry.is_done}
            for _, entry in sorted(self.entries.items())
        ]

    def lose(self, rank: int, text: str) -> None:
        """Report that a rank is gone, unless it was done or never joined."""
        entry = self.entries.get(rank)
        if entry is not None and not entry.is_done and not entry.is_gone:
            entry.is_gone = True
            since = f"  {entry.state.stage_s:.0f} s after that stage began"
            self.report(_report(entry.state, "lost", text, since))

    def _start_diagnosis(self, rank: int) -> None:
        """Ask all watchdogs for stacks and collectives, because `rank` is silent."""
        if self._is_diagnosing or self.verdict is not None:
            return
        self._is_diagnosing = True
        for entry in self.entries.values():
            entry.is_diagnosed = False
        self._reports.append(_report(self.entries[rank].state, "silent", "silent"))
        self._decide_at = time.monotonic() + DIAGNOSIS_S
        for other in self.entries:
            self._tell(other, "diagnose")

    def _decide(self) -> None:
        self._decide_at = None
        if self.verdict is not None:
            return
        report = min(self._reports, key=lambda report: report.order)
        if self._interrupt is not None and report.order > CAUSES.index("error"):
            report = replace(self._interrupt, error=report.error if report.cause in ("stopped", "terminated") else "")
        if report.cause == "silent" and self._may_wait_longer():
            self._reports, self._is_diagnosing = [r for r in self._reports if r.cause != "silent"], False
            for rank in self.entries:
                self._tell(rank, "wait")
            if self._reports:
                self._decide_at = time.monotonic() + COLLECT_S
            return
        report = self._explain(report)
        text, stop, fatal = report.text(), report.cause in ("interrupt", "fatal"), ""
        line = text.partition("\n")[0]
        if report.cause == "fatal":
            text, fatal = f"{FATAL}\n{text}", text  # the cause comes last
        elif not stop and self.history and run_within_wait(partial(self.history.is_repeated, report), False):
            stop, fatal, line = True, text, f"{FATAL}: {report.describe_repetition()}"
            text += f"\n{line}"
        self.verdict = {"stop": stop, "fatal": fatal, "is_told": report.cause in TOLD_TO_END, "line": line}
        self.verdict |= {"end": report.describe_end(is_final=stop), "step": report.step}
        for rank in self.entries:
            self._tell(rank, "abort", **self.verdict)
        self._say(text)

    def _present(self) -> list[RankState]:
        return [entry.state for entry in self.entries.values() if not entry.is_gone]

    def _may_wait_longer(self) -> bool:
        """Return whether the silence is no failure yet. Ranks may wait for exceptional work, whatever stacks show."""
        present = self._present()
        culprit = find_culprit(present)
        within_limit = [state for state in present if not state.frozen and state.silent_s < state.limit_s]
        is_excused = not culprit.frozen and any(state.exceptional for state in within_limit)
        if is_excused or any(state.debugged for state in present):
            return True
        return not culprit.waits_for_others and culprit.silent_s < culprit.limit_s

    def _explain(self, report: Report) -> Report:
        """Add what the other ranks were doing, if the cause is an error, a loss or silence."""
        if report.cause not in ("silent", "lost", "error"):
            return report
        also: list[int] = []
        if report.cause == "silent":
            culprit = find_culprit(self._present())
            report = _report(culprit, "silent", describe_silence(culprit))
            lines = [f"  stacks: {culprit.stacks}"] if culprit.stacks else []
            lines += [f"  NCCL's last collectives: {culprit.collectives}"] if culprit.collectives else []
        else:
            lines = [report.trace.rstrip()] if report.trace else []
            if report.cause == "lost":
                also = [r.rank for r in self._reports if r.cause == "lost" and r.rank != report.rank]
            lines += [f"  also gone: {format_ranks(also)}"] if also else []
        named = {report.rank, *also}
        lines += describe_others(entry.state for rank, entry in self.entries.items() if rank not in named)
        return replace(report, trace="\n".join(lines))


def _read_state(rank: int, message: dict[str, Any]) -> RankState:
    state = msgspec.convert(message["state"], RankState)
    if state.rank != rank:
        raise ValueError(f"the state of rank {state.rank}")
    return state


def _report(state: RankState, cause: Cause, error: str, trace: str = "") -> Report:
    return Report(state.rank, state.roles, state.host, state.stage, state.step, error, trace, cause)
