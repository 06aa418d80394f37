"""What a stranger can send: raw bytes and frames, with and without the handshake."""

import json
import os
import random
import socket
from contextlib import suppress

import msgspec

from rl.common.framing import MAGIC, PREFIX

DEEP = 200_000  # brackets in a message; a parser without a limit exhausts its stack


def frame(head: object, payload: bytes = b"") -> bytes:
    """Return a frame as ranks send it. `head` is what msgpack encodes, or the bytes themselves."""
    text = head if isinstance(head, bytes) else msgspec.msgpack.encode(head)
    return PREFIX.pack(MAGIC, len(text), len(payload)) + text + payload


def json_frame(**values: object) -> bytes:
    """Return a frame as watchdogs send it."""
    return frame(json.dumps(values).encode())


STRANGE = {
    "nothing": b"",
    "one byte": b"\0",
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(1 << 16),
    "deep JSON": frame(b"[" * DEEP),
    "deep msgpack": frame(b"\x91" * DEEP + b"\x90"),
    "a hello of a rank": frame(["Hello", {"rank": 1, "password": ""}]),
    "a hello of a watchdog": json_frame(kind="hello", rank=1, token="token"),
    "a length of 4 EiB": PREFIX.pack(MAGIC, 1 << 31, 1 << 62),
    "random bytes of a proof's length": random.Random(1).randbytes(64),
}


def send_and_leave(address: tuple[str, int], data: bytes) -> None:
    """Connect, send, and wait until the listener has closed the connection, or 0.2 s."""
    with suppress(OSError), socket.create_connection(address, timeout=5) as stranger:
        stranger.sendall(data)
        stranger.settimeout(0.2)
        while stranger.recv(1 << 16):
            pass


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Change, remove or repeat some bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(changed) + 1)
        how = rng.randrange(4)
        if how == 0 and where < len(changed):
            changed[where] ^= 1 << rng.randrange(8)
        elif how == 1:
            del changed[where : where + rng.randint(1, 8)]
        elif how == 2:
            changed[where:where] = changed[where : where + rng.randint(1, 32)]
        else:
            changed[where:where] = os.urandom(rng.randint(1, 16))
    return bytes(changed)
