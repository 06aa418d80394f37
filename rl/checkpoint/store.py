"""A rank's hands on its own node's checkpoint folder, for the other ranks: they ask by message, a thread of its own
answers, whatever the main thread does.

    call(rank, "get" | "put" | "prepare" | ...) --> that rank's store thread, on its disk --> Future[Message]

Disks may be private to nodes or shared by some or all of them, and nobody has to say which: every operation may come
from several nodes that see the same folder, and does its work once.
"""

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
from pathlib import Path
from typing import Any

from rl.checkpoint.manifest import COMMITTED, MANIFEST, STEP_FOLDER, CheckpointError, Manifest, step_folder
from rl.checkpoint.shard_file import NewFile, cannot_write, read_bytes, sync_folder, write_whole
from rl.world.mail import Mail, Message, waiting
from rl.world.restarts import launcher_process

POLL_S = 0.2
RUN_ID = "run_id"
MESSAGE_BYTES = 4 << 20  # of a file, so that prompts between the same ranks do not wait long behind it
LEFT_OVER = re.compile(r"step_\d+\.(tmp|old|claim)-.*")
Answer = tuple[dict[str, Any], bytes | bytearray]


class CheckpointStore:
    """`root` is where this run's steps lie on this node, `source` where another run's do that it forks; `node_leads`
    are the ranks, one a node, that are asked about what concerns a whole disk."""

    def __init__(self, mail: Mail, root: Path, source: Path | None, node_leads: Sequence[int]):
        self.root, self.node_leads = root, node_leads
        self.run_id = ""  # agreed at the start
        self.hosts: list[str] = []  # by node; known to the leader
        self.folders: dict[str, str] = {}  # by host: where this run's steps lie there
        self._mail, self._source = mail, source
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Message]] = {}
        self._asked: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._incoming: dict[str, NewFile] = {}  # files that other nodes send, by path
        self._claimed = ""  # the newest save whose folder this rank put in place
        mail.on("shelf", self._asked.put)
        mail.on("shelf answer", self._on_answer)
        threading.Thread(target=self._serve, name="shelf", daemon=True).start()

    def call(self, rank: int, operation: str, payload: bytes | memoryview = b"", **meta: Any) -> Future[Message]:
        """Asks a rank's store; the future raises CheckpointError where it failed there."""
        number, future = next(self._numbers), Future[Message]()
        self._calls[number] = future
        self._mail.send(rank, "shelf", {"call": number, "operation": operation, **meta}, payload)
        return future

    def ask_all(self, operation: str, payload: bytes = b"", **meta: Any) -> list[Message]:
        """Asks one rank of every node; returns when all have answered, by node."""
        asked = [self.call(rank, operation, payload, **meta) for rank in self.node_leads]
        return [self.wait(future) for future in asked]

    def make_folders(self, run_id: str) -> None:
        """On all nodes, where later a missing folder means that a disk is gone. A run that was killed before its first
        checkpoint keeps the id that its folders have."""
        known = [answer.meta["run_id"] for answer in self.ask_all("read run id")]
        self.run_id = next(filter(None, known), run_id)
        made = self.ask_all("make", run_id=self.run_id)
        self.hosts = [answer.meta["host"] for answer in made]
        self.folders = {answer.meta["host"]: answer.meta["folder"] for answer in made}

    def wait(self, future: Future[Message]) -> Message:
        """Its answer; raises when the world ends in the meantime."""
        with waiting("an answer about checkpoints"):
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except FutureTimeoutError:
                    self._mail.receive(timeout_s=0)

    def _on_answer(self, message: Message) -> None:
        future = self._calls.pop(message.meta["call"])
        if message.meta["error"]:
            future.set_exception(CheckpointError(message.meta["error"]))
        else:
            future.set_result(message)

    def _serve(self) -> None:
        operations: dict[str, Callable[[Message], Answer]] = {
            "list": self._list,
            "get": self._get,
            "read run id": lambda message: ({"run_id": self._read_run_id()}, b""),
            "make": self._make,
            "set aside": self._set_aside,
            "put": self._put,
            "prepare": self._prepare,
            "commit": self._commit,
            "remove": self._remove,
            "confirm": self._confirm,
        }
        while True:
            message = self._asked.get()
            meta: dict[str, Any] = {"call": message.meta["call"], "error": ""}
            payload: bytes | bytearray = b""
            try:
                more, payload = operations[message.meta["operation"]](message)
                meta |= more
            except CheckpointError as error:
                meta["error"] = str(error)
            except Exception as error:  # whatever it is: the one who asked must not wait for ever
                meta["error"] = f"{message.meta['operation']}: {type(error).__name__}: {error}"
            try:
                self._mail.send(message.source, "shelf answer", meta, payload)
            except ConnectionError:
                return  # the one who asked is gone, and with it this world

    def _list(self, message: Message) -> Answer:
        """The steps in this run's folder, or at the source: which are committed, and the files of each with sizes."""
        place = self.root if message.meta["where"] == "root" else self._source
        assert place is not None
        if (place / self.root.name).is_dir():  # a run's folder
            place = place / self.root.name
        folders = [place] if STEP_FOLDER.fullmatch(place.name) else sorted(place.glob("step_*"))
        found = [_describe(folder) for folder in folders if STEP_FOLDER.fullmatch(folder.name) and folder.is_dir()]
        launched_at = launcher_process().create_time()
        meta = {"steps": found, "place": str(place.resolve()), "exists": place.is_dir(), "launched_at": launched_at}
        return meta | {"run_id": self._read_run_id()}, b""

    def _read_run_id(self) -> str:
        try:
            return (self.root / RUN_ID).read_text()
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _get(self, message: Message) -> Answer:
        path = Path(message.meta["folder"]) / message.meta["file"]
        count = message.meta["num_bytes"]
        return {}, read_bytes(path, message.meta["begin"], path.stat().st_size if count is None else count)

    def _make(self, message: Message) -> Answer:
        """Also removes what killed saves left."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for folder in self.root.iterdir():
                if LEFT_OVER.fullmatch(folder.name):
                    _delete(folder)
            if not self._read_run_id():
                (self.root / RUN_ID).write_text(message.meta["run_id"])
        except OSError as error:
            raise cannot_write(self.root, error) from error
        return {"host": socket.gethostname(), "folder": str(self.root.resolve())}, b""

    def _set_aside(self, message: Message) -> Answer:
        with suppress(FileNotFoundError):  # nothing to set aside, or another node on the same disk was first
            self.root.rename(self.root.with_name(f"{self.root.name}.{message.meta['suffix']}"))
        return {}, b""

    def _put(self, message: Message) -> Answer:
        """A piece of a file that another rank has written on its own disk; not needed where this is the same disk."""
        meta = message.meta
        path = self.root / meta["folder"] / meta["file"]
        if meta["begin"] == 0:
            self._check_root()
            if path.exists():
                return {"is_here": True}, b""
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            part.unlink(missing_ok=True)  # of a kill
            self._incoming[str(path)] = NewFile(part)
        if str(path) not in self._incoming:
            raise CheckpointError(f"{path}: an earlier piece of it could not be written")
        file = self._incoming[str(path)]
        try:
            file.write(memoryview(message.payload))
            if meta["last"]:
                del self._incoming[str(path)]
                file.finish()
                if file.digest != meta["digest"]:
                    raise CheckpointError(
                        f"{path}: other bytes arrived than were sent; look at this node's network and memory"
                    )
                file.path.rename(path)
                sync_folder(path.parent)
        except CheckpointError:
            self._incoming.pop(str(path), None)
            file.discard()
            raise
        return {"is_here": False}, b""

    def _prepare(self, message: Message) -> Answer:
        """All files of the step are written everywhere: gives the folder its name, with the manifest in it. Of several
        nodes on one disk the first does it, and what follows."""
        name, step = message.meta["save_id"], message.meta["step"]
        temporary, final = self.root / message.meta["folder"], self.root / step_folder(step)
        self._check_root()
        for file, num_bytes in message.meta["expected"][self.node_leads.index(self._mail.rank)].items():
            if _size(temporary / file) == num_bytes:
                continue
            # Another node on this disk may have given the folder its final name already.
            if _describe(final)["save_id"] != name or _size(final / file) != num_bytes:
                raise CheckpointError(
                    f"{temporary / file} was written and is gone: does another run of this name work in {self.root}?"
                )
        try:
            (self.root / f"{final.name}.claim-{name}").mkdir()
        except FileExistsError:
            return {"claimed": False}, b""
        try:
            temporary.mkdir(exist_ok=True)
            write_whole(temporary / MANIFEST, bytes(message.payload))
            sync_folder(temporary)
            if final.exists():  # what a save left that was never committed, or that this run did not resume from
                final.rename(final.with_name(f"{final.name}.old-{name}"))
            temporary.rename(final)
            sync_folder(self.root)
        except OSError as error:
            raise cannot_write(final, error) from error
        self._claimed = name
        return {"claimed": True}, b""

    def _commit(self, message: Message) -> Answer:
        name, final = message.meta["save_id"], self.root / step_folder(message.meta["step"])
        if name == self._claimed:
            try:
                write_whole(final / COMMITTED, b"")
                sync_folder(final)
            except OSError as error:
                raise cannot_write(final / COMMITTED, error) from error
            self._clear(f"*-{name}")
        return {}, b""

    def _remove(self, message: Message) -> Answer:
        """Steps that are no longer kept vanish at once and are deleted after that."""
        name = message.meta["save_id"]
        if name == self._claimed:
            for step in message.meta["steps"]:
                folder = self.root / step_folder(step)
                if folder.exists():
                    folder.rename(folder.with_name(f"{folder.name}.old-{name}"))
            self._clear(f"*.old-{name}")
        return {}, b""

    def _confirm(self, message: Message) -> Answer:
        """A step that was committed on another node, when the world was killed before it was here."""
        folder = Path(message.meta["folder"])
        if _describe(folder)["save_id"] == message.meta["save_id"] and not (folder / COMMITTED).exists():
            with suppress(CheckpointError):  # another node on this disk did it, or the disk is read-only
                write_whole(folder / COMMITTED, b"")
                sync_folder(folder)
        return {}, b""

    def _check_root(self) -> None:
        if not self.root.is_dir():
            raise CheckpointError(f"{self.root} is gone: was it deleted, or its disk unmounted?")

    def _clear(self, pattern: str) -> None:
        for left in self.root.glob(pattern):
            _delete(left)


def _delete(folder: Path) -> None:
    gone = folder.with_name(f"{folder.name}.old-{secrets.token_hex(4)}")
    try:
        folder.rename(gone)
    except FileNotFoundError:  # another node on this disk was first
        return
    shutil.rmtree(gone, ignore_errors=True)
    if gone.exists():
        print(f"oneworld: could not delete {gone}, which nothing needs any more", file=sys.stderr, flush=True)


def _size(path: Path) -> int | None:
    """None where it is not, or no longer: another node may give its folder the final name."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _describe(folder: Path) -> dict[str, Any]:
    found = {str(path.relative_to(folder)): _size(path) for path in folder.rglob("*") if path.is_file()}
    sizes = {name: size for name, size in found.items() if size is not None}  # a live run may remove some
    entry = {"step": int(folder.name.removeprefix("step_")), "folder": str(folder), "files": sizes, "error": ""}
    entry |= {"committed": COMMITTED in sizes, "save_id": "", "run_id": "", "saved_at": 0.0}
    path = folder / MANIFEST
    try:
        manifest = Manifest.from_json(path.read_bytes(), str(path))
    except CheckpointError as error:
        return entry | {"error": str(error)}
    except OSError as error:
        return entry | {"error": f"{path} cannot be read: {error.strerror}"}
    return entry | {"save_id": manifest.save_id, "run_id": manifest.run_id, "saved_at": manifest.saved_at}
