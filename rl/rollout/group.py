"""One group on the engine that samples it in this round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.data.batch import Batch
from rl.environments.protocol import Ended
from rl.rollout.conversations import Record, RecordedConversation, pack_conversations, unpack_conversations
from rl.rollout.dispatch import Task
from rl.rollout.responses import Response, pack_group, unpack_group


@dataclass
class Group:
    """The responses of one prompt in this round."""

    task: Task
    attempt: int = 0  # number of engines that failed while sampling it; scores of earlier attempts are dropped
    carried: bytes | bytearray = b""  # the responses from earlier rounds, once their owner has sent them
    records: list[Record | None] = field(default_factory=list)  # of carried conversations, by sample
    responses: list[Response] = field(default_factory=list)  # by sample, once requests were added
    conversations: list[RecordedConversation] = field(default_factory=list)  # instead of responses
    running: set[int] = field(default_factory=set)  # samples that still have to be ended or cut
    waiting: set[int] = field(default_factory=set)  # of these: wait for tools, not for the engine
    writing: set[int] = field(default_factory=set)  # of these: the engine samples a turn
    late: dict[int, Ended] = field(default_factory=dict)  # of these: have ended, and leave when the turn is sampled
    scores: dict[int, dict[str, Any]] = field(default_factory=dict)  # of the responses that ended in this round
    num_unscored: int = 0
    num_preemptions: int = 0
    num_kept_tokens: int = 0
    num_read_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def samples(self) -> Sequence[Response | RecordedConversation]:
        return self.conversations or self.responses

    @property
    def is_sampled(self) -> bool:
        return bool(self.samples) and not self.running

    @property
    def occupancy(self) -> float:
        """Return how much room it needs in the engine, compared with a group of the training. A carried group often has
        few responses left, and would otherwise keep new groups out. So would conversations that wait for tools."""
        room = self.task.sampling.room
        if self.conversations:
            return room * len(self.running - self.waiting) / len(self.conversations)
        is_partial = self.task.is_carried and self.responses
        return room * len(self.running) / len(self.responses) if is_partial else room

    def least_length(self, progress: Mapping[str, int]) -> int:
        """Return how long its longest response will be at least. `progress` is that of the engine, whose responses get
        at least one more token."""
        if self.conversations:
            return max(conversation.num_tokens for conversation in self.conversations)
        lengths = [len(response.tokens) for response in self.responses]
        for sample in self.running:
            lengths[sample] += progress[self.request_id(sample)] + 1
        return max(lengths, default=0)

    def request_id(self, sample: int) -> str:
        return f"{self.task.batch}/{self.task.position}/{sample}"

    def begin(self, are_conversations: bool = False) -> None:
        """Begin the round: continue the carried responses or conversations, or start new ones."""
        samples, carried = (
            range(self.task.sampling.num_samples),
            Batch.from_bytes(self.carried) if self.carried else None,
        )
        if are_conversations:
            self.conversations = [RecordedConversation() for _ in samples]
            if carried is not None:
                self.conversations = unpack_conversations(carried, self.records)
        else:
            self.responses = [Response() for _ in samples] if carried is None else unpack_group(carried)
        self.running = {sample for sample, response in enumerate(self.samples) if not response.is_ended}

    def count_read_tokens(self) -> None:
        """Count what the engine reads of its responses: the prompt, and what was sampled in earlier rounds."""
        prompt = len(self.task.prompt.tokens)
        self.num_read_tokens += sum(prompt + len(self.responses[sample].tokens) for sample in self.running)

    def take_score(self, sample: int, result: dict[str, Any]) -> None:
        """Take the result of the reward functions for a sample."""
        self.scores[sample] = self.scores.get(sample, {}) | result
        self.samples[sample].reward = result["score"]
        self.num_unscored -= 1

    def again(self) -> "Group":
        """Return the group as it was before this round, for another engine."""
        return Group(self.task, self.attempt + 1, self.carried, self.records)

    def pack(self) -> Batch:
        prompt, position = self.task.prompt.tokens, self.task.position
        if self.conversations:
            return pack_conversations(prompt, position, self.conversations)
        return pack_group(prompt, position, self.responses)

    def result_of(self, sample: int) -> dict[str, Any] | None:
        """Return the result of a sample that was scored in this round, or the record of a conversation that goes on."""
        if sample in self.scores:
            names = ("parts", "status", "answer", "ending", "counts")
            return {name: self.scores[sample][name] for name in names if name in self.scores[sample]}
        if self.conversations and not self.conversations[sample].is_ended:
            return {"parts": {}, "status": "open", "answer": None, "record": self.conversations[sample].record}
        return None
