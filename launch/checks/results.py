"""The result of a check, the table of all results, and the verdict."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rl.common.text import count_of

OK, WARNING, FAILED = "ok", "warning", "FAILED"
Finding = tuple[str, str]  # a state and a text


@dataclass(frozen=True)
class CheckResult:
    """One row of the table. `details` are further lines: where nodes differ, or what to change."""

    name: str
    state: str
    text: str
    details: Sequence[str] = field(default_factory=list)


def summarize(name: str, findings: Iterable[Finding], text: str) -> CheckResult:
    """Return a result with the worst finding first, or with `text` first if none is a problem."""
    found = sorted(findings, key=lambda finding: (FAILED, WARNING, OK).index(finding[0]))
    if not found or found[0][0] == OK:
        found.insert(0, (OK, text))
    return CheckResult(name, *found[0], [other for _, other in found[1:]])


def format_nodes(nodes: Sequence[int], names: Sequence[str]) -> str:
    """Name up to six of these nodes and count the others. A name is `node 2 (gpu-03)`."""
    if len(nodes) == len(names) > 1:
        return f"all {len(names)} nodes"
    shown = sorted([names[node] for node in nodes], key=lambda name: int(name.split()[1]))
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


def format_table(results: Sequence[CheckResult]) -> str:
    rows = [CheckResult("check", "state", "result"), *results]
    widths = max(len(row.name) for row in rows), max(len(row.state) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"{row.name.ljust(widths[0])}  {row.state.ljust(widths[1])}  {row.text}")
        lines += [" " * (sum(widths) + 4) + detail for detail in row.details]
    return "\n".join(lines)


def format_verdict(results: Sequence[CheckResult], num_nodes: int, num_ranks: int, seconds: float) -> str:
    """Return one line: the problems, or that the cluster is ready."""
    problems = [f"{result.name}: {result.text}" for result in results if result.state == FAILED]
    if problems:
        return f"preflight: {count_of(len(problems), 'problem')}: {'; '.join(problems)}"
    num_warnings = sum(result.state == WARNING for result in results)
    text = f"preflight: ready, {count_of(num_nodes, 'node')}, {count_of(num_ranks, 'rank')}, {seconds:.1f} s"
    return text + (f", {count_of(num_warnings, 'warning')}" if num_warnings else "")
