"""Writes the output files: bytes stream from the shards to their places, in chunks, several tensors at a time.

Where nothing has to be looked at, the kernel copies. Where digests are checked or the dtype changes, the bytes pass
through one chunk of memory, in the order in which they lie in their slice, so that its digest is made on the way.
Slices that are not contiguous in the whole tensor are put together in memory, a contiguous block of it at a time.
"""

import errno
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import xxhash

from rl.checkpoint.manifest import ITEM_BYTES, CheckpointError, File, Manifest, Slice
from rl.checkpoint.shard_file import check_shard, sync_folder
from rl.export.convert import Bytes, OutOfRange, convert
from rl.export.errors import MergeError, cannot_write, part_of
from rl.export.layout import Box, Output, Tensor, box_of, meet, volume

CHUNK_BYTES = 4 << 20
NUM_WORKERS = 4
# Between such filesystems; and of an input or output error only separate calls tell which it was.
NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO)
Progress = Callable[[int], object]


class Spoilt(MergeError):
    """A shard whose bytes are not those that were saved."""

    def __init__(self, file: str, reason: str):
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason


class Stopped(Exception):
    """Another thread failed."""


class Sources:
    """Files of a checkpoint on this machine, held open from the beginning: a live run that removes the step meanwhile
    takes nothing from us."""

    def __init__(self, manifest: Manifest):
        self._about = {"run_id": manifest.run_id, "step": manifest.step, "save_id": manifest.save_id}
        self.handles: dict[str, int] = {}

    def add(self, file: File, path: Path) -> None:
        """A shard must be the one that the manifest lists."""
        try:
            self.handles[file.name] = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise Spoilt(file.name, "it is gone; a run removes its old steps, see checkpoint.keep_every") from None
        except OSError as error:
            raise Spoilt(file.name, f"it cannot be opened: {error.strerror}") from None
        if file.slices:
            try:
                check_shard(file, lambda begin, num_bytes: self.read(file.name, begin, num_bytes), self._about)
            except CheckpointError as error:
                raise Spoilt(file.name, str(error)) from None

    def read(self, name: str, begin: int, num_bytes: int) -> bytes:
        data = np.empty(num_bytes, np.uint8)
        self.read_into(data, name, begin)
        return data.tobytes()

    def read_into(self, data: Bytes, name: str, begin: int) -> None:
        done = 0
        while done < data.size:
            try:
                count = os.preadv(self.handles[name], [data[done:].data], begin + done)
            except OSError as error:
                raise Spoilt(name, f"it cannot be read: {error.strerror}") from None
            if not count:
                raise Spoilt(name, f"it ends before byte {begin + data.size}")
            done += count

    def drop(self, name: str) -> None:
        if name in self.handles:
            os.close(self.handles.pop(name))

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for name in list(self.handles):
            self.drop(name)


class Merger:
    """Tensors of one model, from open shards to files in `folder`."""

    def __init__(self, sources: Sources, folder: Path, verify: bool, progress: Progress):
        self._sources, self._folder, self._verify, self._progress = sources, folder, verify, progress
        self._has_kernel_copy = hasattr(os, "copy_file_range")
        self._scratch = threading.local()
        self._stop = threading.Event()

    def write(self, outputs: Sequence[Output]) -> None:
        """A file has its name when all of it is on the disk; those that are there already are left alone."""
        with ThreadPoolExecutor(NUM_WORKERS) as pool, ThreadPoolExecutor(1) as finisher:
            finishing: list[Future[None]] = []
            try:
                for output in outputs:
                    path = self._folder / output.name
                    if path.exists():
                        self._progress(sum(part.num_bytes for tensor in output.tensors for _, part in tensor.slices))
                        continue
                    finishing.append(finisher.submit(_finish, self._fill(output, path, pool), path))
                for future in finishing:
                    future.result()
            except OSError as error:
                raise cannot_write(self._folder, error) from error

    def _fill(self, output: Output, path: Path, pool: ThreadPoolExecutor) -> int:
        """Writes a file's content; returns its open handle, which is still to be synced."""
        handle = os.open(part_of(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        futures: list[Future[None]] = []
        try:
            os.truncate(handle, output.num_bytes)
            _write_at(handle, output.header, 0)
            futures = [pool.submit(self._copy_tensor, tensor, handle) for tensor in output.tensors]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            self._stop.set()
            for future in futures:
                future.cancel()
            wait(futures)
            os.close(handle)
            raise
        return handle

    def _copy_tensor(self, tensor: Tensor, target: int) -> None:
        try:
            if all(is_run(part) for _, part in tensor.slices):
                for file, part in tensor.slices:
                    begin = tensor.begin + _ravel(part.offsets, part.shape) * ITEM_BYTES[tensor.dtype]
                    self._copy_run(file, part, tensor.dtype, target, begin)
            else:
                self._assemble(tensor, target)
        except OutOfRange as error:
            raise MergeError(f"{tensor.name}: {error}; give --dtype one with a wider range") from None
        # Nobody reads it again soon; and the disk begins to write now, not when all is copied.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(target, tensor.begin, tensor.num_bytes, os.POSIX_FADV_DONTNEED)

    def _copy_run(self, file: File, part: Slice, dtype: str, target: int, begin: int) -> None:
        """A slice that is one run of bytes in the whole tensor too."""
        if not self._verify and dtype == part.dtype and self._copy_in_kernel(file, part, target, begin):
            return
        hasher = xxhash.xxh3_64()
        width, wanted = ITEM_BYTES[part.dtype], ITEM_BYTES[dtype]
        for first in range(0, part.num_bytes, CHUNK_BYTES):
            chunk = self._read(file, part, first, min(CHUNK_BYTES, part.num_bytes - first))
            if self._verify:
                hasher.update(chunk.data)
            _write_at(target, self._converted(chunk, part.dtype, dtype), begin + first // width * wanted)
        self._check(file, part, hasher)

    def _assemble(self, tensor: Tensor, target: int) -> None:
        """Slices along any dimension. What a block of the tensor takes from a slice is one run of the slice's bytes,
        and the runs of all blocks follow each other in it."""
        source = tensor.slices[0][1].dtype
        width = ITEM_BYTES[source]
        hashers = [xxhash.xxh3_64() for _ in tensor.slices]
        for block in blocks(tensor.shape, CHUNK_BYTES // width):
            whole = self._buffer("whole", volume(block) * width)
            elements = whole.view(f"V{width}").reshape([end - first for first, end in block])
            for (file, part), hasher in zip(tensor.slices, hashers):
                box = meet(block, box_of(part))
                if not volume(box):
                    continue
                inside = [first - offset for (first, _), offset in zip(box, part.offsets)]
                chunk = self._read(file, part, _ravel(inside, part.size) * width, volume(box) * width)
                if self._verify:
                    hasher.update(chunk.data)
                place = tuple(slice(low - first, high - first) for (low, high), (first, _) in zip(box, block))
                elements[place] = chunk.view(f"V{width}").reshape([high - low for low, high in box])
            begin = _ravel([first for first, _ in block], tensor.shape) * ITEM_BYTES[tensor.dtype]
            _write_at(target, self._converted(whole, source, tensor.dtype), tensor.begin + begin)
        for (file, part), hasher in zip(tensor.slices, hashers):
            self._check(file, part, hasher)

    def _copy_in_kernel(self, file: File, part: Slice, target: int, begin: int) -> bool:
        """False where these filesystems cannot."""
        done = 0
        while self._has_kernel_copy and done < part.num_bytes:
            self._raise_if_stopped()
            count = min(part.num_bytes - done, 16 * CHUNK_BYTES)
            try:
                source = self._sources.handles[file.name]
                copied = os.copy_file_range(source, target, count, part.begin + done, begin + done)
            except OSError as error:
                if error.errno not in NO_KERNEL_COPY:
                    raise
                self._has_kernel_copy = False
                break
            if not copied:
                raise Spoilt(file.name, f"it ends before byte {part.begin + part.num_bytes}")
            self._progress(copied)
            done += copied
        if done < part.num_bytes:
            self._progress(-done)
        return done == part.num_bytes

    def _read(self, file: File, part: Slice, first: int, num_bytes: int) -> Bytes:
        """These bytes of a slice; valid until this thread reads the next ones."""
        self._raise_if_stopped()
        chunk = self._buffer("chunk", num_bytes)
        self._sources.read_into(chunk, file.name, part.begin + first)
        self._progress(num_bytes)
        return chunk

    def _converted(self, data: Bytes, source: str, target: str) -> Bytes:
        if source == target:
            return data
        result = self._buffer("converted", data.size // ITEM_BYTES[source] * ITEM_BYTES[target])
        convert(data, source, result, target)
        return result

    def _check(self, file: File, part: Slice, hasher: xxhash.xxh3_64) -> None:
        if self._verify and hasher.hexdigest() != part.digest:
            raise Spoilt(file.name, f"the bytes of {part.name} are not those that were saved")

    def _buffer(self, name: str, num_bytes: int) -> Bytes:
        """This thread's memory of this name."""
        kept: Bytes | None = getattr(self._scratch, name, None)
        if kept is None or kept.size < num_bytes:
            kept = np.empty(num_bytes, np.uint8)
            setattr(self._scratch, name, kept)
        return kept[:num_bytes]

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Stopped


def is_run(part: Slice) -> bool:
    """Whether its elements follow each other in the whole tensor too."""
    cut = [dim for dim, length in enumerate(part.size) if length != part.shape[dim]]
    return not cut or all(length == 1 for length in part.size[: cut[-1]])


def blocks(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """A tensor in pieces whose elements follow each other, in their order."""
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = next(dim for dim, num_elements in enumerate(inner) if num_elements <= max_elements)
    step = max(1, max_elements // max(1, inner[cut]))
    rest = tuple((0, length) for length in shape[cut + 1 :])
    for leading in itertools.product(*(range(length) for length in shape[:cut])):
        for first in range(0, shape[cut], step):
            yield (*((index, index + 1) for index in leading), (first, min(first + step, shape[cut])), *rest)


def _ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """The place of an element when all are counted in order."""
    place = 0
    for position, length in zip(index, shape, strict=True):
        place = place * length + position
    return place


def _write_at(handle: int, data: bytes | Bytes, begin: int) -> None:
    view = memoryview(data) if isinstance(data, bytes) else data.data
    while view:
        count = os.pwrite(handle, view, begin)
        view, begin = view[count:], begin + count


def _finish(handle: int, path: Path) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    part_of(path).rename(path)
    sync_folder(path.parent)
