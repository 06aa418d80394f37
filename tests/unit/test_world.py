"""How ranks enter and leave a world together."""

import contextlib
import socket
import threading
import time

import pytest
import torch.distributed as dist

import rl.world.world
from rl.watch.heart import HEART
from rl.world.world import Arrived, Proceed
from tests.mails import WAIT_S, connected_worlds
from tests.ports import free_port


@pytest.mark.timeout(30)
@pytest.mark.parametrize("is_left", [True, False])
def test_rank_0_waits_until_its_port_is_free(is_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever."""
    port = free_port()
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(rl.world.world, "TAKEN_S", 20.0 if is_left else 0.3)
    with socket.create_server(("", port)) as taken:
        threading.Timer(0.3, taken.close if is_left else lambda: None).start()
        began = time.monotonic()
        with contextlib.nullcontext() if is_left else pytest.raises(dist.DistNetworkError, match="EADDRINUSE"):
            store, size = rl.world.world._open_store()
            store.set("key", "value")
            assert (size, store.get("key")) == (1, b"value")
        assert time.monotonic() - began >= 0.3


@pytest.mark.timeout(30)
def test_a_rank_that_is_done_waits_for_the_others() -> None:
    """It says so in its heartbeat, so that it is not blamed when another rank never finishes."""
    seen: list[str] = []
    closed: list[int] = []
    with connected_worlds(3) as worlds:
        for world in worlds:
            world.at_end(lambda rank=world.rank: closed.append(rank))  # type: ignore[misc]

        def finish_others() -> None:
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline and not ((beat := HEART.read()) and beat.activity.waits_for):
                time.sleep(0.01)
            seen.append(beat.activity.waits_for if beat else "")
            assert closed == []
            for world in worlds[1:]:
                threading.Thread(target=world.close).start()

        thread = threading.Thread(target=finish_others)
        thread.start()
        worlds[0].close()
        thread.join(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while len(closed) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert seen == ["the other ranks"]
    assert sorted(closed) == [0, 1, 2]


def test_a_closer_that_fails_keeps_no_other_from_its_work(capsys: pytest.CaptureFixture[str]) -> None:
    """The run is done and saved: an error here must not make torchrun start it again."""
    closed: list[str] = []
    with connected_worlds(1) as (world,):
        world.at_end(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        world.at_end(lambda: closed.append("second"))
        world.close()
    assert closed == ["second"]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_failure_after_all_ranks_are_done_does_not_undo_the_end() -> None:
    with connected_worlds(1) as (world,):
        world.mail.on(
            Arrived, lambda letter: (world.mail.send(0, Proceed("the end")), world.mail.fail(OSError("late")))
        )
        world.close()
