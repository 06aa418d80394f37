"""What preflight says: a row for each check, and a verdict. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rl.watch.text import count_of

OK, WARNING, FAILED = "ok", "warning", "FAILED"


@dataclass(frozen=True)
class Row:
    """`details`: where nodes differ, or what to change; a line each."""

    name: str
    state: str
    result: str
    details: Sequence[str] = field(default_factory=tuple)


class Names:
    """Of nodes, or of ranks: `node 2 (gpu-03)`."""

    def __init__(self, hosts: Sequence[str], numbers: Sequence[int] | None = None, word: str = "node"):
        self._hosts, self._numbers, self._word = hosts, numbers or range(len(hosts)), word

    def __len__(self) -> int:
        return len(self._hosts)

    def one(self, node: int) -> str:
        return f"{self._word} {self._numbers[node]} ({self._hosts[node]})"

    def many(self, nodes: Sequence[int]) -> str:
        """All of them, or the first few."""
        if len(nodes) == len(self) > 1:
            return f"all {len(self)} {self._word}s"
        shown = [self.one(node) for node in sorted(nodes, key=lambda node: self._numbers[node])]
        return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


class Findings:
    """What is wrong, of one check."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []

    def add(self, state: str, text: str) -> None:
        self._found.append((state, text))

    def row(self, name: str, result: str) -> Row:
        """`result` where nothing was found; else the worst of it, which the verdict repeats, then the rest."""
        if not self._found:
            return Row(name, OK, result)
        ordered = sorted(self._found, key=lambda found: found[0] != FAILED)
        return Row(name, ordered[0][0], ordered[0][1], [text for _, text in ordered[1:]])


def table(rows: Sequence[Row]) -> str:
    lines = [("check", "state", ["result"])]
    lines += [(row.name, row.state, [row.result, *row.details]) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    text = []
    for name, state, results in lines:
        text.append(f"{name.ljust(widths[0])}  {state.ljust(widths[1])}  {results[0]}")
        text += [" " * (sum(widths) + 4) + detail for detail in results[1:]]
    return "\n".join(text)


def verdict(rows: Sequence[Row], num_nodes: int, num_ranks: int, seconds: float) -> str:
    """One line."""
    problems = [row for row in rows if row.state == FAILED]
    if problems:
        return f"preflight: {count_of(len(problems), 'problem')}: " + "; ".join(
            f"{row.name}: {row.result}" for row in problems
        )
    warned = sum(row.state == WARNING for row in rows)
    text = f"preflight: ready, {count_of(num_nodes, 'node')}, {count_of(num_ranks, 'rank')}, {seconds:.1f} s"
    return text + (f", {count_of(warned, 'warning')}" if warned else "")
