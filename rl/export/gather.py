"""Fetch files from other nodes into a folder on this machine, in parallel, and check their digests.

An interrupted transfer continues after the last byte that arrived, in this call or in a later one.
"""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import FileIO
from pathlib import Path

import xxhash

from rl.checkpoint.manifest import File, step_folder
from rl.checkpoint.shard_file import pieces_of
from rl.export.errors import MergeError, partial_path
from rl.export.find import Checkpoint
from rl.export.folders import PIECE_BYTES, UNREACHABLE, LocalFolder, NodeUnreachable, RemoteFolder

NUM_STREAMS = 16
NUM_STREAMS_PER_NODE = 2  # sshd refuses more than a few connections that have not logged in yet
MAX_TRIES = 4  # consecutive attempts without any data
PAUSE_S = 1.0


class Gatherer:
    """Fetch files of a checkpoint into `target`. `progress` is called with the number of bytes that arrived."""

    def __init__(self, checkpoint: Checkpoint, target: LocalFolder, progress: Callable[[int], object]):
        self._checkpoint, self._target, self._progress = checkpoint, target, progress
        self._host_limits: dict[str, threading.Semaphore] = {}
        self._stop = threading.Event()

    def fetch(self, files: Sequence[File]) -> None:
        """Fetch all files. If some fail, keep the others and raise an error that names them."""
        by_host: dict[str, list[File]] = {}
        for file in files:
            holders = self._remote_holders(file)
            by_host.setdefault(holders[0].host, []).append(file)
            for place in holders:
                self._host_limits.setdefault(place.host, threading.Semaphore(NUM_STREAMS_PER_NODE))
        round_robin = [file for row in itertools.zip_longest(*by_host.values()) for file in row if file is not None]
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            try:
                problems = [problem for problem in pool.map(self._fetch, round_robin) if problem]
            except BaseException:
                self._stop.set()
                raise
        self._checkpoint.inventory.add([self._target])
        if problems:
            raise MergeError(
                f"{len(problems)} of {len(files)} files did not arrive; the others are kept. Run the command again to "
                "continue:" + "".join(f"\n  {problem}" for problem in problems)
            )

    def _remote_holders(self, file: File) -> list[RemoteFolder]:
        holders = self._checkpoint.holders(file.name, file.num_bytes)
        return [place for place in holders if isinstance(place, RemoteFolder)]

    def _fetch(self, file: File) -> str:
        """Fetch a file from the first node that delivers it. Return the problems if no node does, else ""."""
        problems = []
        for place in self._remote_holders(file):
            with self._host_limits[place.host]:
                try:
                    self._fetch_from(place, file)
                    return ""
                except MergeError as error:
                    problems.append(str(error))
        return f"{file.name}: {'; '.join(problems)}"

    def _fetch_from(self, place: RemoteFolder, file: File) -> None:
        step = self._checkpoint.manifest.step
        path, part = (self._target.path(step, name) for name in (file.name, str(partial_path(Path(file.name)))))
        part.parent.mkdir(parents=True, exist_ok=True)
        was_there = part.exists()
        if self._complete(place, file, part) == file.digest:
            part.rename(path)
            self._checkpoint.corrupt.pop((self._target.name, file.name), None)
            return
        part.unlink()
        self._progress(-file.num_bytes)
        if was_there:  # the bytes that an earlier call left may be the corrupt ones
            self._fetch_from(place, file)
            return
        self._checkpoint.corrupt[place.name, file.name] = reason = "its bytes differ from those that were saved"
        raise MergeError(f"{place.name}: {reason}")

    def _complete(self, place: RemoteFolder, file: File, part: Path) -> str:
        """Append the missing bytes to `part`. Return the digest of the whole file."""
        hasher = xxhash.xxh3_64()
        with part.open("ab", buffering=0) as output:
            if output.tell() > file.num_bytes:
                output.truncate(0)
            for piece in pieces_of(part, PIECE_BYTES):
                if self._stop.is_set():
                    raise MergeError("interrupted")
                hasher.update(piece)
                self._progress(len(piece))
            tries = 0
            while (begin := os.fstat(output.fileno()).st_size) < file.num_bytes:
                try:
                    self._append(place, file, begin, output, hasher)
                except NodeUnreachable:
                    tries = 1 if os.fstat(output.fileno()).st_size > begin else tries + 1
                    if tries == MAX_TRIES or self._stop.wait(PAUSE_S * tries):
                        raise
            os.fsync(output.fileno())
        return hasher.hexdigest()

    def _append(self, place: RemoteFolder, file: File, begin: int, output: FileIO, hasher: xxhash.xxh3_64) -> None:
        left = file.num_bytes - begin
        name = f"{step_folder(self._checkpoint.manifest.step)}/{file.name}"
        with closing(place.stream(name, begin, self._stop)) as pieces:
            for piece in pieces:
                view = memoryview(piece)[:left]
                left -= len(view)
                hasher.update(view)
                self._progress(len(view))
                while view:
                    view = view[output.write(view) :]
        if left:
            raise NodeUnreachable(f"{place.name}: {file.name} ended {left} bytes early; {UNREACHABLE}")
