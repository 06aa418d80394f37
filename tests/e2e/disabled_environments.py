"""The environments of configs/environments without the information that the second call needs."""

from configs.environments.guess import Guess


def add(a: int, b: int) -> int:
    """Add two numbers."""
    raise RuntimeError("it is off")


class GuessWithoutHints(Guess):
    """It does not say in which direction the secret is."""

    def guess(self, n: int) -> str:
        """Guess the secret number."""
        super().guess(n)
        return "right" if self.done else "no"
