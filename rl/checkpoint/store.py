"""Call methods of the checkpoint directories of other nodes. Each rank has a thread that executes such calls.

call(rank, CheckpointDirectory.read, ...) --> that rank's store thread, on its disk --> Future of the result
"""

import inspect
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_type_hints

import msgspec

from rl.checkpoint.directory import CheckpointDirectory, StepsListed
from rl.checkpoint.manifest import CheckpointError
from rl.watch.lease import Lease
from rl.watch.ledger import DISK, Awaited
from rl.world.messages import Letter, Mailbox, Message, waiting

POLL_S = 0.2
MESSAGE_BYTES = 4 << 20  # maximum part of a file in one message; a larger message would delay others
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[CheckpointDirectory, P], R]
# The methods that other ranks may call, and the types of their arguments and results.
METHODS = {name: value for name, value in vars(CheckpointDirectory).items() if name[0] != "_" and callable(value)}
TYPES = {name: get_type_hints(method, include_extras=True) for name, method in METHODS.items()}


@dataclass(frozen=True)
class StoreCall(Message):
    """Call a method of another rank's directory. A payload becomes the method's argument `payload`."""

    number: int
    method: str
    arguments: list[Any]
    named: dict[str, Any]


@dataclass(frozen=True)
class StoreAnswer(Message):
    """Return the result of a call. A result of type bytes is sent as the payload."""

    number: int
    result: StepsListed | bool | None
    error: str


class _Pending(NamedTuple):
    """A call that has no answer yet."""

    rank: int
    method: str
    future: Future[Any]


class CheckpointStore:
    """One rank's access to the checkpoint directories of all nodes. `node_leads` has one rank of each node."""

    def __init__(
        self,
        mail: Mailbox,
        root: Path,
        source: Path | None,
        node_leads: Sequence[int],
        lease: Lease | None = None,
    ):
        """`lease` is that of this node on the run folder, on ranks whose directory others call."""
        self.mail, self.root, self.node_leads = mail, root, node_leads
        self.run_id = ""  # known after create_roots on the leader, and agree_on_resume on the other ranks
        self.hosts: list[str] = []  # by node; known to the leader
        self.folders: dict[str, str] = {}  # host -> this run's checkpoint directory there
        self._directory = CheckpointDirectory(root, source, mail.rank, lease)
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._calls: queue.SimpleQueue[Letter[StoreCall] | None] = queue.SimpleQueue()
        mail.on(StoreCall, self._calls.put)
        mail.on(StoreAnswer, self._on_answer)
        threading.Thread(target=self._serve, name="checkpoint store", daemon=True).start()

    def close(self) -> None:
        """Serve no more calls."""
        self._calls.put(None)

    def call(self, rank: int, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a method of a rank's directory. The future raises CheckpointError if the method failed there."""
        number, future = next(self._numbers), Future[R]()
        self._pending[number] = _Pending(rank, method.__name__, future)
        payload: Any = kwargs.pop("payload", b"")
        self.mail.send(rank, StoreCall(number, method.__name__, list(args), kwargs), payload=payload)
        return future

    def call_all(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method on one rank of every node. Return all results, by node."""
        futures = [self.call(rank, method, *args, **kwargs) for rank in self.node_leads]
        return [self.wait(future) for future in futures]

    def local_path(self, folder: str, file: str) -> Path:
        """Return the path of a step's file on this node. Raise UnsafeName if the folder is no step that was listed."""
        return self._directory._file_of_step(folder, file)

    def create_roots(self, run_id: str) -> None:
        """Create the checkpoint directory on all nodes. If it is missing later, a disk is gone. If the directories have
        an id already, as after a kill before the first checkpoint, use that id instead of `run_id`."""
        listings = self.call_all(CheckpointDirectory.list_steps, "root")
        self.run_id = next((listing.run_id for listing in listings if listing.run_id), run_id)
        self.hosts = [listing.host for listing in listings]
        self.folders = {listing.host: listing.folder for listing in listings}
        self.call_all(CheckpointDirectory.create_root, self.run_id)

    def wait(self, future: Future[R]) -> R:
        """Wait for a result and return it. Raise if the world ends in the meantime."""
        with waiting(Awaited("an answer about checkpoints", DISK)):
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except TimeoutError:
                    self.mail.check()

    def _on_answer(self, letter: Letter[StoreAnswer]) -> None:
        answer, source = letter.message, letter.source
        call = self._pending.get(answer.number)
        if call is None or call.rank != source:
            raise CheckpointError(
                f"rank {source} answered call {answer.number} of the checkpoint store, which rank "
                f"{self.mail.rank} has not sent to it"
            )
        del self._pending[answer.number]
        expected = TYPES.get(call.method, {}).get("return", object)
        result = letter.payload if expected is bytearray else answer.result
        if answer.error:
            call.future.set_exception(CheckpointError(answer.error))
        elif isinstance(result, bytes | bytearray if expected is bytearray else expected):
            call.future.set_result(result)
        else:
            text = f"rank {source} answered {call.method} with a {type(result).__name__}, not a {expected}"
            call.future.set_exception(CheckpointError(text))

    def _serve(self) -> None:
        while (letter := self._calls.get()) is not None:
            call, result, error = letter.message, None, ""
            try:
                result = self._execute(call, letter.payload)
            except CheckpointError as problem:
                error = str(problem)
            except (TypeError, ValueError) as problem:
                error = f"rank {letter.source} called {call.method} of the checkpoint store wrongly: {problem}"
            except Exception as problem:  # the caller must get an answer in any case
                error = f"{call.method}: {type(problem).__name__}: {problem}"
            data, result = (result, None) if isinstance(result, bytearray) else (b"", result)
            try:
                self.mail.send(letter.source, StoreAnswer(call.number, result, error), payload=data)
            except ConnectionError:
                continue  # the caller is lost, which ends this world
            except LookupError:  # this must not end the thread, because other callers would wait forever
                text = f"rank {letter.source}, which is not in this world, called {call.method} of the checkpoint store"
                print(f"oneworld: {text}; it gets no answer", file=sys.stderr, flush=True)
            except Exception as problem:  # without an answer, the caller would wait forever
                self.mail.fail(problem)

    def _execute(self, call: StoreCall, payload: bytes | bytearray) -> Any:
        """Call a method. Raise TypeError or ValueError if it may not be called, or not with these arguments."""
        if call.method not in METHODS:
            raise ValueError(f"there is no such method; the methods are {', '.join(METHODS)}")
        named = call.named | ({"payload": payload} if payload else {})
        given = inspect.signature(METHODS[call.method]).bind(self._directory, *call.arguments, **named)
        for name in given.arguments.keys() - {"self", "payload"}:
            given.arguments[name] = msgspec.convert(given.arguments[name], TYPES[call.method][name])
        return METHODS[call.method](*given.args, **given.kwargs)
