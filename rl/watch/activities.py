"""What the ranks of each role are doing, in a few rows for the leader's live view and for tools/status.py.

watchdog of each rank --> board --> watchdog of the leader --> leader --> live view
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rl.common.text import format_ranges

MAX_ROWS = 16
Row = Mapping[str, Any]  # of a rank, as the board's table and status files hold it


class RoleActivity(NamedTuple):
    """What the ranks with the same roles in the same stage are doing."""

    ranks: str  # such as 0-3,7
    roles: str
    stage: str
    stage_s: float  # since the first of them entered it
    doing: str
    tokens_per_s: int  # of all of them


def describe_doing(row: Row) -> str:
    """Return what a rank is doing, besides its stage."""
    if row["done"]:
        return "done"
    if row.get("ended"):
        return "ended"
    if row.get("debugged"):
        return "in a debugger: tools/debug.py"
    if row["frozen"]:
        return row["frozen"]
    return f"waits for {row['waits_for']}" if row["waits_for"] else row.get("exceptional") or row["item"]


def summarize_activities(rows: Iterable[Row]) -> list[RoleActivity]:
    """Return a row for the ranks of each role and stage. Ranks that work are described rather than ranks that wait."""
    alike: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        alike[row["roles"], "" if row["done"] else row["stage"]].append(row)
    activities = []
    for (roles, stage), group in alike.items():
        first = min(group, key=lambda row: (bool(row["waits_for"]), row["rank"]))
        ranks = format_ranges(row["rank"] for row in group)
        stage_s, tokens = max(row["stage_s"] for row in group), sum(row.get("tokens_per_s", 0) for row in group)
        doing = describe_doing(first)
        if doing and doing == first.get("exceptional") and first["item"]:
            doing = f"{doing}: {first['item']}"
        activities.append(RoleActivity(ranks, roles, stage, round(stage_s, 1), doing, tokens))
    return activities[:MAX_ROWS]
