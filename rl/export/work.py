"""The folders that a merge works in, so that a kill at any moment loses little and leaves no half of a model.

    runs/x/merged/step_40/                the result; has its name when all of it is on the disk
    runs/x/merged/step_40.work-SAVE/      until then, and until an upload that was asked for is done
        model/                            files of the result; one that is being written ends in .part
        shards/step_40/                   the manifest, and what was gathered from other nodes

The same command finds them again and goes on.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.checkpoint.manifest import COMMITTED, MANIFEST, File
from rl.checkpoint.shard_file import sync_folder
from rl.export.errors import MergeError, cannot_write, free_bytes, part_of
from rl.export.find import Checkpoint
from rl.export.layout import Output
from rl.export.places import Folder
from rl.watch.text import format_bytes

RECORD, SHARDS = "merge.json", "shards"


class Work:
    """`record` says what is merged and how; what was begun with another record is not gone on with."""

    def __init__(self, output: Path, record: dict[str, Any]):
        if not output.name or output.is_mount() or (output.is_symlink() and not output.exists()):
            raise MergeError(
                f"--output: {output} cannot be replaced by the result; give a folder that is not there yet"
            )
        self.output, self._record = output, record
        self.folder = output.with_name(f"{output.name}.work-{record['save_id']}")
        self.model, self.place = self.folder / "model", Folder(self.folder / SHARDS)
        self._lock: int | None = None

    def is_merged(self) -> bool:
        if not self.output.exists() or (self.output.is_dir() and not any(self.output.iterdir())):
            return False
        found = read_record(self.output)
        if _satisfies(found, self._record):
            return True
        differences = [f"{name}={found.get(name)}" for name in self._record if found.get(name) != self._record[name]]
        made = f"was made with {', '.join(differences)}" if found else "was not made by this tool"
        raise MergeError(f"{self.output} is there already and {made}; move it away, or give another --output")

    def missing_bytes(self, outputs: Sequence[Output], to_gather: Sequence[File]) -> int:
        """What will be written, less what earlier attempts left."""
        parts = [part_of(self.place.path(self._record["step"], file.name)) for file in to_gather]
        shards = sum(file.num_bytes for file in to_gather) - sum(map(_size, parts))
        written = [output.num_bytes for output in outputs if not (self.model / output.name).exists()]
        overwritten = sum(_size(path) for path in self.model.glob("*.part"))
        return shards + sum(written) - overwritten

    def check_space(self, num_bytes: int) -> None:
        free = free_bytes(self.output.parent)
        if num_bytes > free:
            raise MergeError(
                f"{format_bytes(num_bytes)} are to be written to {self.output.parent}, whose disk has "
                f"{format_bytes(free)} left; free space, or give --output a folder on another disk. Nothing was written"
            )

    def open(self, checkpoint: Checkpoint) -> None:
        """Takes the folder for this process alone. The manifest stays in it: the run may remove the step before its
        merge is uploaded."""
        shards = self.place.path(self._record["step"], "")
        try:
            shards.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            _lock(self._lock, self.folder)
            _write(shards / MANIFEST, checkpoint.text)
            if checkpoint.is_committed:
                (shards / COMMITTED).touch()
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def begin(self) -> None:
        """Makes the result's folder, unless an earlier attempt at the same result left one."""
        try:
            if self.model.exists() and not _satisfies(read_record(self.model), self._record):
                shutil.rmtree(self.model)
            if not self.model.exists():
                self.model.mkdir()
                self.write(RECORD, json.dumps(self._record, indent=2).encode())
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def write(self, name: str, data: bytes) -> None:
        """A small file of the result."""
        _write(self.model / name, data)

    def publish(self) -> None:
        """The result is complete: gives it its name."""
        try:
            for left in self.model.glob("*.part"):
                left.unlink()
            sync_folder(self.model)
            if self.output.exists():
                self.output.rmdir()  # it is empty
            self.model.rename(self.output)
            sync_folder(self.output.parent)
        except OSError as error:
            raise cannot_write(self.output, error) from error

    def clear(self) -> None:
        """All is done: what was gathered goes."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def left_in(*results: Path) -> list[Folder]:
    """What earlier calls gathered."""
    return [Folder(path) for folder in dict.fromkeys(results) for path in sorted(folder.glob(f"*.work-*/{SHARDS}"))]


def _satisfies(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Made as is wanted, or with more proof."""
    return found | {"verified": True} == wanted | {"verified": True} and (found["verified"] or not wanted["verified"])


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing."""
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except OSError as error:
        raise cannot_write(path, error) from error


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MergeError(f"another process works in {folder}; wait for it, or give another --output") from None
    except OSError:
        return  # a filesystem without locks


def read_record(folder: Path) -> dict[str, Any]:
    """Empty where the folder is no result of this tool."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _size(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0
