"""What a lead records of conversations, and what it samples for them within the limits."""

import random
from dataclasses import replace

import pytest

from rl.config.load import load_config
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.prompts import Prompt, sample_seed, turn_seed
from rl.environments.protocol import Ask, Close, Ended, Open, SampledTurn, ToServer
from rl.rollout.conversations import RecordedConversation, RecordedTurn, pack_conversations, unpack_conversations
from rl.rollout.dispatch import Sampling, Task
from rl.rollout.engine import Completion, Request
from rl.rollout.group import Group
from rl.rollout.responses import Response
from rl.rollout.turns import Conversations

STOP = 9
PROMPT = Prompt(3, 1, "text", "42", [1, 2], {"prompt": "text"})


def written(*tokens: int, version: int = 5, noise: bytes = b"", is_ended: bool = True) -> Response:
    logprobs = [-token / 8 for token in tokens]
    return Response(list(tokens), logprobs, [version] * len(tokens), noise, is_ended)


def settings(*overrides: str) -> Config:
    return load_config(None, ["environment.rollout=a.py:f", "reward.function=environment", *overrides])


class Lead:
    """An engine's lead with one group, whose engine and conversation server are lists."""

    def __init__(self, *overrides: str, num_samples: int = 1, per_round: int = 0):
        config = settings(*overrides)
        self.sent: list[ToServer] = []
        self.requests: list[Request] = []
        sampling = Sampling(num_samples, 1.0, config.rollout.max_new_tokens, max_tokens_per_round=per_round)
        self.group = Group(Task(7, 0, 0, PROMPT, sampling, version=5))
        self.conversations = Conversations(self.sent.extend, self.requests.extend, config, run_seed=0)
        self.begin()

    def begin(self) -> None:
        self.group.begin(are_conversations=True)
        self.conversations.begin([self.group])

    def ask(self, turn: int, prompt: list[int], max_tokens: int = 0, sample: int = 0) -> bool:
        key = (7, 0, sample, 0)
        return self.conversations.ask(self.group, Ask(key, turn, prompt, max_tokens, [{"turn": turn}], {"calls": turn}))

    def sample(self, *tokens: int, is_cut: bool = False, noise: bytes = b"", sample: int = 0) -> bool:
        completion = Completion(self.requests[-1].id, list(tokens), [-0.5] * len(tokens), is_cut, noise)
        return self.conversations.take(self.group, sample, completion)

    def carry(self) -> "Lead":
        """Return a lead that goes on with this group in the next round."""
        other = Lead.__new__(Lead)
        other.sent, other.requests, other.conversations = self.sent, self.requests, self.conversations
        other.group = Group(self.group.task, carried=self.group.pack().to_bytes())
        samples = range(len(self.group.conversations))
        other.group.records = [(self.group.result_of(sample) or {}).get("record") for sample in samples]
        other.begin()
        return other


def test_turns_that_go_on_become_one_sequence_with_observations_that_are_not_trained_on() -> None:
    conversation = RecordedConversation(
        [RecordedTurn([1, 2], written(3, STOP)), RecordedTurn([1, 2, 3, STOP, 6, 7], written(4, STOP, version=6))],
        is_ended=True,
    )
    conversation.reward = 0.5
    batch = pack_conversations([1, 2], 4, [conversation])
    assert batch.tokens.tolist() == [1, 2, 3, STOP, 6, 7, 4, STOP]
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert batch.turns is not None and batch.turns.tolist() == [-1, -1, 0, 0, -1, -1, 1, 1]
    assert batch.versions.tolist() == [-1, -1, 5, 5, -1, -1, 6, 6]
    assert batch.rollout_logprobs.tolist() == [0, 0, -3 / 8, -9 / 8, 0, 0, -4 / 8, -9 / 8]
    assert (batch.lengths.tolist(), batch.prompt_lengths.tolist(), batch.group_ids.tolist()) == ([8], [2], [4])
    assert batch.samples is not None and batch.samples.tolist() == [0]
    assert batch.rewards.tolist() == [0.5] and batch.ended is None


def test_a_turn_that_does_not_begin_with_the_one_before_starts_another_sequence() -> None:
    turns = [
        RecordedTurn([1, 2], written(3, STOP)),
        RecordedTurn([1, 2, 8], written(4, 5)),
        RecordedTurn([1, 2, 8, 4, 5], written(6)),
    ]
    other = RecordedConversation([RecordedTurn([1, 2], written(7))], is_ended=True)
    batch = pack_conversations([1, 2], 0, [RecordedConversation(turns, is_ended=True), other])
    assert batch.samples is not None and batch.samples.tolist() == [0, 0, 1]
    assert batch.turns is not None
    assert [part.tolist() for part in batch.tokens.split([4, 6, 3])] == [
        [1, 2, 3, STOP],
        [1, 2, 8, 4, 5, 6],
        [1, 2, 7],
    ]
    assert [part.tolist() for part in batch.turns.split([4, 6, 3])] == [
        [-1, -1, 0, 0],
        [-1, -1, -1, 1, 1, 2],
        [-1, -1, 0],
    ]


def test_a_conversation_that_never_began_is_its_prompt() -> None:
    batch = pack_conversations([1, 2], 0, [RecordedConversation(is_ended=True)])
    assert batch.tokens.tolist() == [1, 2] and not batch.loss_mask.any() and batch.samples is not None


@pytest.mark.parametrize("seed", range(20))
def test_a_carried_group_is_unpacked_as_it_was(seed: int) -> None:
    source = random.Random(seed)
    conversations = []
    for _ in range(3):
        conversation, prompt = RecordedConversation(), [1, 2]
        for number in range(source.randint(1, 4)):
            tokens = [source.randint(3, 8) for _ in range(source.randint(1, 3))]
            conversation.turns.append(RecordedTurn(prompt, written(*tokens), [{"number": number}]))
            prompt = [*prompt, *tokens] if source.random() < 0.7 else [1]
            prompt = [*prompt, *(source.randint(10, 20) for _ in range(source.randint(0, 2)))]
        conversation.is_ended, conversation.counts = source.random() < 0.5, {"calls": 3}
        if not conversation.is_ended and source.random() < 0.5:
            conversation.turns.append(RecordedTurn(prompt, written(is_ended=False), [{"role": "tool"}]))
        elif not conversation.is_ended:
            last = conversation.turns[-1].response
            last.is_ended, last.noise = False, b"abcd"
        conversations.append(conversation)
    conversations[0].is_ended = False
    last = conversations[0].turns[-1].response
    last.is_ended, last.noise = False, b"abcd" if last.tokens else b""
    packed = pack_conversations([1, 2], 0, conversations)
    records = [None if each.is_ended else each.record for each in conversations]
    found = unpack_conversations(Batch.from_bytes(packed.to_bytes()), records)
    for before, after in zip(conversations, found, strict=True):
        if before.is_ended:  # nobody needs what was said in it
            before = replace(before, counts={}, turns=[replace(turn, messages=[]) for turn in before.turns])
        assert after == before


def test_seeds_depend_on_sample_and_turn() -> None:
    lead = Lead()
    assert isinstance(lead.sent[0], Open) and lead.sent[0].seed == sample_seed(0, 1, 3, 0)
    assert lead.ask(0, [1, 2]) and lead.sample(3, STOP)
    assert lead.ask(1, [1, 2, 3, STOP, 4])
    assert [request.seed for request in lead.requests] == [turn_seed(sample_seed(0, 1, 3, 0), turn) for turn in (0, 1)]
    assert lead.requests[0].seed != lead.requests[1].seed
    assert [request.tokens for request in lead.requests] == [[1, 2], [1, 2, 3, STOP, 4]]


def test_limits_of_turn_and_of_all_turns_end_a_turn_or_the_conversation() -> None:
    lead = Lead("rollout.max_new_tokens=5", "environment.max_conversation_tokens=20")
    assert lead.ask(0, [1, 2], max_tokens=3)
    assert lead.requests[-1].max_tokens == 3
    assert lead.sample(3, 3, 3, is_cut=True)
    assert lead.sent[-1] == SampledTurn((7, 0, 0, 0), 0, [3, 3, 3], "length")
    assert lead.ask(1, [1, 2, 3, 3, 3, 4], max_tokens=3)
    assert lead.requests[-1].max_tokens == 2
    assert lead.sample(5, 5, is_cut=True)
    assert lead.sent[-1] == SampledTurn((7, 0, 0, 0), 1, [5, 5], "tokens")


def test_a_stop_at_the_last_token_is_no_limit_but_the_next_turn_gets_none() -> None:
    lead = Lead("rollout.max_new_tokens=2")
    assert lead.ask(0, [1, 2]) and lead.sample(3, STOP)
    assert lead.sent[-1] == SampledTurn((7, 0, 0, 0), 0, [3, STOP], "stop")
    assert lead.ask(1, [1, 2, 3, STOP, 4])
    assert lead.sent[-1] == SampledTurn((7, 0, 0, 0), 1, [], "tokens") and len(lead.requests) == 1


def test_observations_count_in_the_limit_of_all_tokens() -> None:
    lead = Lead("rollout.max_new_tokens=6", "environment.max_conversation_tokens=8")
    assert lead.ask(0, [1, 2]) and lead.sample(3, STOP)
    assert lead.ask(1, [1, 2, 3, STOP, 4, 4, 4, 4])
    assert lead.requests[-1].max_tokens == 2
    assert lead.sample(5, 5, is_cut=True)
    assert lead.sent[-1] == SampledTurn((7, 0, 0, 0), 1, [5, 5], "context")
    assert lead.ask(2, [1, 2, 3, STOP, 4, 4, 4, 4, 5, 5, 6])
    assert lead.sent[-1] == SampledTurn((7, 0, 0, 0), 2, [], "context")


def test_a_round_counts_the_tokens_of_all_turns_and_carries_the_rest() -> None:
    lead = Lead("rollout.max_new_tokens=20", per_round=4)
    assert lead.ask(0, [1, 2]) and lead.sample(3, STOP)
    assert lead.ask(1, [1, 2, 3, STOP, 6])
    assert lead.requests[-1].max_tokens == 2
    assert not lead.sample(4, 4, is_cut=True, noise=b"ab")
    assert lead.sent[-1] == Close((7, 0, 0, 0))
    lead.group.running.clear()
    later = lead.carry()
    opened = later.sent[-1]
    assert isinstance(opened, Open) and opened.counts == {"calls": 1}
    assert [turn.tokens for turn in opened.history] == [[3, STOP], []]
    assert [turn.prompt for turn in opened.history] == [[1, 2], [1, 2, 3, STOP, 6]]
    assert [turn.messages for turn in opened.history] == [[{"turn": 0}], [{"turn": 1}]]
    assert later.ask(1, [1, 2, 3, STOP, 6])
    again = later.requests[-1]
    assert (again.tokens, again.noise, again.max_tokens) == ([1, 2, 3, STOP, 6, 4, 4], b"ab", 4)
    assert again.seed == lead.requests[-1].seed
    assert later.sample(5, STOP)
    assert later.sent[-1] == SampledTurn((7, 0, 0, 0), 1, [4, 4, 5, STOP], "stop")


def test_a_conversation_without_tokens_left_in_the_round_waits_with_its_observation() -> None:
    lead = Lead("rollout.max_new_tokens=20", per_round=2)
    assert lead.ask(0, [1, 2]) and lead.sample(3, STOP)
    assert not lead.ask(1, [1, 2, 3, STOP, 6])
    assert lead.sent[-1] == Close((7, 0, 0, 0))
    lead.group.running.clear()
    later = lead.carry()
    assert later.group.conversations[0].turns[1].prompt == [1, 2, 3, STOP, 6]
    assert later.ask(1, [1, 2, 3, STOP, 6])
    assert later.requests[-1].tokens == [1, 2, 3, STOP, 6] and later.requests[-1].noise == b""


def test_a_turn_that_reads_nothing_new_waits_for_the_next_round() -> None:
    """As when a rollout function asks for more after a limit of its own."""
    lead = Lead("rollout.max_new_tokens=20", per_round=2)
    assert lead.ask(0, [1, 2], max_tokens=2) and lead.sample(3, 4, is_cut=True)
    assert not lead.ask(1, [1, 2, 3, 4], max_tokens=2)
    lead.group.running.clear()
    later = lead.carry()
    opened = later.sent[-1]
    assert isinstance(opened, Open)
    assert [(turn.prompt, turn.tokens, turn.is_cut) for turn in opened.history] == [
        ([1, 2], [3, 4], True),
        ([1, 2, 3, 4], [], False),
    ]
    assert later.ask(1, [1, 2, 3, 4], max_tokens=2)
    assert (later.requests[-1].tokens, later.requests[-1].max_tokens) == ([1, 2, 3, 4], 2)
    assert later.sample(5, STOP)
    assert later.group.pack().turns.tolist() == [-1, -1, 0, 0, 1, 1]  # type: ignore[union-attr]


def test_an_ended_conversation_of_a_carried_group_is_not_opened_again() -> None:
    lead = Lead("rollout.max_new_tokens=20", num_samples=2, per_round=2)
    assert lead.ask(0, [1, 2], sample=0) and lead.sample(3, STOP, sample=0)
    assert lead.ask(0, [1, 2], sample=1) and not lead.sample(4, 4, is_cut=True, sample=1)
    lead.group.conversations[0].end(Ended((7, 0, 0, 0), "done", 1.0, "", [], {"turns": 1}))
    lead.group.running.clear()
    lead.sent.clear()
    later = lead.carry()
    assert [message.key[2] for message in later.sent if isinstance(message, Open)] == [1]
    assert later.group.running == {1} and later.group.conversations[0].is_ended


def test_conversations_that_wait_for_tools_leave_room_for_other_groups() -> None:
    lead = Lead(num_samples=4)
    assert lead.group.occupancy == 1.0  # their first turns come soon
    for sample in range(4):
        lead.ask(0, [1, 2], sample=sample)
    assert lead.group.occupancy == 1.0
    assert lead.sample(3, STOP, sample=3)
    assert lead.group.occupancy == 0.75
    lead.ask(1, [1, 2, 3, STOP, 4], sample=3)
    assert lead.group.occupancy == 1.0
