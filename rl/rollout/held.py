"""The groups that the actors hold between rounds and updates: unfinished ones, and finished ones that wait."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from rl.common.text import count_of
from rl.config.schema import ConfigError
from rl.data.batch import Batch
from rl.data.group_file import State, StoredGroup, groups_from_bytes, groups_to_bytes
from rl.rollout.collect import Carried, Gathered, Results
from rl.rollout.schedule import ScheduleState


@dataclass
class HeldGroups:
    """Groups by their numbers in the schedule. All actors know the owners; each holds only its own groups."""

    owners: dict[int, int] = field(default_factory=dict)  # indices into the actors
    groups: dict[int, Batch] = field(default_factory=dict)
    results: dict[int, Results] = field(default_factory=dict)  # of the reward functions
    counts: Counter[str] = field(default_factory=Counter)  # metrics of the rounds since the last batch was taken

    def to_continue(self, numbers: Sequence[int]) -> Carried:
        own = {position: self.groups[number] for position, number in enumerate(numbers) if number in self.groups}
        results = {position: self.results[numbers[position]] for position in own}
        return Carried([self.owners[number] for number in numbers], own, results)

    def add(self, numbers: Sequence[int], gathered: Gathered) -> None:
        """Take over the groups of a round, which sampled these numbers."""
        self.owners |= dict(zip(numbers, gathered.owners, strict=True))
        for position, group in gathered.groups.items():
            number, new = numbers[position], gathered.scores[position]
            pairs = zip(self.results.get(number, [None] * len(new)), new, strict=True)
            self.groups[number] = group
            self.results[number] = [before if after is None else after for before, after in pairs]

    def drop_others(self, kept: Collection[int]) -> None:
        """Drop all groups but these."""
        for held in (self.owners, self.groups, self.results):
            for number in held.keys() - kept:
                del held[number]

    def to_bytes(self) -> bytes:
        """Return this actor's groups as the bytes of a file."""
        stored = []
        for number, group in sorted(self.groups.items()):
            state: State = "queued" if group.ended is None else "carried"
            stored.append(StoredGroup(number, group, self.results[number], state))
        return groups_to_bytes(stored)

    def copy(self) -> "HeldGroups":
        return HeldGroups(dict(self.owners), dict(self.groups), dict(self.results), Counter(self.counts))

    def check(self, state: ScheduleState, actor: int) -> None:
        """Raise ValueError if these are not the groups of a schedule that this actor holds."""
        carried, finished = set(state.carried), state.finished
        own = {number for number, owner in self.owners.items() if owner == actor}
        if self.owners.keys() != carried | finished or self.groups.keys() != own:
            raise ValueError("the schedule, the list of owners and the files of groups do not fit together")
        if any((group.ended is None) != (number in finished) for number, group in self.groups.items()):
            raise ValueError("the schedule and the files of groups differ on which groups are finished")

    def check_lengths(self, max_new_tokens: int) -> None:
        """Raise ConfigError if a response that a resumed run continues is too long for its settings."""
        for group in self.groups.values():
            if group.ended is None:
                continue
            longest = int(group.conversation_lengths[~group.ended[group.starts_conversation]].max())
            if longest >= max_new_tokens:
                raise ConfigError(
                    f"rollout.max_new_tokens: got {max_new_tokens}, but a response that the checkpoint continues has "
                    f"{count_of(longest, 'token')} already; set it to at least {longest + 1}"
                )

    @staticmethod
    def from_files(
        owners: dict[int, int], files: Iterable[bytes], num_actors: int, counts: dict[str, int] | None = None
    ) -> "HeldGroups":
        """Return the groups of saved files. Actor i takes those of the saved actors i, i + num_actors, and so on."""
        stored = [group for data in files for group in groups_from_bytes(data)]
        return HeldGroups(
            {number: owner % num_actors for number, owner in owners.items()},
            {group.number: group.batch for group in stored},
            {group.number: group.results or [None] * group.batch.num_conversations for group in stored},
            Counter(counts),
        )
