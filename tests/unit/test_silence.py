"""Tests of rl/watch/silence.py: when a rank has been silent for too long."""

import zlib
from dataclasses import replace
from typing import Any

from rl.watch.heart import Activity, Heart, Heartbeat
from rl.watch.silence import STRETCH, SilenceDetector


def beat(
    count: int, at: float, stage: str = "update", waits_for: str = "", exceptional: str = "", **times: float
) -> Heartbeat:
    activity = Activity("actor", stage, 1, 1, "", waits_for, exceptional)
    novelty: Any = {"is_new": False, "shape": "", "is_first_use": False}
    entered_at = float(zlib.crc32(stage.encode()))  # each visit of a stage has a time of its own
    return Heartbeat(activity, count, 0, at=at, **novelty, **({"stage_at": entered_at, "io_at": at} | times))


def is_silent(detector: SilenceDetector, beat: Heartbeat, now: float, letter: str = "") -> bool:
    return detector.state(0, "node0", beat, letter, now).is_silent


def is_frozen(detector: SilenceDetector, beat: Heartbeat, now: float) -> bool:
    return bool(detector.state(0, "node0", beat, "S", now).frozen)


def visit(detector: SilenceDetector, *times: float, stage: str = "update") -> None:
    """Show the detector a stage with heartbeats at these times, and then another stage."""
    for time_s in times:
        detector.see(beat(int(time_s * 10), at=time_s, stage=stage))
    detector.see(beat(int(times[-1] * 10) + 1, at=times[-1], stage="between"))


def test_the_limit_of_a_stage_is_a_multiple_of_its_longest_silence_between_floor_and_cap() -> None:
    detector = SilenceDetector(floor_s=10, cap_s=100)
    detector.see(beat(1, at=0.1))
    detector.see(beat(5, at=0.5))
    assert detector.limit_s(beat(5, 0.5)) == 100, "only visits that have ended count: the longest part may come last"
    visit(detector, 0.6, 0.8)
    assert detector.limit_s(beat(9, 0.9)) == 10
    visit(detector, 10, 18)
    assert detector.limit_s(beat(190, 19)) == 8 * STRETCH
    visit(detector, 20, 60)
    assert detector.limit_s(beat(610, 61)) == 100
    assert detector.limit_s(beat(610, 61, stage="sync")) == 100
    visit(detector, 70, 71, stage="start")
    assert detector.limit_s(beat(720, 72, stage="start")) == 100, "nothing is learnt from the start"


def test_a_long_stage_with_heartbeats_is_no_hang() -> None:
    detector = SilenceDetector(floor_s=2, cap_s=100)
    visit(detector, 0.1, 1.1)
    for second in range(2, 100):
        detector.see(beat(second * 10, at=second))
        assert not is_silent(detector, beat(second * 10, at=second), now=second + 1)
    assert is_silent(detector, beat(990, at=99), now=99 + STRETCH + 0.1)


def test_the_first_work_of_a_kind_may_take_longer_than_other_work_of_its_stage() -> None:
    detector, heart = SilenceDetector(floor_s=10, cap_s=100), Heart()

    def look() -> float:
        seen = heart.read()
        assert seen is not None
        detector.see(seen)
        return detector.limit_s(seen)

    limits = []
    for message in ("score", "score", "forward", "forward", "score"):
        heart.enter("logprobs", message)
        heart.beat("micro-batch 1 of 2")
        limits.append(look())
        heart.enter("serve")
        look()
    assert limits == [100, 10, 100, 10, 10]


def test_exceptional_work_may_last_until_the_cap_and_does_not_raise_the_limit() -> None:
    detector = SilenceDetector(floor_s=60, cap_s=1800)
    for step in range(3):
        visit(detector, *(10 * step + second for second in (1, 2, 3)))
    detector.see(beat(400, at=40))
    assert detector.limit_s(beat(400, at=40)) == 60, "after three quick steps"
    compiles = beat(401, at=41, exceptional="compiling")
    detector.see(compiles)
    assert detector.limit_s(compiles) == 1800
    assert not is_silent(detector, compiles, now=1840)
    assert is_silent(detector, compiles, now=1842), "a compiler may hang too"
    detector.see(beat(402, at=600))
    assert detector.limit_s(beat(402, at=600)) == 60, "known work goes on"
    visit(detector, 601)
    assert detector.limit_s(beat(6020, at=602)) == 60, "the 559 s of compilation do not count"
    assert not is_silent(detector, beat(6020, at=602), now=661)
    assert is_silent(detector, beat(6020, at=602), now=663)


def test_the_first_use_of_a_shape_is_an_estimate_for_the_second_use_only() -> None:
    detector, heart, now = SilenceDetector(floor_s=10, cap_s=1000), Heart(), 0.0

    def work(shape: str, seconds: float) -> float:
        """Do one piece of work in a stage of its own, and return the limit that it had."""
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
        detector.see(replace(seen, at=now))
        return detector.limit_s(seen)

    for _ in range(3):
        work("up to 256 tokens", 1.0)
    assert work("up to 256 tokens", 1.0) == 10
    assert work("up to 512 tokens", 30.0) == 1000, "a shape that was never used"
    assert work("up to 256 tokens", 1.0) == 10, "it says nothing about another shape"
    assert work("up to 512 tokens", 2.0) == 30 * STRETCH, "it may be as slow again"
    assert work("up to 512 tokens", 2.0) == 10, "it was not"
    heart.enter("update")
    heart.forget_shapes()
    assert work("up to 512 tokens", 1.0) == 1000
    assert work("up to 256 tokens", 1.0) == 1000


def test_a_rank_that_waits_is_not_silent_and_its_waiting_does_not_raise_the_limit() -> None:
    detector = SilenceDetector(floor_s=2, cap_s=100)
    visit(detector, 0.1, 1.1)
    detector.see(beat(20, 2, waits_for="group"))
    assert not is_silent(detector, beat(20, 2, waits_for="group"), now=5000)
    visit(detector, 50)
    assert detector.limit_s(beat(510, 51)) == STRETCH


def test_a_rank_that_waits_for_its_own_disk_is_silent_after_the_cap_without_progress() -> None:
    detector = SilenceDetector(floor_s=2, cap_s=100)
    visit(detector, 0.1, 1.1)
    waits = beat(20, at=2, waits_for="its checkpoint")
    progresses = beat(20, at=2, waits_for="its checkpoint", background_at=90.0)
    assert detector.limit_s(waits) == 100, "a disk may be slower than it was"
    assert not is_silent(detector, waits, now=101)
    assert is_silent(detector, waits, now=103)
    assert not is_silent(detector, progresses, now=189), "slow, but it makes progress"
    assert is_silent(detector, progresses, now=191)
    stuck = beat(20, at=2, background_at=90.0)
    assert is_silent(detector, stuck, now=92), "a rank that waits for nothing is not excused by its disk"


def test_a_rank_in_a_debugger_is_not_silent_and_that_time_does_not_raise_the_limit() -> None:
    detector = SilenceDetector(floor_s=2, cap_s=1000)
    visit(detector, 0.1, 1.0)
    debugged = beat(20, at=2.0, debugger_opened_at=2.5)
    detector.see(debugged)
    assert not is_frozen(detector, debugged, now=500) and not is_silent(detector, debugged, now=500)
    released = beat(20, at=2.0, debugger_opened_at=2.5, debugger_closed_at=500.0)
    assert not is_silent(detector, released, now=501.0)
    assert is_silent(detector, released, now=500 + STRETCH * 0.9 + 0.1)
    detector.see(beat(21, at=500.5, debugger_opened_at=2.5, debugger_closed_at=500.0))
    detector.see(beat(22, at=500.6, stage="between"))
    assert detector.limit_s(beat(23, 501)) == STRETCH * 0.9


def test_a_frozen_rank_is_silent_after_the_floor_also_when_it_waits() -> None:
    detector = SilenceDetector(floor_s=2, cap_s=100)
    frozen = beat(1, at=0, waits_for="group", io_at=10)
    assert not is_silent(detector, frozen, now=11.9, letter="T")
    assert is_silent(detector, frozen, now=12.1, letter="T")


def test_a_pause_of_the_machine_is_not_blamed_on_its_rank() -> None:
    detector = SilenceDetector(floor_s=10, cap_s=100)
    visit(detector, 0.1, 1.0)
    before = beat(20, at=2.0, io_at=4.0)
    detector.exclude_pause(now=505.0, seconds=500.0)
    assert not is_frozen(detector, before, now=505.0) and not is_silent(detector, before, now=505.0)
    assert is_silent(detector, before, now=512.1), "3 s before and 7 s after it"
    assert is_frozen(detector, before, now=514.1)
    after = beat(21, at=506.0)
    assert is_silent(detector, after, now=516.1)


def test_a_visit_ends_even_if_no_look_shows_another_stage() -> None:
    """All other stages of a step may pass between two looks of the watchdog."""
    detector = SilenceDetector(floor_s=1.0)
    detector.see(beat(1, at=1.0, stage_at=1.0))
    second = beat(9, at=5.0, stage_at=5.0)
    detector.see(second)
    assert detector.limit_s(second) == 4.0 * STRETCH
