"""How a rank finds the address at which the other nodes reach it."""

import os
import socket

import pytest
import torch.distributed as dist

from rl.config.schema import ConfigError
from rl.world import address as addresses
from rl.world.sealed_store import SealedStore

OTHER, OWN = "192.0.2.7", "192.0.2.1"


def address(monkeypatch: pytest.MonkeyPatch, way: str, others_way: str, others_host: str) -> str:
    """Of rank 0 of two nodes, whose way to the head is `way`."""
    ways = {"head": way, OTHER: OWN}
    monkeypatch.setattr(addresses, "address_towards", ways.__getitem__)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "theirs")
    for name, value in {"MASTER_ADDR": "head", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    store = SealedStore(dist.HashStore(), "world")
    store.set("mail/way/1", [others_way, others_host])
    found = addresses.own_address(store)
    assert store.get("mail/way/0") == [way, socket.gethostname()]
    return found


@pytest.mark.parametrize(
    ("way", "others_way", "others_host", "expected"),
    [
        (OWN, OTHER, "other", OWN),
        ("127.0.1.1", OTHER, "other", OWN),
        ("127.0.0.1", "127.0.0.1", socket.gethostname(), "127.0.0.1"),
    ],
    ids=["the way to the head", "the head itself, by Debian's name of it", "two nodes that are one host"],
)
def test_own_address(
    way: str, others_way: str, others_host: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert address(monkeypatch, way, others_way, others_host) == expected


def test_nodes_that_only_know_themselves_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"every node reaches the head, head, through its own loopback.*other.*--head"
    ):
        address(monkeypatch, "127.0.0.1", "127.0.0.1", "other")


def test_a_chosen_interface_is_used_by_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    store = SealedStore(dist.HashStore(), "world")
    monkeypatch.setenv("ONEWORLD_INTERFACE", "lo")
    assert addresses.own_address(store) == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("ONEWORLD_INTERFACE", "ib7")
    with pytest.raises(ConfigError, match=r"ONEWORLD_INTERFACE=ib7: .* has no such interface .*; it has .*lo"):
        addresses.own_address(store)
