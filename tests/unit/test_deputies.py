"""Which node tells the webhook if that of rank 0 is lost. Deputies are threads of this process, with real sockets."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rl.common.handshake import Refusals
from rl.common.json_channel import JsonChannel
from rl.watch import deputies, launcher
from rl.watch.deputies import Deputy
from rl.watch.launcher import Launcher
from rl.watch.webhook import VARIABLE, Ending, Webhook
from tests.launcher import until
from tests.mails import HOST, KEY, listening
from tests.unit.test_board import FakeWorld
from tests.unit.test_watchdog import running


def make_deputy(rank: int) -> Deputy:
    return Deputy(rank, HOST, KEY, Refusals(lambda text: None))


def meet(*members: Deputy, **lost: tuple[str, int]) -> None:
    """Let deputies know each other, as the board does. `lost` are addresses of others, by `rank_N`."""
    known = {each._rank: each.address for each in members}
    known |= {int(name.removeprefix("rank_")): address for name, address in lost.items()}
    for each in members:
        each.others = known


@pytest.fixture
def dead() -> tuple[str, int]:
    """The address of a deputy that is gone."""
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[:2]


@pytest.fixture
def frozen() -> Any:
    """The address of a deputy that accepts connections and says nothing, as on a frozen host."""
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[:2]


def test_the_lowest_deputy_that_is_alive_is_the_first(
    dead: tuple[str, int], frozen: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deputies, "REACH_S", 0.5)
    members = [make_deputy(rank) for rank in (16, 24, 32)]
    meet(*members)
    assert [each.is_first() for each in members] == [True, False, False]
    meet(*members, rank_8=dead, rank_12=frozen)
    assert [each.is_first() for each in members] == [True, False, False]
    meet(members[1], members[2], rank_8=dead, rank_16=frozen)
    assert [each.is_first() for each in members[1:]] == [True, False]


def test_a_deputy_that_knows_no_other_one_sends_nothing() -> None:
    """The board was lost while the ranks met. Otherwise, every node would send a message."""
    assert not make_deputy(8).is_first()


def test_a_stranger_does_not_pass_for_a_deputy() -> None:
    with listening(key=b"another key") as (address, _):
        deputy = make_deputy(8)
        meet(deputy, rank_4=address)
        assert deputy.is_first()


def test_the_board_tells_deputies_about_each_other_and_about_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    world = FakeWorld(monkeypatch)
    world.send(2, "deputy", host="10.0.0.2", port=700)
    world.send(1, "deputy", host="10.0.0.1", port=701)
    rows = [[2, "10.0.0.2", 700], [1, "10.0.0.1", 701]]
    assert [each for each in world.told if each[1] == "deputies"] == [
        (2, "deputies", {"rows": rows[:1]}),
        (2, "deputies", {"rows": rows}),
        (1, "deputies", {"rows": rows}),
    ]
    world.send(0, "rewards", first=0.25, last=0.5)
    told = [each for each in world.told if each[1] == "rewards"]
    assert told == [(rank, "rewards", {"first": 0.25, "last": 0.5}) for rank in (0, 2, 1)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Ending]:
    """Keep messages to the webhook instead of sending them."""
    endings: list[Ending] = []
    monkeypatch.setenv(VARIABLE, "http://127.0.0.1:9/")
    monkeypatch.setattr(Webhook, "_send", lambda self, ending: endings.append(ending))
    monkeypatch.setattr(deputies, "STAY_S", 0.0)
    return endings


def lose_board(folder: Path, *others: Deputy, local_rank: int = 0) -> None:
    """Run the watchdog of rank 5, which loses the board after it was told about other deputies."""
    ours, theirs = socket.socketpair()
    rank = JsonChannel(ours)
    with listening() as (address, accepted), running(theirs) as (_, heart):
        heart.describe(step=7)
        rank.send("join", rank=5, local_rank=local_rank, world="world", key=KEY.hex(), board=address)
        rank.send("run", folder=str(folder / "x"), floor_s=60.0, cap_s=60.0, collectives="")
        board, messages = JsonChannel(accepted.get()), list[dict[str, Any]]()
        kinds = {"hello", "beat", "deputy"} if local_rank == 0 else {"hello", "beat"}
        until(lambda: messages.extend(board.receive()) or kinds <= {each["kind"] for each in messages}, "the deputy")
        for each in messages:
            if each["kind"] == "deputy":
                rows = [[other._rank, *other.address] for other in others]
                board.send("deputies", rows=[*rows, [5, each["host"], each["port"]]])
                board.send("rewards", first=0.25, last=0.5)
        board.flush_within(5.0)
        board.close()
        until(lambda: "abort" in [message["kind"] for message in rank.receive()], "the end")


def test_a_deputy_tells_the_webhook_that_the_board_is_lost(sent: list[Ending], tmp_path: Path) -> None:
    lose_board(tmp_path, make_deputy(9))
    (ending,) = sent
    assert (ending.run, ending.status, ending.step, ending.id) == ("x", "failed", 7, "x-world")
    assert (ending.reward_first, ending.reward_last) == (0.25, 0.5)
    assert ending.reason.startswith("rank 0 is gone: its process ended, or its host was cut off (seen by rank 5 on ")


def test_a_deputy_leaves_the_message_to_a_lower_one(sent: list[Ending], tmp_path: Path) -> None:
    lose_board(tmp_path, make_deputy(3))
    assert sent == []


def test_only_the_first_watchdog_of_a_node_is_a_deputy(sent: list[Ending], tmp_path: Path) -> None:
    lose_board(tmp_path, local_rank=1)
    assert sent == []


def test_with_a_loop_that_restarts_torchrun_the_loop_tells_when_it_gives_up(
    sent: list[Ending], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = tmp_path / "world"
    monkeypatch.setenv(launcher.STOP_FILE, str(tmp_path / "stop"))
    monkeypatch.setenv(launcher.WORLD_FILE, str(world))
    lose_board(tmp_path)
    assert sent == [] and world.read_text() == "x-world tell"
    lose_board(tmp_path, make_deputy(3))
    assert sent == [] and world.read_text() == "x-world", "another node tells"


TORCHRUN = """
import subprocess, sys, time
first = subprocess.Popen(["sleep", "60"])
print("met", flush=True)
sys.stdin.readline()
first.kill()
first.wait()
if sys.argv[1] == "restarts":
    second = subprocess.Popen(["sleep", "60"])
    sys.stdin.readline()
    second.kill()
"""


@pytest.mark.parametrize("way", ["restarts", "gives up"])
def test_an_end_that_torchrun_does_not_restart_is_told_after_all(way: str) -> None:
    """torchrun still has restarts, but gives up, for example because a node does not come back."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TORCHRUN, way], **options) as torchrun:
        assert torchrun.stdin is not None and torchrun.stdout is not None
        torchrun.stdout.readline()
        agent, found = Launcher(torchrun.pid), list[bool]()
        agent.begin_world("x-world")
        waiter = threading.Thread(target=lambda: found.append(agent.fails_to_restart()))
        waiter.start()
        waiter.join(0.5)
        assert waiter.is_alive(), "torchrun has neither restarted the ranks nor ended"
        torchrun.stdin.write("end\n")
        torchrun.stdin.flush()
        waiter.join(10)
        assert found == [way == "gives up"]
        torchrun.kill()


def test_ranks_that_never_met_are_not_waited_for() -> None:
    assert not Launcher(os.getpid()).fails_to_restart()
