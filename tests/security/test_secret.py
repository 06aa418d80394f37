"""Nodes with different secrets do not form a world, and nobody without the secret changes what ranks agree on."""

import os
import signal
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from rl.common.handshake import SECRET
from rl.config.schema import ConfigError
from rl.world.sealed_store import SealedStore
from tests.launcher import finish, start, until

FIRST, SECOND = "the first secret of this test", "the second secret of this test"


@pytest.fixture
def store() -> dist.TCPStore:
    """Return a store as torchrun has it: everybody on the network can read and write it."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


@pytest.mark.timeout(60)
def test_only_values_of_those_who_know_the_secret_are_read(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, FIRST)
    ours = SealedStore(store, "world")
    ours.set("mail/0", {"host": "127.0.0.1", "port": 1})
    assert ours.get("mail/0") == {"host": "127.0.0.1", "port": 1}
    sealed = store.get("mail/0")
    attacks = {
        "another value": sealed[:-2] + b"2}",
        "no seal": sealed[32:],
        "nothing": b"",
        "deep JSON": b"[" * 200_000,
    }
    monkeypatch.setenv(SECRET, SECOND)
    SealedStore(store, "world").set("mail/0", "another secret")
    attacks["a value with another secret"] = store.get("mail/0")
    monkeypatch.setenv(SECRET, FIRST)
    SealedStore(store, "earlier world").set("mail/0", "replayed")
    attacks["a value of an earlier world"] = store.get("mail/0")
    ours.set("mail/1", "of another name")
    attacks["a value of another name"] = store.get("mail/1")
    for attack in attacks.values():
        store.set("mail/0", attack)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="set the same ONEWORLD_SECRET on every node"):
            ours.get("mail/0")
    store.set("mail/0", sealed)  # type: ignore[arg-type]
    assert ours.get_all(["mail/0", "mail/1"]) == [{"host": "127.0.0.1", "port": 1}, "of another name"]


@pytest.mark.timeout(180)
def test_a_node_with_another_secret_does_not_join(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = ["--nnodes=2", "--nproc-per-node=2", f"--rdzv-endpoint=127.0.0.1:{port}", "train.py"]
    arguments += [f"run.dir={tmp_path}", "run.name=a", "rollout.engine=fake"]
    nodes = [start(*arguments, restarts=True, ONEWORLD_SECRET=secret) for secret in (FIRST, SECOND)]
    until(lambda: any(node.poll() is not None for node in nodes), "the end of one node", 120)
    refused, waiting = sorted(nodes, key=lambda node: node.poll() is None)
    output = finish(refused, 10)
    assert refused.returncode != 0
    assert output.count("oneworld: ") == 1, output
    assert (
        "oneworld: torchrun's store holds a value (world) of a node whose ONEWORLD_SECRET differs from ours" in output
    )
    assert waiting.poll() is None, "it waits for a node that knows its secret"
    os.killpg(waiting.pid, signal.SIGTERM)
    output = finish(waiting, 60)
    assert not [*tmp_path.iterdir()], "nothing was trained"
    assert FIRST not in output and SECOND not in output
