"""The accounting of busy and waiting time: ledgers of ranks, their way to the leader, metrics and file."""

import ast
import json
import random
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from rl.config.schema import ROOT
from rl.placement.roles import ROLES
from rl.report.accounting import ACCOUNTING, MAX_RANKS, AccountingFile, describe_bound, summarize
from rl.rollout.dispatch import BatchTime
from rl.run.reporter import find_slowest
from rl.watch.heart import HEART, Heart
from rl.watch.ledger import DISK, NETWORK, Awaited, Ledger, StepAccount
from rl.world.messages import waiting
from tests.mails import Mark, connected_worlds, take

SERVERS = ("reward", "environment")


class FakeTime:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeTime:
    return FakeTime()


@pytest.fixture
def heart(clock: FakeTime) -> Heart:
    heart = Heart()
    heart.ledger = Ledger("busy/start", clock)
    return heart


def test_every_moment_belongs_to_one_account(heart: Heart, clock: FakeTime) -> None:
    def work(seconds: float) -> None:
        clock.now += seconds

    work(0.25)
    heart.enter("rollout")
    work(1.0)
    heart.wait(Awaited("groups from the engines", "rollout"))
    work(5.0)
    heart.beat("a message has arrived")  # a heartbeat during a wait does not end it
    work(1.0)
    heart.wait("")
    heart.enter("update")
    work(3.0)
    with heart.in_collective("actor"):
        work(0.5)
    work(1.0)
    heart.enter("sync")
    heart.wait(Awaited("the others", "rollout"))  # whoever waits in a sync waits for the sync
    work(0.125)
    heart.wait("")
    heart.enter("start")
    heart.wait("a text without a role")
    work(0.0625)
    before, accounts = clock.now, heart.ledger.take()
    assert accounts == {
        "busy/start": 0.25,
        "busy/rollout": 1.0,
        "wait/rollout": 6.0,
        "busy/update": 4.0,
        "wait/actor": 0.5,
        "busy/sync": 0.0,
        "wait/sync": 0.125,
        "wait/other": 0.0625,
    }
    assert sum(accounts.values()) == before
    work(2.0)
    assert heart.ledger.take() == {"wait/other": 2.0}, "a window begins in the account in which the last one ended"


def test_an_error_in_a_collective_ends_the_wait(heart: Heart, clock: FakeTime) -> None:
    with pytest.raises(ZeroDivisionError), heart.in_collective("actor"):
        raise ZeroDivisionError
    clock.now += 1.0
    assert heart.ledger.take() == {"busy/start": 1.0, "wait/actor": 0.0}


def test_a_wait_of_a_thread_is_not_counted(clock: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HEART, "ledger", Ledger("busy/start", clock))
    with waiting(Awaited("its own disk", DISK)):
        clock.now += 1.0
    assert HEART.ledger.take()["wait/disk"] == 1.0

    def wait() -> None:
        with waiting(Awaited("its own disk", DISK)):
            clock.now += 1.0

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert set(HEART.ledger.take()) == {f"busy/{HEART.read().activity.stage}"}  # type: ignore[union-attr]


def test_every_wait_names_a_known_role() -> None:
    """A role that is misspelt would be a role of its own in the metrics."""
    names = set()
    for path in (ROOT / "rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            name = (
                called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
            )
            if name in ("Awaited", "in_collective"):
                assert isinstance(node, ast.Call)
                role = node.args[-1]
                names.add(role.value if isinstance(role, ast.Constant) else role.id)  # type: ignore[attr-defined]
    assert names == {*ROLES, *SERVERS, "DISK", "NETWORK"}
    assert {DISK, NETWORK}.isdisjoint({*ROLES, *SERVERS})


def test_ledgers_reach_the_leader_before_what_follows_them(monkeypatch: pytest.MonkeyPatch, clock: FakeTime) -> None:
    monkeypatch.setattr(HEART, "ledger", Ledger("busy/update", clock))
    with connected_worlds(3) as worlds:
        for version in (1, 2):
            for world in reversed(worlds):
                world.progress.roles = "actor" if world.rank == 1 else "rollout"
                clock.now += version
                world.accounts.close_window(1, version)
                world.mail.send(1, Mark())
        for _ in range(6):
            take(worlds[1].mail, Mark)
        leader = worlds[1].accounts
        found = leader.take(2)
        assert {name: {*role.ranks} for name, role in found.roles.items()} == {"rollout": {0, 2}, "actor": {1}}
        assert [*found.roles] == ["rollout", "actor"], "in the order of ranks, whichever ledger came first"
        assert [(one.busy_s, one.rank) for one in sorted(found.ranks)] == [(2.0, 0), (2.0, 1), (2.0, 2)]
        assert not leader.take(1).ranks and not leader._found, "older windows are dropped"
        assert not worlds[0].accounts.take(2).ranks


class Written(NamedTuple):
    """The ledger of a rank."""

    rank: int
    roles: str
    seconds: dict[str, float]
    engine: dict[str, list[float]]


def ledger(rank: int, roles: str, engine: dict[str, list[float]] | None = None, **seconds: float) -> Written:
    return Written(rank, roles, {name.replace("_", "/", 1): value for name, value in seconds.items()}, engine or {})


def add_up(ledgers: Iterable[Written]) -> StepAccount:
    account = StepAccount()
    for each in ledgers:
        account.add(*each)
    return account


def test_shares_are_means_over_the_ranks_of_a_role() -> None:
    ledgers = [
        ledger(2, "actor", busy_update=4, wait_rollout=4),
        ledger(0, "rollout", busy_rollout=6, busy_sync=1, wait_actor=3),
        ledger(3, "rollout,actor", busy_update=1, busy_rollout=1, wait_rollout=2),
        ledger(1, "rollout", busy_rollout=2, wait_actor=6, wait_reward=2),
        ledger(4, "rollout"),  # it has just been started
    ]
    found = summarize(add_up(ledgers))
    assert found == pytest.approx(
        {
            "perf/busy/rollout": 0.45,
            "perf/wait/rollout/actor": 0.45,
            "perf/wait/rollout/reward": 0.1,
            "perf/busy/actor": 0.5,
            "perf/wait/actor/rollout": 0.5,
            "perf/busy/rollout_actor": 0.5,
            "perf/wait/rollout_actor/rollout": 0.5,
        }
    )
    assert [*found][:1] == ["perf/busy/rollout"], "in the order of ranks"
    assert summarize(StepAccount()) == {}


def test_the_file_has_a_line_per_step_and_is_bounded(tmp_path: Path) -> None:
    def lines() -> list[dict]:
        return [json.loads(line) for line in (tmp_path / ACCOUNTING).read_text().splitlines()]

    costs = {"decode": [2, 6, 20, 5, 16], "prefill": [1, 4, 5, 100]}
    engine = ledger(0, "rollout", costs, busy_rollout=6, wait_actor=3)
    two = add_up([ledger(1, "actor", busy_update=4.0000004), engine])
    file = AccountingFile(tmp_path, 0)
    for step in (1, 2, 3):
        file.write(two, [0, 1], {"step": step, "bound": "rollout-bound"})
    file.close()
    assert lines()[2] == {
        "step": 3,
        "bound": "rollout-bound",
        "roles": {
            "rollout": {"ranks": 1, "seconds": {"busy/rollout": 6, "wait/actor": 3}},
            "actor": {"ranks": 1, "seconds": {"busy/update": 4.0}},
        },
        "engine": costs,
        "ranks": [
            {"rank": 0, "node": 0, "seconds": {"busy/rollout": 6, "wait/actor": 3}},
            {"rank": 1, "node": 1, "seconds": {"busy/update": 4.0}},
        ],
    }
    file = AccountingFile(tmp_path, 2)  # a resumed run writes step 3 again
    file.write(two, [0, 1], {"step": 3})
    file.close()
    assert [line["step"] for line in lines()] == [1, 2, 3]

    shuffled = random.Random(0).sample(range(1000), 1000)
    many = add_up(ledger(rank, "rollout", busy_rollout=rank + 1, wait_actor=1) for rank in shuffled)
    file = AccountingFile(tmp_path, 0, max_bytes=200_000)
    for step in range(1, 200):
        file.write(many, [0] * 1000, {"step": step})
    file.close()
    found = lines()
    assert (tmp_path / ACCOUNTING).stat().st_size <= 200_000
    assert found[-1]["step"] == 199 and [line["step"] for line in found] == list(range(200 - len(found), 200))
    half = MAX_RANKS // 2
    assert [row["rank"] for row in found[0]["ranks"]] == [*range(half), *range(1000 - half, 1000)]
    assert found[0]["roles"]["rollout"]["ranks"] == 1000


def test_the_round_that_lost_most_names_its_engine() -> None:
    found = find_slowest([BatchTime(3, 4, 0.5), BatchTime(3, 2, 1.5, speed=0.5), BatchTime(3, 7, 0.0)])
    names = ("perf/slowest_engine", "perf/slowest_engine_s", "perf/slowest_engine_speed")
    assert [found[name] for name in names] == [2, 1.5, 0.5]
    assert find_slowest([BatchTime(3, 1, 0.0)]) == find_slowest([]) == {}


def shares(role: str, busy: float, **waits: float) -> dict[str, float]:
    return {f"perf/busy/{role}": busy} | {f"perf/wait/{role}/{name}": share for name, share in waits.items()}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            shares("actor", 0.36, rollout=0.62, sync=0.02) | shares("rollout", 0.6, actor=0.4),
            "rollout-bound: actors wait 62 %",
        ),
        (
            shares("actor", 0.7, rollout=0.25, sync=0.05) | shares("rollout", 0.3, actor=0.7),
            "actor-bound: engines wait 70 %",
        ),
        (shares("actor", 0.2, rollout=0.3, inference=0.5), "inference-bound: actors wait 50 %"),
        (shares("actor", 0.2, rollout=0.3, sync=0.5), "sync-bound: actors wait 50 %"),
        # The engines have sampled everything, and the scores are late.
        (
            shares("actor", 0.2, rollout=0.8) | shares("rollout", 0.1, reward=0.7, actor=0.2),
            "reward-bound: engines wait 70 %",
        ),
        # Ranks that only serve are mostly idle. They do not say what bounds the step.
        (shares("actor", 0.4, rollout=0.6) | shares("inference", 0.05, actor=0.95), "rollout-bound: actors wait 60 %"),
        # Shared ranks are busy in both roles, so the stages tell.
        (
            shares("rollout_actor", 0.9, rollout=0.1) | {"time/step": 10.0, "time/rollout": 7.0, "time/update": 2.5},
            "rollout-bound: sampling takes 70 %",
        ),
        (
            shares("rollout_actor", 0.9, rollout=0.1)
            | {"time/step": 10.0, "time/rollout": 4.0, "time/update": 3.0, "time/logprobs": 2.0},
            "actor-bound: training takes 50 %",
        ),
        (
            shares("rollout_actor", 0.4, reward=0.6) | {"time/step": 10.0, "time/rollout": 8.0, "time/update": 2.0},
            "reward-bound: ranks wait 60 %",
        ),
        # Some actors only train.
        (shares("actor", 0.4, rollout=0.6) | shares("rollout_actor", 1.0), "rollout-bound: actors wait 60 %"),
        ({}, ""),
        ({"time/step": 1.0, "reward/mean": 0.5}, ""),
    ],
)
def test_what_bounds_a_step(values: dict[str, float], expected: str) -> None:
    assert describe_bound(values) == expected
