"""Let nodes without a scheduler find their head through a shared directory.

    python launch/find_head.py serve FOLDER LAUNCH NNODES PORT [ADDRESS]   on the head, while it runs
    python launch/find_head.py find FOLDER SECONDS     on a worker; prints launch, nodes, address, port
    python launch/find_head.py address                 prints this node's address

The head writes its addresses and a random word into FOLDER/head.json. A worker tries these addresses, and uses the
first one at which the head answers with that word. So the file of an older run is ignored, even if clocks differ.
"""

import json
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.checks.sockets import CONNECT_S, listen
from rl.common.files import write_atomically
from rl.watch.parent import die_with_parent
from rl.world.address import address_towards

POLL_S = 0.2  # a shared filesystem does not report new files
FILE = "head.json"
ELSEWHERE = "192.0.2.1"  # reserved for documentation, so the route to it is the default route


def own_addresses() -> list[str]:
    """Return this node's addresses: first the one of the default route, then the others, then the host name."""
    entries = [entry for addresses in psutil.net_if_addrs().values() for entry in addresses]
    found = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    found = [address for address in found if not address.startswith(("127.", "::1", "fe80:", "169.254."))]
    with suppress(OSError):
        found.insert(0, address_towards(ELSEWHERE))
    return list(dict.fromkeys([*found, socket.gethostname()]))


def serve(folder: Path, launch: str, num_nodes: str, port: int, address: str = "") -> None:
    """Write the file, answer workers, and remove the file at the end."""
    die_with_parent(signal.SIGTERM)  # end together with the launcher
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        sys.exit(f"oneworld: port {port}: {error.strerror}; give another one with --port")
    word = secrets.token_hex(8)
    with listen(0) as server:
        file, addresses = folder / FILE, [address] if address else own_addresses()
        record = {"launch": launch, "nnodes": num_nodes, "addresses": addresses, "port": port}
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(record | {"answer_port": server.getsockname()[1], "word": word}))
        print(f"oneworld: {file} tells workers that the head is at {' '.join(addresses)}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # the launcher gets them too, and decides when to end
        print("ready", flush=True)
        try:
            while True:
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    connection.sendall(word.encode())
        finally:
            if _read(file).get("word") == word:  # otherwise the file belongs to a later head
                file.unlink(missing_ok=True)


def find(folder: Path, timeout_s: float) -> tuple[str, str, str, int]:
    """Wait for a head. Return its launch, number of nodes, address and port."""
    deadline, ignored = time.monotonic() + timeout_s, ""
    while True:
        record = _read(folder / FILE)
        for address in record.get("addresses", []):
            place = (address, record["answer_port"])
            with suppress(OSError), socket.create_connection(place, timeout=CONNECT_S) as connection:
                if connection.makefile().read() == record["word"]:
                    return record["launch"], record["nnodes"], address, record["port"]
        if record and ignored != record["word"]:
            ignored, where = record["word"], " ".join(record["addresses"])
            print(f"oneworld: ignoring {folder / FILE}: its head ({where}) does not answer", file=sys.stderr)
        if time.monotonic() > deadline:
            where = f"in {folder} within {timeout_s:g} s"
            sys.exit(f"oneworld: found no head {where}; start one with --master on this folder")
        time.sleep(POLL_S)


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):  # there is no file yet, or a broken one
        return {}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "address":
        print(own_addresses()[0])
    elif what == "serve":
        serve(Path(rest[0]), rest[1], rest[2], int(rest[3]), *rest[4:])
    else:
        print(*find(Path(rest[0]), float(rest[1])), sep="\n")
