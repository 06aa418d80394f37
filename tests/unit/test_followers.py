"""Followers of a tensor-parallel engine count their waiting as their lead does."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rl.data.prompts import Prompt
from rl.rollout.dispatch import NewTasks, Sampling, Task
from rl.rollout.fake_engine import FakeEngine
from rl.rollout.followers import FROM_LEAD, LeadWaits, StepEngine
from rl.rollout.recovery import EngineFailed, EngineHost
from rl.rollout.service import RolloutService, Scored
from rl.watch.heart import HEART
from rl.watch.ledger import Awaited, Ledger
from rl.world.messages import Letter
from rl.world.service import EndRun, EndService, serve
from rl.world.world import World
from tests.launcher import until
from tests.mails import Mark, connected_worlds, take
from tests.unit.test_engine_failures import HARMLESS, fail
from tests.unit.test_reward_service import NUM_SAMPLES, STOP, Rewards, Tokenizer

pytestmark = pytest.mark.timeout(30)
LEAD, LEADER, FOLLOWER = 0, 1, 2


class Pair:
    """The two ranks of an engine. Rank 1 is the leader of the run, and the owner of all groups."""

    def __init__(self, worlds: list[World]):
        self.worlds, self.rewards = worlds, Rewards(worlds[LEAD].mail)
        self.lead, self.follower = self._serve(LEAD, self.rewards), self._serve(FOLLOWER, None)

    def _serve(self, rank: int, rewards: Any) -> RolloutService:
        def build(failed: Any = None) -> FakeEngine:
            return FakeEngine(8, STOP)

        tokenizer: Any = Tokenizer()
        host = EngineHost(self.worlds[rank], (LEAD, FOLLOWER), build(), build)
        host.engine.confirm(6)  # type: ignore[attr-defined]
        return RolloutService(self.worlds[rank], host, rewards, tokenizer, 4, 8, LEADER)

    def start(self) -> None:
        task = Task(2, 5, LEADER, Prompt(5, 0, "prompt", "5", [11]), Sampling(NUM_SAMPLES, 1.0, 9), 6)
        self.lead.handle(Letter(LEADER, NewTasks([task])))

    def sample(self) -> None:
        while self.lead.engine.num_unfinished:
            self.lead.work()

    def score(self, *samples: int) -> None:
        for sample in samples:
            self.rewards.say((2, 5, sample, 0), 1.0)
            self.lead.handle(take(self.worlds[LEAD].mail, Scored))

    def hear(self) -> list[type]:
        """Have the follower handle what its lead has sent. Return the kinds of these messages."""
        mail, heard = self.worlds[FOLLOWER].mail, []
        self.worlds[LEAD].mail.send(FOLLOWER, Mark())
        while not isinstance((letter := take(mail, *FROM_LEAD, Mark)).message, Mark):
            self.follower.handle(letter)
            heard.append(type(letter.message))
        return heard

    def roles(self) -> tuple[str, str]:
        """Return the roles that the lead and the follower wait for when neither is busy."""
        awaited = self.lead.awaited, self.follower.awaited
        assert all(isinstance(each, Awaited) for each in awaited)
        return tuple(each.role for each in awaited)  # type: ignore[attr-defined, return-value]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with connected_worlds(3) as worlds:
        yield Pair(worlds)


def test_a_follower_waits_for_what_its_lead_waits_for(pair: Pair) -> None:
    assert pair.roles() == ("actor", "actor") and pair.follower.awaited == f"work from rank {LEAD}"
    pair.start()
    pair.hear()
    assert pair.follower.awaited == f"the next call of rank {LEAD}"
    assert pair.roles()[1] == "rollout"
    pair.sample()
    heard = pair.hear()
    assert heard == [StepEngine] * (len(heard) - 1) + [LeadWaits]
    assert pair.roles() == ("reward", "reward") and pair.follower.is_scoring
    pair.score(0)
    assert pair.hear() == [], "nothing has changed"
    pair.score(1, 2)
    assert pair.hear() == [LeadWaits]
    assert pair.roles() == ("actor", "actor") and not pair.follower.is_scoring
    pair.start()
    pair.hear()
    assert pair.roles()[1] == "rollout"


def test_a_follower_waits_for_tools(pair: Pair) -> None:
    group: Any = SimpleNamespace(num_unscored=0, conversations={0: "it calls a tool"}, is_sampled=False, occupancy=1.0)
    pair.lead._groups[2, 5] = group
    pair.lead.handle(Letter(LEADER, NewTasks([])))
    assert pair.hear()[-1] is LeadWaits
    assert pair.roles() == ("environment", "environment") and pair.follower.is_scoring


def test_after_a_failure_a_follower_waits_for_weights(pair: Pair) -> None:
    pair.start()
    for service in (pair.lead, pair.follower):
        fail(service, HARMLESS[0])
    pair.worlds[FOLLOWER].mail.send(LEAD, EngineFailed())  # the lead recovers when the follower has failed too
    pair.lead.work()
    pair.hear()
    assert pair.lead.awaited == pair.follower.awaited == "weights for its new engine"


def test_the_ledger_of_a_follower(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lead waits 0.2 s for scores, and then 0.3 s for work, after the follower has heard of it."""
    monkeypatch.setattr(HEART, "ledger", Ledger("busy/start"))

    def lead() -> None:
        pair.start()
        pair.sample()
        until(lambda: pair.follower.is_scoring, "the follower waits for scores")
        time.sleep(0.2)
        pair.score(0, 1, 2)
        until(lambda: not pair.follower.is_scoring, "the follower waits for work")
        time.sleep(0.3)
        pair.worlds[LEADER].mail.send(FOLLOWER, EndRun())

    thread, end = threading.Thread(target=lead), EndService()
    thread.start()
    serve(pair.worlds[FOLLOWER], [pair.follower, end], until=lambda: end.ended)
    thread.join()
    seconds = HEART.ledger.take()
    assert seconds["wait/reward"] >= 0.15 and seconds["wait/actor"] >= 0.25, seconds
