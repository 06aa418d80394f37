"""Write the output files: stream bytes in chunks from the shards to their places, several tensors in parallel.

If no digest is checked and no value changes, the kernel copies the bytes. Otherwise each slice is read from its first
byte to its last through a buffer, and its digest is computed on the way. The bytes of a base model are always checked:
adapters make sense only on the model that they were trained on.
"""

import errno
import math
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from rl.checkpoint.manifest import ITEM_BYTES, CheckpointError, File, Manifest, Slice
from rl.checkpoint.shard_file import check_shard, rename_durably
from rl.common.files import join_inside
from rl.export.convert import Bytes, OutOfRange, convert
from rl.export.errors import MergeError, partial_path
from rl.export.plan import BASE, MergedTensor, OutputFile

CHUNK_BYTES, KERNEL_CHUNK_BYTES = 4 << 20, 64 << 20
NUM_WORKERS = 4
# The filesystems do not support a copy in the kernel. EIO: read and write calls then tell which of the two failed.
NO_KERNEL_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO)
Progress = Callable[[int], object]
Floats = npt.NDArray[np.float32]


class CorruptFile(MergeError):
    """A file of the checkpoint cannot be read, or its bytes differ from those that were saved."""

    def __init__(self, file: str, reason: str):
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason


class OtherBytes(CorruptFile):
    """The bytes of a slice differ from those that were saved."""

    def __init__(self, file: str, name: str):
        super().__init__(file, f"the bytes of {name} differ from those that were saved")
        self.name = name


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
        if any(part.kind != BASE for part in file.slices):
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

    def close(self, *names: str) -> None:
        """Close these files, by default all."""
        for name in names or tuple(self.handles):
            if name in self.handles:
                os.close(self.handles.pop(name))


class Merger:
    """Write the tensors of one model from open shards to files in `folder`."""

    def __init__(self, files: OpenFiles, folder: Path, verify: bool, progress: Progress):
        self._files, self._folder, self._verify, self._progress = files, folder, verify, progress
        self._has_kernel_copy = hasattr(os, "copy_file_range")
        self._stop = threading.Event()

    def write(self, outputs: Sequence[OutputFile]) -> None:
        """Write all files. Each gets its final name when it is complete on disk. Existing files are kept."""
        with ThreadPoolExecutor(NUM_WORKERS) as pool, ThreadPoolExecutor(1) as finisher:
            finishing: list[Future[None]] = []
            for output in outputs:
                path = join_inside(self._folder, output.name)
                if path.exists():
                    self._progress(output.num_bytes)
                else:
                    finishing.append(finisher.submit(_finish, self._fill(output, path, pool), path))
            for future in finishing:
                future.result()

    def _fill(self, output: OutputFile, path: Path, pool: ThreadPoolExecutor) -> int:
        """Write a file's content and return its open handle, which the caller must sync."""
        part = join_inside(self._folder, partial_path(path).name)
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        futures: list[Future[None]] = []  # each ends soon after `_stop` is set
        try:
            os.truncate(handle, output.num_bytes)
            _write_at(handle, memoryview(output.header), 0)
            self._progress(len(output.header))
            futures = [pool.submit(self._copy_tensor, tensor, handle) for tensor in output.tensors]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            self._stop.set()
            wait(futures)
            os.close(handle)
            raise
        return handle

    def _copy_tensor(self, tensor: MergedTensor, target: int) -> None:
        begin = tensor.begin
        try:
            factors = self._read_factors(tensor)
            for file, part in tensor.slices:
                self._copy_slice(tensor, file, part, factors, target, begin)
                begin += part.num_bytes // ITEM_BYTES[part.dtype] * ITEM_BYTES[tensor.dtype]
        except OutOfRange as error:
            raise MergeError(f"{tensor.name}: {error}; choose a --dtype with a wider range") from None
        # These pages are not read again soon, and writing them now shortens the final sync.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(target, tensor.begin, tensor.num_bytes, os.POSIX_FADV_DONTNEED)

    def _copy_slice(
        self,
        tensor: MergedTensor,
        file: File,
        part: Slice,
        factors: tuple[Floats, Floats] | None,
        target: int,
        begin: int,
    ) -> None:
        width, written_width = ITEM_BYTES[part.dtype], ITEM_BYTES[tensor.dtype]
        is_checked = self._verify or part.kind == BASE
        is_plain = not is_checked and factors is None and {part.dtype, tensor.trained_as} <= {tensor.dtype, ""}
        hasher = xxhash.xxh3_64()
        row_bytes = max(math.prod(part.size[1:]) * width, 1) if factors else 1  # adapters are added to whole rows
        buffer = np.empty(min(max(CHUNK_BYTES // row_bytes, 1) * row_bytes, part.num_bytes), np.uint8)
        done = 0
        while done < part.num_bytes:
            if self._stop.is_set():
                raise CancelledError
            source, place = part.begin + done, begin + done * written_width // width  # the kernel may split an element
            count = self._copy_in_kernel(file, source, target, place, part.num_bytes - done) if is_plain else 0
            if not count:
                chunk = buffer[: part.num_bytes - done]
                self._files.read_into(chunk, file.name, source)
                if is_checked:
                    hasher.update(chunk.data)
                added = None
                if factors is not None:
                    first = part.offsets[0] + done // row_bytes
                    added = factors[0][first : first + chunk.size // row_bytes] @ factors[1]
                _write_at(target, _change(tensor, part, chunk, added).data, place)
                count = chunk.size
            self._progress(count * written_width // width)
            done += count
        if is_checked and hasher.hexdigest() != part.digest:
            raise OtherBytes(file.name, part.name)

    def _read_factors(self, tensor: MergedTensor) -> tuple[Floats, Floats] | None:
        """Return scale x B and A of the tensor's adapters, if it has any."""
        if tensor.delta is None:
            return None
        b, a = (self._read_floats(matrix) for matrix in (tensor.delta.b, tensor.delta.a))
        return np.float32(tensor.delta.scale) * b, a

    def _read_floats(self, tensor: MergedTensor) -> Floats:
        """Return the whole of a tensor in float32."""
        pieces = [np.empty(0, np.uint8)]
        for file, part in tensor.slices:
            data = np.empty(part.num_bytes, np.uint8)
            self._files.read_into(data, file.name, part.begin)
            if self._verify and xxhash.xxh3_64_hexdigest(data.data) != part.digest:
                raise OtherBytes(file.name, part.name)
            pieces.append(convert(data, part.dtype, "F32"))
        return np.concatenate(pieces).view(np.float32).reshape(tensor.shape)

    def _copy_in_kernel(self, file: File, source: int, target: int, place: int, num_bytes: int) -> int:
        """Return how many bytes the kernel copied: 0 at the end of the file, or if the filesystems lack such a copy."""
        if self._has_kernel_copy:
            try:
                handle = self._files.handles[file.name]
                return os.copy_file_range(handle, target, min(num_bytes, KERNEL_CHUNK_BYTES), source, place)
            except OSError as error:
                if error.errno not in NO_KERNEL_COPY:
                    raise
                self._has_kernel_copy = False
        return 0


def _change(tensor: MergedTensor, part: Slice, chunk: Bytes, added: Floats | None) -> Bytes:
    """Return the bytes to write for a chunk of a slice. `added` is added to its elements."""
    dtype = part.dtype
    if tensor.trained_as not in ("", dtype):
        chunk, dtype = convert(chunk, dtype, tensor.trained_as), tensor.trained_as
    if added is not None:
        added += convert(chunk, dtype, "F32").view(np.float32).reshape(added.shape)
        chunk, dtype = added.reshape(-1).view(np.uint8), "F32"
    return chunk if dtype == tensor.dtype else convert(chunk, dtype, tensor.dtype)


def _write_at(handle: int, view: memoryview, begin: int) -> None:
    while view:
        count = os.pwrite(handle, view, begin)
        view, begin = view[count:], begin + count


def _finish(handle: int, path: Path) -> None:
    with os.fdopen(handle, "wb"):
        os.fsync(handle)
    rename_durably(partial_path(path), path)
