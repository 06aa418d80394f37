"""Safetensors files whose header says which slices they hold, written and read by bytes. No torch here.

We write them ourselves, since each byte is digested as it passes and nothing is copied once more. Any safetensors
reader opens them; `__metadata__` names run, step and, for every tensor, the whole's shape and the slice's offsets.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from rl.checkpoint.manifest import FORMAT, ITEM_BYTES, CheckpointError, File, Slice
from rl.watch.heart import HEART
from rl.watch.text import format_bytes

CHUNK_BYTES = 16 << 20
# So that a slow disk is seen to get on: a sync at the end alone could take longer than silence may.
SYNC_BYTES = 2 << 30
ALIGNMENT = 8
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Content:
    """A slice to write, and its bytes in pieces."""

    part: Slice
    pieces: Iterable[memoryview]


def rows_to_write(kind: str, name: str, dtype: str, shape: tuple[int, ...], first: int, end: int) -> Slice:
    """Rows of a tensor; their place in the file and their digest are not known yet."""
    offsets, size = ((first, *(0 for _ in shape[1:])), (end - first, *shape[1:])) if shape else ((), ())
    return Slice(kind, name, dtype, shape, offsets, size, 0, math.prod(size) * ITEM_BYTES[dtype], "")


def write_shard(path: Path, contents: Sequence[Content], about: dict[str, Any]) -> File:
    """Writes and syncs a new file; `about` (run, step, ...) goes into its header."""
    contents = sorted(contents, key=lambda content: -ITEM_BYTES[content.part.dtype])  # so that all are aligned
    header = _header([content.part for content in contents], about)
    parts: list[Slice] = []
    with NewFile(path) as file:
        file.write(memoryview(header))
        for content in contents:
            begin, hasher = file.num_bytes, xxhash.xxh3_64()
            for piece in content.pieces:
                for start in range(0, len(piece), CHUNK_BYTES):
                    chunk = piece[start : start + CHUNK_BYTES]
                    hasher.update(chunk)
                    file.write(chunk)
            assert file.num_bytes - begin == content.part.num_bytes, content.part
            parts.append(replace(content.part, begin=begin, digest=hasher.hexdigest()))
    return File(path.name, file.num_bytes, file.digest, (), tuple(parts))


class NewFile:
    """A file that must not exist yet: written in pieces, digested, and on the disk after `finish`. A failure names the
    file and the space that is left; `discard` leaves nothing."""

    def __init__(self, path: Path):
        self.path, self.num_bytes = path, 0
        self._num_unsynced = 0
        self._hasher = xxhash.xxh3_64()
        self._handle: int | None = None
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            raise cannot_write(path, error) from error

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    def write(self, chunk: memoryview) -> None:
        assert self._handle is not None, f"{self.path} is finished"
        self._hasher.update(chunk)
        self.num_bytes += len(chunk)
        self._num_unsynced += len(chunk)
        try:
            while chunk:
                chunk = chunk[os.write(self._handle, chunk) :]
                HEART.touch_background()
            if self._num_unsynced >= SYNC_BYTES:
                self._sync()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def finish(self) -> None:
        assert self._handle is not None, f"{self.path} is finished"
        try:
            self._sync()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._close()

    def discard(self) -> None:
        self._close()
        with suppress(OSError):
            self.path.unlink()

    def _sync(self) -> None:
        assert self._handle is not None
        os.fsync(self._handle)
        self._num_unsynced = 0
        HEART.touch_background()

    def _close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.finish()
        except CheckpointError:
            self.discard()
            raise


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    try:
        folder = next(parent for parent in path.parents if parent.exists())
        space = os.statvfs(folder)
        left = f"{folder} has {format_bytes(space.f_bavail * space.f_frsize)} left"
    except OSError as failure:
        left = f"its folder cannot be read either: {failure.strerror}"
    return CheckpointError(
        f"cannot write {path}: {error.strerror} ({left}); checkpoints that were committed before stay as they are. "
        "Free space or mend the folder, and start again under the same run.name: it goes on from the last of them"
    )


def write_whole(path: Path, data: bytes) -> File:
    """A small file of any content, synced."""
    with NewFile(path) as file:
        file.write(memoryview(data))
    return File(path.name, file.num_bytes, file.digest, ())


def read_bytes(path: Path, begin: int, num_bytes: int) -> bytearray:
    """These bytes of a file, all of them."""
    data = bytearray(num_bytes)
    view, done = memoryview(data), 0
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while done < num_bytes:
            count = file.readinto(view[done:])
            if not count:
                size = os.fstat(file.fileno()).st_size
                raise CheckpointError(f"{path} has {size} bytes; {num_bytes} from byte {begin} on were asked for")
            done += count
    return data


def pieces_of(path: Path, num_bytes: int) -> Iterator[memoryview]:
    """A file's bytes, so many at a time; of an empty file one empty piece."""
    with path.open("rb", buffering=0) as file:
        yield memoryview(file.read(num_bytes))
        while piece := file.read(num_bytes):
            yield memoryview(piece)


def digest(data: bytes | bytearray | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def sync_folder(folder: Path) -> None:
    """Makes renames and new names in it last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_durably(source: Path, target: Path) -> None:
    """Rename a file or folder so that its new name survives a crash of the machine."""
    source.rename(target)
    sync_folder(target.parent)


def pack_header(metadata: dict[str, str], tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """The first bytes of a safetensors file; `tensors` are (name, dtype, shape, bytes), in the order of the file."""
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, dtype, shape, num_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + num_bytes]}
        begin += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return LENGTH.pack(len(text)) + text


def check_shard(file: File, read: Callable[[int, int], bytes | bytearray], about: dict[str, Any]) -> None:
    """That a shard is the one that the manifest lists: its own header names the run, step and save in `about`, and has
    every slice where the manifest has it. `read` gives so many bytes from a place on."""
    try:
        num_bytes = LENGTH.unpack(read(0, LENGTH.size))[0]
        if LENGTH.size + num_bytes > file.num_bytes:
            raise ValueError(f"a header of {num_bytes} bytes")
        header = json.loads(read(LENGTH.size, num_bytes))
        own = json.loads(header["__metadata__"]["oneworld"])
        data = LENGTH.size + num_bytes
        found = {name: (data + begin, data + end) for name, (begin, end) in _offsets(header).items()}
        other = [f"{name} {own[name]}, not {value}" for name, value in about.items() if own[name] != value]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"it is no shard of a checkpoint: {type(error).__name__}: {error}") from None
    if other:
        raise CheckpointError(f"it is a shard of another checkpoint: {', '.join(other)}")
    if found != {part.key: (part.begin, part.begin + part.num_bytes) for part in file.slices}:
        raise CheckpointError("it holds other slices than its manifest lists")


def _offsets(header: dict[str, Any]) -> dict[str, list[int]]:
    return {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}


def _header(parts: Sequence[Slice], about: dict[str, Any]) -> bytes:
    slices = {part.key: {"shape": part.shape, "offsets": part.offsets} for part in parts}
    metadata = {"oneworld": json.dumps({"format": FORMAT, **about, "slices": slices})}
    return pack_header(metadata, [(part.key, part.dtype, part.size, part.num_bytes) for part in parts])
