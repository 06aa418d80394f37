"""The rules that score a response."""

import pytest

from rl.config import ConfigError
from rl.rewards import REWARDS, exact_match, find_reward, last_number


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
    assert exact_match(response, answer) == reward


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
def test_last_number(response: str, answer: str, reward: float) -> None:
    assert last_number(response, answer) == reward


def test_find_reward() -> None:
    assert find_reward("exact_match") is exact_match
    assert find_reward("last_number") is last_number
    with pytest.raises(ConfigError) as caught:
        find_reward("last_word")
    assert str(caught.value).startswith("reward.function: got 'last_word'; choose one of")
    assert all(name in str(caught.value) for name in REWARDS)
