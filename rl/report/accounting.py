"""What bounds a step: the shares of busy and waiting time of every role, and which role the others wait for.

`perf/busy/ROLE` and `perf/wait/ROLE/FOR` are shares of the time of a step, and means over the ranks of a role. For each
role they add up to 1. Ranks with several roles are a role of their own, such as `rollout_actor`.

A step is counted from the beginning of one weight sync to the beginning of the next one (rl/world/accounts.py). So it
includes the evaluation and the checkpoint that follow the first of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from rl.common.files import write_atomically
from rl.report.rows import iterate_rows
from rl.watch.ledger import RankAccount, StepAccount

ACCOUNTING = "accounting.jsonl"  # in the run's folder
MAX_RANKS = 64  # of a line; in larger worlds, it has those that were busy longest, and as many that were idle longest
MAX_BYTES = 32 << 20  # of the file; when it is larger, its older half is dropped

BUSY, WAIT = "perf/busy", "perf/wait"
RANKS = {"actor": "actors", "rollout": "engines", "inference": "inference ranks"}  # how texts call the ranks of a role
SERVERS = ("reward", "environment")  # what an engine waits for when it has sampled everything
# The stages of actors that also sample, by the role whose work they are.
STAGES = {
    "rollout": ("sampling", ["rollout"]),
    "actor": ("training", ["logprobs", "advantages", "update"]),
    "sync": ("publishing", ["sync", "handover"]),
}


def summarize(account: StepAccount) -> dict[str, float]:
    """Return the metrics of a step."""
    found: dict[str, float] = {}
    for name, role in account.roles.items():
        waits = role.mean_waits()
        found[f"{BUSY}/{name}"] = 1 - sum(waits.values())
        found |= {f"{WAIT}/{name}/{awaited}": share for awaited, share in waits.items()}
    return found


class AccountingFile:
    """accounting.jsonl: for each step, what the ranks did in seconds, and what bounds the step.

    A line has the mean over the ranks of each role, by stage and by what they waited for. It also has the seconds of
    single ranks. `step` is the step from which the run resumes. Lines after it are dropped, as in metrics.jsonl.
    """

    def __init__(self, run_dir: Path, step: int, max_bytes: int = MAX_BYTES):
        self._path, self._max_bytes = run_dir / ACCOUNTING, max_bytes
        rows = (row for row in iterate_rows(self._path) if row["step"] <= step)
        self._rewrite(json.dumps(row) + "\n" for row in rows)

    def write(self, account: StepAccount, nodes: Sequence[int], about: Mapping[str, Any]) -> None:
        """Write the line of a step. `nodes` are the numbers of the nodes of all ranks. `about` is what else the line
        says, such as the step."""
        roles = {
            name: {"ranks": len(role.ranks), "seconds": _rounded(role.mean_seconds())}
            for name, role in account.roles.items()
        }
        engine = {name: [round(total, 6) for total in totals] for name, totals in account.engine.items()}
        ranks = [
            {"rank": one.rank, "node": nodes[one.rank], "seconds": _rounded(one.seconds)}
            for one in _choose(account.ranks)
        ]
        self._file.write(json.dumps({**about, "roles": roles, "engine": engine, "ranks": ranks}) + "\n")
        if self._file.tell() > self._max_bytes:
            self._file.close()
            text = self._path.read_text()
            self._rewrite(text[text.index("\n", len(text) // 2) + 1 :])

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, text: str | Iterator[str]) -> None:
        write_atomically(self._path, text)
        self._file = self._path.open("a", buffering=1)


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}


def _choose(ranks: Sequence[RankAccount]) -> list[RankAccount]:
    """Return at most MAX_RANKS of the ranks: all of them, or those with the largest and the smallest busy time."""
    if len(ranks) > MAX_RANKS:
        by_busy = sorted(ranks)
        ranks = by_busy[: MAX_RANKS // 2] + by_busy[-MAX_RANKS // 2 :]
    return sorted(ranks, key=attrgetter("rank"))


def describe_bound(values: Mapping[str, float]) -> str:
    """Return what bounds a step, such as "rollout-bound: actors wait 62 %". Empty if the metrics do not tell.

    The actors drive the loop. So whatever they wait for most bounds the step, unless they are busy for longer.
    """
    values = {name: value for name, value in values.items() if name.startswith(("perf/", "time/"))}  # few of many
    actors = [name.removeprefix(f"{BUSY}/") for name in values if name.startswith(f"{BUSY}/") and "actor" in name]
    role = min(actors, key=len, default="")  # those that only train, if there are any
    if not role:
        return ""
    if "rollout" in role:
        return _describe_shared(role, values)
    waits = _waits_of(role, values)
    awaited = max(waits, key=waits.__getitem__, default="")
    if not awaited or waits[awaited] <= values[f"{BUSY}/{role}"]:
        share = _waits_of("rollout", values).get("actor", 0.0)
        return f"actor-bound: engines wait {_percent(share)}"
    if awaited == "rollout":
        servers = {name: share for name, share in _waits_of("rollout", values).items() if name in SERVERS}
        slowest = max(servers, key=servers.__getitem__, default="")
        if slowest and servers[slowest] > values.get(f"{BUSY}/rollout", 0.0):
            return f"{slowest}-bound: engines wait {_percent(servers[slowest])}"
    return f"{awaited}-bound: {RANKS['actor']} wait {_percent(waits[awaited])}"


def _describe_shared(role: str, values: Mapping[str, float]) -> str:
    """Return what bounds a step whose actors also sample: the stage that takes longest."""
    whole = values.get("time/step", 0.0)
    if not whole:
        return ""
    shares = {
        name: sum(values.get(f"time/{stage}", 0.0) for stage in stages) / whole for name, (_, stages) in STAGES.items()
    }
    longest = max(shares, key=shares.__getitem__)
    servers = {name: share for name, share in _waits_of(role, values).items() if name in SERVERS}
    slowest = max(servers, key=servers.__getitem__, default="")
    if longest == "rollout" and slowest and servers[slowest] > shares[longest] / 2:
        return f"{slowest}-bound: ranks wait {_percent(servers[slowest])}"
    return f"{longest}-bound: {STAGES[longest][0]} takes {_percent(shares[longest])}"


def _waits_of(role: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the shares in which the ranks of a role wait, by what they wait for."""
    prefix = f"{WAIT}/{role}/"
    return {name.removeprefix(prefix): share for name, share in values.items() if name.startswith(prefix)}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
