"""Tests of the built-in reward functions, and of what is made of their results."""

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from rl.rewards.failure import RewardFailure
from rl.rewards.functions import FUNCTIONS
from rl.rewards.totals import add, count_samples, metrics_of, total
from rl.rewards.worker import RewardFunction, read_value, score


def rate(name: str, response: str, answer: str, prompt: str = "", **options: Any) -> Any:
    return FUNCTIONS[name](prompt, response, {"answer": answer}, **options)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42 ", 1.0),
        ("42.", "42", 0.0),
        ("042", "42", 0.0),
        ("4 2", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_exact_match(response: str, answer: str, reward: float) -> None:
    assert rate("exact_match", response, answer) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("so the answer is 42.", "6 * 7 = 42\n#### 42", 1.0),
        ("first 42, then 43", "#### 42", 0.0),
        ("$1,234.50 in all", "#### 1234.5", 1.0),
        ("it is 42.0", "#### 42", 1.0),
        ("x = -7", "#### -7", 1.0),
        ("x = 7", "#### -7", 0.0),
        ("42, as said", "#### 42", 1.0),
        ("3.14159", "#### 3", 0.0),
        ("I do not know", "#### 42", 0.0),
        ("", "#### 42", 0.0),
        ("no number", "none here either", 0.0),
    ],
)
@pytest.mark.parametrize("name", ["last_number", "gsm8k"])
def test_last_number(name: str, response: str, answer: str, reward: float) -> None:
    assert rate(name, response, answer) == reward


@pytest.mark.parametrize(
    ("response", "last", "marked"),
    [
        ("it is 42\n#### 42\nthat took 3 steps", 0.0, 1.0),
        ("#### 41\n#### 42 of 100", 0.0, 1.0),
        ("#### 42\n####", 1.0, 1.0),  # a mark without a number marks nothing
        ("#### Step 1\n5\n#### Step 2\nso \\boxed{42}, in 2 ways", 0.0, 1.0),  # a heading
        ("The answer is 42. It took 3 steps.", 0.0, 1.0),
        ("<think>7 or 8</think><answer>42</answer>, in 2 ways", 0.0, 1.0),
        (r"\boxed{42} (within \boxed{} as asked)", 1.0, 1.0),
        (r"\boxed{40 + 2}", 0.0, 0.0),  # nothing is computed, and no number is picked
        (r"\boxed{41 \text{ or } 42}", 1.0, 0.0),
        (r"\boxed{42!}", 1.0, 0.0),
        ("#### 42 thousand", 1.0, 0.0),
        ("#### 42 + 1", 0.0, 0.0),
        (r"\boxed{41}, no: \boxed{42}, found in 2 ways", 0.0, 1.0),
        (r"$\boxed{x = 42}$ in 2 ways", 0.0, 1.0),
        (r"\boxed{unclear} 42", 1.0, 0.0),
        ("42 is \\boxed{41}", 0.0, 0.0),
    ],
)
def test_what_is_marked_as_the_answer_counts_before_what_comes_last(response: str, last: float, marked: float) -> None:
    assert (rate("last_number", response, "#### 42"), rate("gsm8k", response, "#### 42")) == (last, marked)


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"$x^2 + 2x + 1$", r"$(x+1)^2$", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        (r"\boxed{(1, 2)}", "(1, 2)", 1.0),
        (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
        (r"\boxed{41}", "#### 42", 0.0),
        (r"\boxed{42}", "long reasoning with 7\n#### 42", 1.0),
        ("no idea", "42", 0.0),
        ("", "42", 0.0),
        ("\\frac{" * 50, "42", 0.0),
    ],
)
def test_math(response: str, answer: str, reward: float) -> None:
    assert rate("math", response, answer) == reward


@pytest.mark.parametrize("answer", ["", " ", "so\n####"])
def test_an_empty_reference_answer_is_an_error_of_the_data(answer: str) -> None:
    with pytest.raises(ValueError, match="the reference answer is empty"):
        rate("math", r"\boxed{1}", answer)


@pytest.mark.parametrize(
    ("response", "answer", "options", "reward"),
    [
        ("the answer: blue\n", "blue|red", {}, 1.0),
        ("the answer: blue\n", "blue|red", {"whole": True}, 0.0),
        (" red ", "blue|red", {"whole": True}, 1.0),
        ("a = 3", "", {"pattern": r"^\w = \d$"}, 1.0),
        ("first\nlast", "", {"pattern": "first.last", "whole": True}, 1.0),
        ("a = b", "", {"pattern": r"\d"}, 0.0),
    ],
)
def test_regex(response: str, answer: str, options: dict[str, Any], reward: float) -> None:
    assert rate("regex", response, answer, **options) == reward


@pytest.mark.parametrize(
    ("response", "parts"),
    [
        ("<think>so</think>\n<answer>4</answer>\n", (1.0, 1.0, 1.0)),
        ("<think>so</think> hm <answer>4</answer>", (0.0, 1.0, 1.0)),
        ("<think>so</think><answer>4</answer> or 5", (0.0, 1.0, 1.0)),
        ("<think>so</think><answer> </answer>", (0.0, 1.0, 1.0)),
        ("<answer>4</answer><think>so</think>", (0.0, 1.0, 1.0)),
        ("<think><think>so</think><answer>4</answer>", (0.0, 0.0, 1.0)),
        ("<think>so</think><answer>4", (0.0, 1.0, 0.0)),
        ("</think><think><answer>4</answer>", (0.0, 0.0, 1.0)),
        ("4", (0.0, 0.0, 0.0)),
        ("", (0.0, 0.0, 0.0)),
    ],
)
def test_format(response: str, parts: tuple[float, ...]) -> None:
    assert tuple(rate("format", response, "4").values()) == parts


def test_a_chat_template_may_have_opened_the_first_tag() -> None:
    response = "so</think><answer>4</answer>"
    assert rate("format", response, "4")["score"] == 0.0
    assert rate("format", response, "4", prompt="2+2? <think>\n") == {"score": 1.0, "think": 1.0, "answer": 1.0}
    assert rate("format", "<a>4</a>", "4", tags=["a"]) == {"score": 1.0, "a": 1.0}


@pytest.mark.parametrize(
    ("response", "options", "reward"),
    [
        ("abcd", {"most": 8, "free": 4}, 0.0),
        ("abcdef", {"most": 8, "free": 4}, -0.5),
        ("a" * 8, {"most": 8, "free": 4}, -1.0),
        ("a" * 99, {"most": 8}, -1.0),
        ("", {"most": 8}, 0.0),
        ("a bc def", {"most": 4, "unit": "words"}, -0.75),
    ],
)
def test_length(response: str, options: dict[str, Any], reward: float) -> None:
    assert rate("length", response, "", **options) == reward


@pytest.mark.parametrize(
    ("name", "response", "answer"),
    [
        ("exact_match", " yes\n", "yes"),
        ("last_number", "it is 1,234.50", "1234.5"),
        ("gsm8k", "#### -7 of 9", "-7"),
        ("gsm8k", "none", None),
        ("math", r"it is \boxed{\frac{2}{4}}", "1/2"),
        ("math", "nothing", None),
    ],
)
def test_the_final_answer_of_a_response(name: str, response: str, answer: str | None) -> None:
    assert FUNCTIONS[name].answer(response) == answer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (True, (1.0, {})),
        (3, (3.0, {})),
        (np.float32(0.5), (0.5, {})),
        (np.bool_(True), (1.0, {})),
        ({"a": 1, "b": 0.5}, (1.5, {"a": 1.0, "b": 0.5})),
        ({"a": 1, "score": 0.25}, (0.25, {"a": 1.0})),
        ({"score": 2}, (2.0, {})),
    ],
)
def test_what_a_function_may_return(value: Any, read: tuple[float, dict[str, float]]) -> None:
    assert read_value(value) == read


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", [1.0], 1j, math.nan, math.inf, 10**400, 1e31, {}, {"a": None}, {1: 1.0}, {"": 1.0}),
        *({"a": math.nan}, {str(n): 1.0 for n in range(100)}, {"n" * 101: 1.0}, "x" * 10_000_000, np.zeros(3)),
    ],
    ids=range(17),
)
def test_what_it_may_not(value: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)) as caught:
        read_value(value)
    assert len(str(caught.value)) < 300


def test_the_weighted_sum_and_its_parts() -> None:
    def shape(prompt: str, response: str, row: dict[str, Any], scale: float) -> dict[str, float]:
        return {"score": scale, "words": 2.0}

    functions = [
        RewardFunction("exact_match", 1.0, FUNCTIONS["exact_match"], {}),
        RewardFunction("shape", 0.5, shape, {"scale": 3.0}),
        RewardFunction("gsm8k", 0.0, FUNCTIONS["gsm8k"], {}),
    ]
    result = score(functions, "", "42", {"answer": "42"}, answer_of="exact_match")
    parts = {"exact_match": 1.0, "shape": 3.0, "shape/words": 2.0, "gsm8k": 1.0}
    assert result == {"status": "ok", "score": 2.5, "parts": parts, "answer": "42", "failure": None}
    assert score(functions, "", "42", {"answer": "42"})["answer"] is None
    assert score(functions, "", "42.0", {"answer": "42"}, answer_of="exact_match")["answer"] == "42.0"
    assert score(functions, "", "42.0", {"answer": "42"}, answer_of="gsm8k")["answer"] == "42"
    assert score(functions, "", "42", {"answer": "42"}, answer_of="shape")["answer"] is None  # it cannot tell


def test_a_sample_of_which_one_function_fails_has_none_of_them() -> None:
    def broken(prompt: str, response: str, row: dict[str, Any]) -> float:
        return row["missing"]

    exact_match = RewardFunction("exact_match", 1.0, FUNCTIONS["exact_match"], {})
    functions = [exact_match, RewardFunction("broken", 1.0, broken, {})]
    result = score(functions, "", "42", {"answer": "42"})
    place = f"{__file__}:{broken.__code__.co_firstlineno + 1}"
    failure = RewardFailure("broken", "KeyError", "KeyError: 'missing'", place)
    assert str(failure) == f"the reward function broken failed at {place}: KeyError: 'missing'"
    parts = {"exact_match": 0.0, "broken": 0.0}
    assert result == {"status": "error", "score": 0.0, "parts": parts, "answer": None, "failure": asdict(failure)}


def test_totals_are_means_over_all_samples_and_counts_of_failures() -> None:
    first = [
        {"status": "ok", "parts": {"math": 1.0, "math/steps": 4.0}},
        {"status": "timeout", "parts": {"math": 0.0}},
        {"status": "crash", "parts": {"math": 0.0}},
    ]
    second = [{"status": "error", "parts": {"math": 0.0}}]
    sums = [total(first), total(second), total([])]
    expected = {"reward/math": 0.25, "reward/math/steps": 4.0, "reward/timeouts": 2.0, "reward/errors": 1.0}
    assert metrics_of(add(sums)) == expected
    assert metrics_of(total([])) == {"reward/timeouts": 0.0, "reward/errors": 0.0}
    assert (count_samples(add(sums)), count_samples(total([])), count_samples({})) == ((4, 3), (0, 0), (0, 0))
