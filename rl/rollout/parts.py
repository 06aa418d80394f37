"""Cut a batch into parts while it is sampled, so that actors can train on the first ones early (actor.overlap).

Groups are ordered by their longest response, since engines end short responses first. A part is a quarter of the groups
that are left, and at least one group per actor:

    16 groups, 2 actors:   4 | 3 | 3 | 2 | 2 | 2      the last part waits for the whole batch

Parts get smaller, so that few groups are left when the last response ends. Responses of the maximum length end last,
so a part with such a response is joined with all that follow it. Order and cuts depend on the lengths of responses
alone, not on the time at which engines end them.

This module has no torch and no messages.
"""

from bisect import insort
from collections.abc import Sequence

PARTS_OF_REST = 4


class Parts:
    """The parts of one batch. A length is the number of tokens of a group's longest response."""

    def __init__(self, num_groups: int, num_actors: int, max_length: int):
        """`max_length` is the maximum length of a response."""
        self._num_left, self._num_actors, self._max_length = num_groups, num_actors, max_length
        self._bounds = dict.fromkeys(range(num_groups), 0)  # lowest possible lengths of the groups that are not whole
        self._whole: list[tuple[int, int]] = []  # length and position of groups that are whole and in no part; sorted

    @property
    def is_whole(self) -> bool:
        """Return whether the whole batch is known."""
        return not self._bounds

    def follow(self, positions: Sequence[int], lengths: Sequence[int]) -> None:
        """Learn that these groups will have at least these lengths."""
        for position, length in zip(positions, lengths, strict=True):
            if position in self._bounds:
                self._bounds[position] = max(length, self._bounds[position])

    def add(self, position: int, length: int) -> None:
        """Learn that a group is whole, and its length."""
        del self._bounds[position]
        insort(self._whole, (length, position))

    def take_next(self) -> list[int] | None:
        """Return the groups of the next part, or None if they are not known yet, or only the last part is left."""
        size = max(self._num_actors, -(-self._num_left // PARTS_OF_REST))
        if self._num_left < size + self._num_actors or len(self._whole) < size:
            return None
        longest, _ = self._whole[size - 1]
        if longest >= min(self._bounds.values(), default=self._max_length):
            return None
        part, self._whole = self._whole[:size], self._whole[size:]
        self._num_left -= size
        return [position for _, position in part]
