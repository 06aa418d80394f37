"""Let nodes without a scheduler find their head, and the run's secret, through a shared directory.

    python launch/find_head.py serve FOLDER LAUNCH NNODES PORT [ADDRESS]   on the head, while it runs; prints the secret
    python launch/find_head.py find FOLDER SECONDS     on a worker; prints launch, nodes, address, port, secret
    python launch/find_head.py address                 prints this node's address

The head writes its addresses and a secret into FOLDER/head.json, which only its user can read. A worker connects to
these addresses. Both prove that they know the secret, and the head describes its launch. So a worker ignores the file
of a head that has ended, even if clocks differ. If ONEWORLD_SECRET is set, it is used instead, and is not written into
the file.
"""

import errno
import json
import os
import secrets
import signal
import socket
import stat
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.checks.sockets import CONNECT_S, listen, read_messages, reason, say_refused, send_message
from rl.common.files import write_atomically
from rl.common.handshake import SECRET, Listener, Refusals, Untrusted, connect, derive_key
from rl.watch.parent import die_with_parent
from rl.world.address import address_towards

POLL_S = 0.2  # interval; a shared file system does not report new files
FILE = "head.json"
MAX_BYTES = 1 << 16  # read from the file
PURPOSE = "find head"
ELSEWHERE = "192.0.2.1"  # reserved for documentation, so the route to it is the default route
REMEDY = f"give another folder, or set the same {SECRET} on every node"
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Word = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,200}\Z")]  # becomes an argument of launch/run_node.sh


@dataclass(frozen=True)
class HeadFile:
    """The content of FOLDER/head.json. `secret` is empty if ONEWORLD_SECRET is set."""

    addresses: Annotated[list[str], msgspec.Meta(max_length=64)]
    answer_port: Port
    secret: str


class HeadFacts(msgspec.Struct, frozen=True, tag_field="kind", tag="head"):
    """Describe the head's launch to a worker."""

    launch: Word
    nnodes: Word
    port: Port


def own_addresses() -> list[str]:
    """Return this node's addresses: first the one of the default route, then the others, then the host name."""
    entries = [entry for addresses in psutil.net_if_addrs().values() for entry in addresses]
    found = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    found = [address for address in found if not address.startswith(("127.", "::1", "fe80:", "169.254."))]
    with suppress(OSError):
        found.insert(0, address_towards(ELSEWHERE))
    return list(dict.fromkeys([*found, socket.gethostname()]))


def serve(folder: Path, launch: str, num_nodes: str, port: int, address: str = "") -> None:
    """Write the file, print the secret, answer workers until the launcher ends, and remove the file."""
    die_with_parent(signal.SIGTERM)  # end together with the launcher
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        sys.exit(f"oneworld: port {port}: {error.strerror}; give another one with --port")
    file, server, given = folder / FILE, listen(0), os.environ.get(SECRET, "")
    own = HeadFile(
        [address] if address else own_addresses(), server.getsockname()[1], "" if given else choose_secret(file)
    )
    os.environ[SECRET] = given or own.secret

    def describe(connection: socket.socket, host: str) -> None:
        with connection:
            send_message(connection, "head", launch=launch, nnodes=num_nodes, port=port)

    Listener(server, derive_key(PURPOSE), describe, Refusals(say_refused))
    folder.mkdir(parents=True, exist_ok=True)
    write_privately(file, own)
    where = " ".join(own.addresses)
    print(f"oneworld: {file} tells workers that the head is at {where}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the launcher gets them too, and decides when to end
    try:
        print(os.environ[SECRET], flush=True)
        while True:
            signal.pause()
    finally:
        with suppress(ValueError):
            if read(file, needs_secret=False) == own:  # otherwise the file belongs to a later head
                file.unlink(missing_ok=True)


def choose_secret(file: Path) -> str:
    """Return a new secret. After a head was killed, return its secret, because its workers may still run."""
    with suppress(ValueError):
        if left := read(file, needs_secret=True):
            return left.secret
    return secrets.token_hex(32)


def write_privately(path: Path, content: HeadFile) -> None:
    """Replace the file by one that only this user can read. Exit if the file system cannot do that."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as probe:  # with mode 0600
        if content.secret and (trouble := find_access(os.fstat(probe.fileno()))):
            sys.exit(f"oneworld: a new file in {path.parent} {trouble}, but it would hold the secret; {REMEDY}")
    write_atomically(path, json.dumps(asdict(content)), mode=0o600)


def find_access(about: os.stat_result) -> str:
    """Return how other users could read or change a file, or an empty string."""
    if about.st_uid not in (0, os.geteuid()):
        return f"belongs to the user {about.st_uid}, not to you"
    mode = stat.S_IMODE(about.st_mode)
    return f"can be read or changed by others (mode {mode:o})" if mode & 0o077 else ""


def read(file: Path, needs_secret: bool) -> HeadFile | None:
    """Return the content of the file, or None if there is none. Raise ValueError if it cannot be used."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a named pipe would block
        with os.fdopen(descriptor, "rb") as opened:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("no regular file")
            data = opened.read(MAX_BYTES)
        content = msgspec.json.decode(data, type=HeadFile)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else reason(error)
        raise ValueError(f"it cannot be read: {why}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"it is not the file of a head: {error}") from None
    if needs_secret and (trouble := find_access(about)):
        raise ValueError(f"it {trouble}; {REMEDY}")
    if needs_secret and not content.secret:
        raise ValueError(f"it holds no secret, because {SECRET} is set on the head: set the same {SECRET} here")
    return content


def find(folder: Path, timeout_s: float) -> tuple[str, str, str, int, str]:
    """Wait for a head. Return its launch, number of nodes, address, port and secret."""
    deadline, given, said = time.monotonic() + timeout_s, os.environ.get(SECRET, ""), ""
    while True:
        try:
            if content := read(folder / FILE, needs_secret=not given):
                os.environ[SECRET] = given or content.secret
                facts, address = ask(content)
                return facts.launch, facts.nnodes, address, facts.port, os.environ[SECRET]
        except ValueError as error:
            if str(error) != said:
                said = str(error)
                print(f"oneworld: ignoring {folder / FILE}: {said}", file=sys.stderr, flush=True)
        if time.monotonic() > deadline:
            where = f"in {folder} within {timeout_s:g} s"
            sys.exit(f"oneworld: found no head {where}; start one: launch/local.sh --master --shared {folder} ...")
        time.sleep(POLL_S)


def ask(content: HeadFile) -> tuple[HeadFacts, str]:
    """Return the head's description of its launch, and the address that answered. Raise ValueError if none does."""
    trouble = f"its head ({' '.join(content.addresses)}) does not answer"
    for address in content.addresses:
        try:
            with connect((address, content.answer_port), derive_key(PURPOSE), CONNECT_S) as connection:
                connection.settimeout(CONNECT_S)
                return next(read_messages(connection, HeadFacts)), address
        except Untrusted as error:
            trouble = f"{address}: {error}"
        except OSError:
            continue
        except ValueError as error:
            trouble = f"the head at {address} sent a message that cannot be read: {error}"
    raise ValueError(trouble)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "address":
        print(own_addresses()[0])
    elif what == "serve":
        serve(Path(rest[0]), rest[1], rest[2], int(rest[3]), *rest[4:])
    else:
        print(*find(Path(rest[0]), float(rest[1])), sep="\n")
