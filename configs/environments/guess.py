"""A number-guessing game. In configs/tiny_guess.yaml, a tiny model learns to halve the interval with each guess."""

from typing import Any


class Guess:
    """One game. Public methods are tools, and `done` ends the conversation."""

    def reset(self, row: dict[str, Any]) -> None:
        self.secret = row["secret"]
        self.done = False

    def guess(self, n: int) -> str:
        """Guess the secret number."""
        self.done = n == self.secret
        return "right" if self.done else "higher" if n < self.secret else "lower"

    def reward(self) -> float:
        return float(self.done)
