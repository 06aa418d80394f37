"""A simulated user who asks twice, whatever the model says, for tests of conversations on a GPU."""

from typing import Any


class Doubt:
    def reset(self, row: dict[str, Any]) -> None:
        self.answer, self.said = row["answer"].rpartition("#### ")[2], ""
        self.num_messages = 0

    def step(self, message: str) -> tuple[str, bool]:
        self.num_messages += 1
        self.said = message
        return "Are you sure? Check each step, and give the final number again.", self.num_messages == 3

    def reward(self) -> float:
        return float(self.answer in self.said)
