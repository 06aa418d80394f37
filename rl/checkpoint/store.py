"""Call methods of the checkpoint directories of other nodes. Each rank has a thread that executes such calls.

call(rank, CheckpointDirectory.read, ...) --> that rank's store thread, on its disk --> Future of the result
"""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from rl.checkpoint.directory import CheckpointDirectory, StepsListed
from rl.checkpoint.manifest import CheckpointError
from rl.world.messages import Letter, Mailbox, Message, waiting

POLL_S = 0.2
MESSAGE_BYTES = 4 << 20  # maximum part of a file in one message; a larger message would delay others
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[CheckpointDirectory, P], R]


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


class CheckpointStore:
    """One rank's access to the checkpoint directories of all nodes. `node_leads` has one rank of each node."""

    def __init__(self, mail: Mailbox, root: Path, source: Path | None, node_leads: Sequence[int]):
        self.mail, self.root, self.node_leads = mail, root, node_leads
        self.run_id = ""  # known after create_roots on the leader, and agree_on_resume on the other ranks
        self.hosts: list[str] = []  # by node; known to the leader
        self.folders: dict[str, str] = {}  # host -> this run's checkpoint directory there
        self._directory = CheckpointDirectory(root, source, mail.rank)
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._calls: queue.SimpleQueue[Letter[StoreCall]] = queue.SimpleQueue()
        mail.on(StoreCall, self._calls.put)
        mail.on(StoreAnswer, self._on_answer)
        threading.Thread(target=self._serve, name="checkpoint store", daemon=True).start()

    def call(self, rank: int, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a method of a rank's directory. The future raises CheckpointError if the method failed there."""
        number, future = next(self._numbers), Future[R]()
        self._futures[number] = future
        payload: Any = kwargs.pop("payload", b"")
        self.mail.send(rank, StoreCall(number, method.__name__, list(args), kwargs), payload=payload)
        return future

    def call_all(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call a method on one rank of every node. Return all results, by node."""
        futures = [self.call(rank, method, *args, **kwargs) for rank in self.node_leads]
        return [self.wait(future) for future in futures]

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
        with waiting("an answer about checkpoints"):
            while True:
                try:
                    return future.result(timeout=POLL_S)
                except TimeoutError:
                    self.mail.check()

    def _on_answer(self, letter: Letter[StoreAnswer]) -> None:
        answer, future = letter.message, self._futures.pop(letter.message.number)
        if answer.error:
            future.set_exception(CheckpointError(answer.error))
        else:
            future.set_result(letter.payload if answer.result is None else answer.result)

    def _serve(self) -> None:
        while True:
            letter = self._calls.get()
            call, result, error = letter.message, None, ""
            payload = {"payload": letter.payload} if letter.payload else {}
            try:
                result = getattr(self._directory, call.method)(*call.arguments, **call.named, **payload)
            except CheckpointError as problem:
                error = str(problem)
            except Exception as problem:  # the caller must get an answer in any case
                error = f"{call.method}: {type(problem).__name__}: {problem}"
            data, result = (result, None) if isinstance(result, bytearray) else (b"", result)
            try:
                self.mail.send(letter.source, StoreAnswer(call.number, result, error), payload=data)
            except ConnectionError:
                return  # the caller is lost, which ends this world
            except Exception as problem:  # without an answer, the caller would wait forever
                self.mail.fail(problem)
                return
