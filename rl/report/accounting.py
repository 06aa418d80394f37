"""What bounds a step: the shares of busy and waiting time of every role, and which role the others wait for.

`perf/busy/ROLE` and `perf/wait/ROLE/FOR` are shares of the time of a step, and means over the ranks of a role. For each
role they add up to 1. Ranks with several roles are a role of their own, such as `rollout_actor`.

A step is counted from the beginning of one weight sync to the beginning of the next one (rl/world/accounts.py). So it
includes the evaluation and the checkpoint that follow the first of them.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.common.files import write_atomically
from rl.report.rows import read_metrics
from rl.watch.ledger import RankAccount

ACCOUNTING = "accounting.jsonl"  # in the run's folder
MAX_RANKS = 64  # of a line; in larger worlds, it has those that were busy longest, and as many that were idle longest
MAX_BYTES = 32 << 20  # of the file; when it is larger, the older half of its lines is dropped

BUSY, WAIT = "perf/busy", "perf/wait"
RANKS = {"actor": "actors", "rollout": "engines", "inference": "inference ranks"}  # how texts call the ranks of a role
SERVERS = ("reward", "environment")  # what an engine waits for when it has sampled everything
# The stages of actors that also sample, by the role whose work they are.
STAGES = {
    "rollout": ("sampling", ["rollout"]),
    "actor": ("training", ["logprobs", "advantages", "update"]),
    "sync": ("publishing", ["sync", "handover"]),
}


def summarize(accounts: Sequence[RankAccount]) -> dict[str, float]:
    """Return the metrics of a step, from the ledgers of its ranks."""
    found: dict[str, float] = {}
    for role, members in _by_role(accounts).items():
        waits: defaultdict[str, float] = defaultdict(float)  # sums of shares, by role
        for account in members:
            wall_s = account.wall_s
            for awaited, seconds in account.waits.items():
                waits[awaited] += seconds / wall_s
        found[f"{BUSY}/{role}"] = 1 - sum(waits.values()) / len(members)
        found |= {f"{WAIT}/{role}/{awaited}": waits[awaited] / len(members) for awaited in sorted(waits)}
    return found


def _by_role(accounts: Sequence[RankAccount]) -> dict[str, list[RankAccount]]:
    found: defaultdict[str, list[RankAccount]] = defaultdict(list)
    for account in accounts:
        if account.wall_s > 0:
            found[account.roles.replace(",", "_")].append(account)
    return dict(found)


class AccountingFile:
    """accounting.jsonl: for each step, what the ranks did in seconds, and what bounds the step.

    A line has the mean over the ranks of each role, by stage and by what they waited for. It also has the seconds of
    single ranks. `step` is the step from which the run resumes. Lines after it are dropped, as in metrics.jsonl.
    """

    def __init__(self, run_dir: Path, step: int, max_bytes: int = MAX_BYTES):
        self._path, self._max_bytes = run_dir / ACCOUNTING, max_bytes
        self._rewrite([row for row in read_metrics(self._path) if row["step"] <= step])

    def write(self, accounts: Sequence[RankAccount], hosts: Sequence[str], about: Mapping[str, Any]) -> None:
        """Write the line of a step. `hosts` are the hosts of all ranks, which are numbered in this order. `about` is
        what else the line says, such as the step."""
        nodes = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        roles = {
            role: {"ranks": len(members), "seconds": _mean_seconds(members)}
            for role, members in _by_role(accounts).items()
        }
        ranks = [
            {"rank": account.rank, "node": nodes[hosts[account.rank]], "seconds": _rounded(account.seconds)}
            for account in _choose(accounts)
        ]
        line = {**about, "roles": roles, "engine": _sum_engines(accounts), "ranks": ranks}
        self._file.write(json.dumps(line) + "\n")
        if self._file.tell() > self._max_bytes:
            self._file.close()
            rows = read_metrics(self._path)
            self._rewrite(rows[len(rows) // 2 :])

    def close(self) -> None:
        self._file.close()

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in rows))
        self._file = self._path.open("a", buffering=1)


def _sum_engines(accounts: Sequence[RankAccount]) -> dict[str, list[float]]:
    """Return the sums of all engines' steps. See rl/rollout/meter.py."""
    names = sorted({name for account in accounts for name in account.engine})
    sums = {name: zip(*(account.engine[name] for account in accounts if name in account.engine)) for name in names}
    return {name: [round(sum(column), 6) for column in columns] for name, columns in sums.items()}


def _mean_seconds(accounts: Sequence[RankAccount]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for account in accounts:
        for name, seconds in account.seconds.items():
            sums[name] += seconds
    return _rounded({name: sums[name] / len(accounts) for name in sorted(sums)})


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}


def _choose(accounts: Sequence[RankAccount]) -> list[RankAccount]:
    """Return at most MAX_RANKS of the ranks: all of them, or those with the largest and the smallest busy time."""
    if len(accounts) <= MAX_RANKS:
        return list(accounts)
    by_busy = sorted(accounts, key=lambda account: account.busy_s)
    return sorted(by_busy[: MAX_RANKS // 2] + by_busy[-MAX_RANKS // 2 :], key=lambda account: account.rank)


def describe_bound(values: Mapping[str, float]) -> str:
    """Return what bounds a step, such as "rollout-bound: actors wait 62 %". Empty if the metrics do not tell.

    The actors drive the loop. So whatever they wait for most bounds the step, unless they are busy for longer.
    """
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
