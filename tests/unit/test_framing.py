"""Tests of rl/common/framing.py: frames arrive whole, in order, within limits, and nobody blocks."""

import fcntl
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rl.common.framing import MAGIC, PREFIX, READ_BYTES, Channel, Frame, FrameReader, pack

Pair = tuple[socket.socket, socket.socket]
LARGE = bytes(range(256)) * (READ_BYTES // 64)  # four times what is read at once


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Return connected sockets. One has a high descriptor, as sockets of rank 0 in a large run have."""
    low, theirs = socket.socketpair()
    number = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1))
    low.close()
    with socket.socket(fileno=number) as ours, theirs:
        yield ours, theirs


def read_until(reader: FrameReader, count: int) -> list[Frame]:
    frames: list[Frame] = []
    deadline = time.monotonic() + 10
    while len(frames) < count:
        assert time.monotonic() < deadline
        frames += reader.frames()
    return frames


FRAMES = [
    (b"a", b""),
    (b"", b"b"),
    (b"", b""),
    (b"head", LARGE),
    (LARGE, b"c"),
    (b"x" * READ_BYTES, LARGE),
    (b"e", b""),
]


@pytest.mark.parametrize("piece", [1 << 30, 4096, 100_003])
def test_frames_of_any_size_arrive_in_order_however_they_are_cut(pair: Pair, piece: int) -> None:
    ours, theirs = pair
    stream = b"".join(pack(head, len(payload)) + payload for head, payload in FRAMES)

    def send() -> None:
        for begin in range(0, len(stream), piece):
            ours.sendall(stream[begin : begin + piece])

    threading.Thread(target=send, daemon=True).start()
    reader = FrameReader(theirs, max_head_bytes=1 << 20, max_payload_bytes=1 << 20)
    assert read_until(reader, len(FRAMES)) == FRAMES
    assert list(reader.frames()) == []


def test_a_frame_is_not_seen_before_its_last_byte(pair: Pair) -> None:
    ours, theirs = pair
    reader = FrameReader(theirs, 10, 10)
    data = pack(b"head", 7) + b"payload"
    for position in range(len(data)):
        assert list(reader.frames()) == []
        ours.sendall(data[position : position + 1])
    assert list(reader.frames()) == [(b"head", b"payload")]


def test_a_reader_does_not_hold_a_payload_that_it_has_returned(pair: Pair) -> None:
    ours, theirs = pair
    threading.Thread(target=ours.sendall, args=[pack(b"", len(LARGE)) + LARGE], daemon=True).start()
    reader = FrameReader(theirs, 10, 1 << 20)
    payload = reader.wait_for_frame().payload
    assert isinstance(payload, bytearray)
    payload.clear()  # a BufferError if the reader still had a view of it, and so kept it in memory


def test_a_blocking_reader_waits_for_one_frame_at_a_time(pair: Pair) -> None:
    ours, theirs = pair
    reader = FrameReader(theirs, 10, 1 << 20)
    threading.Timer(0.1, ours.sendall, [pack(b"1") + pack(b"2", len(LARGE)) + LARGE]).start()
    assert reader.wait_for_frame() == (b"1", b"")
    assert reader.wait_for_frame() == (b"2", LARGE)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="closed"):
        reader.wait_for_frame()


@pytest.mark.parametrize(
    "prefix",
    [b"GET / HTTP/1.1\r\n\r\n", PREFIX.pack(MAGIC, 11, 0), PREFIX.pack(MAGIC, 0, 1)],
    ids=["stranger", "head", "payload"],
)
def test_a_frame_that_breaks_a_limit_raises_after_those_before_it(pair: Pair, prefix: bytes) -> None:
    ours, theirs = pair
    ours.sendall(pack(b"good") + prefix)
    frames = FrameReader(theirs, max_head_bytes=10).frames()
    assert next(frames) == (b"good", b"")
    with pytest.raises(ValueError, match="a frame begins with"):
        next(frames)


def test_limits_may_change_after_a_handshake(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(pack(b"hello") + pack(b"head", 7) + b"payload")
    reader = FrameReader(theirs, max_head_bytes=10)
    frames = reader.frames()
    assert next(frames).head == b"hello"
    reader.max_payload_bytes = 7
    assert next(frames) == (b"head", b"payload")


def test_the_end_of_the_stream_raises_after_the_last_frame(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(pack(b"last"))
    ours.close()
    reader = FrameReader(theirs, 10)
    assert next(reader.frames()) == (b"last", b"")
    with pytest.raises(ConnectionError, match="closed"):
        list(reader.frames())


def test_frames_of_an_abandoned_iterator_are_not_lost(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(pack(b"1") + pack(b"2"))
    reader = FrameReader(theirs, 10)
    assert next(reader.frames()).head == b"1"
    assert [frame.head for frame in reader.frames()] == [b"2"]


def test_one_that_sends_without_end_leaves_others_their_turn(pair: Pair) -> None:
    ours, theirs = pair
    frame = pack(b"", READ_BYTES) + bytes(READ_BYTES)

    def send() -> None:
        try:
            while True:
                ours.sendall(frame)
        except OSError:
            return

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert len(list(FrameReader(theirs, 0, READ_BYTES).frames())) < 100
    theirs.close()
    sender.join(10)


def test_a_channel_keeps_what_the_socket_does_not_take(pair: Pair) -> None:
    ours, theirs = pair
    channel, peer = Channel(ours, 10, 8 << 20), Channel(theirs, 10, 8 << 20)
    payload = LARGE * 16
    channel.send_frame(b"1", payload)
    channel.send_frame(b"2")
    assert channel.has_unsent
    began = time.monotonic()
    channel.flush_within(0.2)
    assert channel.has_unsent and time.monotonic() - began >= 0.2, "nobody reads"
    received: list[Frame] = []
    while len(received) < 2:
        received += peer.receive_frames()
        channel.flush()
    assert received == [(b"1", payload), (b"2", b"")]
    assert not channel.has_unsent and channel.is_open and peer.is_open


def test_a_channel_drops_frames_for_a_peer_that_does_not_read(pair: Pair) -> None:
    ours, theirs = pair
    channel, peer = Channel(ours, 10, max_unsent_bytes=100_000), Channel(theirs, 10, 1 << 20)
    for number in range(20):
        channel.send_frame(b"%d" % number, LARGE)
    received: list[Frame] = []
    while channel.has_unsent or not received:
        received += peer.receive_frames()
        channel.flush()
    received += peer.receive_frames()
    assert 1 < len(received) < 20
    assert [int(frame.head) for frame in received] == list(range(len(received)))
    channel.send_frame(b"more")
    assert [frame.head for frame in peer.receive_frames()] == [b"more"]


def test_a_channel_closes_for_a_stranger_and_for_a_peer_that_is_gone(pair: Pair) -> None:
    ours, theirs = pair
    stranger = Channel(ours, 10)
    theirs.sendall(pack(b"good") + b"GET / HTTP/1.1\r\n\r\n")
    assert [frame.head for frame in stranger.receive_frames()] == [b"good"]
    assert not stranger.is_open
    assert stranger.receive_frames() == []
    left = Channel(theirs, 10)
    stranger.close()
    left.send_frame(b"lost")
    assert not left.is_open and not left.has_unsent
