"""Calls and answers between checkpoint stores that no store of ours would send. The service thread survives them."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rl.checkpoint.directory import CheckpointDirectory
from rl.checkpoint.manifest import CheckpointError, File
from rl.checkpoint.save import FilesWritten, receive_files
from rl.checkpoint.store import CheckpointStore, StoreAnswer, StoreCall
from rl.world.messages import Mailbox, _Arrival
from tests.launcher import until
from tests.mails import connected

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def mails() -> Iterator[list[Mailbox]]:
    with connected(3) as mails:
        yield mails


@pytest.fixture
def stores(mails: list[Mailbox], tmp_path: Path) -> Iterator[list[CheckpointStore]]:
    """Stores of ranks 0 and 1. Rank 2 has none, and sends what a test wants."""
    stores = [CheckpointStore(mail, tmp_path / str(mail.rank), None, [0, 1]) for mail in mails[:2]]
    stores[0].create_roots("r1")
    yield stores
    for store in stores:
        store.close()


def method_named(name: str) -> Any:
    """Return something that `CheckpointStore.call` takes for a method of this name."""

    def method(directory: CheckpointDirectory) -> None: ...

    method.__name__ = name
    return method


def refusal(store: CheckpointStore, rank: int, method: str, *arguments: Any, **named: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        store.call(rank, method_named(method), *arguments, **named).result(timeout=10)
    return str(caught.value)


def check_alive(store: CheckpointStore) -> None:
    for rank in (0, 1):
        assert store.call(rank, CheckpointDirectory.list_steps, "root").result(timeout=10).exists


@pytest.mark.parametrize("rank", [0, 1])
def test_only_methods_for_callers_can_be_called(stores: list[CheckpointStore], rank: int, tmp_path: Path) -> None:
    others = ("_read_run_id", "_describe", "_check_root", "__init__", "__class__", "__dict__", "root", "rm", "", "a\0")
    for method in others:
        for arguments in ([], [str(tmp_path / "evil"), None, 0]):
            text = refusal(stores[0], rank, method, *arguments)
            assert "rank 0 called" in text and "list_steps" in text, text
    check_alive(stores[0])
    assert not (tmp_path / "evil").exists()


BAD_CALLS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("list_steps", ["elsewhere"], {}),
    ("list_steps", [], {}),
    ("list_steps", ["root", "root"], {}),
    ("list_steps", [], {"where": "root", "what": 1}),
    ("create_root", [7], {}),
    ("create_root", ["../r"], {}),
    ("rename_root", [["a"]], {}),
    ("rename_root", ["a/b"], {}),
    ("read", ["step_4", 4], {}),
    ("read", ["step_4", "model", "0", 1], {}),
    ("read", ["step_4", "model", -1, 1], {}),
    ("read", ["step_4", "model", 0, -1], {}),
    ("read", ["step_4", "model", 0, 1 << 62], {}),
    ("write", ["step_4.tmp-w1-4", "model", 0, "x"], {}),
    ("write", ["step_4.tmp-w1-4", "model", 0, 5, True], {}),
    ("write", ["step_4.tmp-w1-4", "model", -1, "x", True], {}),
    ("prepare", [4, "w1-4", "step_4.tmp-w1-4", ["model"]], {}),
    ("prepare", ["4", "w1-4", "step_4.tmp-w1-4", {}], {}),
    ("prepare", [-4, "w1-4", "step_-4.tmp-w1-4", {}], {}),
    ("prepare", [4, "*", "step_4.tmp-*", {}], {}),
    ("commit", [4, None], {}),
    ("commit", [4, "*"], {}),
    ("remove", ["w1-4", "12"], {}),
    ("remove", ["w1-4", [-1]], {}),
    ("confirm", [{}, "w1-4"], {}),
]


@pytest.mark.parametrize(("method", "arguments", "named"), BAD_CALLS)
def test_a_malformed_call_is_answered_with_its_sender(
    stores: list[CheckpointStore], method: str, arguments: list[Any], named: dict[str, Any]
) -> None:
    for rank in (0, 1):
        text = refusal(stores[0], rank, method, *arguments, **named)
        assert text.startswith(f"rank 0 called {method} "), text
    check_alive(stores[0])


def test_a_source_outside_the_world_does_not_end_the_service(
    stores: list[CheckpointStore], mails: list[Mailbox], capfd: pytest.CaptureFixture[str]
) -> None:
    for source in (3, 99, -1, 1 << 70):
        call = StoreCall(0, "list_steps", ["root"], {})
        mails[0]._deliver(_Arrival(source, "StoreCall", call, b""))
    check_alive(stores[1])
    mails[0].check()
    said = capfd.readouterr().err
    assert "rank 99" in said and "list_steps" in said


def failure_of(mail: Mailbox) -> BaseException:
    until(lambda: mail._failure is not None, "an error in the mailbox")
    assert mail._failure is not None
    return mail._failure


def test_an_answer_without_a_call_names_its_sender(stores: list[CheckpointStore], mails: list[Mailbox]) -> None:
    mails[2].send(0, StoreAnswer(77, None, ""))
    error = failure_of(mails[0])
    assert isinstance(error, CheckpointError) and "rank 2" in str(error), repr(error)


def test_only_the_rank_that_was_called_can_answer(stores: list[CheckpointStore], mails: list[Mailbox]) -> None:
    """Else a rank could make the leader believe that another node has written its files."""
    number = next(stores[0]._numbers) + 1
    pending = stores[0].call(2, CheckpointDirectory.list_steps, "root")  # rank 2 does not answer
    mails[1].send(0, StoreAnswer(number, None, ""))
    error = failure_of(mails[0])
    assert isinstance(error, CheckpointError) and "rank 1" in str(error), repr(error)
    assert not pending.done()


@pytest.mark.parametrize("result", [True, None])
def test_a_result_of_another_type_names_its_sender(
    stores: list[CheckpointStore], mails: list[Mailbox], result: Any
) -> None:
    number = next(stores[0]._numbers) + 1
    pending: Future[Any] = stores[0].call(2, CheckpointDirectory.list_steps, "root")
    mails[2].send(0, StoreAnswer(number, result, ""), payload=b"abc")
    with pytest.raises(CheckpointError, match="rank 2 answered list_steps with "):
        pending.result(timeout=10)


def test_calls_do_not_open_files_without_end(stores: list[CheckpointStore], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each first piece of a file opens it."""
    monkeypatch.setattr("rl.checkpoint.directory.MAX_INCOMING", 50)
    before = len(os.listdir("/proc/self/fd"))
    texts = []
    for number in range(200):
        arguments = ("step_4.tmp-w1-4", f"model-{number}", 0, "x", False)
        try:
            stores[0].call(1, CheckpointDirectory.write, *arguments, payload=b"1").result(timeout=10)
        except CheckpointError as error:
            texts.append(str(error))
    assert len(os.listdir("/proc/self/fd")) < before + 60 and texts and "files are being sent already" in texts[0]
    check_alive(stores[0])


def report(*nodes: int, name: str = "model-0") -> bytes:
    return msgspec.msgpack.encode([(vars(File("model-0", 1, "", (), ())) | {"name": name}, nodes)])


@pytest.mark.parametrize(
    ("source", "step", "payload"),
    [
        (2, 4, report(0)),  # not an actor
        (1, 3, report(0)),
        (1, 4, b"\xff"),
        (1, 4, report(2)),  # there is no such node
        (1, 4, report(-1)),
        (1, 4, report(0, name="../model")),
        (1, 4, b"\x91" * 100_000),
    ],
)
def test_an_invalid_report_of_files_names_its_sender(
    mails: list[Mailbox], source: int, step: int, payload: bytes
) -> None:
    mails[0].send(0, FilesWritten(4, {}), payload=report(0))
    mails[source].send(0, FilesWritten(step, {}), payload=payload)
    with pytest.raises(CheckpointError, match=f"rank {source} sent an invalid report of its files of step {step}"):
        list(receive_files(mails[0], [0, 1], 4, num_nodes=2))


def test_a_rank_cannot_report_for_another_one(mails: list[Mailbox]) -> None:
    """Else a step without the files of a rank would be committed."""
    for _ in range(2):
        mails[1].send(0, FilesWritten(4, {}), payload=report(0))
    with pytest.raises(CheckpointError, match=r"^rank 1 sent .* ranks \[0\] have not reported yet"):
        list(receive_files(mails[0], [0, 1], 4, num_nodes=2))
