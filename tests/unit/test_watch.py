"""Who is silent, who is to blame, and what is said about it: without processes."""

import json
import os
import pickle
import select
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl.config.schema import ROOT
from rl.watch import board as board_module
from rl.watch import recorder
from rl.watch.board import CUT_S, DEADLOCK_S, Board
from rl.watch.culprit import Account, find_culprit
from rl.watch.heart import HEART, MAX_SHAPES, Beat, Heart, size_class
from rl.watch.host import Host
from rl.watch.launcher import Launcher
from rl.watch.lines import Lines
from rl.watch.process import RankProcess
from rl.watch.reports import Memory, Report
from rl.watch.silence import STRETCH, Limits, Watch
from rl.watch.stacks import Stacks, stands_in_collective
from rl.watch.watchdog import Watchdog
from rl.watch.witness import Witness
from rl.world.world import World
from tests.launcher import until
from tests.mails import connected


def beat(number: int, at: float, stage: str = "update", waits_for: str = "", io_at: float | None = None) -> Beat:
    return Beat(number, 0, at, at, at if io_at is None else io_at, 0.0, "actor", stage, 1, 1, "", waits_for)


def account(rank: int, **values: Any) -> Account:
    fields = {"roles": "actor", "stage": "update", "step": 7, "version": 7, "item": "", "waits_for": ""}
    return Account(rank=rank, host=f"node{rank // 2}", **(fields | {"silent_s": 10.0, "stage_s": 12.0} | values))


def visit(watch: Watch, *times: float, stage: str = "update") -> None:
    """Beats at these times, and then another stage."""
    for time_s in times:
        watch.see(beat(int(time_s * 10), at=time_s, stage=stage))
    watch.see(beat(int(times[-1] * 10) + 1, at=times[-1], stage="between"))


class TestSilence:
    def test_a_stage_may_take_a_multiple_of_what_it_took_but_no_less_than_the_floor(self) -> None:
        watch = Watch(Limits(floor_s=10, cap_s=100))
        watch.see(beat(1, at=0.1))
        watch.see(beat(5, at=0.5))
        assert watch.limit_s(beat(5, 0.5)) == 100, "not before it has been left: its longest part may come last"
        visit(watch, 0.6, 0.8)
        assert watch.limit_s(beat(9, 0.9)) == 10
        visit(watch, 10, 18)
        assert watch.limit_s(beat(190, 19)) == 8 * STRETCH
        visit(watch, 20, 60)
        assert watch.limit_s(beat(610, 61)) == 100
        assert watch.limit_s(beat(610, 61, stage="sync")) == 100
        visit(watch, 70, 71, stage="start")
        assert watch.limit_s(beat(720, 72, stage="start")) == 100, "loading follows, whatever came before"

    def test_a_long_stage_is_no_hang_while_it_beats(self) -> None:
        watch = Watch(Limits(floor_s=2, cap_s=100))
        visit(watch, 0.1, 1.1)
        for second in range(2, 100):
            watch.see(beat(second * 10, at=second))
            assert not watch.is_silent(beat(second * 10, at=second), now=second + 1, frozen="")
        assert watch.is_silent(beat(990, at=99), now=99 + STRETCH + 0.1, frozen="")

    def test_the_first_work_of_a_kind_may_take_longer_than_other_work_of_its_stage(self) -> None:
        watch, heart = Watch(Limits(floor_s=10, cap_s=100)), Heart()

        def look() -> float:
            seen = heart.read()
            assert seen is not None
            watch.see(seen)
            return watch.limit_s(seen)

        limits = []
        for message in ("score", "score", "forward", "forward", "score"):
            heart.enter("logprobs", message)
            heart.beat("micro-batch 1 of 2")
            limits.append(look())
            heart.enter("serve")
            look()
        assert limits == [100, 10, 100, 10, 10]

    def test_exceptional_work_may_take_as_long_as_anything_and_teaches_nothing(self) -> None:
        watch = Watch(Limits(floor_s=60, cap_s=1800))
        for step in range(3):
            visit(watch, *(10 * step + second for second in (1, 2, 3)))
        watch.see(beat(400, at=40))
        assert watch.limit_s(beat(400, at=40)) == 60, "after three quick steps"
        compiles = replace(beat(401, at=41), exceptional="compiling")
        watch.see(compiles)
        assert watch.limit_s(compiles) == 1800
        assert not watch.is_silent(compiles, now=1840, frozen="")
        assert watch.is_silent(compiles, now=1842, frozen=""), "a compiler may hang too"
        watch.see(beat(402, at=600))
        assert watch.limit_s(beat(402, at=600)) == 60, "known work goes on"
        visit(watch, 601)
        assert watch.limit_s(beat(6020, at=602)) == 60, "559 s of compilation are no measure"
        assert not watch.is_silent(beat(6020, at=602), now=661, frozen="")
        assert watch.is_silent(beat(6020, at=602), now=663, frozen="")

    def test_the_first_use_of_a_shape_is_a_measure_of_the_second_alone(self) -> None:
        watch, heart, now = Watch(Limits(floor_s=10, cap_s=1000)), Heart(), 0.0

        def work(shape: str, seconds: float) -> float:
            """A stage of one piece of work; returns what it might have taken."""
            nonlocal now
            heart.enter("update")
            heart.beat("micro-batch 1 of 1", shape=shape)
            limit_s = look()
            now += seconds
            heart.enter("between")
            look()
            return limit_s

        def look() -> float:
            seen = heart.read()
            assert seen is not None
            watch.see(replace(seen, at=now))
            return watch.limit_s(seen)

        for _ in range(3):
            work("up to 256 tokens", 1.0)
        assert work("up to 256 tokens", 1.0) == 10
        assert work("up to 512 tokens", 30.0) == 1000, "a shape that was never used"
        assert work("up to 256 tokens", 1.0) == 10, "of another shape it says nothing"
        assert work("up to 512 tokens", 2.0) == 30 * STRETCH, "it may be as slow again"
        assert work("up to 512 tokens", 2.0) == 10, "it was not"
        heart.enter("update")
        heart.forget_shapes()
        assert work("up to 512 tokens", 1.0) == 1000
        assert work("up to 256 tokens", 1.0) == 1000

    def test_a_shape_is_new_once_in_each_stage_until_the_next_beat_and_there_are_few(self) -> None:
        heart, firsts = Heart(), []

        def is_first_use() -> bool:
            seen = heart.read()
            assert seen is not None
            return seen.is_first_use

        for stage in ("update", "logprobs", "update"):
            heart.enter(stage)
            for _ in range(2):
                heart.beat("micro-batch 1 of 2", shape="up to 256 tokens")
                firsts.append(is_first_use())
        assert firsts == [True, False, True, False, False, False]
        heart.beat("micro-batch 1 of 2", shape="up to 512 tokens")
        with heart.exceptional("compiling"):
            assert is_first_use()
        assert is_first_use(), "the same micro-batch goes on"
        heart.beat("something else")
        assert not is_first_use()
        for number in range(MAX_SHAPES):
            heart.beat(shape=f"{number} tokens")
        assert not is_first_use(), "these are no classes"

    def test_one_that_waits_is_not_silent_and_its_waiting_teaches_nothing(self) -> None:
        watch = Watch(Limits(floor_s=2, cap_s=100))
        visit(watch, 0.1, 1.1)
        watch.see(beat(20, 2, waits_for="group"))
        assert not watch.is_silent(beat(20, 2, waits_for="group"), now=5000, frozen="")
        visit(watch, 50)
        assert watch.limit_s(beat(510, 51)) == STRETCH

    def test_one_that_waits_for_its_own_disk_is_silent_when_that_takes_nothing_for_the_longest_time(self) -> None:
        watch = Watch(Limits(floor_s=2, cap_s=100))
        visit(watch, 0.1, 1.1)
        waits = beat(20, at=2, waits_for="its checkpoint")
        assert watch.limit_s(waits) == 100, "a disk may be slower than it was"
        assert not watch.is_silent(waits, now=101, frozen="")
        assert watch.is_silent(waits, now=103, frozen="")
        assert not watch.is_silent(replace(waits, background_at=90.0), now=189, frozen=""), "slow, and it gets on"
        assert watch.is_silent(replace(waits, background_at=90.0), now=191, frozen="")
        stuck = replace(beat(20, at=2), background_at=90.0)
        assert watch.is_silent(stuck, now=92, frozen=""), "one that waits for nothing is not excused by its disk"

    def test_one_in_a_debugger_is_not_silent_and_what_a_person_took_teaches_nothing(self) -> None:
        watch = Watch(Limits(floor_s=2, cap_s=1000))
        visit(watch, 0.1, 1.0)
        debugged = replace(beat(20, at=2.0), opened_at=2.5)
        watch.see(debugged)
        assert not watch.frozen(debugged, now=500, state="S") and not watch.is_silent(debugged, now=500, frozen="")
        released = replace(debugged, closed_at=500.0)
        assert not watch.is_silent(released, now=501.0, frozen="")
        assert watch.is_silent(released, now=500 + STRETCH * 0.9 + 0.1, frozen="")
        watch.see(replace(beat(21, at=500.5), opened_at=2.5, closed_at=500.0))
        watch.see(beat(22, at=500.6, stage="between"))
        assert watch.limit_s(beat(23, 501)) == STRETCH * 0.9

    def test_a_frozen_one_is_silent_after_the_floor_also_when_it_waits(self) -> None:
        watch = Watch(Limits(floor_s=2, cap_s=100))
        frozen = beat(1, at=0, waits_for="group", io_at=10)
        assert not watch.is_silent(frozen, now=11.9, frozen="its process was stopped by a signal")
        assert watch.is_silent(frozen, now=12.1, frozen="its process was stopped by a signal")

    def test_a_machine_that_stood_still_is_not_blamed_on_its_rank(self) -> None:
        watch = Watch(Limits(floor_s=10, cap_s=100))
        visit(watch, 0.1, 1.0)
        before = beat(20, at=2.0, io_at=4.0)
        watch.forgive(now=505.0, seconds=500.0)
        assert not watch.frozen(before, now=505.0, state="S") and not watch.is_silent(before, now=505.0, frozen="")
        assert watch.is_silent(before, now=512.1, frozen=""), "3 s before and 7 s after it"
        assert watch.frozen(before, now=514.1, state="S")
        after = beat(21, at=506.0)
        assert watch.is_silent(after, now=516.1, frozen="")


def test_a_watchdog_forgives_its_rank_what_it_missed_itself() -> None:
    process = subprocess.Popen(["sleep", "60"])
    watchdog = Watchdog(process.pid, 0, socket.socketpair()[1], Heart(), Stacks())
    watchdog._witness.watch.limits = Limits(floor_s=1.0, cap_s=10.0)
    watchdog._round_at -= 20.0
    old = replace(watchdog._witness.beat, at=time.monotonic() - 20.0, io_at=time.monotonic() - 20.0)
    watchdog._witness._heart.read = lambda: old
    runner = threading.Thread(target=watchdog.run, daemon=True)
    runner.start()
    time.sleep(0.5)
    assert process.poll() is None, "else it is killed for a silence before it joined"
    process.kill()
    process.wait()
    runner.join(10)


def test_a_heart_is_read_by_a_child() -> None:
    heart = Heart()
    heart.describe(roles="actor", step=3, version=4)
    heart.enter("update")
    heart.beat("micro-batch 1 of 2 " + "x" * 10_000, tokens=5)
    heart.wait("group")
    reader, writer = os.pipe()
    if not os.fork():
        seen = heart.read()
        assert seen is not None
        fields = [seen.roles, seen.stage, seen.step, seen.version, seen.item[:20], seen.waits_for, seen.tokens]
        os.write(writer, json.dumps(fields).encode())
        os._exit(0)
    assert json.loads(os.read(reader, 1000)) == ["actor", "update", 3, 4, "micro-batch 1 of 2 x", "group", 5]
    before = heart.read()
    heart.beat()
    after = heart.read()
    assert before is not None and after is not None and after.beats == before.beats + 1 and after.at >= before.at


def test_exceptional_work_is_said_with_a_beat_when_it_begins_and_ends() -> None:
    heart = Heart()

    def seen() -> tuple[str, int]:
        beat = heart.read()
        assert beat is not None
        return beat.exceptional, beat.beats

    heart.enter("update")
    with pytest.raises(ZeroDivisionError), heart.exceptional("building the engine"):  # noqa: PT012
        name, before = seen()
        assert name == "building the engine"
        with heart.exceptional("compiling"):
            assert seen() == ("compiling", before + 1)
        heart.beat("vLLM's start")
        assert seen() == ("building the engine", before + 3)
        raise ZeroDivisionError
    assert seen() == ("", before + 4)
    heart.end_exceptional("compiling")
    assert seen()[0] == "", "a callback that was registered in the middle of a compilation"
    with heart.exceptional("\N{GRINNING FACE}" * 10_000):
        heart.wait("\N{GRINNING FACE}" * 10_000)
        heart.beat("\N{GRINNING FACE}" * 10_000)
        assert seen()[0] == "\N{GRINNING FACE}" * 200, "the memory holds it"


def test_an_account_says_what_is_exceptional_and_how_long_it_may_take() -> None:
    heart = Heart()
    witness = Witness(heart, RankProcess(os.getpid(), leads_group=False), Stacks())
    for _ in range(2):
        heart.enter("update")
        witness.look()
        heart.enter("between")
        witness.look()
    heart.enter("update")
    with heart.exceptional("compiling"):
        witness.look()
        compiles = witness.account()
    witness.look()
    works = witness.account()
    assert (compiles.exceptional, compiles.limit_s) == ("compiling", Limits().cap_s)
    assert (works.exceptional, works.limit_s) == ("", Limits().floor_s)


def test_sizes_are_classed_by_powers_of_two() -> None:
    assert [size_class(count) for count in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 2048]
    assert [size_class(count, least=256) for count in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert len({size_class(count, least=256) for count in range(0, 65_537)}) == 10


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
def test_the_culprit_is_the_one_that_the_others_wait_for(culprit: dict[str, Any], other: dict[str, Any]) -> None:
    accounts = [account(rank, **other) for rank in range(3)] + [account(3, **culprit)]
    assert find_culprit(accounts).rank == 3


def test_a_stack_tells_whether_a_rank_stands_in_a_collective() -> None:
    lines = ["Thread 0x1 (most recent call first):", '  File "rl/world/mail.py", line 1 in _serve', ""]
    lines += ["Current thread 0x2 (most recent call first):", '  File "torch/distributed/x.py", line 1 in all_gather']
    assert stands_in_collective("\n".join(lines))
    assert not stands_in_collective("\n".join([*lines[:4], '  File "rl/learner/policy.py", line 9 in update']))
    assert not stands_in_collective("")


ASKS_AGAIN = """
import os, time
from rl.watch.stacks import MAX_BYTES, Stacks

def somewhere():
    stacks = Stacks()
    os.write(stacks._file.fileno(), b"x" * (MAX_BYTES + 1))
    stacks.ask(is_stopped=False)
    time.sleep(0.1)
    assert "in somewhere" in stacks.take()

somewhere()
"""


def test_stacks_are_read_however_many_were_written_before() -> None:
    """In a process of its own, which has one thread."""
    subprocess.run([sys.executable, "-c", ASKS_AGAIN], cwd=ROOT, check=True, timeout=30)


class FakeWorld:
    """A board with four ranks, and what it told and said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(board_module.time, "monotonic", lambda: self.now)
        self.told: list[tuple[int, str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.board = Board(lambda rank, kind, **values: self.told.append((rank, kind, values)), self.said.append)
        for rank in range(4):
            self.beat(rank)

    def beat(self, rank: int, **values: Any) -> None:
        self.send(rank, "beat", account=vars(account(rank, **values)), about={})

    def send(self, rank: int, kind: str, **values: Any) -> None:
        self.board.handle(rank, {"kind": kind, **values})

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.board.tick()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    return FakeWorld(monkeypatch)


def report(rank: int, cause: str, error: str = "ValueError: no") -> dict[str, Any]:
    return vars(Report(rank, "actor", "node0", "update", 7, error, "", cause))


def aborted(world: FakeWorld) -> list[tuple[int, bool]]:
    return [(rank, values["stop"]) for rank, kind, values in world.told if kind == "abort"]


class TestBoard:
    def test_the_exception_explains_the_broken_connections_and_is_said_once(self, world: FakeWorld) -> None:
        world.send(1, "report", report=report(1, "connection", "broken"))
        world.send(2, "died")
        world.send(3, "report", report=report(3, "error"))
        assert not world.said
        world.wait(1)
        world.wait(1)
        assert len(world.said) == 1
        first, *others = world.said[0].splitlines()
        assert first == "oneworld: rank 3 (actor) on node0, stage update, step 7: ValueError: no"
        assert others == ["  ranks 0-2 (actor): stage update, working, or in a collective, silent for up to 10 s"]
        assert aborted(world) == [(rank, False) for rank in range(4)]

    def test_a_death_names_its_stage_and_who_waited(self, world: FakeWorld) -> None:
        world.beat(0, roles="rollout", stage="rollout", waits_for="work")
        world.send(2, "died")
        world.wait(1)
        assert world.said[0].splitlines() == [
            "oneworld: rank 2 (actor) on node1, stage update, step 7: its process ended without a word",
            "  12 s after that stage began",
            "  rank 0 (rollout): stage rollout, waiting for work, silent for up to 10 s",
            "  ranks 1,3 (actor): stage update, working, or in a collective, silent for up to 10 s",
        ]

    def test_a_silent_rank_may_not_be_the_culprit(self, world: FakeWorld) -> None:
        world.send(1, "silent")
        assert [(rank, kind) for rank, kind, _ in world.told] == [(rank, "account") for rank in range(4)]
        for rank in (0, 1, 2):
            world.send(rank, "account", account=vars(account(rank, in_collective=True)))
        world.wait(0.1)
        assert not world.said
        frozen = account(3, frozen="its process was stopped by a signal", item="micro-batch 2 of 9", stacks="a/b")
        world.send(3, "account", account=vars(frozen))
        world.wait(0.1)
        assert world.said[0].splitlines()[:2] == [
            "oneworld: rank 3 (actor) on node1, stage update, step 7: its process was stopped by a signal; silent for "
            "10 s on micro-batch 2 of 9, 12 s after the stage began",
            "  stacks: a/b",
        ]

    def test_a_beat_does_not_replace_an_account(self, world: FakeWorld) -> None:
        world.send(1, "silent")
        for rank in (3, 0, 1, 2):
            world.send(rank, "account", account=vars(account(rank, in_collective=rank < 3, stacks=f"rank_{rank}")))
            world.beat(rank)
        world.wait(0.1)
        assert world.said[0].startswith("oneworld: rank 3 ") and "  stacks: rank_3" in world.said[0]

    def test_a_slow_rank_that_may_be_slow_is_left_alone(self, world: FakeWorld) -> None:
        """One that stands in a collective is at its limit, the one that compiles is not."""
        world.send(1, "silent")
        for rank in (0, 1, 2):
            world.send(rank, "account", account=vars(account(rank, in_collective=True, limit_s=10.0)))
        world.send(3, "account", account=vars(account(3, silent_s=30.0, limit_s=100.0)))
        world.wait(0.1)
        assert not world.said
        assert [(rank, kind) for rank, kind, _ in world.told[4:]] == [(rank, "patience") for rank in range(4)]
        world.send(1, "silent")
        for rank in (0, 1, 2):
            world.send(rank, "account", account=vars(account(rank, in_collective=True, limit_s=10.0)))
        world.send(3, "account", account=vars(account(3, silent_s=101.0, limit_s=100.0)))
        world.wait(0.1)
        assert world.said[0].startswith("oneworld: rank 3 ")

    def test_nobody_is_blamed_while_a_rank_compiles_unless_it_is_frozen(self, world: FakeWorld) -> None:
        """Its main thread may seem to stand in a collective (a backward pass compiles in a thread of autograd), and
        one that waits for it on a GPU may not."""
        compiles = account(3, silent_s=70.0, limit_s=1800.0, exceptional="compiling", in_collective=True)
        frozen = account(0, silent_s=90.0, limit_s=60.0, frozen="its process was stopped by a signal")
        for other, is_named in [(account(0, silent_s=90.0, limit_s=60.0), False), (frozen, True)]:
            world.send(0, "silent")
            world.send(0, "account", account=vars(other))
            for rank in (1, 2):
                world.send(rank, "account", account=vars(account(rank, silent_s=90.0, limit_s=60.0)))
            world.send(3, "account", account=vars(compiles))
            world.wait(0.1)
            assert bool(world.said) == is_named
        assert world.said[0].startswith("oneworld: rank 0 ")
        assert world.said[0].splitlines()[-1] == "  rank 3 (actor): stage update, compiling, silent for up to 70 s"

    def test_a_rank_that_compiles_for_too_long_is_named(self, world: FakeWorld) -> None:
        world.send(3, "silent")
        for rank in (0, 1, 2):
            world.send(rank, "account", account=vars(account(rank, silent_s=90.0, in_collective=True)))
        hangs = account(3, silent_s=1801.0, limit_s=1800.0, item="micro-batch 2 of 9", exceptional="compiling")
        world.send(3, "account", account=vars(hangs))
        world.wait(0.1)
        assert "silent for 1801 s on micro-batch 2 of 9, compiling, 12 s after the stage began" in world.said[0]

    def test_nobody_is_blamed_while_a_rank_is_debugged(self, world: FakeWorld) -> None:
        world.send(1, "silent")
        for rank in (0, 1, 2):
            world.send(rank, "account", account=vars(account(rank, silent_s=90.0, limit_s=10.0)))
        world.send(3, "account", account=vars(account(3, silent_s=9000.0, limit_s=10.0, debugged=True)))
        world.wait(0.1)
        assert not world.said and world.told[-1][1] == "patience"
        for rank in range(4):
            world.beat(rank, waits_for="group", silent_s=DEADLOCK_S + 1, debugged=rank == 2)
        world.wait(0.1)
        world.wait(3)
        assert not world.said

    def test_broken_connections_wait_for_who_broke_them(self, world: FakeWorld) -> None:
        world.send(1, "report", report=report(1, "connection", "broken"))
        world.wait(1)
        assert not world.said
        world.send(2, "died")
        world.wait(0.5)
        assert world.said[0].startswith("oneworld: rank 2 ")

    def test_broken_connections_alone_end_the_world_too(self, world: FakeWorld) -> None:
        world.send(1, "report", report=report(1, "connection", "broken"))
        for _ in range(8):
            world.wait(0.5)
        assert world.said == ["oneworld: rank 1 (actor) on node0, stage update, step 7: broken"]

    def test_who_comes_after_the_verdict_hears_it(self, world: FakeWorld) -> None:
        world.send(0, "report", report=report(0, "fatal", "wrong"))
        world.wait(1)
        world.beat(4)
        assert world.told[-1][:2] == (4, "abort") and world.told[-1][2]["stop"]

    def test_a_board_that_stood_still_blames_nobody(self, world: FakeWorld) -> None:
        world.now += 60
        world.board.forgive(60)
        world.wait(0.1)
        assert not world.said

    def test_an_inquest_does_not_wait_for_ever(self, world: FakeWorld) -> None:
        world.send(1, "silent")
        world.wait(3)
        assert len(world.said) == 1

    def test_a_host_that_is_cut_off_is_named_with_all_its_ranks(self, world: FakeWorld) -> None:
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

    def test_all_waiting_for_each_other_is_an_end_too(self, world: FakeWorld) -> None:
        for rank in range(4):
            world.beat(rank, waits_for="group", silent_s=DEADLOCK_S + 1)
        world.wait(0.1)
        world.wait(3)
        assert "waiting for group" in world.said[0]

    def test_a_slow_checkpoint_is_no_deadlock(self, world: FakeWorld) -> None:
        for rank in range(4):
            world.beat(rank, waits_for="its checkpoint" if rank == 2 else "saved", silent_s=DEADLOCK_S + 1)
        world.wait(0.1)
        world.wait(3)
        assert not world.said

    def test_a_checkpoint_that_gets_on_is_waited_for_and_one_that_does_not_is_named(self, world: FakeWorld) -> None:
        for silent_s in (50.0, 101.0):
            world.send(1, "silent")
            for rank in (0, 1, 2):
                others = account(rank, waits_for="the others' checkpoints", silent_s=200.0, limit_s=10.0)
                world.send(rank, "account", account=vars(others))
            slow = account(3, stage="checkpoint", waits_for="its checkpoint", silent_s=silent_s, limit_s=100.0)
            world.send(3, "account", account=vars(slow))
            world.wait(0.1)
            assert len(world.said) == (silent_s > 100)
        assert world.said[0].splitlines() == [
            "oneworld: rank 3 (actor) on node1, stage checkpoint, step 7: silent for 101 s, waiting for its "
            "checkpoint, 12 s after the stage began",
            "  ranks 0-2 (actor): stage update, waiting for the others' checkpoints, silent for up to 200 s",
        ]

    def test_reports_that_patience_leaves_are_judged(self, world: FakeWorld) -> None:
        world.send(1, "silent")
        world.send(0, "report", report=report(0, "connection", "broken"))
        for rank in range(4):
            world.send(rank, "account", account=vars(account(rank, silent_s=1.0, limit_s=10.0)))
        for _ in range(8):
            world.wait(0.5)
        assert len(world.said) == 1 and world.said[0].endswith("step 7: broken")

    def test_a_rank_that_is_done_may_go(self, world: FakeWorld) -> None:
        for rank in range(4):
            world.send(rank, "done")
            world.board.lost_connection(rank)
        world.wait(60)
        assert not world.said

    def test_the_same_error_again_stops_the_launcher(self, world: FakeWorld, tmp_path: Path) -> None:
        world.board.memory = Memory(tmp_path)
        Memory(tmp_path).is_repeated(Report(**report(3, "error", "ValueError: other details")))
        world.send(3, "report", report=report(3, "error"))
        world.wait(1)
        assert world.said[1] == "oneworld: fatal, will not be restarted"
        assert aborted(world) == [(rank, True) for rank in range(4)]

    def test_an_interrupt_stops_the_launcher_and_is_not_fatal(self, world: FakeWorld) -> None:
        world.send(0, "report", report=report(0, "interrupt", ""))
        world.wait(1)
        assert world.said == ["oneworld: interrupted at step 7, stage update"]
        assert aborted(world) == [(rank, True) for rank in range(4)]

    @pytest.mark.parametrize(("cause", "said"), [("stopped", ": step 6 is saved"), ("lost", "")])
    def test_what_ends_the_world_after_an_interrupt_is_due_to_that(
        self, cause: str, said: str, world: FakeWorld
    ) -> None:
        world.send(1, "interrupting", report=report(1, "interrupt", ""))
        world.wait(1)
        assert not world.said
        world.send(2, "report", report=report(2, cause, "step 6 is saved"))
        world.wait(1)
        assert world.said == [f"oneworld: interrupted at step 7, stage update{said}"]
        assert aborted(world) == [(rank, True) for rank in range(4)]


def test_time_of_beats_is_that_of_the_system() -> None:
    heart = Heart()
    seen = heart.read()
    assert seen is not None and abs(seen.at - time.monotonic()) < 5


def test_a_host_hears_those_who_know_the_token_and_stays_until_they_have_gone() -> None:
    told: list[dict[str, Any]] = []
    with selectors.DefaultSelector() as selector:
        host = Host("127.0.0.1", "token", selector, told.append, lambda text: None)

        def read(is_so: Callable[[], bool]) -> None:
            deadline = time.monotonic() + 10
            while not is_so():
                assert time.monotonic() < deadline
                for key, _ in selector.select(0.1):
                    key.data()

        friend, stranger = (Lines(socket.create_connection(("127.0.0.1", host.port))) for _ in range(2))
        for line, rank, token in ((stranger, 2, "other"), (friend, 1, "token")):
            line.send("hello", token=token, rank=rank)
            line.send("beat", account=vars(account(rank)), about={})
        read(lambda: not stranger.receive() and not stranger.is_open)
        read(lambda: set(host.board.entries) == {1})
        host.send("beat", account=vars(account(0)), about={})
        host.send("silent")
        assert told == [{"kind": "account"}]
        select.select([friend.connection], [], [], 10)
        assert friend.receive() == [{"kind": "account"}]
        assert not host.may_end(is_settled=True)
        friend.send("done")
        friend.close()
        read(lambda: host.may_end(is_settled=True))
        assert not host.may_end(is_settled=False), "its own rank is not settled"


def test_a_rank_that_is_done_has_told_how_far_it_got() -> None:
    process = subprocess.Popen(["sleep", "60"])
    ours, theirs = socket.socketpair()
    rank, heart = Lines(ours), Heart()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watchdog = threading.Thread(target=Watchdog(process.pid, 0, theirs, heart, Stacks()).run, daemon=True)
        watchdog.start()
        rank.send("join", rank=1, local_rank=1, token="token", board=listener.getsockname())
        board = Lines(listener.accept()[0])
        messages: list[dict[str, Any]] = []
        until(lambda: messages.extend(board.receive()) or len(messages) >= 2, "the first beat")
        heart.describe(step=7)
        rank.send("done")
        process.kill()
        process.wait()
        watchdog.join(10)
        until(lambda: messages.extend(board.receive()) or messages[-1]["kind"] == "done", "the end")
    *_, beat, done = messages
    assert (beat["kind"], beat["account"]["step"], done["kind"]) == ("beat", 7, "done")


def test_a_rank_that_is_done_waits_for_the_others() -> None:
    """And is not to blame when one of them never is."""
    seen: list[str] = []

    def wait(seconds: float) -> bool:
        now = HEART.read()
        assert now is not None
        seen.append(now.waits_for)
        return True

    with connected(1) as (mail,):
        world: Any = SimpleNamespace(mail=mail, closers=[], _all_finished=SimpleNamespace(wait=wait))
        world._tell_watchdog, world._attempt = seen.append, SimpleNamespace(end_well=lambda: None)
        World.close(world)
    assert seen == ["the others to finish", "done"]


@pytest.mark.parametrize(
    ("code", "has_crashed"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", True),
        ("import os; os._exit(1)", True),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", False),
        ("", False),
    ],
)
def test_how_a_process_ended_is_seen(code: str, has_crashed: bool) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(0.5); {code}"])
    process = RankProcess(child.pid, leads_group=False)
    assert not process.has_crashed
    assert select.select([process.exit_fd], [], [], 10)[0]
    assert process.has_crashed == has_crashed
    child.wait()
    assert not process.has_crashed, "nothing is known of it any more"


def test_starts_that_end_early_are_counted_once_each_until_the_ranks_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def counts(attempt: int) -> list[int]:
        launchers = []
        for local_rank in (1, 0):  # the first rank of a node need not be the one that ends
            folder = tmp_path / "logs" / f"attempt_{attempt}" / str(local_rank)
            folder.mkdir(parents=True)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            monkeypatch.setenv("LOCAL_RANK", str(local_rank))
            launchers.append(Launcher(os.getpid()))
        return [launcher.count_early_death() for launcher in launchers]

    assert [counts(attempt) for attempt in range(3)] == [[1, 0], [2, 0], [3, 0]]
    Launcher(os.getpid()).forget_early_deaths()
    assert counts(3) == [1, 0]


@contextmanager
def watched(folder: Path) -> Iterator[tuple[Lines, Heart]]:
    """Rank 0 and its watchdog, in this process; and the line between them."""
    process = subprocess.Popen(["sleep", "60"])
    ours, theirs = socket.socketpair()
    rank, heart = Lines(ours), Heart()
    watchdog = threading.Thread(target=Watchdog(process.pid, 0, theirs, heart, Stacks()).run, daemon=True)
    watchdog.start()
    try:
        rank.send("host", address="127.0.0.1", token="token")
        rank.send("join", rank=0, local_rank=0, token="token", board=[])
        rank.send("run", folder=str(folder), floor_s=60.0, cap_s=60.0, collectives="")
        yield rank, heart
    finally:
        process.kill()
        process.wait()
        watchdog.join(10)


def test_a_frozen_rank_is_shown_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Witness, "frozen", lambda witness: "its interpreter is frozen")
    with watched(tmp_path):
        files = [tmp_path / "status" / f"{name}.json" for name in ("board", "rank_0")]
        until(lambda: all(file.exists() for file in files), "written")
        time.sleep(1.5)  # a beat that was sent when the folder was known
        board, rank = (json.loads(file.read_text()) for file in files)
    assert board["ranks"][0]["frozen"] == rank["frozen"] == "its interpreter is frozen"


def test_how_far_rank_0_got_is_remembered_whoever_failed(tmp_path: Path) -> None:
    """It may only serve, and be a step ahead of the actor that was killed in step 7: it will be so again."""
    with watched(tmp_path) as (rank, heart):
        heart.describe(step=8)
        rank.send("report", **report(2, "lost"))
        until(lambda: "abort" in [message["kind"] for message in rank.receive()], "the verdict")
    assert json.loads((tmp_path / "attempts.json").read_text()) == [0, 8]


@pytest.mark.parametrize("name", ["is_repeated", "write_fatal", "note_end"])
def test_what_is_remembered_of_an_end_is_not_waited_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(Memory, name, lambda *args: is_over.wait())
    with watched(tmp_path) as (rank, _):
        rank.send("report", **report(0, "fatal" if name == "write_fatal" else "error"))
        messages: list[dict[str, Any]] = []
        until(lambda: messages.extend(rank.receive()) or len(messages) > 1, "the verdict", timeout_s=10)
    is_over.set()
    assert [message["kind"] for message in messages] == ["hosted", "abort"]


class TestRecorder:
    def test_a_byte_in_the_pipe_asks_for_the_last_collectives(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(recorder, "PIPES", tmp_path)
        for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "environ", dict(os.environ))
        stem = recorder.keep_collectives(tmp_path / "run", "0123", 500)
        assert Path(stem).parent.is_dir()
        assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) == int(os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"]) == 500
        assert not recorder.ask_for_collectives("0123", 7), "nobody listens"
        pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}7.pipe"  # as torch names it
        os.mkfifo(pipe)
        assert not recorder.ask_for_collectives("0123", 7), "still nobody"
        listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        assert recorder.ask_for_collectives("0123", 7)
        assert os.read(listener, 10) == b"1"

    @pytest.mark.parametrize("is_pending", [True, False])
    def test_what_a_device_waits_for_is_read_from_them(
        self, is_pending: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A main thread that waits for its device stands in no collective."""
        monkeypatch.setattr(recorder, "PIPES", tmp_path)
        pipe, file = tmp_path / "oneworld-0123-nccl_7.pipe", tmp_path / "nccl_rank_7"
        os.mkfifo(pipe)
        listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        file.write_bytes(pickle.dumps(self.trace(4, 4 - (not is_pending))))  # of an earlier silence: the opposite
        recording = recorder.Recording("0123", 7, str(tmp_path / "nccl_rank_"))
        assert select.select([listener], [], [], 5)[0] and os.read(listener, 10) == b"1"
        assert not file.exists()
        data = pickle.dumps(self.trace(6, 6 - is_pending))
        file.write_bytes(data[:-20])  # torch is writing
        time.sleep(0.3)
        assert not recording.is_over
        file.write_bytes(data)
        until(lambda: recording.is_over, "read")
        assert (recording.path, recording.is_pending) == (str(file), is_pending)
        os.close(listener)

    def test_nobody_may_listen_or_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recorder, "PIPES", tmp_path)
        monkeypatch.setattr(recorder, "READ_S", 0.3)
        assert recorder.Recording("0123", 7, "").is_over, "there is no recorder"
        deaf = recorder.Recording("0123", 7, str(tmp_path / "nccl_rank_"))
        until(lambda: deaf.is_over, "nobody listens")
        os.mkfifo(tmp_path / "oneworld-0123-nccl_7.pipe")
        listener = os.open(tmp_path / "oneworld-0123-nccl_7.pipe", os.O_RDONLY | os.O_NONBLOCK)
        mute = recorder.Recording("0123", 7, str(tmp_path / "nccl_rank_"))
        until(lambda: mute.is_over, "nobody answers")
        assert (deaf.path, mute.path) == ("", str(tmp_path / "nccl_rank_7"))
        assert not deaf.is_pending and not mute.is_pending
        os.close(listener)

    @pytest.mark.parametrize("is_pending", [True, False])
    def test_an_account_has_it(self, is_pending: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recorder, "PIPES", tmp_path)
        pipe = tmp_path / "oneworld-0123-nccl_7.pipe"
        os.mkfifo(pipe)
        listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

        def record() -> None:
            select.select([listener], [], [], 5)
            (tmp_path / "nccl_rank_7").write_bytes(pickle.dumps(self.trace(6, 6 - is_pending)))

        threading.Thread(target=record, daemon=True).start()
        account, _ = self.ask(tmp_path)
        assert (account.is_pending, account.collectives) == (is_pending, str(tmp_path / "nccl_rank_7"))
        assert Path(account.stacks).read_text()
        os.close(listener)

    def test_a_folder_that_hangs_does_not_keep_an_account_from_the_board(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        is_over = threading.Event()
        monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: is_over.wait())
        monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: is_over.wait())
        account, seconds = self.ask(tmp_path)
        is_over.set()
        assert (account.stacks, account.collectives) == ("", "")
        assert seconds < board_module.INQUEST_S - 0.5

    @staticmethod
    def ask(folder: Path) -> tuple[Account, float]:
        """A watchdog's witness, in the process of its rank; and how long its answer took."""
        process: Any = SimpleNamespace(state="S")  # that of a process that waits
        witness = Witness(Heart(), process, Stacks())
        witness.rank, witness.world, witness.folder = 7, "0123", folder
        witness.collectives = str(folder / "nccl_rank_")
        started = time.monotonic()
        witness.ask()
        while (account := witness.answer()) is None:
            time.sleep(0.05)
        assert witness.answer() is None, "it is told once"
        return account, time.monotonic() - started

    @staticmethod
    def trace(enqueued: int, completed: int) -> dict[str, Any]:
        """As torch writes it, less what is not read."""
        done = {"last_enqueued_collective": 9, "last_started_collective": -1, "last_completed_collective": 9}
        last = {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
        return {"version": "2.10", "entries": [], "pg_status": {"0": done, "1": done | last}}

    def test_it_may_be_off(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "environ", {})
        assert recorder.keep_collectives(tmp_path, "0123", 0) == ""
        assert os.environ == {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}

    def test_what_the_user_has_set_wins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "environ", os.environ | {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/trace_"})
        assert recorder.keep_collectives(tmp_path, "0123", 500) == "/mine/trace_"
        assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ
