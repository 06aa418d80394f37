"""Calls that a worker leaves to others keep their order, and none of them runs twice."""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.common.framing import FrameReader, pack
from rl.rewards import worker as worker_module
from rl.rewards.failure import CallTrace
from rl.rewards.server import MAX_RESULT, Server, _Worker
from rl.rewards.worker import MAX_CALL_ID, RewardFunction, run_worker

pytestmark = pytest.mark.timeout(60)


class Bench:
    """A server that is not running, with one worker whose answers a test writes."""

    def __init__(self) -> None:
        self.rank, connection = socket.socketpair()
        self.server = Server(connection, os.getpid())
        self.server._functions = [RewardFunction("length", 1.0, len, {})]
        self.process = subprocess.Popen(["sleep", "1000"])
        ours, self.connection = socket.socketpair()
        self.worker = worker = _Worker(self.process.pid, ours, CallTrace())
        worker.has_started = True
        worker.calls.extend((name.encode(), b"") for name in "abcde")
        self.server._workers.append(worker)
        self.server._calls.append((b"f", b""))
        for fd in (ours, worker.exit_fd):
            self.server._selector.register(fd, 1)

    def answer(self, name: str, is_last: bool = False) -> None:
        result = {"status": "ok", "score": 1.0, "parts": {}, "answer": None, "failure": None, "is_last": is_last}
        body = json.dumps(result).encode()
        self.connection.sendall(pack(name.encode(), len(body)) + body)

    def give_back(self, name: str) -> None:
        self.connection.sendall(pack(name.encode()))

    def read(self, has_ended: bool = False) -> str:
        """Let the server read the answers. Return the calls that wait for a worker then."""
        self.server._read_worker(self.worker, has_ended)
        return b"".join(call_id for call_id, _ in self.server._calls).decode()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.process.kill()
    bench.connection.close()
    bench.rank.close()


def test_a_worker_that_goes_on_gives_calls_back(bench: Bench) -> None:
    bench.answer("a")
    bench.give_back("b")
    bench.give_back("c")
    assert bench.read() == "bcf"
    bench.answer("d")
    assert bench.read() == "bcf", "a call is given back once"
    assert [call_id for call_id, _ in bench.worker.calls] == [b"e"]


@pytest.mark.parametrize("end", ["last call", "crash", "invalid answer"])
def test_calls_that_a_worker_leaves_keep_their_order(end: str, bench: Bench) -> None:
    """It gives back two calls, gets through one that came later or not, and ends."""
    bench.answer("a")
    bench.give_back("b")
    bench.give_back("c")
    if end == "last call":
        bench.answer("d", is_last=True)
    if end == "invalid answer":
        bench.answer("z")
    if end == "crash":
        bench.process.kill()
    assert bench.read(has_ended=end == "crash") == "bcef"
    assert bench.server._workers == []


def test_a_worker_runs_no_call_after_its_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may arrive when it has said that it ends. Another worker gets that call too."""
    file = tmp_path / "calls"

    def note(prompt: str, response: str, row: dict[str, str]) -> float:
        with file.open("a") as opened:
            opened.write(response)
        return 1.0

    monkeypatch.setattr(worker_module, "MAX_CALLS", 1)
    ours, theirs = socket.socketpair()
    server, pid = os.getpid(), os.fork()
    if not pid:
        ours.close()
        run_worker(theirs, [RewardFunction("note", 1.0, note, {})], server, CallTrace())
    theirs.close()
    reader = FrameReader(ours, MAX_CALL_ID, MAX_RESULT)
    assert reader.wait_for_frame().head == b""
    for name in "ab":
        call = json.dumps({"prompt": "", "response": name, "row": {}}).encode()
        ours.sendall(pack(name.encode(), len(call)) + call)
        if name == "a":
            assert json.loads(reader.wait_for_frame().payload)["is_last"]
    ours.shutdown(socket.SHUT_WR)
    os.waitpid(pid, 0)
    ours.close()
    assert file.read_text() == "a"
