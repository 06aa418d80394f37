"""The table of all ranks, and the judge of their failures. It lives in the watchdog of rank 0, and so outlives rank 0.

Watchdogs send it beats, reports of exceptions, deaths and silence. When something has gone wrong it collects what
others say for a moment (the exception that started it beats the broken connections that follow), prints one block that
names who failed, where, for how long and who waited, and tells every watchdog to end its rank.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from rl.watch.culprit import (
    Account,
    describe_others,
    describe_silence,
    find_culprit,
    is_excused,
    waits_for_others,
)
from rl.watch.in_time import in_time
from rl.watch.reports import CAUSES, Memory, Report
from rl.watch.text import format_ranks

COLLECT_S = 0.7  # reports
MAX_COLLECT_S = 3.0  # while all that has come are broken connections: who broke them will be told
INQUEST_S = 3.0  # accounts of silent ranks, for which stacks and collectives are written
BEAT_S = 1.0  # between two words of a watchdog, and of the board to each
CUT_S = 10.0  # without a word: a host may pause
TICK_S = 0.2
DEADLOCK_S = 600.0  # of every rank waiting for another; a slow disk may be behind it


@dataclass
class Entry:
    """What is known of a rank."""

    account: Account
    heard_at: float
    about: dict[str, Any] = field(default_factory=dict)  # memory, tokens a second: for people
    is_done: bool = False  # it ended as it should
    is_gone: bool = False
    has_accounted: bool = False  # since it was asked to


class Board:
    def __init__(self, tell: Callable[..., None], say: Callable[[str], None]):
        """`tell(rank, kind, **values)` sends to a rank's watchdog, `say` prints."""
        self.entries: dict[int, Entry] = {}
        self.memory: Memory | None = None
        self.verdict: dict[str, Any] | None = None
        self._tell, self._say = tell, say
        self._reports: list[Report] = []
        self._first_at = 0.0
        self._judge_at: float | None = None
        self._is_inquest = False
        self._interrupt: Report | None = None  # somebody typed Ctrl-C: whatever ends the world now is due to that

    def handle(self, rank: int, message: dict[str, Any]) -> None:
        kind, now = message.pop("kind"), time.monotonic()
        entry = self.entries.get(rank)
        if kind == "beat":
            account = Account(**message["account"])
            if entry is None:
                entry = self.entries[rank] = Entry(account, now)
                if self.verdict is not None:  # it came too late to hear it
                    self._tell(rank, "abort", **self.verdict)
            entry.heard_at, entry.about = now, message["about"]
            if not (self._is_inquest and entry.has_accounted):  # an account says more
                entry.account = account
        elif entry is None:
            return
        elif kind == "report":
            self.report(Report(**message["report"]))
        elif kind == "interrupting":
            self._interrupt = Report(**message["report"])
        elif kind == "died":
            self._lose(rank, "its process ended without a word")
        elif kind == "silent":
            self._begin_inquest(rank)
        elif kind == "account":
            entry.account, entry.has_accounted, entry.heard_at = Account(**message["account"]), True, now
        elif kind == "done":
            entry.is_done = True

    def lost_connection(self, rank: int) -> None:
        if rank in self.entries:
            self._lose(rank, "its process and its watchdog are gone")

    def report(self, report: Report) -> None:
        now = time.monotonic()
        if not self._reports:
            self._first_at = now
        self._reports.append(report)
        if self._judge_at is None:
            self._judge_at = now + COLLECT_S

    def forgive(self, seconds: float) -> None:
        """This process itself could not listen for so long."""
        for entry in self.entries.values():
            entry.heard_at += seconds

    def tick(self) -> None:
        now = time.monotonic()
        for rank, entry in self.entries.items():
            if not entry.is_done and not entry.is_gone and now - entry.heard_at > CUT_S:
                self._lose(rank, f"no word from its host for {now - entry.heard_at:.0f} s: it is down or cut off")
        working = [entry for entry in self.entries.values() if not entry.is_done]
        if working and all(waits_for_others(e.account) and e.account.silent_s > DEADLOCK_S for e in working):
            self._begin_inquest(min(entry.account.rank for entry in working))
        everybody = all(entry.has_accounted or entry.is_gone for entry in self.entries.values())
        if self._judge_at is not None and (now >= self._judge_at or (self._is_inquest and everybody)):
            echoes = all(report.cause in ("connection", "terminated") for report in self._reports)
            if echoes and now < self._first_at + MAX_COLLECT_S:
                self._judge_at = now + TICK_S
            else:
                self._judge()

    def _lose(self, rank: int, text: str) -> None:
        entry = self.entries[rank]
        if entry.is_done or entry.is_gone:
            return
        entry.is_gone = True
        account = entry.account
        self.report(
            Report(rank, account.roles, account.host, account.stage, account.step, text, self._since(rank), "lost")
        )

    def _since(self, rank: int) -> str:
        return f"  {self.entries[rank].account.stage_s:.0f} s after that stage began"

    def _begin_inquest(self, rank: int) -> None:
        if self._is_inquest or self.verdict is not None:
            return
        self._is_inquest = True
        for entry in self.entries.values():
            entry.has_accounted = False
        account = self.entries[rank].account
        silent = Report(rank, account.roles, account.host, account.stage, account.step, "silent", "", "silent")
        self._reports.append(silent)
        self._judge_at = time.monotonic() + INQUEST_S
        for other in self.entries:
            self._tell(other, "account")

    def _judge(self) -> None:
        self._judge_at = None
        if self.verdict is not None:
            return
        report = min(self._reports, key=lambda report: report.order)
        if self._interrupt is not None and report.order > CAUSES.index("error"):
            report = replace(self._interrupt, error=report.error if report.cause in ("stopped", "terminated") else "")
        if report.cause == "silent" and self._is_patience_due():
            self._reports, self._is_inquest = [r for r in self._reports if r.cause != "silent"], False
            for rank in self.entries:
                self._tell(rank, "patience")
            if self._reports:
                self._judge_at = time.monotonic() + COLLECT_S
            return
        report = self._explain(report)
        stop = report.cause in ("interrupt", "fatal") or self._is_repeated(report)
        fatal = report.text() if stop and report.cause != "interrupt" else ""
        self.verdict = {"stop": stop, "fatal": fatal}
        for rank in self.entries:
            self._tell(rank, "abort", **self.verdict)
        self._say(report.text())
        if fatal:
            self._say("oneworld: fatal, will not be restarted")

    def _is_repeated(self, report: Report) -> bool:
        return self.memory is not None and in_time(partial(self.memory.is_repeated, report), False)

    def _is_patience_due(self) -> bool:
        """Whoever is waited for is slow, but not slower than it may be; or somebody debugs a rank; or a rank compiles,
        and the others may wait for that, whatever their stacks say."""
        present = [entry.account for entry in self.entries.values() if not entry.is_gone]
        if any(account.debugged for account in present):
            return True
        culprit = find_culprit(present)
        if not culprit.frozen and any(map(is_excused, present)):
            return True
        return not waits_for_others(culprit) and culprit.silent_s < culprit.limit_s

    def _explain(self, report: Report) -> Report:
        """With what the others did, where the report does not speak for itself."""
        accounts = {rank: entry.account for rank, entry in self.entries.items()}
        if report.cause == "silent":
            present = [entry.account for entry in self.entries.values() if not entry.is_gone]
            culprit = find_culprit(present)
            place = (culprit.rank, culprit.roles, culprit.host, culprit.stage, culprit.step)
            lines = [f"  stacks: {culprit.stacks}"] if culprit.stacks else []
            lines += [f"  NCCL's last collectives: {culprit.collectives}"] if culprit.collectives else []
            lines += describe_others(account for rank, account in accounts.items() if rank != culprit.rank)
            return Report(*place, describe_silence(culprit), "\n".join(lines), "silent")
        if report.cause == "lost":
            also = [r.rank for r in self._reports if r.cause == "lost" and r.rank != report.rank]
            lines = [report.trace, *([f"  also gone: {format_ranks(also)}"] if also else [])]
            lines += describe_others(account for rank, account in accounts.items() if rank not in (*also, report.rank))
            return replace(report, trace="\n".join(lines))
        if report.cause == "error":
            lines = [report.trace.rstrip()] if report.trace else []
            lines += describe_others(account for rank, account in accounts.items() if rank != report.rank)
            return replace(report, trace="\n".join(lines))
        return report

    def table(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            asdict(entry.account) | entry.about | {"heard_s_ago": round(now - entry.heard_at, 1), "done": entry.is_done}
            for _, entry in sorted(self.entries.items())
        ]
