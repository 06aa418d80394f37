"""The reward function `code`: run the program in a response against the tests of its row, in a sandbox."""

import ast
import re
from typing import Any

from rl.rewards.extract import answer_part
from rl.rewards.sandbox import CodeTask, Limits, check_sandbox, run_in_sandbox

SCORES = ("all", "share")
LANGUAGES = ("", "python", "python3", "py", "py3")
MAX_PROGRAM = 1 << 20  # characters
_FENCE = re.compile(r"^[ \t]*(```+|~~~+)[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")
_DEFINED = re.compile(r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*=[^=]", re.MULTILINE)
TEST_COLUMNS = "tests (or test_list, as in MBPP, or test, as in HumanEval)"


def code(
    prompt: str,
    response: str,
    row: dict[str, Any],
    score: str = "all",
    timeout_s: float = Limits.cpu_s,
    memory_mb: int = 512,
) -> dict[str, float]:
    """Return 1 if the program in the response passes all tests of the row, or with `score: share` the share of passed
    tests. The part `passed` is always that share."""
    task = read_task(response, row)
    if not task.program.strip() or len(task.program) > MAX_PROGRAM:
        return {"score": 0.0, "passed": 0.0}
    results = run_in_sandbox(task, read_limits(score, timeout_s, memory_mb))
    share = sum(results) / len(results)
    return {"score": share if score == "share" else float(all(results)), "passed": share}


def check(**options: Any) -> None:
    """Raise ValueError if the options are wrong, or if this machine cannot isolate programs."""
    check_sandbox(read_limits(**options))


code.check = check  # type: ignore[attr-defined]


def read_limits(score: str = "all", timeout_s: float = Limits.cpu_s, memory_mb: int = 512) -> Limits:
    """Return the limits in the options. Raise ValueError if an option is wrong."""
    if score not in SCORES:
        raise ValueError(f"score: got {score!r}; choose one of {', '.join(SCORES)}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0.1 <= timeout_s <= 3600:
        raise ValueError(f"timeout_s: got {timeout_s!r}; it must be a number of seconds from 0.1 to 3600")
    if isinstance(memory_mb, bool) or not isinstance(memory_mb, int) or not 64 <= memory_mb <= 2048:
        raise ValueError(f"memory_mb: got {memory_mb!r}; it must be a whole number from 64 to 2048")
    return Limits(float(timeout_s), memory_mb << 20)


def read_task(response: str, row: dict[str, Any]) -> CodeTask:
    """Return the program in the response with the tests in the row. Raise KeyError or ValueError if it has none."""
    column = next((name for name in ("tests", "test_list", "test") if row.get(name)), None)
    if column is None:
        raise KeyError(TEST_COLUMNS)
    tests = [row[column]] if isinstance(row[column], str) else row[column]
    setup = [row.get("test_setup_code") or "", *(row.get("test_imports") or [])]
    entry_point = row.get("entry_point") or ""
    for name, texts in ((column, tests), ("test_setup_code or test_imports", setup), ("entry_point", [entry_point])):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"the column {name!r} holds {texts!r:.80}; it must hold Python code as text, or a list of it"
            )
    starter = row.get("starter")
    if starter is None and entry_point:
        starter = row.get("prompt")
    names = {entry_point} | {word for test in tests for word in _WORD.findall(test)}
    return CodeTask(find_program(response, names), tests, "\n".join(setup), _as_code(starter, entry_point), entry_point)


def _as_code(starter: Any, entry_point: str) -> str:
    """Return a starter that is Python and defines the entry point, else "". A prompt may be a sentence instead."""
    if not isinstance(starter, str):
        return ""
    try:
        body = ast.parse(starter).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    return starter if any(getattr(node, "name", None) == entry_point for node in body) else ""


def find_program(response: str, names: set[str]) -> str:
    """Return the last fenced block that defines one of the names, else the last block, else the whole text.

    Only the text after the thinking counts, or in answer tags. Blocks in other languages do not.
    """
    text = answer_part(response)
    blocks, opened = list[str](), None
    for match in _FENCE.finditer(text):
        if opened is None:
            opened = match
        elif match[1].startswith(opened[1]) and not match[2]:
            if opened[2].lower() in LANGUAGES:
                blocks.append(text[opened.end() + 1 : match.start()])
            opened = None
    if opened is not None and opened[2].lower() in LANGUAGES:  # the response ends inside of a block
        blocks.append(text[opened.end() + 1 :])
    if not blocks:
        return "" if _FENCE.search(text) else text
    defining = [block for block in blocks if names & {name for pair in _DEFINED.findall(block) for name in pair}]
    return (defining or blocks)[-1]
