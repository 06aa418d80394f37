"""The built-in functions. Each takes the prompt, the response, and the row of the data file, whose `answer` is the text
of the field that data.answer_key names; what follows is reward.options.

`answer` of a function takes the final answer out of a response, in one way of writing it, so that equal answers are
equal texts.
"""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

# A minus between digits is a range, and a comma is part of a number only before exactly three digits.
NUMBER = re.compile(r"(?:(?<!\d)-)?\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|(?:(?<!\d)-)?\d+(?:\.\d+)?")
BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")
UNITS: dict[str, Callable[[str], int]] = {"characters": len, "words": lambda text: len(text.split())}


def with_answer(answer: Callable[[str], str | None]) -> Callable[[Callable], Callable]:
    def decorate(function: Callable) -> Callable:
        function.answer = answer  # type: ignore[attr-defined]
        return function

    return decorate


def last_number_of(text: str) -> str | None:
    numbers = NUMBER.findall(text)
    return f"{float(numbers[-1].replace(',', '')):.15g}" if numbers else None


def marked_number_of(text: str) -> str | None:
    """The one after the last `####`; else the one in the last box; else the last of all."""
    _, mark, tail = text.rpartition("####")
    if mark:
        numbers = NUMBER.findall(tail)
        return last_number_of(numbers[0]) if numbers else None
    boxes = BOXED.findall(text)
    return last_number_of(boxes[-1] if boxes else text)


def parsed_text_of(text: str) -> str | None:
    parsed = _parse(text)
    return str(parsed[0]) if parsed else None


@with_answer(str.strip)
def exact_match(prompt: str, response: str, row: dict[str, Any]) -> float:
    return float(response.strip() == row["answer"].strip())


@with_answer(last_number_of)
def last_number(prompt: str, response: str, row: dict[str, Any]) -> float:
    """The last number of the response equals the last number of the answer (GSM8K's answers end in '#### 42')."""
    got, wanted = last_number_of(response), last_number_of(row["answer"])
    return float(got is not None and got == wanted)


@with_answer(marked_number_of)
def gsm8k(prompt: str, response: str, row: dict[str, Any]) -> float:
    """As last_number, but what is marked as the final answer counts before what comes last."""
    got, wanted = marked_number_of(response), marked_number_of(row["answer"])
    return float(got is not None and got == wanted)


@with_answer(parsed_text_of)
def math(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Equal to the answer as mathematics, by math-verify."""
    from math_verify import verify

    wanted = _parse_answer(row["answer"])
    if not wanted:
        raise ValueError(f"math-verify finds no mathematics in the reference answer {row['answer'][:80]!r}")
    return float(verify(wanted, _parse(response), timeout_seconds=None))


def regex(prompt: str, response: str, row: dict[str, Any], pattern: str = "", whole: bool = False) -> float:
    """The pattern, or where there is none the row's answer as one, is found in the response, or matches all of it."""
    search = re.fullmatch if whole else re.search
    return float(search(pattern or row["answer"], response.strip(), re.DOTALL) is not None)


def format(
    prompt: str, response: str, row: dict[str, Any], tags: Sequence[str] = ("think", "answer")
) -> dict[str, float]:
    """The response is one pair of each tag, in this order, with something in it, and nothing around them. A chat
    template may have opened the first. Parts: which tags stand there once."""
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
    """0 up to `free`, then evenly down to -1 at `most` and beyond."""
    if not 0 <= free < most:
        raise ValueError(f"got free = {free} and most = {most}; required is 0 <= free < most")
    if unit not in UNITS:
        raise ValueError(f"unit: got {unit!r}; choose one of {', '.join(UNITS)}")
    return -min(1.0, max(0.0, (UNITS[unit](response) - free) / (most - free)))


def _parse(text: str) -> list:
    """Without math-verify's own time limit, which is an alarm signal: the pool's wall holds in C code too."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of that
    return parse(text, parsing_timeout=None)  # type: ignore[arg-type]


def _parse_answer(text: str) -> list:
    """Of a reference, which may stand without the marks that tell mathematics from text."""
    text = text.rpartition("####")[2].strip()
    if "$" in text or "\\boxed" in text:
        return _parse(text)
    return _parse(f"${text}$") or _parse(text)


FUNCTIONS: dict[str, Callable[..., float | dict[str, float]]] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "gsm8k": gsm8k,
    "math": math,
    "regex": regex,
    "format": format,
    "length": length,
}
