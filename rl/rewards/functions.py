"""The built-in reward functions. Each takes the prompt, the response and the row of the data file. The row's `answer`
is the text of the column that data.answer_key names. reward.options sets further parameters.

A function may have an attribute `answer`, which extracts the final answer of a response as text. It should return equal
texts for equal answers. Its attribute `check`, if it has one, gets the options before a run starts, and raises
ValueError if the function cannot work with them on this machine.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rl.rewards.answers import is_same, text_of
from rl.rewards.code import code
from rl.rewards.extract import last_number_of, marked_number_of

UNITS: dict[str, Callable[[str], int]] = {"characters": len, "words": lambda text: len(text.split())}


def with_answer(answer: Callable[[str], str | None]) -> Callable[[Callable], Callable]:
    """Return a decorator that sets the attribute `answer` of a reward function."""

    def decorate(function: Callable) -> Callable:
        function.answer = answer  # type: ignore[attr-defined]
        return function

    return decorate


@with_answer(str.strip)
def exact_match(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the response equals the answer, apart from surrounding whitespace."""
    return float(response.strip() == row["answer"].strip())


@with_answer(last_number_of)
def last_number(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the last number of the response equals the last number of the answer."""
    got, wanted = last_number_of(response), last_number_of(row["answer"])
    return float(got is not None and got == wanted)


@with_answer(marked_number_of)
def gsm8k(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the number marked as the final answer is right. Without a mark, the last number counts."""
    got, wanted = marked_number_of(response), marked_number_of(row["answer"])
    return float(got is not None and got == wanted)


@with_answer(text_of)
def math(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return 1 if the response's final answer equals the reference answer, as mathematics or as words."""
    return float(is_same(row["answer"], response, prompt))


def regex(prompt: str, response: str, row: dict[str, Any], pattern: str = "", whole: bool = False) -> float:
    """Return 1 if the response contains the pattern (by default the answer), or with `whole` matches it fully."""
    search = re.fullmatch if whole else re.search
    return float(search(pattern or row["answer"], response.strip(), re.DOTALL) is not None)


def format(
    prompt: str, response: str, row: dict[str, Any], tags: Sequence[str] = ("think", "answer")
) -> dict[str, float]:
    """Return 1 if the response consists of one non-empty pair of each tag, in this order, and nothing else.
    The chat template may have opened the first tag. The parts say which tags appear exactly once."""
    if isinstance(tags, str) or not tags or not all(isinstance(tag, str) and tag for tag in tags):
        raise ValueError(f"tags: got {tags!r}; it must be a list of names, such as [think, answer]")
    opened = f"<{tags[0]}>"
    text = opened + response if prompt.rstrip().endswith(opened) else response
    rest, is_filled, parts = text.strip(), True, {}
    for tag in tags:
        begin, end = f"<{tag}>", f"</{tag}>"
        parts[tag] = float(text.count(begin) == text.count(end) == 1 and text.find(begin) < text.find(end))
        inside, _, after = rest.removeprefix(begin).partition(end)
        is_filled = is_filled and rest.startswith(begin) and bool(inside.strip())
        rest = after.strip()
    return {"score": float(is_filled and not rest and all(parts.values())), **parts}


def environment(prompt: str, response: str, row: dict[str, Any]) -> float | dict[str, float]:
    """Return the reward that the environment of a conversation, or a rollout function, has given."""
    return row["environment_reward"]


environment.check = lambda: None  # type: ignore[attr-defined]  # nothing can be tried without a conversation


def length(
    prompt: str, response: str, row: dict[str, Any], most: int, free: int = 0, unit: str = "characters"
) -> float:
    """Return 0 up to a length of `free`. Beyond it, fall linearly to -1 at `most`, and stay there."""
    if not 0 <= free < most:
        raise ValueError(f"got free = {free} and most = {most}; they must satisfy 0 <= free < most")
    if unit not in UNITS:
        raise ValueError(f"unit: got {unit!r}; choose one of {', '.join(UNITS)}")
    return -min(1.0, max(0.0, (UNITS[unit](response) - free) / (most - free)))


FUNCTIONS: dict[str, Callable[..., float | dict[str, float]]] = {
    function.__name__: function
    for function in (exact_match, last_number, gsm8k, math, code, regex, format, length, environment)
}
