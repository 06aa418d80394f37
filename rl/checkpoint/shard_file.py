"""Read and write shards: safetensors files whose header says which slices they hold. Does not import torch.

Any safetensors reader can open them. This writer also computes digests while it writes, and makes no extra copy.
The header's `__metadata__` has the run, the step and, for each slice, its offsets and the shape of the whole tensor.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from rl.checkpoint.manifest import FORMAT, ITEM_BYTES, CheckpointError, File, Slice
from rl.common.text import format_bytes
from rl.watch.heart import HEART

CHUNK_BYTES = 16 << 20
SYNC_BYTES = 2 << 30  # between syncs, which show the watchdog that a slow disk makes progress
ALIGNMENT = 8
LENGTH = struct.Struct("<Q")


class Content(NamedTuple):
    """A slice to write, and its bytes in pieces."""

    part: Slice
    pieces: Iterable[memoryview]


def rows_to_write(kind: str, name: str, dtype: str, shape: tuple[int, ...], first: int, end: int) -> Slice:
    """Describe rows of a tensor. `write_shard` fills in their position in the file and their digest."""
    offsets, size = ((first, *(0 for _ in shape[1:])), (end - first, *shape[1:])) if shape else ((), ())
    num_bytes = math.prod(size) * ITEM_BYTES[dtype]
    return Slice(kind, name, dtype, shape, offsets, size, begin=0, num_bytes=num_bytes, digest="")


def write_shard(
    path: Path,
    contents: Sequence[Content],
    about: dict[str, Any],
    count: Callable[[int], None] = lambda num_bytes: None,
) -> File:
    """Write and sync a new file. `about` (run, step, save) goes into its header. `count` gets the bytes of slices as
    they are written."""
    # The widest dtype comes first, so that all slices are aligned.
    contents = sorted(contents, key=lambda content: -ITEM_BYTES[content.part.dtype])
    slices = {part.key: {"shape": part.shape, "offsets": part.offsets} for part, _ in contents}
    metadata = {"oneworld": json.dumps({"format": FORMAT, **about, "slices": slices})}
    entries = [(part.key, part.dtype, part.size, part.num_bytes) for part, _ in contents]
    parts: list[Slice] = []
    with NewFile(path) as file:
        file.write(memoryview(pack_header(metadata, entries)))
        for part, pieces in contents:
            begin, hasher = file.num_bytes, xxhash.xxh3_64()
            for piece in pieces:
                for start in range(0, len(piece), CHUNK_BYTES):
                    chunk = piece[start : start + CHUNK_BYTES]
                    hasher.update(chunk)
                    file.write(chunk)
                    count(len(chunk))
            assert file.num_bytes - begin == part.num_bytes, part
            parts.append(part._replace(begin=begin, digest=hasher.hexdigest()))
    return File(path.name, file.num_bytes, file.digest, (), tuple(parts))


class NewFile(AbstractContextManager["NewFile"]):
    """Write a new file in pieces and compute its digest. `with` finishes the file, or discards it after an error."""

    def __init__(self, path: Path):
        self.path, self.num_bytes, self.digest = path, 0, ""
        self._num_unsynced, self._hasher = 0, xxhash.xxh3_64()
        with writing(path):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)  # only the owner may change it
            self._file = os.fdopen(handle, "wb", buffering=0)

    def write(self, chunk: memoryview) -> None:
        self._hasher.update(chunk)
        self.num_bytes += len(chunk)
        self._num_unsynced += len(chunk)
        with writing(self.path):
            while chunk:
                chunk = chunk[os.write(self._file.fileno(), chunk) :]
                HEART.touch_background()
        if self._num_unsynced >= SYNC_BYTES:
            self._sync()

    def finish(self) -> None:
        self._sync()
        self._file.close()
        self.digest = self._hasher.hexdigest()

    def discard(self) -> None:
        self._file.close()
        with suppress(OSError):
            self.path.unlink()

    def _sync(self) -> None:
        with writing(self.path):
            os.fsync(self._file.fileno())
        self._num_unsynced = 0
        HEART.touch_background()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.finish()
        finally:
            if not self._file.closed:
                self.discard()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the file, the reason and the free space."""
    try:
        yield
    except OSError as error:
        try:
            folder = next(parent for parent in path.parents if parent.exists())
            left = f"{folder} has {format_bytes(shutil.disk_usage(folder).free)} left"
        except OSError as failure:
            left = f"its folder cannot be read: {failure.strerror}"
        raise CheckpointError(
            f"cannot write {path}: {error.strerror} ({left}); earlier committed checkpoints are intact. Free space or "
            "fix the folder, and start again with the same run.name to resume from the last of them"
        ) from error


def write_small_file(path: Path, data: bytes) -> File:
    """Write and sync a new file. It needs no temporary name, because its folder gets its final name later."""
    with NewFile(path) as file:
        file.write(memoryview(data))
    return File(path.name, file.num_bytes, file.digest, (), ())


def read_bytes(path: Path, begin: int, num_bytes: int) -> bytearray:
    """Return these bytes of a file. Raise if the file is shorter."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if begin + num_bytes <= size:  # else do not even allocate the memory
            data = bytearray(num_bytes)
            file.seek(begin)
            if file.readinto(data) == num_bytes:
                return data
    raise CheckpointError(f"{path} has {size} bytes; {num_bytes} from byte {begin} were asked for")


def pieces_of(path: Path, num_bytes: int) -> Iterator[memoryview]:
    """Yield a file's bytes in pieces of `num_bytes`. An empty file yields one empty piece."""
    with path.open("rb", buffering=0) as file:
        yield memoryview(file.read(num_bytes))
        while piece := file.read(num_bytes):
            yield memoryview(piece)


def digest(data: bytes | bytearray | memoryview) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new names in it survive a crash of the machine."""
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
    """Return the header of a safetensors file. `tensors` are (name, dtype, shape, bytes), in the order of the file."""
    header: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, dtype, shape, num_bytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + num_bytes]}
        begin += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return LENGTH.pack(len(text)) + text


def check_shard(file: File, read: Callable[[int, int], bytes | bytearray], about: dict[str, Any]) -> None:
    """Raise unless a shard is the one that the manifest lists: its header must have the run, step and save in `about`,
    and the same slice positions. `read(begin, num_bytes)` returns bytes of the shard."""
    try:
        num_bytes = LENGTH.unpack(read(0, LENGTH.size))[0]
        data = LENGTH.size + num_bytes
        if data > file.num_bytes:
            raise ValueError(f"a header of {num_bytes} bytes")
        header = json.loads(read(LENGTH.size, num_bytes))
        own = json.loads(header.pop("__metadata__")["oneworld"])
        found = {name: [data + offset for offset in entry["data_offsets"]] for name, entry in header.items()}
        other = [f"{name} {own[name]}, not {value}" for name, value in about.items() if own[name] != value]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise CheckpointError(f"it is not a shard of a checkpoint: {type(error).__name__}: {error}") from None
    if other:
        raise CheckpointError(f"it is a shard of another checkpoint: {', '.join(other)}")
    if found != {part.key: [part.begin, part.begin + part.num_bytes] for part in file.slices}:
        raise CheckpointError("it holds other slices than its manifest lists")
