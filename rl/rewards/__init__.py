"""Rules that score a response: `(response, answer) -> float`, chosen by name through reward.function."""

import re
from collections.abc import Callable

from rl.config import ConfigError

# A minus between digits is a range, and a comma is part of a number only before exactly three digits.
NUMBER = re.compile(r"(?:(?<!\d)-)?\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|(?:(?<!\d)-)?\d+(?:\.\d+)?")


def exact_match(response: str, answer: str) -> float:
    return float(response.strip() == answer.strip())


def last_number(response: str, answer: str) -> float:
    """The last number of the response equals the last number of the answer (GSM8K's answers end in '#### 42')."""
    got, wanted = _last_number(response), _last_number(answer)
    return float(got is not None and got == wanted)


def _last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


REWARDS: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "last_number": last_number}


def find_reward(name: str) -> Callable[[str, str], float]:
    if name not in REWARDS:
        raise ConfigError(f"reward.function: got {name!r}; choose one of {', '.join(REWARDS)}")
    return REWARDS[name]
