"""launch/roll_call.py on the loopback: missing nodes, wrong nodes, and nodes that come when the others train."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from launch import roll_call
from launch.checks.sockets import is_own_address, listen
from launch.roll_call import NOT_READY, READY, UNDER_WAY, Roll, RollCall, answer, parse_nnodes
from rl.common.framing import pack

HELLO = pack(b'{"kind": "hello", "run": "x", "node": 1, "name": "b"}')
pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("here", "names", "text"),
    [
        ([(0, "a"), (1, "b"), (3, "d")], ["a", "b", "c", "d"], "1 of 4 nodes: node 2 (c)"),
        ([(0, "a"), (3, "d")], [], "2 of 4 nodes: node 1, node 2"),
        ([(0, "a")], ["a", "b"], "3 of 4 nodes: node 1 (b), node 2, node 3"),
        ([(None, "d"), (None, "a")], [], "2 of 4 nodes; present: a, d"),
    ],
)
def test_missing_nodes_are_named(here: list[tuple[int | None, str]], names: list[str], text: str) -> None:
    roll = Roll(4, 4, names)
    assert [roll.enter(rank, name) for rank, name in here] == [""] * len(here)
    assert roll.missing() == text


def test_many_missing_nodes_are_counted() -> None:
    roll = Roll(40, 40)
    roll.enter(0, "a")
    assert roll.missing().endswith("node 7, node 8 and 31 more")


def test_two_nodes_cannot_have_one_rank() -> None:
    roll = Roll(2, 2)
    assert roll.enter(1, "b") == "" == roll.enter(1, "b"), "a node that connects again"
    assert roll.enter(1, "c") == "got node rank 1 from c, but b has it; give each node its own rank"
    assert "got node rank 2 in a launch of 2 nodes" in roll.enter(2, "c")
    roll.leave(1, "b")
    assert roll.enter(1, "c") == ""


def test_numbers_of_nodes_and_own_addresses() -> None:
    assert (parse_nnodes("4"), parse_nnodes("3:4")) == ((4, 4), (3, 4))
    assert is_own_address("127.0.0.1") and is_own_address("localhost") and not is_own_address("192.0.2.1")


def call(roll: Roll, wait_s: float, *hellos: dict[str, object]) -> tuple[int, list[int]]:
    """Run a head and these other nodes. Return the exit codes."""
    codes: dict[int, int] = {}
    roll.enter(0, "head")
    with listen(0) as server:
        port = server.getsockname()[1]

        def other(number: int) -> None:
            codes[number] = answer("127.0.0.1", port, 1, {"run": "x"} | hellos[number], wait_s)

        threads = [threading.Thread(target=other, args=[number]) for number in range(len(hellos))]
        for thread in threads:
            thread.start()
        code = RollCall(server, roll, "x").call(wait_s)
        for thread in threads:
            thread.join()
    return code, [codes[number] for number in range(len(hellos))]


def test_all_nodes_are_there() -> None:
    assert call(Roll(3, 3), 10, {"node": 2, "name": "c"}, {"node": 1, "name": "b"}) == (READY, [READY, READY])


def test_a_missing_node_ends_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(Roll(3, 3, ["head", "b", "c"]), 0.5, {"node": 1, "name": "b"}) == (NOT_READY, [NOT_READY])
    assert (
        capsys.readouterr().err.count("gave up after 0.5 s (ONEWORLD_PREFLIGHT_WAIT_S) on 1 of 3 nodes: node 2 (c)")
        == 2
    )


def test_nodes_beyond_the_minimum_have_a_little_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roll_call, "EXTRA_S", 0.3)
    assert call(Roll(2, 3), 10, {"node": 1, "name": "b"}) == (READY, [READY])
    assert "begins without 1 of 3 nodes: node 2" in capsys.readouterr().err


def test_nodes_of_another_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, codes = call(Roll(2, 2), 1.0, {"run": "y", "node": 1, "name": "b"})
    assert (code, codes) == (NOT_READY, [NOT_READY])
    assert "got b of the run y, but this is the roll call of x; give one another --port" in capsys.readouterr().err


def test_nodes_that_leave_and_strangers_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    roll = Roll(3, 3)
    roll.enter(0, "head")
    with listen(0) as server:
        place = ("127.0.0.1", server.getsockname()[1])
        for data in (HELLO, pack(b"{}"), pack(b'{"kind": "hello"}'), b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(place) as connection:
                connection.sendall(data)
        assert RollCall(server, roll, "x").call(0.5) == NOT_READY
    assert "on 2 of 3 nodes: node 1, node 2" in capsys.readouterr().err


def test_a_node_that_reconnects_before_its_old_connection_ends_stays() -> None:
    roll = Roll(2, 2)
    with listen(0) as server:
        caller, place = RollCall(server, roll, "x"), ("127.0.0.1", server.getsockname()[1])

        with socket.create_connection(place) as old, socket.create_connection(place) as new:
            for connection in (old, new):
                connection.sendall(HELLO)
                caller.step(timeout_s=5)  # the connection
                caller.step(timeout_s=5)  # its message
            assert roll.present == {1: "b"}
            old.close()
            caller.step(timeout_s=5)
            assert roll.present == {1: "b"}
        caller.step(timeout_s=5)
        assert roll.present == {}


@pytest.mark.timeout(120)  # torch is imported three times at once
def test_a_late_node_joins_its_own_run_and_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training port has torchrun's rendezvous of the run x, or a listener that says nothing."""
    monkeypatch.setattr(roll_call, "UNDER_WAY_S", 0.0)
    monkeypatch.setattr(roll_call, "STORE_S", 60.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    C10dRendezvousBackend(store, "x")
    codes: dict[str, int] = {}

    def other(run: str, port: int) -> None:
        codes[run] = answer("127.0.0.1", port, store.port, {"run": run, "node": 1, "name": "b"}, 0.5)

    with listen(0) as silent, listen(0) as unused:
        port, silent_port = unused.getsockname()[1], silent.getsockname()[1]
        unused.close()
        command = [sys.executable, roll_call.__file__, "rendezvous", "127.0.0.1", str(silent_port), "x", "0.2"]
        asks = subprocess.Popen(command)
        threads = [threading.Thread(target=other, args=[run, port]) for run in ("x", "y")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert asks.wait(timeout=100) == -signal.SIGALRM
    assert codes == {"x": UNDER_WAY, "y": NOT_READY}
    said = capsys.readouterr().err
    assert f"but the rendezvous of x at 127.0.0.1:{store.port} answers: joins the others without preflight" in said
    assert f"node 1 (b): the listener at 127.0.0.1:{store.port} is not the rendezvous of y" in said


def test_a_busy_port_ends_the_head_and_not_a_node_that_shares_its_address() -> None:
    """Without ranks, two nodes on one machine both own the head's address. The second to come is no head."""
    with listen(0) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, roll_call.__file__, "127.0.0.1", port, "2", "0", "x", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stdout) == (NOT_READY, "")
        assert f"port {port} of the head is held by process {os.getpid()} (" in done.stderr
        assert "or give another --port than 1, which is one less" in done.stderr
    command[-3] = ""
    one, two = (subprocess.Popen(command, env=os.environ | {"ONEWORLD_PREFLIGHT_WAIT_S": "15"}) for _ in range(2))
    assert (one.wait(timeout=20), two.wait(timeout=20)) == (READY, READY)
