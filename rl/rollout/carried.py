"""Serve the unfinished groups of an actor to the engines that continue them.

    engine's lead --FetchGroup--> CarriedGroups, on the owner --CarriedGroup--> engine's lead

They are served in a thread of their own. The main thread may be training. The mailbox's I/O thread must keep reading:
if two of them sent each other large groups, both would wait for ever.
"""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.data.batch import Batch
from rl.rollout.conversations import Record
from rl.world.messages import Letter, Message
from rl.world.world import World


@dataclass(frozen=True)
class FetchGroup(Message):
    """Ask the owner of a carried group for its responses."""

    batch: int
    position: int


@dataclass(frozen=True)
class CarriedGroup(Message):
    """Answer FetchGroup. The payload is the group as a Batch."""

    batch: int
    position: int
    records: list[Record | None] = field(default_factory=list)  # what the batch does not tell of conversations


class CarriedGroups:
    """The groups of one actor that engines will fetch."""

    def __init__(self, world: World):
        self._world = world
        self._changed = threading.Condition()
        self._groups: dict[tuple[int, int], tuple[Batch, list[Record | None]]] = {}  # by batch and position
        self._asked: deque[Letter[FetchGroup]] = deque()
        world.mail.on(FetchGroup, self._on_fetch)
        threading.Thread(target=self._serve, name="carried groups", daemon=True).start()

    def offer(
        self, batch: int, groups: Mapping[int, Batch], results: Mapping[int, list[dict[str, Any] | None]] | None = None
    ) -> None:
        """Let engines fetch these groups, which are given by position. The `results` of conversations that go on are
        their records."""
        with self._changed:
            for position, group in groups.items():
                found = (results or {}).get(position, [])
                records = [result.get("record") if result is not None else None for result in found]
                self._groups[batch, position] = group, records
            self._changed.notify()

    def _on_fetch(self, letter: Letter[FetchGroup]) -> None:
        with self._changed:
            self._asked.append(letter)
            self._changed.notify()

    def _serve(self) -> None:
        try:
            while True:
                letter, (group, records) = self._next()
                asked = letter.message
                answer = CarriedGroup(asked.batch, asked.position, records)
                self._world.mail.send(letter.source, answer, payload=group.to_bytes())
        except BaseException as error:
            self._world.faults.fail_in_background(error, "rollout", self._world.step)

    def _next(self) -> tuple[Letter[FetchGroup], tuple[Batch, list[Record | None]]]:
        """Wait for a question that can be answered. An engine may ask before this actor has started the batch."""
        with self._changed:
            while True:
                for index, letter in enumerate(self._asked):
                    group = self._groups.pop((letter.message.batch, letter.message.position), None)
                    if group is not None:
                        del self._asked[index]
                        return letter, group
                self._changed.wait()
