"""A stranger sends thousands of inputs to every socket of a run. The run ends as without them, with the same tokens."""

import random
import socket
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rl.common.handshake import NONCE, SECRET, connect, derive_key
from rl.world.sealed_store import SealedStore
from tests.launcher import Result, finish, members, start, train, until
from tests.security.raw import STRANGE, frame, json_frame, mutate
from tests.unit.test_board import report, state

NUM_INPUTS = 10_000  # for each socket
NUM_STEPS = 300  # enough to last longer than the attack
SETTINGS = ["placement.rollout=0", "placement.actor=1", "train.num_prompts_per_step=16", "eval.interval=0"]
SETTINGS += [f"train.num_steps={NUM_STEPS}", "debug.save_rollouts=true"]
THE_SECRET = "a secret of more than sixteen characters"
MESSAGES = [
    frame(["Proceed", {"meeting": "the end"}]),
    frame(["StoreCall", {"number": 1, "method": "remove", "arguments": ["x", [1]], "named": {}}]),
    frame(["EndRun", {}]),
    frame(["NumSteps", {"num_steps": 1}], bytes(100)),
]
BOARD_MESSAGES = [
    json_frame(kind="beat", state=asdict(state(1)), about={}),
    json_frame(kind="report", report=report(1, "fatal", "planted")),
    json_frame(kind="died"),
    json_frame(kind="silent"),
]


class Fuzzer:
    """Attack the sockets of a run, with the secret for half of the inputs."""

    def __init__(self, launcher: int):
        self.rng, self.sent = random.Random(25), Counter[int]()
        processes = [process for process in members(launcher) if "train.py" in " ".join(process.cmdline())]
        environment = next(process.environ() for process in processes if "RANK" in process.environ())
        where = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)
        world = SealedStore(store, "").get("world")
        self.keys = [derive_key("mail", world), derive_key("board", world)]
        listening = {
            connection.laddr
            for process in processes
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        self.addresses = [(place.ip, place.port) for place in listening if self._key_of((place.ip, place.port))]

    def attack(self, address: tuple[str, int], is_over: threading.Event) -> None:
        key = self._key_of(address)
        while self.sent[address[1]] < NUM_INPUTS and not is_over.is_set():
            self.sent[address[1]] += 1
            with suppress(OSError):
                if self.rng.random() < 0.5:
                    with socket.create_connection(address, timeout=5) as stranger:
                        stranger.sendall(self._strange())
                else:
                    with connect(address, key, 5) as insider:
                        insider.sendall(self._mutated(key == self.keys[0]))

    def _key_of(self, address: tuple[str, int]) -> bytes:
        """Return the key that a socket accepts, or nothing if it is not one of ours."""
        with suppress(OSError), socket.create_connection(address, timeout=0.3) as connection:
            if len(connection.recv(NONCE, socket.MSG_WAITALL)) == NONCE:  # gloo and torch's store say nothing
                for key in self.keys:
                    with suppress(OSError):
                        connect(address, key, 5).close()
                        return key
        return b""

    def _strange(self) -> bytes:
        if self.rng.random() < 0.2:
            return self.rng.choice(list(STRANGE.values()))
        return self.rng.randbytes(self.rng.choice([1, 16, 63, 64, 65, 500]))

    def _mutated(self, to_rank: bool) -> bytes:
        """Return a greeting of a rank and a message to a rank, or to the board, with some bytes changed."""
        rank = self.rng.randrange(-1, 4)
        greeting = frame(["Hello", {"rank": rank, "password": "x" * 32}])
        hello = greeting if to_rank else json_frame(kind="hello", rank=rank)
        message = self.rng.choice(MESSAGES if to_rank else BOARD_MESSAGES)
        return mutate(self.rng, hello) + message if self.rng.random() < 0.3 else hello + mutate(self.rng, message)


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, THE_SECRET)


def attack_during(folder: Path, *settings: str) -> tuple[Result, Counter[int]]:
    """Return the result of a run on two ranks, and how many inputs each of its sockets got."""
    process = start("--nproc-per-node=2", "train.py", f"run.dir={folder.parent}", f"run.name={folder.name}", *settings)
    until(lambda: (folder / "metrics.jsonl").exists(), "the first step", 120)
    fuzzer, is_over = Fuzzer(process.pid), threading.Event()
    threads = [threading.Thread(target=fuzzer.attack, args=(address, is_over)) for address in fuzzer.addresses]
    for thread in threads:
        thread.start()
    try:
        output = finish(process, 400)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert process.returncode == 0, output[-6000:]
    return Result(output, folder), fuzzer.sent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("secret")
def test_a_run_under_attack_ends_as_without_it(tmp_path: Path) -> None:
    attacked, sent = attack_during(tmp_path / "attacked", *SETTINGS)
    assert list(sent.values()) == [NUM_INPUTS] * 3, "two ranks and the board, all inputs"
    assert "no proof that it knows the run's secret" in attacked.output
    calm = train(tmp_path / "calm", 2, *SETTINGS)
    for step in range(1, NUM_STEPS + 1):
        assert torch.equal(attacked.rollouts(step).tokens, calm.rollouts(step).tokens), step
    assert THE_SECRET not in attacked.output + calm.output
