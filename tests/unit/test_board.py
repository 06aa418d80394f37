"""Tests of rl/watch/board.py, culprit.py and board_link.py: who is to blame, and what is printed about it."""

import selectors
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rl.common.handshake import connect
from rl.common.json_channel import JsonChannel
from rl.common.waiting import wait_until_readable
from rl.watch import board as board_module
from rl.watch.board import CUT_S, DEADLOCK_S, Board
from rl.watch.board_link import BoardServer
from rl.watch.culprit import RankState, find_culprit
from rl.watch.reports import NOT_SAVED, AttemptHistory, Report
from tests.mails import KEY


def state(rank: int, **values: Any) -> RankState:
    """Return the state of a rank in the stage `update`, with these values."""
    values = {"roles": "actor", "stage": "update", "step": 7, "version": 7, "silent_s": 10.0, "stage_s": 12.0} | values
    return RankState(rank=rank, host=f"node{rank // 2}", **values)


def report(rank: int, cause: str, error: str = "ValueError: no") -> dict[str, Any]:
    return vars(Report(rank, "actor", "node0", "update", 7, error, "", cause))


@pytest.mark.parametrize(
    ("culprit", "other"),
    [
        ({"frozen": "stopped", "waits_for": "group"}, {"silent_s": 90.0}),
        ({}, {"waits_for": "group", "silent_s": 90.0}),
        ({"waits_for": "its checkpoint"}, {"waits_for": "group", "silent_s": 90.0}),
        ({}, {"in_collective": True, "silent_s": 90.0}),
        ({}, {"is_pending": True, "silent_s": 90.0}),
        ({"is_pending": True}, {"in_collective": True, "silent_s": 90.0}),
        ({"step": 6}, {"silent_s": 90.0}),
        ({"silent_s": 11.0}, {}),
    ],
)
def test_the_culprit_is_the_rank_that_the_others_wait_for(culprit: dict[str, Any], other: dict[str, Any]) -> None:
    states = [state(rank, **other) for rank in range(3)] + [state(3, **culprit)]
    assert find_culprit(states).rank == 3


class FakeWorld:
    """A board with four ranks and a clock, and what it sent and printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(board_module.time, "monotonic", lambda: self.now)
        self.told: list[tuple[int, str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.board = Board(lambda rank, kind, **values: self.told.append((rank, kind, values)), self.said.append)
        for rank in range(4):
            self.beat(rank)

    def beat(self, rank: int, **values: Any) -> None:
        self.send(rank, "beat", state=asdict(state(rank, **values)), about={})

    def send(self, rank: int, kind: str, **values: Any) -> None:
        self.board.handle(rank, {"kind": kind, **values})

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.board.tick()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    return FakeWorld(monkeypatch)


def aborted(world: FakeWorld) -> list[tuple[int, bool]]:
    return [(rank, values["stop"]) for rank, kind, values in world.told if kind == "abort"]


def test_an_exception_explains_the_broken_connections_and_is_printed_once(world: FakeWorld) -> None:
    world.send(1, "report", report=report(1, "connection", "broken"))
    world.send(2, "died", how="its process was killed")
    world.send(3, "report", report=report(3, "error"))
    assert not world.said
    world.wait(1)
    world.wait(1)
    assert len(world.said) == 1
    first, *others = world.said[0].splitlines()
    assert first == "oneworld: rank 3 (actor) on node0, stage update, step 7: ValueError: no"
    assert others == ["  ranks 0-2 (actor): stage update, working, or in a collective, silent for up to 10 s"]
    assert aborted(world) == [(rank, False) for rank in range(4)]


def test_only_the_rank_that_collects_measurements_is_told_about_them(world: FakeWorld) -> None:
    world.board.share_usage()
    world.send(2, "collect_usage")
    world.board.share_usage()
    assert world.told == []  # no rank was measured yet
    world.send(1, "beat", state=asdict(state(1)), about={"memory_mb": 9})
    world.send(3, "beat", state=asdict(state(3)), about={"memory_mb": 6, "gpu_memory_mb": 7, "gpu_utilization": 8})
    world.board.share_usage()
    assert world.told == [(2, "usage", {"rows": [(1, 9, -1, -1), (3, 6, 7, 8)]})]


def test_a_death_names_its_stage_and_who_waited(world: FakeWorld) -> None:
    world.beat(0, roles="rollout", stage="rollout", waits_for="work")
    world.send(2, "died", how="its process was killed")
    world.wait(1)
    assert world.said[0].splitlines() == [
        "oneworld: rank 2 (actor) on node1, stage update, step 7: its process was killed",
        "  12 s after that stage began",
        "  rank 0 (rollout): stage rollout, waiting for work, silent for up to 10 s",
        "  ranks 1,3 (actor): stage update, working, or in a collective, silent for up to 10 s",
    ]


def test_a_silent_rank_may_not_be_the_culprit(world: FakeWorld) -> None:
    world.send(1, "silent")
    assert [(rank, kind) for rank, kind, _ in world.told] == [(rank, "diagnose") for rank in range(4)]
    for rank in (0, 1, 2):
        world.send(rank, "diagnosis", state=asdict(state(rank, in_collective=True)))
    world.wait(0.1)
    assert not world.said
    frozen = state(3, frozen="its process was stopped by a signal", item="micro-batch 2 of 9", stacks="a/b")
    world.send(3, "diagnosis", state=asdict(frozen))
    world.wait(0.1)
    assert world.said[0].splitlines()[:2] == [
        "oneworld: rank 3 (actor) on node1, stage update, step 7: its process was stopped by a signal; silent for "
        "10 s on micro-batch 2 of 9, 12 s after the stage began",
        "  stacks: a/b",
    ]


def test_a_heartbeat_does_not_replace_a_diagnosis(world: FakeWorld) -> None:
    world.send(1, "silent")
    for rank in (3, 0, 1, 2):
        world.send(rank, "diagnosis", state=asdict(state(rank, in_collective=rank < 3, stacks=f"rank_{rank}")))
        world.beat(rank)
    world.wait(0.1)
    assert world.said[0].startswith("oneworld: rank 3 ") and "  stacks: rank_3" in world.said[0]


def test_a_slow_rank_within_its_limit_is_left_alone(world: FakeWorld) -> None:
    """The ranks in a collective are at their limit; the one that they wait for is not."""
    world.send(1, "silent")
    for rank in (0, 1, 2):
        world.send(rank, "diagnosis", state=asdict(state(rank, in_collective=True, limit_s=10.0)))
    world.send(3, "diagnosis", state=asdict(state(3, silent_s=30.0, limit_s=100.0)))
    world.wait(0.1)
    assert not world.said
    assert [(rank, kind) for rank, kind, _ in world.told[4:]] == [(rank, "wait") for rank in range(4)]
    world.send(1, "silent")
    for rank in (0, 1, 2):
        world.send(rank, "diagnosis", state=asdict(state(rank, in_collective=True, limit_s=10.0)))
    world.send(3, "diagnosis", state=asdict(state(3, silent_s=101.0, limit_s=100.0)))
    world.wait(0.1)
    assert world.said[0].startswith("oneworld: rank 3 ")


def test_nobody_is_blamed_while_a_rank_compiles_unless_it_is_frozen(world: FakeWorld) -> None:
    """Its main thread may seem to be in a collective, because a backward pass compiles in a thread of autograd. A rank
    that waits for it on a GPU may seem not to be in one."""
    compiles = state(3, silent_s=70.0, limit_s=1800.0, exceptional="compiling", in_collective=True)
    frozen = state(0, silent_s=90.0, limit_s=60.0, frozen="its process was stopped by a signal")
    for other, is_named in [(state(0, silent_s=90.0, limit_s=60.0), False), (frozen, True)]:
        world.send(0, "silent")
        world.send(0, "diagnosis", state=asdict(other))
        for rank in (1, 2):
            world.send(rank, "diagnosis", state=asdict(state(rank, silent_s=90.0, limit_s=60.0)))
        world.send(3, "diagnosis", state=asdict(compiles))
        world.wait(0.1)
        assert bool(world.said) == is_named
    assert world.said[0].startswith("oneworld: rank 0 ")
    assert world.said[0].splitlines()[-1] == "  rank 3 (actor): stage update, compiling, silent for up to 70 s"


def test_a_rank_that_compiles_for_too_long_is_named(world: FakeWorld) -> None:
    world.send(3, "silent")
    for rank in (0, 1, 2):
        world.send(rank, "diagnosis", state=asdict(state(rank, silent_s=90.0, in_collective=True)))
    hangs = state(3, silent_s=1801.0, limit_s=1800.0, item="micro-batch 2 of 9", exceptional="compiling")
    world.send(3, "diagnosis", state=asdict(hangs))
    world.wait(0.1)
    assert "silent for 1801 s on micro-batch 2 of 9, compiling, 12 s after the stage began" in world.said[0]


def test_nobody_is_blamed_while_a_rank_is_debugged(world: FakeWorld) -> None:
    world.send(1, "silent")
    for rank in (0, 1, 2):
        world.send(rank, "diagnosis", state=asdict(state(rank, silent_s=90.0, limit_s=10.0)))
    world.send(3, "diagnosis", state=asdict(state(3, silent_s=9000.0, limit_s=10.0, debugged=True)))
    world.wait(0.1)
    assert not world.said and world.told[-1][1] == "wait"
    for rank in range(4):
        world.beat(rank, waits_for="group", silent_s=DEADLOCK_S + 1, debugged=rank == 2)
    world.wait(0.1)
    world.wait(3)
    assert not world.said


def test_broken_connections_are_explained_by_a_later_report(world: FakeWorld) -> None:
    world.send(1, "report", report=report(1, "connection", "broken"))
    world.wait(1)
    assert not world.said
    world.send(2, "died", how="its process was killed")
    world.wait(0.5)
    assert world.said[0].startswith("oneworld: rank 2 ")


def test_broken_connections_alone_end_the_world_too(world: FakeWorld) -> None:
    world.send(1, "report", report=report(1, "connection", "broken"))
    for _ in range(8):
        world.wait(0.5)
    assert world.said == ["oneworld: rank 1 (actor) on node0, stage update, step 7: broken"]


def test_a_rank_that_joins_after_the_verdict_gets_it(world: FakeWorld) -> None:
    world.send(0, "report", report=report(0, "fatal", "wrong"))
    world.wait(1)
    world.beat(4)
    assert world.told[-1][:2] == (4, "abort") and world.told[-1][2]["stop"]


def test_a_board_that_was_paused_blames_nobody(world: FakeWorld) -> None:
    world.now += 60
    world.board.exclude_pause(60)
    world.wait(0.1)
    assert not world.said


def test_a_diagnosis_is_not_waited_for_without_end(world: FakeWorld) -> None:
    world.send(1, "silent")
    world.wait(3)
    assert len(world.said) == 1


def test_a_host_that_is_cut_off_is_named_with_all_its_ranks(world: FakeWorld) -> None:
    for _ in range(int(CUT_S) + 1):
        world.wait(1)
        for rank in (0, 1):
            world.beat(rank)
    world.wait(1)
    first, _, also, *_ = world.said[0].splitlines()
    assert first.startswith(
        f"oneworld: rank 2 (actor) on node1, stage update, step 7: no word from its host for {CUT_S + 1:.0f} s"
    )
    assert also == "  also gone: rank 3"


def test_a_deadlock_ends_the_world(world: FakeWorld) -> None:
    for rank in range(4):
        world.beat(rank, waits_for="group", silent_s=DEADLOCK_S + 1)
    world.wait(0.1)
    world.wait(3)
    assert "waiting for group" in world.said[0]


def test_a_slow_checkpoint_is_no_deadlock(world: FakeWorld) -> None:
    for rank in range(4):
        world.beat(rank, waits_for="its checkpoint" if rank == 2 else "saved", silent_s=DEADLOCK_S + 1)
    world.wait(0.1)
    world.wait(3)
    assert not world.said


def test_a_checkpoint_without_progress_is_named_and_a_slow_one_is_not(world: FakeWorld) -> None:
    for silent_s in (50.0, 101.0):
        world.send(1, "silent")
        for rank in (0, 1, 2):
            others = state(rank, waits_for="the others' checkpoints", silent_s=200.0, limit_s=10.0)
            world.send(rank, "diagnosis", state=asdict(others))
        slow = state(3, stage="checkpoint", waits_for="its checkpoint", silent_s=silent_s, limit_s=100.0)
        world.send(3, "diagnosis", state=asdict(slow))
        world.wait(0.1)
        assert len(world.said) == (silent_s > 100)
    assert world.said[0].splitlines() == [
        "oneworld: rank 3 (actor) on node1, stage checkpoint, step 7: silent for 101 s, waiting for its "
        "checkpoint, 12 s after the stage began",
        "  ranks 0-2 (actor): stage update, waiting for the others' checkpoints, silent for up to 200 s",
    ]


def test_other_reports_count_after_the_silence_was_excused(world: FakeWorld) -> None:
    world.send(1, "silent")
    world.send(0, "report", report=report(0, "connection", "broken"))
    for rank in range(4):
        world.send(rank, "diagnosis", state=asdict(state(rank, silent_s=1.0, limit_s=10.0)))
    for _ in range(8):
        world.wait(0.5)
    assert len(world.said) == 1 and world.said[0].endswith("step 7: broken")


def test_a_rank_that_is_done_may_go(world: FakeWorld) -> None:
    for rank in range(4):
        world.send(rank, "done")
        world.board.lose(rank, "gone")
    world.wait(60)
    assert not world.said


def test_the_same_error_again_stops_the_launcher(world: FakeWorld, tmp_path: Path) -> None:
    world.board.history = AttemptHistory(tmp_path)
    AttemptHistory(tmp_path).is_repeated(Report(**report(3, "error", "ValueError: other details")))
    world.send(3, "report", report=report(3, "error"))
    world.wait(1)
    assert world.said[0].startswith("oneworld: rank 3 (actor) on node0, stage update, step 7: ValueError: no\n")
    last = "oneworld: fatal, will not be restarted: rank 3 failed again in stage update of step 7: "
    assert world.said[0].splitlines()[-1] == last + "ValueError: no"
    assert aborted(world) == [(rank, True) for rank in range(4)]
    assert {values["line"] for _, kind, values in world.told if kind == "abort"} == {last + "ValueError: no"}


def test_bad_settings_stand_last(world: FakeWorld) -> None:
    world.send(1, "report", report=report(1, "fatal", "placement: no role\nfor rank 2"))
    world.wait(1)
    assert world.said == ["oneworld: fatal, will not be restarted\noneworld: placement: no role\nfor rank 2"]
    verdicts = [values for _, kind, values in world.told if kind == "abort"]
    assert [verdict["line"] for verdict in verdicts] == ["oneworld: placement: no role"] * 4
    assert [verdict["fatal"] for verdict in verdicts] == ["oneworld: placement: no role\nfor rank 2"] * 4


def test_an_interrupt_stops_the_launcher_and_is_not_fatal(world: FakeWorld) -> None:
    world.send(0, "report", report=report(0, "interrupt", ""))
    world.wait(1)
    assert world.said == [f"oneworld: interrupted at step 7, stage update: {NOT_SAVED}"]
    assert aborted(world) == [(rank, True) for rank in range(4)]


@pytest.mark.parametrize(("cause", "said"), [("stopped", "step 6 is saved"), ("lost", NOT_SAVED)])
def test_an_interrupt_explains_whatever_ends_the_world_after_it(cause: str, said: str, world: FakeWorld) -> None:
    world.send(1, "interrupting", report=report(1, "interrupt", ""))
    world.wait(1)
    assert not world.said
    world.send(2, "report", report=report(2, cause, "step 6 is saved"))
    world.wait(1)
    assert world.said == [f"oneworld: interrupted at step 7, stage update: {said}"]
    assert aborted(world) == [(rank, True) for rank in range(4)]


def test_a_server_accepts_a_watchdog_for_each_rank_and_stays_until_they_have_gone() -> None:
    orders: list[dict[str, Any]] = []
    with selectors.DefaultSelector() as selector:
        server = BoardServer("127.0.0.1", KEY, 3, selector, orders.append, lambda text: None)

        def read(is_so: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 10
            while not is_so():
                assert time.monotonic() < deadline
                for key, _ in selector.select(0.1):
                    key.data()

        friend, second, third = (JsonChannel(connect(("127.0.0.1", server.port), KEY, 10)) for _ in range(3))
        for line, rank in ((friend, 1), (second, 1), (third, 3)):  # one that is there already, and one that is not
            line.send("hello", rank=rank)
            line.send("beat", state=asdict(state(rank)), about={})
            read(lambda: set(server.board.entries) == {1})
        read(lambda: not second.receive() and not second.is_open)
        read(lambda: not third.receive() and not third.is_open)
        server.send("beat", state=asdict(state(0)), about={})
        server.send("silent")
        assert orders == [{"kind": "diagnose"}]
        wait_until_readable([friend.connection], 10)
        assert friend.receive() == [{"kind": "diagnose"}]
        assert not server.may_end(is_settled=True)
        friend.send("done")
        friend.close()
        read(lambda: server.may_end(is_settled=True))
        assert not server.may_end(is_settled=False), "its own rank is not settled"
