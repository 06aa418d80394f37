"""The result of a check, the table of all results, and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.common.text import count_of

OK, WARNING, FAILED = "ok", "warning", "FAILED"


@dataclass(frozen=True)
class CheckResult:
    """One row of the table. `details` are further lines: where nodes differ, or what to change."""

    name: str
    state: str
    text: str
    details: Sequence[str] = ()


class Names:
    """Names of nodes or ranks for messages, such as `node 2 (gpu-03)`."""

    def __init__(self, hosts: Sequence[str], numbers: Sequence[int] | None = None, word: str = "node"):
        self._hosts, self._numbers, self._word = hosts, numbers or range(len(hosts)), word

    def __len__(self) -> int:
        return len(self._hosts)

    def one(self, node: int) -> str:
        return f"{self._word} {self._numbers[node]} ({self._hosts[node]})"

    def many(self, nodes: Sequence[int]) -> str:
        """Name up to six of these nodes and count the others."""
        if len(nodes) == len(self) > 1:
            return f"all {len(self)} {self._word}s"
        shown = [self.one(node) for node in sorted(nodes, key=lambda node: self._numbers[node])]
        return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")


class Findings:
    """The problems that one check has found."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []

    def add(self, state: str, text: str) -> None:
        self._found.append((state, text))

    def result(self, name: str, text: str) -> CheckResult:
        """Return a result with `text` if nothing was found, otherwise with the findings, the worst one first."""
        if not self._found:
            return CheckResult(name, OK, text)
        (state, worst), *others = sorted(self._found, key=lambda found: found[0] != FAILED)
        return CheckResult(name, state, worst, [other for _, other in others])


def format_table(results: Sequence[CheckResult]) -> str:
    lines = [("check", "state", ["result"])]
    lines += [(result.name, result.state, [result.text, *result.details]) for result in results]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    text = []
    for name, state, texts in lines:
        text.append(f"{name.ljust(widths[0])}  {state.ljust(widths[1])}  {texts[0]}")
        text += [" " * (sum(widths) + 4) + detail for detail in texts[1:]]
    return "\n".join(text)


def format_verdict(results: Sequence[CheckResult], num_nodes: int, num_ranks: int, seconds: float) -> str:
    """Return one line: the problems, or that the cluster is ready."""
    problems = [f"{result.name}: {result.text}" for result in results if result.state == FAILED]
    if problems:
        return f"preflight: {count_of(len(problems), 'problem')}: {'; '.join(problems)}"
    num_warnings = sum(result.state == WARNING for result in results)
    text = f"preflight: ready, {count_of(num_nodes, 'node')}, {count_of(num_ranks, 'rank')}, {seconds:.1f} s"
    return text + (f", {count_of(num_warnings, 'warning')}" if num_warnings else "")
