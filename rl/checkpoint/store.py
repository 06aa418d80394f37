"""Serve one node's checkpoint directory to the other ranks, in a thread of its own.

    call(rank, ReadBytes(...)) --> that rank's store thread, on its disk --> Future of a typed answer

A disk may be private to a node or shared by several nodes, and no setting says which. So several nodes may get the same
request for the same directory, and it must take effect only once.
"""

import dataclasses
import itertools
import queue
import re
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from rl.checkpoint.manifest import COMMITTED, MANIFEST, STEP_FOLDER, CheckpointError, Manifest, step_folder
from rl.checkpoint.shard_file import NewFile, cannot_write, read_bytes, rename_durably, sync_folder, write_small_file
from rl.world.messages import Letter, Mailbox, Message, waiting
from rl.world.restarts import launcher_process

POLL_S = 0.2
RUN_ID = "run_id"
MESSAGE_BYTES = 4 << 20  # maximum size of a piece of a file, so that other messages do not wait long behind it
LEFT_OVER = re.compile(r"step_\d+\.(tmp|old|claim)-.*")


@dataclass(frozen=True, kw_only=True)
class StoreAnswer(Message):
    """The answer to a call. The payload holds the bytes that were asked for, if any."""

    call: int = -1
    error: str = ""
    took_effect: bool = True  # False if another node on the same disk has already done the work


@dataclass(frozen=True)
class StoredStep:
    """A step in a store's directory, and the sizes of its files."""

    step: int
    folder: str
    files: dict[str, int]
    is_committed: bool
    error: str  # why the manifest cannot be read, in which case the fields below are empty
    save_id: str = ""
    run_id: str = ""
    saved_at: float = 0.0


@dataclass(frozen=True)
class StepsListed(StoreAnswer):
    """The answer to ListSteps."""

    steps: list[StoredStep]
    folder: str
    exists: bool
    launched_at: float  # Unix time at which this launch began
    run_id: str  # of the run that uses the root


@dataclass(frozen=True)
class RootCreated(StoreAnswer):
    """The answer to CreateRoot."""

    host: str
    folder: str


A = TypeVar("A", bound=StoreAnswer)


@dataclass(frozen=True, kw_only=True)
class StoreRequest(Message, Generic[A]):
    """A call of another rank's store, which answers with a message of type A."""

    call: int = -1


@dataclass(frozen=True)
class ListSteps(StoreRequest[StepsListed]):
    """List the steps of this run, or of the run that it forks."""

    where: Literal["root", "source"]


@dataclass(frozen=True)
class CreateRoot(StoreRequest[RootCreated]):
    """Create the run's checkpoint directory, and delete what killed saves left in it."""

    run_id: str


@dataclass(frozen=True)
class RenameRoot(StoreRequest[StoreAnswer]):
    """Append a suffix to the name of the run's checkpoint directory, so that the run starts with an empty one."""

    suffix: str


@dataclass(frozen=True)
class ReadBytes(StoreRequest[StoreAnswer]):
    """Read `num_bytes` of a file, or all of it."""

    folder: str
    file: str
    begin: int = 0
    num_bytes: int | None = None


@dataclass(frozen=True)
class WriteBytes(StoreRequest[StoreAnswer]):
    """Write the next piece of a file that the caller has on its own disk. The payload is the piece."""

    folder: str
    file: str
    begin: int
    digest: str  # of the whole file
    is_last: bool


@dataclass(frozen=True)
class PrepareStep(StoreRequest[StoreAnswer]):
    """Rename a step's folder to its final name. All nodes have written all files. The payload is the manifest."""

    step: int
    save_id: str
    folder: str
    expected: list[dict[str, int]]  # for each node, its files and their sizes


@dataclass(frozen=True)
class CommitStep(StoreRequest[StoreAnswer]):
    """Write COMMITTED into a step whose folder has its final name on all nodes."""

    step: int
    save_id: str


@dataclass(frozen=True)
class RemoveSteps(StoreRequest[StoreAnswer]):
    """Delete steps that are not kept after the save `save_id`."""

    save_id: str
    steps: list[int]


@dataclass(frozen=True)
class ConfirmStep(StoreRequest[StoreAnswer]):
    """Write COMMITTED into a step that a killed world had not marked on all nodes."""

    folder: str
    save_id: str


class CheckpointStore:
    """One rank's access to the checkpoint directories of all nodes.

    `root` holds this run's steps on this node. `source` holds the steps of the run that this one forks.
    `node_leads` are the ranks, one per node, that answer for the node's disk.
    """

    def __init__(self, mail: Mailbox, root: Path, source: Path | None, node_leads: Sequence[int]):
        self.root, self.node_leads = root, node_leads
        self.run_id = ""  # known after create_roots or join_run
        self.hosts: list[str] = []  # by node; known to the leader
        self.folders: dict[str, str] = {}  # by host: this run's checkpoint directory there
        self.mail, self._source = mail, source
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._requests: queue.SimpleQueue[Letter[Any]] = queue.SimpleQueue()
        self._incoming: dict[str, NewFile] = {}  # files that other nodes send, by path
        self._claimed = ""  # id of the newest save whose folder this rank renamed to its final name
        self._handlers: dict[type[StoreRequest], Callable[[Any], StoreAnswer]] = {
            ListSteps: self._list,
            CreateRoot: self._create_root,
            RenameRoot: self._rename_root,
            CommitStep: self._commit,
            RemoveSteps: self._remove,
            ConfirmStep: self._confirm,
        }
        for request in (*self._handlers, ReadBytes, WriteBytes, PrepareStep):
            mail.on(request, self._requests.put)
        for answer in (StoreAnswer, StepsListed, RootCreated):
            mail.on(answer, self._on_answer)
        threading.Thread(target=self._serve, name="checkpoint store", daemon=True).start()

    def call(self, rank: int, request: StoreRequest[A], payload: bytes | memoryview = b"") -> Future[Letter[A]]:
        """Send a request to a rank's store. The future raises CheckpointError if the request failed there."""
        number, future = next(self._numbers), Future[Letter[A]]()
        self._calls[number] = future
        self.mail.send(rank, dataclasses.replace(request, call=number), payload=payload)
        return future

    def call_all(self, request: StoreRequest[A], payload: bytes = b"") -> list[Letter[A]]:
        """Send a request to one rank of every node. Return all answers, by node."""
        futures = [self.call(rank, request, payload) for rank in self.node_leads]
        return [self.wait(future) for future in futures]

    def create_roots(self, run_id: str) -> None:
        """Create the checkpoint directory on all nodes. If it is missing later, a disk is gone.

        A run that was killed before its first checkpoint keeps the id in its directories, instead of `run_id`.
        """
        known = [answer.message.run_id for answer in self.call_all(ListSteps("root"))]
        self.run_id = next(filter(None, known), run_id)
        created = [answer.message for answer in self.call_all(CreateRoot(self.run_id))]
        self.hosts = [root.host for root in created]
        self.folders = {root.host: root.folder for root in created}

    def join_run(self, run_id: str) -> None:
        """Use the run's id, which the leader's `create_roots` has determined."""
        self.run_id = run_id

    def wait(self, future: Future[Letter[A]]) -> Letter[A]:
        """Wait for an answer and return it. Raise if the world ends in the meantime."""
        with waiting("an answer about checkpoints"):
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except FutureTimeoutError:
                    self.mail.check()

    def _on_answer(self, letter: Letter[StoreAnswer]) -> None:
        future = self._calls.pop(letter.message.call)
        if letter.message.error:
            future.set_exception(CheckpointError(letter.message.error))
        else:
            future.set_result(letter)

    def _serve(self) -> None:
        while True:
            letter = self._requests.get()
            request = letter.message
            payload: bytes | bytearray = b""
            try:
                if isinstance(request, ReadBytes):
                    answer, payload = StoreAnswer(), self._read(request)
                elif isinstance(request, WriteBytes):
                    answer = StoreAnswer(took_effect=self._write(request, letter.payload))
                elif isinstance(request, PrepareStep):
                    answer = StoreAnswer(took_effect=self._prepare(request, letter.payload))
                else:
                    answer = self._handlers[type(request)](request)
            except CheckpointError as error:
                answer = StoreAnswer(error=str(error))
            except Exception as error:  # the caller must get an answer in any case
                answer = StoreAnswer(error=f"{type(request).__name__}: {type(error).__name__}: {error}")
            try:
                self.mail.send(letter.source, dataclasses.replace(answer, call=request.call), payload=payload)
            except ConnectionError:
                return  # the caller is lost, which ends this world
            except Exception as error:  # the caller waits for an answer: end the world instead
                self.mail.fail(error)
                return

    def _list(self, request: ListSteps) -> StepsListed:
        place = self.root if request.where == "root" else self._source
        assert place is not None
        if (place / self.root.name).is_dir():  # `place` is a run's folder
            place = place / self.root.name
        folders = [place] if STEP_FOLDER.fullmatch(place.name) else sorted(place.glob("step_*"))
        steps = [_describe(folder) for folder in folders if STEP_FOLDER.fullmatch(folder.name) and folder.is_dir()]
        return StepsListed(
            steps=steps,
            folder=str(place.resolve()),
            exists=place.is_dir(),
            launched_at=launcher_process().create_time(),
            run_id=self._read_run_id(),
        )

    def _read_run_id(self) -> str:
        try:
            return (self.root / RUN_ID).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _read(self, request: ReadBytes) -> bytearray:
        path = Path(request.folder) / request.file
        num_bytes = path.stat().st_size if request.num_bytes is None else request.num_bytes
        return read_bytes(path, request.begin, num_bytes)

    def _create_root(self, request: CreateRoot) -> RootCreated:
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for folder in self.root.iterdir():
                if LEFT_OVER.fullmatch(folder.name):
                    _delete(folder)
            if not self._read_run_id():
                # Not through a temporary file: nodes that share the disk would race for its name. All write the same.
                (self.root / RUN_ID).write_text(request.run_id)
        except OSError as error:
            raise cannot_write(self.root, error) from error
        return RootCreated(socket.gethostname(), str(self.root.resolve()))

    def _rename_root(self, request: RenameRoot) -> StoreAnswer:
        with suppress(FileNotFoundError):  # there is none, or another node on the same disk was first
            self.root.rename(self.root.with_name(f"{self.root.name}.{request.suffix}"))
        return StoreAnswer()

    def _write(self, request: WriteBytes, payload: bytes | bytearray) -> bool:
        """Write a piece of a file. Return False if the file exists, because the caller shares this disk."""
        path = self.root / request.folder / request.file
        if request.begin == 0:
            self._check_root()
            if path.exists():
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.unlink(missing_ok=True)  # left by a kill
            self._incoming[str(path)] = NewFile(part)
        if str(path) not in self._incoming:
            raise CheckpointError(f"{path}: an earlier piece of it could not be written")
        file = self._incoming[str(path)]
        try:
            file.write(memoryview(payload))
            if request.is_last:
                del self._incoming[str(path)]
                file.finish()
                if file.digest != request.digest:
                    raise CheckpointError(
                        f"{path}: the bytes that arrived differ from those that were sent; check this node's network "
                        "and memory"
                    )
                rename_durably(file.path, path)
        except CheckpointError:
            self._incoming.pop(str(path), None)
            file.discard()
            raise
        return True

    def _prepare(self, request: PrepareStep, manifest: bytes | bytearray) -> bool:
        """Put a step in place. Return False if another node on this disk does so."""
        save_id = request.save_id
        temporary, final = self.root / request.folder, self.root / step_folder(request.step)
        self._check_root()
        for file, num_bytes in request.expected[self.node_leads.index(self.mail.rank)].items():
            if _size(temporary / file) == num_bytes:
                continue
            # Another node on this disk may already have renamed the folder to its final name.
            if _describe(final).save_id != save_id or _size(final / file) != num_bytes:
                raise CheckpointError(
                    f"{temporary / file} was written and is gone: does another run of this name work in {self.root}?"
                )
        try:
            (self.root / f"{final.name}.claim-{save_id}").mkdir()
        except FileExistsError:
            return False
        try:
            temporary.mkdir(exist_ok=True)
            write_small_file(temporary / MANIFEST, bytes(manifest))
            sync_folder(temporary)
            if final.exists():  # left by an uncommitted save, or newer than the step that this run resumed from
                final.rename(final.with_name(f"{final.name}.old-{save_id}"))
            rename_durably(temporary, final)
        except OSError as error:
            raise cannot_write(final, error) from error
        self._claimed = save_id
        return True

    def _commit(self, request: CommitStep) -> StoreAnswer:
        final = self.root / step_folder(request.step)
        if request.save_id == self._claimed:
            try:
                write_small_file(final / COMMITTED, b"")
                sync_folder(final)
            except OSError as error:
                raise cannot_write(final / COMMITTED, error) from error
            self._delete_all(f"*-{request.save_id}")
        return StoreAnswer()

    def _remove(self, request: RemoveSteps) -> StoreAnswer:
        if request.save_id == self._claimed:
            for step in request.steps:  # rename all first, because deletion takes time
                folder = self.root / step_folder(step)
                if folder.exists():
                    folder.rename(folder.with_name(f"{folder.name}.old-{request.save_id}"))
            self._delete_all(f"*.old-{request.save_id}")
        return StoreAnswer()

    def _confirm(self, request: ConfirmStep) -> StoreAnswer:
        folder = Path(request.folder)
        if _describe(folder).save_id == request.save_id and not (folder / COMMITTED).exists():
            with suppress(CheckpointError):  # another node on this disk was first, or the disk is read-only
                write_small_file(folder / COMMITTED, b"")
                sync_folder(folder)
        return StoreAnswer()

    def _check_root(self) -> None:
        if not self.root.is_dir():
            raise CheckpointError(f"{self.root} is gone: was it deleted, or its disk unmounted?")

    def _delete_all(self, pattern: str) -> None:
        for folder in self.root.glob(pattern):
            _delete(folder)


def _delete(folder: Path) -> None:
    renamed = folder.with_name(f"{folder.name}.old-{secrets.token_hex(4)}")
    try:
        folder.rename(renamed)
    except FileNotFoundError:  # another node on this disk was first
        return
    shutil.rmtree(renamed, ignore_errors=True)
    if renamed.exists():
        print(f"oneworld: could not delete {renamed}, which is no longer needed", file=sys.stderr, flush=True)


def _size(path: Path) -> int | None:
    """Return a file's size, or None if it is absent. Another node may have renamed its folder."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _describe(folder: Path) -> StoredStep:
    found = {str(path.relative_to(folder)): _size(path) for path in folder.rglob("*") if path.is_file()}
    sizes = {name: size for name, size in found.items() if size is not None}  # a running job may delete some
    path, manifest, error = folder / MANIFEST, None, ""
    try:
        manifest = Manifest.from_json(path.read_bytes(), str(path))
    except CheckpointError as problem:
        error = str(problem)
    except OSError as problem:
        error = f"{path} cannot be read: {problem.strerror}"
    return StoredStep(
        step=int(folder.name.removeprefix("step_")),
        folder=str(folder),
        files=sizes,
        is_committed=COMMITTED in sizes,
        error=error,
        save_id=manifest.save_id if manifest else "",
        run_id=manifest.run_id if manifest else "",
        saved_at=manifest.saved_at if manifest else 0.0,
    )
