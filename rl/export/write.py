"""Write the output files: stream bytes in chunks from the shards to their places, several tensors in parallel.

If no digest is checked and no dtype converted, the kernel copies the bytes. Otherwise each slice is read from its first
byte to its last through a buffer, and its digest is computed on the way. Slices that are not contiguous in the whole
tensor are assembled in memory, one contiguous block of the tensor at a time.
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
from rl.checkpoint.shard_file import check_shard, rename_durably
from rl.export.convert import Bytes, OutOfRange, convert
from rl.export.errors import MergeError, cannot_write, partial_path
from rl.export.plan import Box, MergedTensor, OutputFile, box_of, intersect, volume

CHUNK_BYTES = 4 << 20
NUM_WORKERS = 4
# The filesystems do not support a copy in the kernel. EIO: read and write calls then tell which of the two failed.
NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO)
Progress = Callable[[int], object]


class CorruptFile(MergeError):
    """A file of the checkpoint cannot be read, or its bytes differ from those that were saved."""

    def __init__(self, file: str, reason: str):
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason


class Cancelled(Exception):
    """Work was cancelled because another thread failed."""


class OpenFiles:
    """The checkpoint's files on this machine. They stay open, so a running job may delete the step during the merge."""

    def __init__(self, manifest: Manifest):
        self._about = {"run_id": manifest.run_id, "step": manifest.step, "save_id": manifest.save_id}
        self.handles: dict[str, int] = {}

    def add(self, file: File, path: Path) -> None:
        """Open a file. Raise CorruptFile if it is a shard other than the one that the manifest lists."""
        try:
            self.handles[file.name] = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise CorruptFile(file.name, "it is gone; a run deletes its old steps, see checkpoint.keep_every") from None
        except OSError as error:
            raise CorruptFile(file.name, f"it cannot be opened: {error.strerror}") from None
        if file.slices:
            try:
                check_shard(file, lambda begin, num_bytes: self.read(file.name, begin, num_bytes), self._about)
            except CheckpointError as error:
                raise CorruptFile(file.name, str(error)) from None

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
                raise CorruptFile(name, f"it cannot be read: {error.strerror}") from None
            if not count:
                raise CorruptFile(name, f"it ends before byte {begin + data.size}")
            done += count

    def close(self, name: str) -> None:
        if name in self.handles:
            os.close(self.handles.pop(name))

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for name in list(self.handles):
            self.close(name)


class Merger:
    """Write the tensors of one model from open shards to files in `folder`."""

    def __init__(self, files: OpenFiles, folder: Path, verify: bool, progress: Progress):
        self._files, self._folder, self._verify, self._progress = files, folder, verify, progress
        self._has_kernel_copy = hasattr(os, "copy_file_range")
        self._scratch = threading.local()
        self._stop = threading.Event()

    def write(self, outputs: Sequence[OutputFile]) -> None:
        """Write all files. Each gets its final name when it is complete on disk. Existing files are kept."""
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

    def _fill(self, output: OutputFile, path: Path, pool: ThreadPoolExecutor) -> int:
        """Write a file's content and return its open handle, which the caller must sync."""
        handle = os.open(partial_path(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
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

    def _copy_tensor(self, tensor: MergedTensor, target: int) -> None:
        try:
            if all(is_contiguous(part) for _, part in tensor.slices):
                for file, part in tensor.slices:
                    begin = tensor.begin + _ravel(part.offsets, part.shape) * ITEM_BYTES[tensor.dtype]
                    self._copy_contiguous(file, part, tensor.dtype, target, begin)
            else:
                self._assemble(tensor, target)
        except OutOfRange as error:
            raise MergeError(f"{tensor.name}: {error}; choose a --dtype with a wider range") from None
        # These pages are not read again soon, and writing them now shortens the final sync.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(target, tensor.begin, tensor.num_bytes, os.POSIX_FADV_DONTNEED)

    def _copy_contiguous(self, file: File, part: Slice, dtype: str, target: int, begin: int) -> None:
        """Copy a slice that is also contiguous in the whole tensor."""
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

    def _assemble(self, tensor: MergedTensor, target: int) -> None:
        """Assemble slices that are cut along any dimension.

        Each block of the tensor needs one contiguous range of a slice. The ranges of successive blocks are adjacent, so
        every slice is read in order.
        """
        source = tensor.slices[0][1].dtype
        width = ITEM_BYTES[source]
        hashers = [xxhash.xxh3_64() for _ in tensor.slices]
        for block in blocks(tensor.shape, CHUNK_BYTES // width):
            whole = self._buffer("whole", volume(block) * width)
            elements = whole.view(f"V{width}").reshape([end - first for first, end in block])
            for (file, part), hasher in zip(tensor.slices, hashers):
                box = intersect(block, box_of(part))
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
        """Copy a slice in the kernel. Return False if these filesystems do not support that."""
        done = 0
        while self._has_kernel_copy and done < part.num_bytes:
            self._raise_if_stopped()
            count = min(part.num_bytes - done, 16 * CHUNK_BYTES)
            try:
                source = self._files.handles[file.name]
                copied = os.copy_file_range(source, target, count, part.begin + done, begin + done)
            except OSError as error:
                if error.errno not in NO_KERNEL_COPY:
                    raise
                self._has_kernel_copy = False
                break
            if not copied:
                raise CorruptFile(file.name, f"it ends before byte {part.begin + part.num_bytes}")
            self._progress(copied)
            done += copied
        if done < part.num_bytes:
            self._progress(-done)
        return done == part.num_bytes

    def _read(self, file: File, part: Slice, first: int, num_bytes: int) -> Bytes:
        """Return bytes of a slice, which are valid until the next call in this thread."""
        self._raise_if_stopped()
        chunk = self._buffer("chunk", num_bytes)
        self._files.read_into(chunk, file.name, part.begin + first)
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
            raise CorruptFile(file.name, f"the bytes of {part.name} differ from those that were saved")

    def _buffer(self, name: str, num_bytes: int) -> Bytes:
        """Return this thread's buffer of this name."""
        kept: Bytes | None = getattr(self._scratch, name, None)
        if kept is None or kept.size < num_bytes:
            kept = np.empty(num_bytes, np.uint8)
            setattr(self._scratch, name, kept)
        return kept[:num_bytes]

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise Cancelled


def is_contiguous(part: Slice) -> bool:
    """Return whether the slice's elements are also contiguous in the whole tensor."""
    cut = [dim for dim, length in enumerate(part.size) if length != part.shape[dim]]
    return not cut or all(length == 1 for length in part.size[: cut[-1]])


def blocks(shape: tuple[int, ...], max_elements: int) -> Iterator[Box]:
    """Yield contiguous pieces of a tensor in order, each with at most `max_elements`."""
    inner = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = next(dim for dim, num_elements in enumerate(inner) if num_elements <= max_elements)
    step = max(1, max_elements // max(1, inner[cut]))
    rest = tuple((0, length) for length in shape[cut + 1 :])
    for leading in itertools.product(*(range(length) for length in shape[:cut])):
        for first in range(0, shape[cut], step):
            yield (*((index, index + 1) for index in leading), (first, min(first + step, shape[cut])), *rest)


def _ravel(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the flat index of an element in row-major order."""
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
    rename_durably(partial_path(path), path)
