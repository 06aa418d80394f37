"""Find the address at which other nodes reach this one. Launchers use this too, so torch is not imported."""

import ipaddress
import os
import socket
from typing import TYPE_CHECKING

import psutil

from rl.config.schema import ConfigError

INTERFACE = "ONEWORLD_INTERFACE"

if TYPE_CHECKING:
    from rl.world.sealed_store import SealedStore


def own_address(store: "SealedStore") -> str:
    """Return this node's address on the route to the rendezvous host, and let gloo use its interface too.

    ONEWORLD_INTERFACE names another interface, for gloo and NCCL as well. On the rendezvous host itself, its name may
    resolve to a loopback address (127.0.1.1 on Debian), which other nodes cannot reach. Then return the address on the
    route to another node, unless all nodes are on this host.
    """
    master, chosen = os.environ["MASTER_ADDR"], os.environ.get(INTERFACE)
    address = _address_of(chosen, like=master) if chosen else address_towards(master)
    if chosen:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", chosen)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", chosen)
    if os.environ["WORLD_SIZE"] == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        return address
    store.set(f"mail/way/{os.environ['RANK']}", [address, socket.gethostname()])
    ways = store.get_all([f"mail/way/{k}" for k in range(int(os.environ["WORLD_SIZE"]))])
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


def _address_of(interface: str, like: str) -> str:
    """Return the address of an interface, of the same family as the route to the host `like`."""
    known, version = psutil.net_if_addrs(), ipaddress.ip_address(address_towards(like)).version
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    found = [entry.address for entry in known.get(interface, []) if entry.family == family]
    if not found:
        raise ConfigError(
            f"{INTERFACE}={interface}: {socket.gethostname()} has no such interface with an IPv{version} address, like "
            f"the route to {like}; it has {', '.join(sorted(known))}"
        )
    return found[0]


def address_towards(host: str) -> str:
    """Return this node's address on the route to `host`. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
