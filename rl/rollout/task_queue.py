"""Tasks that wait for an engine. Some belong to one engine, which has their KV cache."""

from collections import deque
from itertools import chain
from typing import Generic, TypeVar

T = TypeVar("T")


class TaskQueue(Generic[T]):
    """An engine gets its own tasks first, then those that belong to none, and those of others if nothing else is
    left. Among these, the order is that in which they were added."""

    def __init__(self) -> None:
        self._of_none = deque[T]()
        self._of_engine: dict[int, deque[T]] = {}

    def __len__(self) -> int:
        return len(self._of_none) + sum(map(len, self._of_engine.values()))

    @property
    def any(self) -> T | None:
        """One of the tasks, if there are any."""
        return next(chain(self._of_none, *self._of_engine.values()), None)

    def add(self, task: T, engine: int | None) -> None:
        queue = self._of_none if engine is None else self._of_engine.setdefault(engine, deque())
        queue.append(task)

    def take(self, engine: int, count: int) -> list[T]:
        """Take the next tasks for an engine. There must be so many."""
        taken: list[T] = []
        while len(taken) < count:
            queue = self._of_engine.get(engine) or self._of_none or max(self._of_engine.values(), key=len)
            taken.append(queue.popleft())
        return taken
