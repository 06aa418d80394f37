"""One node's checkpoint directory: list, read, write, rename, commit and delete its steps.

A disk may be private to a node or shared by several nodes, and no setting says which. So several nodes may get the same
call for the same directory, and it must take effect only once. rl/checkpoint/store.py carries calls between nodes.
"""

import re
import secrets
import shutil
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.checkpoint.manifest import COMMITTED, MANIFEST, STEP_FOLDER, CheckpointError, Manifest, step_folder
from rl.checkpoint.shard_file import NewFile, read_bytes, rename_durably, sync_folder, write_small_file, writing
from rl.world.restarts import launcher_process

RUN_ID = "run_id"
LEFT_OVER = re.compile(r"step_\d+\.(tmp|old|claim)-.*")


@dataclass(frozen=True)
class StoredStep:
    """A step in a checkpoint directory, and the sizes of its files."""

    step: int
    folder: str
    rank: int  # the rank that listed the step, and can read its files
    files: dict[str, int]
    is_committed: bool
    error: str  # why the manifest cannot be read, in which case the fields below are empty
    save_id: str = ""
    run_id: str = ""
    saved_at: float = 0.0


@dataclass(frozen=True)
class StepsListed:
    steps: list[StoredStep]
    folder: str
    exists: bool
    host: str
    launched_at: float  # Unix time at which this launch began
    run_id: str  # of the run that uses the root


class CheckpointDirectory:
    """The steps of this run under `root`, and of the run that this one forks under `source`."""

    def __init__(self, root: Path, source: Path | None, rank: int):
        self.root, self._source, self._rank = root, source, rank
        self._incoming: dict[Path, NewFile] = {}  # files that other nodes send
        self._claimed = ""  # id of the newest save whose folder this rank renamed to its final name

    def list_steps(self, where: Literal["root", "source"]) -> StepsListed:
        place = self.root if where == "root" else self._source
        assert place is not None
        if (place / self.root.name).is_dir():  # `place` is a run's folder
            place = place / self.root.name
        folders = [place] if STEP_FOLDER.fullmatch(place.name) else sorted(place.glob("step_*"))
        return StepsListed(
            steps=[self._describe(path) for path in folders if STEP_FOLDER.fullmatch(path.name) and path.is_dir()],
            folder=str(place.resolve()),
            exists=place.is_dir(),
            host=socket.gethostname(),
            launched_at=launcher_process().create_time(),
            run_id=self._read_run_id(),
        )

    def create_root(self, run_id: str) -> None:
        """Create the run's checkpoint directory, and delete what killed saves left in it."""
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            _delete_all(folder for folder in self.root.iterdir() if LEFT_OVER.fullmatch(folder.name))
            if not self._read_run_id():
                # Not through a temporary file: nodes that share the disk would race for its name. All write the same.
                (self.root / RUN_ID).write_text(run_id)

    def rename_root(self, suffix: str) -> None:
        """Append a suffix to the directory's name, so that the run starts with an empty one."""
        with suppress(FileNotFoundError):  # there is none, or another node on the same disk was first
            self.root.rename(self.root.with_name(f"{self.root.name}.{suffix}"))

    def read(self, folder: str, file: str, begin: int = 0, num_bytes: int | None = None) -> bytearray:
        """Return `num_bytes` of a file, or all of it."""
        path = Path(folder, file)
        return read_bytes(path, begin, path.stat().st_size if num_bytes is None else num_bytes)

    def write(
        self, folder: str, file: str, begin: int, digest: str, is_last: bool, payload: bytes | memoryview = b""
    ) -> bool:
        """Write the next piece of a file. Return False if the file exists, because the caller shares this disk."""
        path = self.root / folder / file
        if begin == 0:
            self._check_root()
            if path.exists():
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.unlink(missing_ok=True)  # left by a kill
            self._incoming[path] = NewFile(part)
        if path not in self._incoming:
            raise CheckpointError(f"{path}: an earlier piece of it could not be written")
        new = self._incoming[path]
        try:
            new.write(memoryview(payload))
            if is_last:
                del self._incoming[path]
                new.finish()
                if new.digest != digest:
                    raise CheckpointError(
                        f"{path}: the bytes that arrived differ from those that were sent; check this node's network "
                        "and memory"
                    )
                rename_durably(new.path, path)
        except CheckpointError:
            self._incoming.pop(path, None)
            new.discard()
            raise
        return True

    def prepare(self, step: int, save_id: str, folder: str, expected: dict[str, int], payload: bytes) -> bool:
        """Rename a step's folder to its final name, after all nodes have written all files. Return False if another
        node on this disk does it. `expected` are the sizes of this node's files. The payload is the manifest."""
        temporary, final = self.root / folder, self.root / step_folder(step)
        self._check_root()
        for file, num_bytes in expected.items():
            if _size(temporary / file) == num_bytes:
                continue
            # Another node on this disk may already have renamed the folder to its final name.
            if self._describe(final).save_id != save_id or _size(final / file) != num_bytes:
                raise CheckpointError(
                    f"{temporary / file} was written and is gone: does another run of this name work in {self.root}?"
                )
        try:
            (self.root / f"{final.name}.claim-{save_id}").mkdir()
        except FileExistsError:
            return False
        with writing(final):
            temporary.mkdir(exist_ok=True)
            write_small_file(temporary / MANIFEST, payload)
            sync_folder(temporary)
            if final.exists():  # left by an uncommitted save, or newer than the step that this run resumed from
                final.rename(final.with_name(f"{final.name}.old-{save_id}"))
            rename_durably(temporary, final)
        self._claimed = save_id
        return True

    def commit(self, step: int, save_id: str) -> None:
        """Write COMMITTED into a step whose folder has its final name on all nodes."""
        if save_id == self._claimed:
            _mark_committed(self.root / step_folder(step))
            _delete_all(self.root.glob(f"*-{save_id}"))

    def remove(self, save_id: str, steps: list[int]) -> None:
        """Delete steps that are not kept after this save."""
        if save_id == self._claimed:
            for step in steps:  # rename all first, because deletion takes time
                folder = self.root / step_folder(step)
                if folder.exists():
                    folder.rename(folder.with_name(f"{folder.name}.old-{save_id}"))
            _delete_all(self.root.glob(f"*.old-{save_id}"))

    def confirm(self, folder: str, save_id: str) -> None:
        """Write COMMITTED into a step that a killed world had not marked on all nodes."""
        path = Path(folder)
        if self._describe(path).save_id == save_id and not (path / COMMITTED).exists():
            with suppress(CheckpointError):  # another node on this disk was first, or the disk is read-only
                _mark_committed(path)

    def _describe(self, folder: Path) -> StoredStep:
        found = {str(path.relative_to(folder)): _size(path) for path in folder.rglob("*") if path.is_file()}
        sizes = {name: size for name, size in found.items() if size is not None}  # a running job may delete some
        step, path = int(folder.name.removeprefix("step_")), folder / MANIFEST
        try:
            saved = Manifest.from_json(path.read_bytes(), str(path))
        except (CheckpointError, OSError) as problem:
            error = f"{path} cannot be read: {problem.strerror}" if isinstance(problem, OSError) else str(problem)
            return StoredStep(step, str(folder), self._rank, sizes, COMMITTED in sizes, error)
        facts = (saved.save_id, saved.run_id, saved.saved_at)
        return StoredStep(step, str(folder), self._rank, sizes, COMMITTED in sizes, "", *facts)

    def _read_run_id(self) -> str:
        try:
            return (self.root / RUN_ID).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _check_root(self) -> None:
        if not self.root.is_dir():
            raise CheckpointError(f"{self.root} is gone: was it deleted, or its disk unmounted?")


def _mark_committed(folder: Path) -> None:
    with writing(folder / COMMITTED):
        write_small_file(folder / COMMITTED, b"")
        sync_folder(folder)


def _delete_all(folders: Iterable[Path]) -> None:
    for folder in list(folders):
        renamed = folder.with_name(f"{folder.name}.old-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):  # another node on this disk was first
            folder.rename(renamed)
            shutil.rmtree(renamed, ignore_errors=True)
            if renamed.exists():
                print(f"oneworld: could not delete {renamed}, which is no longer needed", file=sys.stderr, flush=True)


def _size(path: Path) -> int | None:
    """Return a file's size, or None if it is absent. Another node may have renamed its folder."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
