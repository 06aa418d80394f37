"""One node's checkpoint directory: list, read, write, rename, commit and delete its steps.

A disk may be private to a node or shared by several nodes, and no setting says which. So several nodes may get the same
call for the same directory, and it must take effect only once. rl/checkpoint/store.py carries calls between nodes.
Other ranks can call all public methods of `CheckpointDirectory`, with arguments of the types in their signatures. So
these methods refuse names that lead out of the directory.
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
from typing import Annotated, Literal

import msgspec

from rl.checkpoint.manifest import COMMITTED, ID, MANIFEST, PROBE, STEP_FOLDER, CheckpointError, Manifest, step_folder
from rl.checkpoint.shard_file import NewFile, read_bytes, rename_durably, sync_folder, write_small_file, writing
from rl.common.files import UnsafeName, join_inside
from rl.watch.lease import Lease, LeaseLost
from rl.world.restarts import launch_time

RUN_ID = "run_id"
LEFT_OVER = re.compile(r"step_\d+\.(tmp|old|claim)-.*")
IN_PROGRESS = re.compile(rf"{STEP_FOLDER.pattern}\.tmp-{ID.pattern}")  # the folder of a save until its commit
MAX_READ_BYTES = 1 << 30  # in one call; only manifests are read as a whole
MAX_INCOMING = 1024  # files that others may be sending at a time
Id = Annotated[str, msgspec.Meta(pattern=rf"\A{ID.pattern}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0)]


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
    """Steps on this node: those of this run, in `root`, and those of the run that it forks, in `source`."""

    def __init__(self, root: Path, source: Path | None, rank: int, lease: Lease | None = None):
        self.root, self._source, self._rank = root, source, rank
        self._lease = lease  # on the run folder; None if this process has taken none
        self._known_saves: set[str] = set()  # ids of the saves found at the start and of this world's own
        self._incoming: dict[Path, NewFile] = {}  # files that other nodes send
        self._claimed = ""  # id of the newest save whose folder this rank renamed to its final name

    def list_steps(self, where: Literal["root", "source"]) -> StepsListed:
        place = self._place(where)
        assert place is not None
        folders = [place] if STEP_FOLDER.fullmatch(place.name) else sorted(place.glob("step_*"))
        steps = [self._describe(path) for path in folders if STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
        self._known_saves |= {step.save_id for step in steps}
        return StepsListed(
            steps=steps,
            folder=str(place.resolve()),
            exists=place.is_dir(),
            host=socket.gethostname(),
            launched_at=launch_time(),
            run_id=self._read_run_id(),
        )

    def create_root(self, run_id: Id) -> None:
        """Create the run's checkpoint directory, and delete what killed saves left in it."""
        self._check_lease()
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            _delete_all(folder for folder in self.root.iterdir() if LEFT_OVER.fullmatch(folder.name))
            if not self._read_run_id():
                # Not through a temporary file: nodes that share the disk would race for its name. All write the same.
                (self.root / RUN_ID).write_text(run_id)

    def rename_root(self, suffix: Id) -> None:
        """Append a suffix to the directory's name, so that the run starts with an empty one."""
        self._check_lease()
        with suppress(FileNotFoundError):  # there is none, or another node on the same disk was first
            self.root.rename(self.root.with_name(f"{self.root.name}.{suffix}"))

    def read(self, folder: str, file: str, begin: Count = 0, num_bytes: Count | None = None) -> bytearray:
        """Return `num_bytes` of a step's file, or all of it."""
        path = self._file_of_step(folder, file)
        count = path.stat().st_size if num_bytes is None else num_bytes
        if count > MAX_READ_BYTES:
            raise CheckpointError(f"{path}: {count} bytes were asked for; read at most {MAX_READ_BYTES} at a time")
        return read_bytes(path, begin, count)

    def write(
        self, folder: str, file: str, begin: Count, digest: str, is_last: bool, payload: bytes | memoryview = b""
    ) -> bool:
        """Write the next piece of a file. Return False if the file is complete: then the caller shares this disk."""
        if not IN_PROGRESS.fullmatch(folder) and (not STEP_FOLDER.fullmatch(folder) or file != PROBE):
            raise UnsafeName(f"{file!a} in {folder!a} is neither part of a save in progress nor {PROBE}")
        path = join_inside(self.root, f"{folder}/{file}")
        if begin == 0:
            self._check_root()
            if len(self._incoming) >= MAX_INCOMING:
                raise CheckpointError(f"{MAX_INCOMING} files are being sent already; finish one before the next")
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

    def prepare(self, step: Count, save_id: Id, folder: str, expected: dict[str, int], payload: bytes) -> bool:
        """Rename a step's folder to its final name, after all nodes have written all files. Return False if another
        node on this disk does it. `expected` are the sizes of this node's files. The payload is the manifest."""
        if folder != f"{step_folder(step)}.tmp-{save_id}":
            raise UnsafeName(f"{folder!a} is not the folder of step {step} of save {save_id}")
        temporary, final = join_inside(self.root, folder), join_inside(self.root, step_folder(step))
        self._check_lease()
        self._check_root()
        self._known_saves.add(save_id)
        for file, num_bytes in expected.items():
            if _size(join_inside(temporary, file)) == num_bytes:
                continue
            # Another node on this disk may already have renamed the folder to its final name.
            if self._describe(final).save_id != save_id or _size(final / file) != num_bytes:
                raise CheckpointError(
                    f"{temporary / file} was written and is gone: does another run of this name work in {self.root}?"
                )
        self._check_known(final)
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

    def commit(self, step: Count, save_id: Id) -> None:
        """Write COMMITTED into a step whose folder has its final name on all nodes."""
        if save_id == self._claimed:
            self._check_lease()
            _mark_committed(self.root / step_folder(step))
            _delete_all(self.root.glob(f"*-{save_id}"))

    def remove(self, save_id: Id, steps: list[Count]) -> None:
        """Delete steps that are not kept after this save."""
        if save_id == self._claimed:
            self._check_lease()
            folders = [self.root / step_folder(step) for step in steps]
            for folder in folders:
                self._check_known(folder)
            for folder in folders:  # rename all first, because deletion takes time
                if folder.exists():
                    folder.rename(folder.with_name(f"{folder.name}.old-{save_id}"))
            _delete_all(self.root.glob(f"*.old-{save_id}"))

    def confirm(self, folder: str, save_id: Id) -> None:
        """Write COMMITTED into a step that a killed world had not marked on all nodes."""
        path = self._file_of_step(folder, COMMITTED).parent
        if self._describe(path).save_id == save_id and not (path / COMMITTED).exists():
            with suppress(CheckpointError):  # another node on this disk was first, or the disk is read-only
                _mark_committed(path)

    def _file_of_step(self, folder: str, file: str) -> Path:
        """Return the path of a file. Raise UnsafeName unless `folder` is one that `list_steps` may return."""
        path = Path(folder)
        for place in (self._place("root"), self._place("source")):
            if place is not None and STEP_FOLDER.fullmatch(path.name) and path in (place, place / path.name):
                return join_inside(place, f"{path.relative_to(place)}/{file}".removeprefix("./"))
        raise UnsafeName(f"{folder!a} is not a step of this run or of the run that it forks")

    def _place(self, where: Literal["root", "source"]) -> Path | None:
        """Return the folder that holds the steps. The source may be a run, its checkpoints or a single step."""
        place = self.root if where == "root" else self._source
        return place / self.root.name if place is not None and (place / self.root.name).is_dir() else place

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

    def _check_lease(self) -> None:
        if self._lease is not None:
            try:
                self._lease.check()
            except LeaseLost as error:
                raise CheckpointError(str(error)) from None

    def _check_known(self, folder: Path) -> None:
        """Raise CheckpointError if `folder` is a committed step that another launch saved since this world began."""
        if (folder / COMMITTED).exists() and (found := self._describe(folder)).save_id not in self._known_saves:
            raise CheckpointError(
                f"{folder} was committed by another launch (save {found.save_id or 'without an id'}) while this one "
                "ran, so it is neither replaced nor deleted; find out which launch works in this folder. Start only "
                "one launch per run.name"
            )

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
