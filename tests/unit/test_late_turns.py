"""Conversations that end while the engine still samples a turn of theirs."""

from collections.abc import Iterator

import pytest

from rl.config.load import load_config
from rl.environments.protocol import Ask, Close, Ended, ToServer
from rl.rollout.service import ConversationEnded, TurnAsked
from rl.rollout.turns import Conversations
from rl.world.messages import Letter
from rl.world.world import World
from tests.mails import connected_worlds
from tests.unit.test_reward_service import NUM_SAMPLES, Bench

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    with connected_worlds(2) as worlds:
        yield worlds


def test_a_conversation_whose_time_is_over_ends_when_its_turn_is_sampled(worlds: list[World]) -> None:
    bench, sent = Bench(worlds), list[ToServer]()
    service = bench.service
    config = load_config(None, ["environment.rollout=a.py:f", "reward.function=environment"])
    service.conversations = Conversations(sent.extend, service.add_requests, config, 0)
    bench.start(0)
    keys = [message.key for message in sent]  # type: ignore[union-attr]
    assert len(keys) == NUM_SAMPLES
    for key in keys:
        service.handle(Letter(0, TurnAsked(Ask(key, 0, [1, 2], 0, [], {}))))
    for key in keys:
        service.handle(Letter(0, ConversationEnded(Ended(key, "seconds", 0.0, "", [], {}))))
    assert not bench.rewards.calls, "their turns are being sampled"
    while service.busy:
        service.work()
    assert sorted(call[0] for call in bench.rewards.calls) == sorted(keys)
    assert {message.key for message in sent if isinstance(message, Close)} == set(keys), "the pool waits for nothing"
