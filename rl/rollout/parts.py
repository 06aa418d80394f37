"""Cut a batch into parts while it is sampled, so that actors can train on the first ones early (actor.overlap).

Groups are ordered by their longest response, since engines end short responses first. If engines cannot sample all
groups at once, the stream is cut into windows of as many groups as they can, and each window is ordered. A part is a
quarter of the groups that are left, and at least one group per actor:

    16 groups, 2 actors:   4 | 3 | 3 | 2 | 2 | 2      the last part waits for the whole batch

Parts get smaller, so that few groups are left when the last response ends. In the last window, responses of the maximum
length end last, so a part with such a response is joined with all that follow it. Order and cuts depend on the lengths
of responses alone, not on the time at which engines end them.

This module has no torch and no messages.
"""

from bisect import insort
from collections.abc import Sequence

PARTS_OF_REST = 4


class Parts:
    """The parts of one batch. A length is the number of tokens of a group's longest response."""

    def __init__(self, num_groups: int, num_actors: int, max_length: int, num_at_once: int):
        """`max_length` is the maximum length of a response. Engines sample `num_at_once` groups at the same time."""
        self._num_left, self._num_actors, self._num_at_once = num_groups, num_actors, num_at_once
        self._end = ((num_groups - 1) // num_at_once, max_length)  # no part reaches this place in the order
        self._bounds = dict.fromkeys(range(num_groups), 0)  # lowest possible lengths of the groups that are not whole
        self._whole: list[tuple[int, int, int]] = []  # window, length, position of whole groups in no part yet; sorted

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
        insort(self._whole, (position // self._num_at_once, length, position))

    def take_next(self) -> list[int] | None:
        """Return the groups of the next part, or None if they are not known yet, or only the last part is left."""
        size = max(self._num_actors, -(-self._num_left // PARTS_OF_REST))
        if self._num_left < size + self._num_actors or len(self._whole) < size:
            return None
        window, length, _ = self._whole[size - 1]
        if (window, length) >= self._first_place_left():
            return None
        part, self._whole = self._whole[:size], self._whole[size:]
        self._num_left -= size
        return [position for _, _, position in part]

    def _first_place_left(self) -> tuple[int, int]:
        """Return the first place in the order that a group may have which is not whole."""
        places = ((position // self._num_at_once, length) for position, length in self._bounds.items())
        return min(places, default=self._end)
