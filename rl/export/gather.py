"""Brings files from other nodes into a folder of this machine, in parallel; each is checked by its digest on arrival.

A transfer that breaks off goes on from the byte where it stopped, in this call or in a later one.
"""

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import xxhash

from rl.checkpoint.manifest import File, step_folder
from rl.checkpoint.shard_file import pieces_of
from rl.export.errors import MergeError, cannot_write, part_of
from rl.export.find import Checkpoint
from rl.export.places import PIECE_BYTES, UNREACHABLE, Folder, Remote, Unreachable

NUM_STREAMS = 16
NUM_STREAMS_PER_NODE = 2  # a server refuses more than a few that have not logged in yet
MAX_TRIES = 4  # in a row that brought nothing
PAUSE_S = 1.0


class Gatherer:
    """`progress` is called with numbers of bytes; `place` takes what comes."""

    def __init__(self, checkpoint: Checkpoint, place: Folder, progress: Callable[[int], object]):
        self._checkpoint, self._place, self._progress = checkpoint, place, progress
        self._turns: dict[str, threading.Semaphore] = {}
        self._stop = threading.Event()

    def fetch(self, files: Sequence[File]) -> None:
        """All of them, or an error that says which did not come and why; those that came stay."""
        by_host: dict[str, list[File]] = {}
        for file in files:
            for place in self._remote_holders(file):
                self._turns.setdefault(place.host, threading.Semaphore(NUM_STREAMS_PER_NODE))
            by_host.setdefault(self._remote_holders(file)[0].host, []).append(file)
        in_turn = [file for row in itertools.zip_longest(*by_host.values()) for file in row if file is not None]
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            try:
                results = list(pool.map(self._fetch, in_turn))
            except BaseException:
                self._stop.set()
                raise
        self._checkpoint.look_again(self._place)
        problems = [problem for problem in results if problem]
        if problems:
            raise MergeError(
                f"{len(problems)} of {len(files)} files did not arrive; those that did are kept, and the same command "
                "goes on:" + "".join(f"\n  {problem}" for problem in problems)
            )

    def _remote_holders(self, file: File) -> list[Remote]:
        holders = self._checkpoint.holders(file.name, file.num_bytes)
        return [place for place in holders if isinstance(place, Remote)]

    def _fetch(self, file: File) -> str:
        """From the first holder that gives it; what went wrong, where none did."""
        problems = []
        for place in self._remote_holders(file):
            with self._turns[place.host]:
                try:
                    self._raise_if_stopped()
                    self._fetch_from(place, file)
                    return ""
                except MergeError as error:
                    problems.append(str(error))
                except OSError as error:
                    raise cannot_write(self._place.root, error) from error
        return f"{file.name}: {'; '.join(problems)}"

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise MergeError("interrupted")

    def _fetch_from(self, place: Remote, file: File) -> None:
        path = self._place.path(self._checkpoint.manifest.step, file.name)
        part = part_of(path)
        part.parent.mkdir(parents=True, exist_ok=True)
        was_there = part.exists()
        if self._complete(place, file, part) == file.digest:
            part.rename(path)
            self._checkpoint.spoilt.pop((self._place.name, file.name), None)
            return
        part.unlink()
        self._progress(-file.num_bytes)
        if was_there:  # what an earlier call left may have been wrong
            self._fetch_from(place, file)
            return
        self._checkpoint.spoilt[place.name, file.name] = reason = "other bytes came than were saved"
        raise MergeError(f"{place.name}: {reason}")

    def _complete(self, place: Remote, file: File, part: Path) -> str:
        """Appends what is missing; returns the digest of it all."""
        hasher = xxhash.xxh3_64()
        with part.open("ab", buffering=0) as output:
            if output.tell() > file.num_bytes:
                output.truncate(0)
            for piece in pieces_of(part, PIECE_BYTES):
                self._raise_if_stopped()
                hasher.update(piece)
                self._progress(len(piece))
            tries = 0
            while (begin := os.fstat(output.fileno()).st_size) < file.num_bytes:
                try:
                    self._append(place, file, begin, output, hasher)
                except Unreachable:
                    tries = 1 if os.fstat(output.fileno()).st_size > begin else tries + 1
                    if tries == MAX_TRIES or self._stop.wait(PAUSE_S * tries):
                        raise
            os.fsync(output.fileno())
        return hasher.hexdigest()

    def _append(self, place: Remote, file: File, begin: int, output: FileIO, hasher: xxhash.xxh3_64) -> None:
        left = file.num_bytes - begin
        name = f"{step_folder(self._checkpoint.manifest.step)}/{file.name}"
        with place.stream(name, begin, self._stop) as pieces:
            for piece in pieces:
                view = memoryview(piece)[:left]
                left -= len(view)
                hasher.update(view)
                self._progress(len(view))
                while view:
                    view = view[output.write(view) :]
        self._raise_if_stopped()
        if left:
            raise Unreachable(f"{place.name}: {file.name} ended {left} bytes early; {UNREACHABLE}")
