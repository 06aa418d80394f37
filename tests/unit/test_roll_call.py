"""launch/roll_call.py on the loopback: missing nodes, wrong nodes, and nodes that come when the others train."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from launch import roll_call
from launch.checks.sockets import is_own_address, listen
from launch.roll_call import NOT_READY, READY, UNDER_WAY, Node, RollCall, answer, describe_missing, refusal
from rl.common.framing import pack
from rl.common.handshake import connect, derive_key

HELLO = pack(b'{"kind": "hello", "run": "x", "node": 1, "name": "b"}')
HEAD = Node(0, "head")
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
    assert describe_missing({Node(*node) for node in here}, 4, names) == text


def test_many_missing_nodes_are_counted() -> None:
    assert describe_missing({Node(0, "a")}, 40, []).endswith("node 7, node 8 and 31 more")


def test_two_nodes_cannot_have_one_rank() -> None:
    present = {Node(0, "a"), Node(1, "b")}
    assert refusal(Node(1, "b"), present, 2) == "", "a node that connects again"
    assert refusal(Node(1, "c"), present, 2) == "got node rank 1 from c, but b has it; give each node its own rank"
    assert "got node rank 2 in a launch of 2 nodes" in refusal(Node(2, "c"), present, 2)
    assert refusal(Node(1, "c"), {Node(0, "a")}, 2) == refusal(Node(None, "c"), {Node(None, "b")}, 2) == ""


def test_own_addresses() -> None:
    assert is_own_address("127.0.0.1") and is_own_address("localhost") and not is_own_address("192.0.2.1")


def call(nnodes: str, wait_s: float, *others: Node, names: Sequence[str] = (), run: str = "x") -> tuple[int, list[int]]:
    """Run a head and these other nodes. Return the exit codes."""
    codes: dict[int, int] = {}
    with listen(0) as server:
        port = server.getsockname()[1]

        def other(number: int) -> None:
            codes[number] = answer("127.0.0.1", port, 1, run, others[number], wait_s)

        threads = [threading.Thread(target=other, args=[number]) for number in range(len(others))]
        for thread in threads:
            thread.start()
        code = RollCall(server, HEAD, "x", nnodes, names).call(wait_s)
        for thread in threads:
            thread.join()
    return code, [codes[number] for number in range(len(others))]


def test_all_nodes_are_there() -> None:
    assert call("3", 10, Node(2, "c"), Node(1, "b")) == (READY, [READY, READY])


def test_a_missing_node_ends_all_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("3", 0.5, Node(1, "b"), names=["head", "b", "c"]) == (NOT_READY, [NOT_READY])
    assert (
        capsys.readouterr().err.count("gave up after 0.5 s (ONEWORLD_PREFLIGHT_WAIT_S) on 1 of 3 nodes: node 2 (c)")
        == 2
    )


def test_nodes_beyond_the_minimum_have_a_little_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roll_call, "EXTRA_S", 0.3)
    assert call("2:3", 10, Node(1, "b")) == (READY, [READY])
    assert "begins without 1 of 3 nodes: node 2" in capsys.readouterr().err


def test_nodes_of_another_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, codes = call("2", 1.0, Node(1, "b"), run="y")
    assert (code, codes) == (NOT_READY, [NOT_READY])
    said = "got b of the run y, but this is the roll call of x; give one of the runs another --port"
    assert said in capsys.readouterr().err


def register(place: tuple[str, int]) -> socket.socket:
    """Connect as node 1 does."""
    connection = connect(place, derive_key(roll_call.PURPOSE), 5)
    connection.sendall(HELLO)
    return connection


def test_nodes_that_leave_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    with listen(0) as server:
        caller, place = RollCall(server, HEAD, "x", "3"), ("127.0.0.1", server.getsockname()[1])
        with register(place):
            step_until(caller, {HEAD, Node(1, "b")})
        assert caller.call(0.5) == NOT_READY
    assert "on 2 of 3 nodes: node 1, node 2" in capsys.readouterr().err


def step_until(caller: RollCall, present: set[Node]) -> None:
    deadline = time.monotonic() + 10
    while caller.present != present:
        assert time.monotonic() < deadline
        caller.step(timeout_s=0.1)


def test_a_node_that_reconnects_before_its_old_connection_ends_stays() -> None:
    with listen(0) as server:
        caller, place = RollCall(server, HEAD, "x", "2"), ("127.0.0.1", server.getsockname()[1])
        old = register(place)
        step_until(caller, {HEAD, Node(1, "b")})
        with register(place):
            for _ in range(2):  # its connection, and its message
                caller.step(timeout_s=1)
            old.close()
            caller.step(timeout_s=5)
            assert caller.present == {HEAD, Node(1, "b")}
        step_until(caller, {HEAD})
        caller.close()


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
        codes[run] = answer("127.0.0.1", port, store.port, run, Node(1, "b"), 0.5)

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
    assert f"but the rendezvous of x at 127.0.0.1:{store.port} answers: it joins the others without preflight" in said
    assert f"node 1 (b): the listener at 127.0.0.1:{store.port} is not the rendezvous of y" in said


def test_a_busy_port_ends_the_head_and_not_a_node_that_shares_its_address() -> None:
    """Without ranks, two nodes on one machine both own the head's address. The second to come is no head."""
    with listen(0) as server:
        port = str(server.getsockname()[1])
        command = [sys.executable, roll_call.__file__, "127.0.0.1", port, "2", "0", "x", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stdout) == (NOT_READY, "")
        assert f"port {port} of the head is held by process {os.getpid()} (" in done.stderr
        assert "or give another --port: the roll call uses --port + 1, and --port is 1" in done.stderr
    command[-3] = ""
    one, two = (subprocess.Popen(command, env=os.environ | {"ONEWORLD_PREFLIGHT_WAIT_S": "15"}) for _ in range(2))
    assert (one.wait(timeout=20), two.wait(timeout=20)) == (READY, READY)
