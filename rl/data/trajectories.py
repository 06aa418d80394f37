"""Read and write the files between the phases rollout and update. Each holds one group, as rl/data/group_file.py says.

A file gets its name when it is whole, so a kill leaves only whole files. The facts about its step hold its provenance:
everything that decides what the group is, by names that a user knows, such as rollout.temperature. Groups are used only
where the provenance is the same. rl/data/trajectory_files.py names the files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rl.common.files import write_atomically
from rl.data.batch import Batch
from rl.data.group_file import State, StoredGroup, groups_from_bytes, groups_to_bytes, step_from_bytes
from rl.data.trajectory_files import GroupKey

MAX_SHOWN = 80  # characters of a value in a message
RESULT = {"parts", "status", "answer"}  # of the reward functions for a sample
# How a conversation ended, and counts of its calls; or the record of one that goes on, whose status is "open".
RESULT_OF_CONVERSATION = {"ending", "counts", "record"}

Provenance = dict[str, Any]  # what decides the content of a group, by name; JSON can hold it


@dataclass(frozen=True)
class Trajectory:
    """A group as an engine has delivered it at the end of a round."""

    batch: Batch
    scores: list[dict[str, Any] | None]  # by sample; None: not scored in this round
    engine: str
    num_preemptions: int
    num_kept_tokens: int
    num_read_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def has_score(self) -> bool:
        """Whether the reward functions did not fail for all samples that they got."""
        found = [score for score in self.scores if score is not None and score["status"] != "open"]
        return not found or any(score["status"] == "ok" for score in found)


@dataclass(frozen=True)
class _Facts:
    """The facts about a step in a file."""

    step: int
    provenance: Provenance
    engine: str
    num_preemptions: int
    num_kept_tokens: int
    num_read_tokens: int = 0  # files of earlier versions lack the last two
    num_cached_tokens: int = 0


def write_trajectory(folder: Path, key: GroupKey, group: Trajectory, step: int, provenance: Provenance) -> None:
    """Write a group to its file in a step's folder."""
    state: State = "queued" if group.batch.ended is None else "carried"
    numbers = (group.num_preemptions, group.num_kept_tokens, group.num_read_tokens, group.num_cached_tokens)
    facts = _Facts(step, provenance, group.engine, *numbers)
    data = groups_to_bytes([StoredGroup(key.number, group.batch, group.scores, state)], vars(facts))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / key.file, data)  # a crash of the machine may damage it, which a reader notices


def read_trajectory(key: GroupKey, data: bytes | bytearray) -> Trajectory:
    """Return the group of a file. Raise ValueError, which says what is wrong, if the file is damaged or is not that of
    this group."""
    facts, stored = _facts(data), groups_from_bytes(data)
    if [group.number for group in stored] != [key.number]:
        raise ValueError(f"it must hold one group, number {key.number}, as its name says")
    (group,) = stored
    results = group.results or [None] * group.batch.num_conversations
    for result in results:
        if result is not None and not (RESULT <= result.keys() <= RESULT | RESULT_OF_CONVERSATION):
            raise ValueError(
                f"the results of its reward functions must have {', '.join(sorted(RESULT))}, and perhaps "
                f"{', '.join(sorted(RESULT_OF_CONVERSATION))}"
            )
    numbers = (facts.num_preemptions, facts.num_kept_tokens, facts.num_read_tokens, facts.num_cached_tokens)
    return Trajectory(group.batch, results, facts.engine, *numbers)


def read_provenance(path: Path) -> Provenance:
    """Return the provenance of a file, whose tensors are not read. Raise OSError or ValueError if that fails."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
    return _facts(length + header).provenance


def _facts(data: bytes | bytearray) -> _Facts:
    try:
        return msgspec.convert(step_from_bytes(data), _Facts)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f'the entry "step" of its metadata is damaged: {error}') from error


def compare_provenance(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return what differs, by name: what a file has, and what this run needs."""
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    return [f"{name} is {_show(found.get(name))} there and {_show(wanted.get(name))} here" for name in names]


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
