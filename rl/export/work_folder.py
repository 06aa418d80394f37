"""The work folder of a merge. A kill at any moment loses little work and never leaves half a model.

    runs/x/merged/step_40/                the result; it appears when it is complete
    runs/x/merged/step_40.work-SAVE/      deleted when the merge and a requested upload are done
        model/                            files of the result; incomplete ones end in .part
        shards/step_40/                   the manifest, and files gathered from other nodes

The same command finds these folders again and continues.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl.checkpoint.manifest import COMMITTED, MANIFEST, MERGE_RECORD, File, step_folder
from rl.checkpoint.shard_file import rename_durably, sync_folder
from rl.common.files import join_inside, write_atomically
from rl.common.text import format_bytes
from rl.export.errors import MergeError, cannot_write, free_bytes, partial_path
from rl.export.find import Checkpoint
from rl.export.folders import LocalFolder
from rl.export.plan import OutputFile

RECORD, SHARDS = MERGE_RECORD, "shards"


class WorkFolder:
    """The work folder of one result. `record` says what is merged and how. Only work with the same record continues."""

    def __init__(self, output: Path, record: dict[str, Any]):
        if not output.name or output.is_mount() or (output.is_symlink() and not output.exists()):
            raise MergeError(f"--output: the result cannot replace {output}; give a folder that does not exist yet")
        self.output, self._record = output, record
        self.folder = output.with_name(f"{output.name}.work-{record['save_id']}")
        self.model, self.shards = self.folder / "model", LocalFolder(self.folder / SHARDS)

    def is_merged(self) -> bool:
        """Return whether the result exists. Raise if something else exists in its place."""
        if not self.output.exists() or (self.output.is_dir() and not any(self.output.iterdir())):
            return False
        found = read_record(self.output)
        if _satisfies(found, self._record):
            return True
        differences = [f"{name}={found.get(name)}" for name in self._record if found.get(name) != self._record[name]]
        made = f"was made with {', '.join(differences)}" if found else "was not made by this tool"
        raise MergeError(f"{self.output} exists already and {made}; move it away, or give another --output")

    def missing_bytes(self, outputs: Sequence[OutputFile], to_gather: Sequence[File]) -> int:
        """Return how many bytes are still to be written."""
        parts = [partial_path(self.shards.path(self._record["step"], file.name)) for file in to_gather]
        shards = sum(file.num_bytes for file in to_gather) - sum(map(_disk_usage, parts))
        written = [output.num_bytes for output in outputs if not (self.model / output.name).exists()]
        overwritten = sum(_disk_usage(path) for path in self.model.glob("*.part"))
        return shards + sum(written) - overwritten

    def check_space(self, num_bytes: int) -> None:
        free = free_bytes(self.output.parent)
        if num_bytes > free:
            raise MergeError(
                f"{format_bytes(num_bytes)} are to be written to {self.output.parent}, whose disk has "
                f"{format_bytes(free)} left; free space, or give --output a folder on another disk. Nothing was written"
            )

    @contextmanager
    def locked(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Lock the folder, and store the manifest in it: the run may delete the step. Explain any OSError."""
        inside = [SHARDS, f"{SHARDS}/{step_folder(self._record['step'])}", self.model.name]
        for name in inside:  # somebody who planted a symlink could have other files overwritten
            join_inside(self.output.parent, f"{self.folder.name}/{name}")
        shards = self.folder / inside[1]
        try:
            shards.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                _lock(handle, self.folder)
                write_atomically(shards / MANIFEST, checkpoint.text, fsync=True)
                if checkpoint.is_committed:
                    join_inside(shards, COMMITTED).touch()
                yield
            finally:
                os.close(handle)
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def begin(self) -> None:
        """Create the folder of the result, unless an earlier attempt at the same result left one."""
        if self.model.exists() and not _satisfies(read_record(self.model), self._record):
            shutil.rmtree(self.model)
        if not self.model.exists():
            self.model.mkdir()
            self.write(RECORD, json.dumps(self._record, indent=2).encode())

    def write(self, name: str, data: bytes) -> None:
        path = join_inside(self.model, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data, fsync=True)

    def publish(self) -> None:
        """Rename the complete result to its final name."""
        for left in self.model.glob("*.part"):
            left.unlink()
        sync_folder(self.model)
        if self.output.exists():
            self.output.rmdir()  # it is empty
        rename_durably(self.model, self.output)


def find_gathered(*results: Path) -> list[LocalFolder]:
    """Return the places in which earlier calls gathered files."""
    folders = dict.fromkeys(results)
    return [LocalFolder(path) for folder in folders for path in sorted(folder.glob(f"*.work-*/{SHARDS}"))]


def _satisfies(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether a result was made as wanted. A verified result also satisfies a request without verification."""
    return found | {"verified": True} == wanted | {"verified": True} and (found["verified"] or not wanted["verified"])


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MergeError(f"another process works in {folder}; wait for it, or give another --output") from None
    except OSError:
        return  # this filesystem has no locks


def read_record(folder: Path) -> dict[str, Any]:
    """Return what a result was made from, or {} if the folder is not a result of this tool."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _disk_usage(path: Path) -> int:
    return path.stat().st_blocks * 512 if path.exists() else 0
