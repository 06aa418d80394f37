"""Send samples of different prompts to the leader, which writes them to TensorBoard.

The actors own the groups of a batch, and know the scores of their parts. The leader knows the reference answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.config.schema import MetricsConfig
from rl.data.batch import Batch
from rl.data.prompts import PromptStream
from rl.placement.roles import Placement
from rl.report.samples import ReportedSample, shows_samples
from rl.rollout.held import HeldGroups
from rl.world.messages import Message
from rl.world.world import World


@dataclass(frozen=True)
class ShownSample(Message):
    """Deliver the first sample of a group to the leader. The payload is the sample as a Batch."""

    place: int  # of the group in its batch
    result: dict[str, Any] | None  # of the reward functions: parts and status
    rewards: list[float]  # of all samples of the group
    awaited = "samples of a batch from the other actors"


class SampleExchange:
    """Collect the first samples of the first metrics.num_samples groups of a batch, every metrics.samples_interval
    steps. All actors call `collect`."""

    def __init__(self, world: World, placement: Placement, metrics: MetricsConfig):
        self._world, self._metrics = world, metrics
        self._leader, self._actor = placement.leader, placement.actors.index(world.rank)
        self.samples: list[ReportedSample] = []  # of the last batch, on the leader; empty if no samples are shown

    def collect(self, numbers: Sequence[int], held: HeldGroups, stream: PromptStream | None) -> None:
        """Send this actor's samples of a batch. `numbers` are the groups of the batch in the schedule."""
        self.samples = []
        if not shows_samples(self._metrics, self._world.step):
            return
        mail, shown = self._world.mail, numbers[: self._metrics.num_samples]
        own = [place for place, number in enumerate(shown) if held.owners[number] == self._actor]
        letters = {place: self._describe(place, shown[place], held) for place in own}
        if mail.rank != self._leader:
            for message, sample in letters.values():
                mail.send(self._leader, message, payload=sample.to_bytes())
            return
        while len(letters) < len(shown):
            letter = mail.receive(ShownSample)
            letters[letter.message.place] = letter.message, Batch.from_bytes(letter.payload)
        assert stream is not None, "the leader has the prompts"
        for place, number in enumerate(shown):
            message, sample = letters[place]
            self.samples.append(ReportedSample(sample, stream.at(number).answer, message.result, message.rewards))

    def _describe(self, place: int, number: int, held: HeldGroups) -> tuple[ShownSample, Batch]:
        group, results = held.groups[number], held.results[number]
        # A conversation may have several sequences.
        num_first = 1 if group.samples is None else int((group.samples == group.samples[0]).sum())
        rewards = group.rewards[group.starts_conversation].tolist()
        result = results[0]
        known = None if result is None else {name: result[name] for name in ("parts", "status")}
        return ShownSample(place, known, rewards), group.select(range(num_first))
