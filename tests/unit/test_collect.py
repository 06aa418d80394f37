"""An actor collects its groups. The engine and the other actor are mailboxes of the test."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rl.data.prompts import Prompt
from rl.placement.roles import plan
from rl.rollout.collect import Gathered, Rollouts
from rl.rollout.dispatch import NewTasks, Pull, Sampling, Task
from rl.rollout.orders import Collected, Execute
from rl.rollout.responses import Response, pack_group
from rl.rollout.service import ScoredGroup
from rl.watch.heart import HEART
from rl.world.messages import Mailbox
from rl.world.orders import Order
from rl.world.world import World
from tests.mails import WAIT_S, connected_worlds, take

pytestmark = pytest.mark.timeout(30)
LEADER, OTHER, ENGINE = 0, 1, 2
PROMPTS = [Prompt(place, 0, "p", "a", [place]) for place in range(4)]


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    with connected_worlds(3) as worlds:
        yield worlds


def make_rollouts(world: World, done: list[str]) -> Rollouts:
    balancer: Any = None
    return Rollouts(world, plan({"actor": "0-1", "rollout": "2"}, 1, 3), 1, None, done.append, balancer)


def deliver(mail: Mailbox, task: Task) -> None:
    response = Response([task.position], [-0.5], [task.version], is_ended=True, reward=1.0)
    score = {"parts": {"rule": 1.0}, "status": "ok", "answer": None}
    message = ScoredGroup(task.batch, task.position, "fake", [score], num_preemptions=1)
    mail.send(task.owner, message, payload=pack_group(task.prompt.tokens, task.position, [response]).to_bytes())


def awaited(unlike: str) -> str:
    """Return what the main thread waits for, once that differs from `unlike`."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        beat = HEART.read()
        if beat is not None and beat.activity.waits_for not in ("", unlike):
            return beat.activity.waits_for
        time.sleep(0.01)
    return unlike


def test_reports_tell_an_actor_that_lacks_groups_from_one_that_waits_for_others(worlds: list[World]) -> None:
    seen, done, engine = [""], list[str](), worlds[ENGINE].mail
    rollouts = make_rollouts(worlds[LEADER], done)

    def others() -> None:
        """Both waits of the leader are seen, and orders reach it in both."""
        engine.send(LEADER, Pull(4, 0))
        tasks = take(engine, NewTasks).message.tasks
        seen.append(awaited(seen[-1]))
        engine.send(LEADER, Order("save"))
        take(worlds[OTHER].mail, Execute)
        for task in tasks:
            deliver(engine, task)
        seen.append(awaited(seen[-1]))
        engine.send(LEADER, Order("publish again"))
        take(worlds[OTHER].mail, Execute)
        worlds[OTHER].mail.send(LEADER, Collected(batch, {}))

    batch = rollouts.start(PROMPTS, Sampling(1, 1.0, 4), version=3)
    thread = threading.Thread(target=others)
    thread.start()
    gathered: Gathered = rollouts.gather(batch)
    thread.join()
    assert seen[1:] == ["groups from the engines", "the other actors' groups"]
    assert done == ["save", "publish again"]
    assert (sorted(gathered.groups), gathered.owners) == ([0, 2], [0, 1, 0, 1])
    assert gathered.num_preemptions == 2
