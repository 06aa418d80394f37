"""The address at which the other nodes reach this one. Launchers ask here too, so torch is not imported."""

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
    """It is the one on the way to the rendezvous host.

    On that host itself its name may mean the loopback (Debian's 127.0.1.1), which is of no use to other nodes; then it
    is the one on the way to another node, if there is one: all "nodes" may be one host. gloo would take the host name's
    address as well, so it is told the interface.
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
            f"({', '.join(hosts)}): give one that they can reach, --rdzv-endpoint ADDRESS:PORT, or --head of a launcher"
        )
    if outside and ipaddress.ip_address(address).is_loopback:
        address = address_towards(outside[0])
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return address


def address_towards(host: str) -> str:
    """This node's, on the way to that host. Nothing is sent to find it."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
