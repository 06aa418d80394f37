"""Tests of rl/watch/heart.py: heartbeats in shared memory."""

import json
import os
import threading
import time

import pytest

from rl.watch.heart import HEART, MAX_SHAPES, Heart, Heartbeat, size_class
from tests.launcher import until
from tests.mails import Mark, connected


def newest(heart: Heart) -> Heartbeat:
    beat = heart.read()
    assert beat is not None
    return beat


def test_a_forked_process_reads_heartbeats() -> None:
    heart = Heart()
    heart.describe(roles="actor", step=3, version=4)
    heart.enter("update")
    heart.beat("micro-batch 1 of 2 " + "x" * 10_000, tokens=5)
    heart.wait("group")
    reader, writer = os.pipe()
    if not os.fork():
        seen = newest(heart)
        doing = seen.activity
        fields = [doing.roles, doing.stage, doing.step, doing.version, doing.item[:20], doing.waits_for, seen.tokens]
        os.write(writer, json.dumps(fields).encode())
        os._exit(0)
    assert json.loads(os.read(reader, 1000)) == ["actor", "update", 3, 4, "micro-batch 1 of 2 x", "group", 5]
    before = newest(heart)
    heart.beat()
    after = newest(heart)
    assert after.count == before.count + 1 and after.at >= before.at


def test_exceptional_work_makes_a_heartbeat_when_it_begins_and_ends() -> None:
    heart = Heart()

    def seen() -> tuple[str, int]:
        beat = newest(heart)
        return beat.activity.exceptional, beat.count

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
        assert seen()[0] == "\N{GRINNING FACE}" * 200, "long texts are cut so that they fit"


def test_heartbeats_can_be_read_after_one_that_was_interrupted() -> None:
    heart = Heart()
    heart._numbers[0] += 1  # as a KeyboardInterrupt in the middle of `_write` leaves it
    assert heart.read() is None
    heart.beat("next")
    assert newest(heart).activity.item == "next"


def test_size_classes_are_powers_of_two() -> None:
    assert [size_class(count) for count in (0, 1, 2, 3, 4, 5, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 2048]
    assert [size_class(count, least=256) for count in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert len({size_class(count, least=256) for count in range(0, 65_537)}) == 10


def test_heartbeats_use_the_monotonic_clock() -> None:
    assert abs(newest(Heart()).at - time.monotonic()) < 5


def test_the_first_use_of_a_shape_in_a_stage_lasts_until_the_next_heartbeat() -> None:
    heart, firsts = Heart(), []

    def is_first_use() -> bool:
        return newest(heart).is_first_use

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
    assert not is_first_use(), "too many shapes for classes of size"


def test_a_rank_that_waits_for_a_message_says_so() -> None:
    """A rank that waits is not to blame if the message never comes."""
    seen: list[str] = []

    with connected(1) as (mail,):

        def answer() -> None:
            until(lambda: bool(newest(HEART).activity.waits_for), "the rank waits")
            seen.append(newest(HEART).activity.waits_for)
            mail.send(0, Mark())

        threading.Thread(target=answer, daemon=True).start()
        mail.receive(Mark)
    assert seen == ["mark"] and newest(HEART).activity.waits_for == ""
