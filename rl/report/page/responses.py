"""Responses to the same prompts, early and late in training, from the files of evaluations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.report.page.parts import ResponsesToPrompt, ShownResponse
from rl.report.page.read import RunData, read_lines

MAX_CHARS = 2000  # of a text on the page
MAX_SETS = 3
MAX_TURNS = 24  # of a response


def compare_responses(runs: Sequence[RunData], num_prompts: int) -> list[ResponsesToPrompt]:
    """Return the first response to the first prompts of each set, at the first and the last evaluation of each run.

    The prompts are not chosen by their scores, so they show neither more nor less progress than there is.
    """
    found: list[ResponsesToPrompt] = []
    files = {run.name: run.response_files() for run in runs}
    sets = dict.fromkeys(name for by_set in files.values() for name in by_set)
    for name in list(sets)[:MAX_SETS]:
        columns: list[tuple[str, dict[str, dict[str, Any]]]] = []  # label, and the rows by prompt
        for run in runs:
            by_step = files[run.name].get(name, {})
            for step, path in by_step.items():
                label = f"{run.name}, step {step}" if len(runs) > 1 else f"step {step}"
                columns.append((label, _first_rows(path, num_prompts)))
        prompts = dict.fromkeys(prompt for _, rows in columns for prompt in rows)
        for number, prompt in enumerate(list(prompts)[:num_prompts], start=1):
            samples = [_sample(label, rows[prompt]) for label, rows in columns if prompt in rows]
            row = next(rows[prompt] for _, rows in columns if prompt in rows)
            answer = _shorten(str(row.get("answer") or ""))
            found.append(ResponsesToPrompt(f"{name}, prompt {number}", _shorten(_prompt(row)), answer, samples))
    return found


def _first_rows(path: Path, num_prompts: int) -> dict[str, dict[str, Any]]:
    """Return the first rows of a file by the text of their prompts. Rows without responses are left out."""
    found: dict[str, dict[str, Any]] = {}
    for row in read_lines(path):
        responses = row.get("responses")
        if isinstance(responses, list) and responses and isinstance(responses[0], dict):
            found.setdefault(str(row.get("prompt")), row)
        if len(found) == num_prompts:
            break
    return found


def _prompt(row: dict[str, Any]) -> str:
    """Return what the model read: in a conversation, with the tools and what the environment added."""
    prompt = row["responses"][0].get("prompt") or row.get("prompt") or ""
    return prompt if isinstance(prompt, str) else str(prompt)


def _sample(label: str, row: dict[str, Any]) -> ShownResponse:
    response = row["responses"][0]
    facts = [f"score {response['score']:.3g}"] if isinstance(response.get("score"), int | float) else []
    if isinstance(response.get("num_tokens"), int):
        facts.append(f"{response['num_tokens']} tokens")
    facts += ["cut off"] if response.get("is_truncated") else []
    if response.get("status") not in (None, "ok"):
        facts.append(f"reward: {response['status']}")
    if response.get("ending"):
        facts.append(f"ended: {response['ending']}")
    turns = response.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns):
        shown = [(str(turn.get("role", "")), _shorten(str(turn.get("text", "")))) for turn in turns[:MAX_TURNS]]
        if len(turns) > MAX_TURNS:
            shown.append(("", f"... ({len(turns) - MAX_TURNS:,} more turns)"))
    else:
        shown = [("", _shorten(str(response.get("text", ""))))]
    return ShownResponse(label, ", ".join(facts), shown)


def _shorten(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    return f"{text[:MAX_CHARS]} ... ({len(text) - MAX_CHARS:,} more characters)"
