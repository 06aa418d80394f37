"""The built-in reward functions. Each takes the prompt, the response and the row of the data file, whose `answer` is
the text of the field that data.answer_key names. Further parameters are set by reward.options.

The attribute `answer` of a function extracts the final answer of a response, written so that equal answers are equal
texts.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rl.rewards.answers import is_same, text_of
from rl.rewards.extract import last_number_of, marked_number_of

UNITS: dict[str, Callable[[str], int]] = {"characters": len, "words": lambda text: len(text.split())}


def with_answer(answer: Callable[[str], str | None]) -> Callable[[Callable], Callable]:
    """Give a reward function the attribute `answer`."""

    def decorate(function: Callable) -> Callable:
        function.answer = answer  # type: ignore[attr-defined]
        return function

    return decorate


@with_answer(str.strip)
def exact_match(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the response is the answer, apart from blanks around it."""
    return float(response.strip() == row["answer"].strip())


@with_answer(last_number_of)
def last_number(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the last number of the response equals that of the answer (GSM8K's answers end in '#### 42')."""
    got, wanted = last_number_of(response), last_number_of(row["answer"])
    return float(got is not None and got == wanted)


@with_answer(marked_number_of)
def gsm8k(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the number that is marked as the final answer is right; without a mark, the last number counts."""
    got, wanted = marked_number_of(response), marked_number_of(row["answer"])
    return float(got is not None and got == wanted)


@with_answer(text_of)
def math(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the response's final answer equals the reference answer, as mathematics or as words."""
    return float(is_same(row["answer"], response, prompt))


def regex(prompt: str, response: str, row: dict[str, Any], pattern: str = "", whole: bool = False) -> float:
    """Return 1 if the pattern is found in the response; with `whole` it must match all of it. The row's answer is the
    default pattern."""
    search = re.fullmatch if whole else re.search
    return float(search(pattern or row["answer"], response.strip(), re.DOTALL) is not None)


def format(
    prompt: str, response: str, row: dict[str, Any], tags: Sequence[str] = ("think", "answer")
) -> dict[str, float]:
    """Return 1 if the response is one pair of each tag, in this order, with content and nothing around them. A chat
    template may have opened the first tag. The parts say which tags appear exactly once."""
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag for tag in tags):
        raise ValueError(f"tags: got {tags!r}; it is a list of names, such as [think, answer]")
    opened = f"<{tags[0]}>"
    text = opened + response if prompt.rstrip().endswith(opened) else response
    places = [(text.find(f"<{tag}>"), text.find(f"</{tag}>")) for tag in tags]
    parts = {
        tag: float(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 and first < second)
        for tag, (first, second) in zip(tags, places)
    }
    rest = text.strip()
    for tag in tags:
        begin, end = f"<{tag}>", f"</{tag}>"
        inside, closed, after = rest.removeprefix(begin).partition(end)
        if not rest.startswith(begin) or not closed or not inside.strip():
            return {"score": 0.0, **parts}
        rest = after.strip()
    return {"score": float(not rest and all(parts.values())), **parts}


def length(
    prompt: str, response: str, row: dict[str, Any], most: int, free: int = 0, unit: str = "characters"
) -> float:
    """Return 0 up to a length of `free`, then linearly down to -1 at `most` and beyond."""
    if not 0 <= free < most:
        raise ValueError(f"got free = {free} and most = {most}; required is 0 <= free < most")
    if unit not in UNITS:
        raise ValueError(f"unit: got {unit!r}; choose one of {', '.join(UNITS)}")
    return -min(1.0, max(0.0, (UNITS[unit](response) - free) / (most - free)))


FUNCTIONS: dict[str, Callable[..., float | dict[str, float]]] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "gsm8k": gsm8k,
    "math": math,
    "regex": regex,
    "format": format,
    "length": length,
}
