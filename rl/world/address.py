"""Find the address at which other nodes reach this one. Launchers use this too, so torch is not imported."""

import ipaddress
import json
import os
import socket
from typing import TYPE_CHECKING

import psutil

from rl.config.schema import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist


def own_address(store: "dist.Store") -> str:
    """Return this node's address on the route to the rendezvous host, and let gloo use its interface too.

    On the rendezvous host itself, its name may resolve to a loopback address (127.0.1.1 on Debian), which other nodes
    cannot reach. Then return the address on the route to another node, unless all nodes are on this host.
    """
    master = os.environ["MASTER_ADDR"]
    address = address_towards(master)
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        return address
    store.set(f"mail/way/{os.environ['RANK']}", json.dumps([address, socket.gethostname()]))
    ways = [json.loads(way) for way in store.multi_get([f"mail/way/{k}" for k in range(int(os.environ["WORLD_SIZE"]))])]
    outside = [way for way, _ in ways if not ipaddress.ip_address(way).is_loopback]
    hosts = sorted({host for _, host in ways})
    if not outside and len(hosts) > 1:
        raise ConfigError(
            f"every node reaches the head, {master}, through its own loopback, so none has an address for the others "
            f"({', '.join(hosts)}): give one that all can reach, --rdzv-endpoint ADDRESS:PORT, or --head of a launcher"
        )
    if outside and ipaddress.ip_address(address).is_loopback:
        address = address_towards(outside[0])
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return address


def address_towards(host: str) -> str:
    """Return this node's address on the route to `host`. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
