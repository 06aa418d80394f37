"""Checkpoint stores on private and on shared disks: their answers, and that concurrent requests lose nothing."""

import errno
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate

import pytest

from rl.checkpoint.directory import CheckpointDirectory as Directory
from rl.checkpoint.directory import StoredStep
from rl.checkpoint.manifest import CheckpointError, Manifest
from rl.checkpoint.shard_file import digest
from rl.checkpoint.store import CheckpointStore, P, R
from rl.common.processes import start_time
from tests.mails import connected, stores_on

MANIFEST = Manifest(
    run_id="r1",
    run_name="first",
    step=4,
    save_id="w1-4",
    saved_at=1700000000.5,
    state={},
    config={},
    placement={},
    files=(),
)


def answer(
    store: CheckpointStore, rank: int, method: Callable[Concatenate[Directory, P], R], *args: P.args, **kwargs: P.kwargs
) -> R:
    return store.call(rank, method, *args, **kwargs).result(timeout=10)


def prepare(
    store: CheckpointStore, step: int, save_id: str = "", expected: list[dict[str, int]] | None = None
) -> list[bool]:
    """Prepare a step on all nodes as the leader does; return which nodes put the step in place.

    `expected` are the files of each node and their sizes.
    """
    save_id = save_id or f"w1-{step}"
    text = replace(MANIFEST, step=step, save_id=save_id).to_json()
    futures = [
        store.call(rank, Directory.prepare, step, save_id, f"step_{step}.tmp-{save_id}", files, payload=text)
        for rank, files in zip(store.node_leads, expected or [{} for _ in store.node_leads], strict=True)
    ]
    return [store.wait(future) for future in futures]


def commit(store: CheckpointStore, step: int, save_id: str = "") -> None:
    store.call_all(Directory.commit, step, save_id or f"w1-{step}")


def write(root: Path, folder: str, **files: str) -> Path:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / folder / name).write_text(text)
    return root / folder


def tree(root: Path) -> list[str]:
    """Every file and every empty folder, apart from the run's id."""
    paths = [path for path in root.rglob("*") if path.is_file() or not any(path.iterdir())]
    paths = [path for path in paths if path.name != "run_id"]
    return sorted(str(path.relative_to(root)) for path in paths)


def test_making_the_folder_clears_what_killed_saves_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    root = tmp_path / "run" / "checkpoints"
    for folder in ("step_2.tmp-w0-2", "step_2.old-w0-2", "step_2.claim-w0-2", "step_2", "step_4.tmp", "notes"):
        write(root, folder, a="x")
    with stores_on([root]) as (store,):
        store.create_roots("r1")
        assert store.hosts == [socket.gethostname()]
        assert tree(root) == ["notes/a", "step_2/a", "step_4.tmp/a"]
    assert capsys.readouterr().err == ""


def test_making_the_folder_makes_its_parents(tmp_path: Path) -> None:
    roots = [tmp_path / node / "run" / "checkpoints" for node in "ab"]
    with stores_on(roots) as stores:
        stores[1].create_roots("r1")
        assert all(root.is_dir() for root in roots)
        assert stores[1].hosts == [socket.gethostname()] * 2


def test_what_cannot_be_deleted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It is of no use and of no harm: the run goes on."""
    with stores_on([tmp_path]) as (store,):
        store.create_roots("r1")
        write(tmp_path, "step_2", model="1")
        left = write(tmp_path, "step_1.tmp-w0-1", model="1")
        monkeypatch.setattr(shutil, "rmtree", lambda *given, **options: None)
        store.create_roots("r1")
        told = r"oneworld: could not delete {}\.old-\w+, which is no longer needed\n"
        assert re.fullmatch(told.format(left), capsys.readouterr().err)
        assert prepare(store, 4) == [True]
        commit(store, 4)
        assert re.fullmatch(told.format(tmp_path / "step_4.claim-w1-4"), capsys.readouterr().err)
        store.call_all(Directory.remove, "w1-4", [2])
        assert re.fullmatch(told.format(tmp_path / "step_2.old-w1-4"), capsys.readouterr().err)


def test_a_folder_keeps_the_id_of_its_run(tmp_path: Path) -> None:
    """A run that was killed before its first checkpoint is the same run when it starts again."""
    roots = [tmp_path / "a", tmp_path / "b"]
    with stores_on(roots) as (store, other):
        assert [listing.run_id for listing in store.call_all(Directory.list_steps, "root")] == ["", ""]
        store.create_roots("r1")
        assert store.run_id == "r1"
        assert [(root / "run_id").read_text() for root in roots] == ["r1", "r1"]
        other.create_roots("r2")
        assert other.run_id == "r1"
        assert [(root / "run_id").read_text() for root in roots] == ["r1", "r1"]
        assert [listing.run_id for listing in store.call_all(Directory.list_steps, "root")] == ["r1", "r1"]


def test_an_id_that_a_kill_cut_off_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "run_id").touch()
    with stores_on([tmp_path]) as (store,):
        store.create_roots("r1")
        assert (store.run_id, (tmp_path / "run_id").read_text()) == ("r1", "r1")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with (
        stores_on([tmp_path / "run" / "checkpoints"]) as (store,),
        pytest.raises(CheckpointError) as caught,
    ):
        store.create_roots("r1")
    assert f"cannot write {tmp_path}/run/checkpoints: Not a directory" in str(caught.value)


def test_the_list_tells_steps_files_and_sizes(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    text = MANIFEST.to_json().decode()
    write(root, "step_4", **{"manifest.json": text, "COMMITTED": "", "model-0": "12345"})
    write(root, "step_4/hf", config="{}")
    write(root, "step_12", model="1")
    write(root, "step_6", **{"manifest.json": text[:40]})
    write(root, "step_8.tmp-w1-8", model="1")
    (root / "step_9").write_text("a file")
    with stores_on([root]) as (store,):
        listed = answer(store, 0, Directory.list_steps, "root")
    steps = {step.step: step for step in listed.steps}
    assert sorted(steps) == [4, 6, 12]
    assert steps[4] == StoredStep(
        step=4,
        folder=str(root / "step_4"),
        rank=0,
        files={"manifest.json": len(text), "COMMITTED": 0, "model-0": 5, "hf/config": 2},
        is_committed=True,
        error="",
        save_id="w1-4",
        run_id="r1",
        saved_at=1700000000.5,
    )
    assert (steps[6].is_committed, steps[6].save_id, steps[6].saved_at) == (False, "", 0.0)
    assert steps[6].error.startswith(f"{root}/step_6/manifest.json is damaged: ")
    assert steps[12].error == f"{root}/step_12/manifest.json cannot be read: No such file or directory"
    assert steps[12].files == {"model": 1}
    assert (listed.folder, listed.exists) == (str(root), True)
    assert listed.launched_at == pytest.approx(start_time(os.getpid()), abs=0.1)


@pytest.mark.parametrize(
    ("source", "place", "steps"),
    [
        ("other", "other/checkpoints", [2, 4]),
        ("other/checkpoints", "other/checkpoints", [2, 4]),
        ("other/checkpoints/step_2", "other/checkpoints/step_2", [2]),
        ("other/checkpoints/step_3", "other/checkpoints/step_3", []),
        ("nowhere", "nowhere", []),
    ],
)
def test_the_list_of_another_runs_steps(tmp_path: Path, source: str, place: str, steps: list[int]) -> None:
    for step in (2, 4):
        write(tmp_path / "other" / "checkpoints", f"step_{step}", COMMITTED="")
    with stores_on([tmp_path / "run" / "checkpoints"], [tmp_path / source]) as (store,):
        source_steps = answer(store, 0, Directory.list_steps, "source")
        assert (source_steps.folder, [step.step for step in source_steps.steps]) == (str(tmp_path / place), steps)
        assert source_steps.exists == bool(steps)
        own = answer(store, 0, Directory.list_steps, "root")
        assert (own.exists, own.steps) == (False, [])


def test_bytes_of_another_nodes_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", "step_4", model="0123456789")
    with stores_on([tmp_path / "a", tmp_path / "b"]) as (store, _):
        assert answer(store, 1, Directory.read, str(folder), "model") == b"0123456789"
        assert answer(store, 1, Directory.read, str(folder), "model", 3, 4) == b"3456"
        with pytest.raises(CheckpointError, match="is not a step of this run"):  # although it sees that disk too
            answer(store, 0, Directory.read, str(folder), "model", 9, 1)


def test_an_error_reaches_the_caller_and_the_store_still_answers(tmp_path: Path) -> None:
    folder = write(tmp_path / "b", "step_4", model="0123456789")
    with stores_on([tmp_path / "a", tmp_path / "b"]) as (store, other):
        for asking in (store, other):
            with pytest.raises(CheckpointError, match=rf"read: FileNotFoundError: .*'{folder}/optimizer'"):
                answer(asking, 1, Directory.read, str(folder), "optimizer")
            with pytest.raises(CheckpointError, match=rf"{folder}/model has 10 bytes; 7 from byte 5 were"):
                asking.wait(asking.call(1, Directory.read, str(folder), "model", 5, 7))
            assert answer(asking, 1, Directory.list_steps, "root").exists


def test_every_failure_is_answered(tmp_path: Path) -> None:
    """Without an answer the caller would wait forever, and so would the next one if the thread died."""
    tmp_path.joinpath("step_4", "hf").mkdir(parents=True)
    step = str(tmp_path / "step_4")
    failing: list[tuple[str, list[Any], str]] = [
        ("list_steps", ["source"], "list_steps: AssertionError: "),
        ("read", [step, "hf", 0, 1], "read: IsADirectoryError: "),
        ("read", [step, "a\0", 0, 1], r"rank \d called read of the checkpoint store wrongly: "),
        ("prepare", [4, "w1-4", "step_4.tmp-w1-4", []], r"rank \d called prepare of the checkpoint store wrongly: "),
    ]
    with stores_on([tmp_path, tmp_path]) as stores:
        for method, arguments, text in failing:
            for store in stores:
                with pytest.raises(CheckpointError, match=f"^{text}"):
                    answer(store, 1, getattr(Directory, method), *arguments)
        assert answer(stores[0], 1, Directory.list_steps, "root").exists


def test_an_error_on_one_node_fails_the_call_to_all(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("a file")
    with stores_on([tmp_path / "a", tmp_path / "b" / "checkpoints"]) as (store, _):
        with pytest.raises(CheckpointError, match="/b/checkpoints: Not a directory"):
            store.create_roots("r1")
        assert (tmp_path / "a").is_dir()


def test_a_wait_ends_with_the_world(tmp_path: Path) -> None:
    with connected(1) as (mail,):
        store = CheckpointStore(mail, tmp_path, None, [0])
        threading.Timer(0.1, lambda: mail.fail(RuntimeError("another rank failed"))).start()
        with pytest.raises(RuntimeError, match="another rank failed"):
            store.wait(Future())


def put(store: CheckpointStore, rank: int, *chunks: bytes, file: str = "model-1", said: str = "") -> list[bool]:
    """Send a file in chunks; return for each whether it was written. `said` replaces the digest."""
    begin, written = 0, []
    for number, chunk in enumerate(chunks, start=1):
        whole = said or digest(b"".join(chunks))
        is_last = number == len(chunks)
        sent = answer(store, rank, Directory.write, "step_4.tmp-w1-4", file, begin, whole, is_last, payload=chunk)
        written.append(sent)
        begin += len(chunk)
    return written


def test_a_file_is_put_on_another_nodes_disk_in_chunks(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    with stores_on(roots) as (store, _):
        store.create_roots("r1")
        assert put(store, 1, b"0123", b"4567", b"89") == [True] * 3
        put(store, 1, b"{}", file="hf/config.json")
        prepare(store, 4)
    assert tree(tmp_path) == ["a/step_4.claim-w1-4", "a/step_4/manifest.json"] + [
        f"b/{name}" for name in ("step_4.claim-w1-4", "step_4/hf/config.json", "step_4/manifest.json", "step_4/model-1")
    ]
    assert (tmp_path / "b" / "step_4" / "model-1").read_bytes() == b"0123456789"


def test_files_of_several_ranks_arrive_at_once(tmp_path: Path) -> None:
    with stores_on([tmp_path / node for node in "abc"]) as stores:
        stores[0].create_roots("r1")
        texts = {1: [b"1" * 9, b"2" * 9] * 20, 2: [b"3" * 5, b"4" * 5] * 20}
        threads = [
            threading.Thread(target=put, args=(stores[rank], 0, *chunks), kwargs={"file": f"model-{rank}"})
            for rank, chunks in texts.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank, chunks in texts.items():
            assert (tmp_path / "a" / "step_4.tmp-w1-4" / f"model-{rank}").read_bytes() == b"".join(chunks)


def test_other_bytes_than_were_sent_are_not_kept(tmp_path: Path) -> None:
    with stores_on([tmp_path / "a", tmp_path / "b"]) as (store, _):
        store.create_roots("r1")
        with pytest.raises(CheckpointError, match=r"/b/step_4\.tmp-w1-4/model-1: the bytes that arrived differ from"):
            put(store, 1, b"0123", b"4567", said=digest(b"01234568"))
        assert list((tmp_path / "b" / "step_4.tmp-w1-4").iterdir()) == []
        put(store, 1, b"0123", b"4567")
        assert (tmp_path / "b" / "step_4.tmp-w1-4" / "model-1").read_bytes() == b"01234567"


def test_a_disk_that_both_nodes_see_has_the_file_already(tmp_path: Path) -> None:
    write(tmp_path, "step_4.tmp-w1-4", **{"model-1": "01234567"})
    with stores_on([tmp_path, tmp_path]) as (store, _):
        assert put(store, 1, b"XX") == [False]
    assert (tmp_path / "step_4.tmp-w1-4" / "model-1").read_text() == "01234567"


def test_a_disk_that_is_gone_gets_no_files(tmp_path: Path) -> None:
    """A new folder in the mount point would hide that the disk is not there."""
    with stores_on([tmp_path / "a", tmp_path / "b"]) as (store, _):
        store.create_roots("r1")
        (tmp_path / "b").rename(tmp_path / "unmounted")
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/b is gone: was it deleted, or its disk unmounted\?"):
            put(store, 1, b"0123", b"4567")
        assert not (tmp_path / "b").exists()


def test_a_piece_behind_one_that_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are under way when the first answer comes."""

    def fail(handle: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_piece(begin: int, piece: bytes, is_last: bool = False) -> bool:
        whole = digest(b"012345678")
        return answer(store, 1, Directory.write, "step_4.tmp-w1-4", "model-1", begin, whole, is_last, payload=piece)

    path = tmp_path / "b" / "step_4.tmp-w1-4" / "model-1"
    with stores_on([tmp_path / "a", tmp_path / "b"]) as (store, _):
        store.create_roots("r1")
        write_piece(0, b"012")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fail)
            with pytest.raises(CheckpointError, match=rf"cannot write {path}\.part: No space left on device"):
                write_piece(3, b"345")
        for is_last in (False, True):
            with pytest.raises(CheckpointError, match=rf"^{path}: an earlier piece of it could not be written"):
                write_piece(6, b"678", is_last)
        assert not path.exists()
        put(store, 1, b"012", b"345", b"678")
        assert path.read_bytes() == b"012345678"


def test_an_empty_file_is_put_too(tmp_path: Path) -> None:
    with stores_on([tmp_path / "a", tmp_path / "b"]) as (store, _):
        store.create_roots("r1")
        assert put(store, 1, b"", file="hf/merges.txt") == [True]
    assert (tmp_path / "b" / "step_4.tmp-w1-4" / "hf" / "merges.txt").read_bytes() == b""


def test_nodes_expect_the_files_that_were_written_there(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    with stores_on(roots) as (_, store):
        store.create_roots("r1")
        write(roots[0], "step_4.tmp-w1-4", **{"model-0": "1", "model-1": "22"})
        write(roots[1], "step_4.tmp-w1-4", **{"model-1": "22"})
        assert prepare(store, 4, expected=[{"model-0": 1, "model-1": 2}, {"model-1": 2}]) == [True, True]
    assert all((root / "step_4" / "manifest.json").exists() for root in roots)


@pytest.mark.parametrize("fault", ["gone", "cut", "grown", "all gone"])
def test_a_step_with_a_file_that_is_gone_or_cut_gets_no_name(tmp_path: Path, fault: str) -> None:
    """Another world of the same run name clears what it takes for leftovers."""
    roots = [tmp_path / "a", tmp_path / "b"]
    with stores_on(roots) as (store, _):
        store.create_roots("r1")
        write(roots[0], "step_4.tmp-w1-4", **{"model-0": "333"})
        folder = write(roots[1], "step_4.tmp-w1-4", **{"model-1": "333", "model-2": "4444"})
        path = folder / "model-2"
        {
            "gone": path.unlink,
            "cut": lambda: path.write_text("444"),
            "grown": lambda: path.write_text("44444"),
            "all gone": lambda: folder.rename(roots[1] / "away"),
        }[fault]()
        named = folder / ("model-1" if fault == "all gone" else "model-2")
        message = rf"^{named} was written and is gone: does another run of this name work in {roots[1]}\?"
        with pytest.raises(CheckpointError, match=message):
            prepare(store, 4, expected=[{"model-0": 3}, {"model-1": 3, "model-2": 4}])
        assert not (roots[1] / "step_4").exists()
        assert not (roots[1] / "step_4.claim-w1-4").exists()


def test_files_of_the_step_that_is_to_be_replaced_are_not_those_expected(tmp_path: Path) -> None:
    """Two worlds of one name: the other one has saved this step, with files of the same sizes, and cleared ours."""
    with stores_on([tmp_path]) as (store,):
        text = replace(MANIFEST, save_id="w2-4").to_json().decode()
        theirs = write(tmp_path, "step_4", **{"model-0": "333", "manifest.json": text, "COMMITTED": ""})
        with pytest.raises(CheckpointError, match=r"/step_4\.tmp-w1-4/model-0 was written and is gone"):
            prepare(store, 4, expected=[{"model-0": 3}])
        assert (theirs / "model-0").read_text() == "333"
        assert (theirs / "COMMITTED").exists()


def test_the_name_may_be_given_while_another_node_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one disk the folder gets its final name between two looks at it."""
    stat = Path.stat
    looked = []

    def stat_and_rename(path: Path, **options: Any) -> os.stat_result:
        found = stat(path, **options)
        if path == tmp_path / "step_4.tmp-w1-4" / "model-1" and not looked:
            looked.append(path)
            os.mkdir(tmp_path / "step_4.claim-w1-4")
            os.rename(tmp_path / "step_4.tmp-w1-4", tmp_path / "step_4")
        return found

    with stores_on([tmp_path]) as (store,):
        write(tmp_path, "step_4.tmp-w1-4", **{"model-1": "22", "manifest.json": MANIFEST.to_json().decode()})
        monkeypatch.setattr(Path, "stat", stat_and_rename)
        assert prepare(store, 4, expected=[{"model-1": 2}]) == [False]
        assert looked


def test_of_nodes_on_one_disk_one_puts_the_step_in_place(tmp_path: Path) -> None:
    """The other one finds its files under the final name, and has nothing left to do."""
    with stores_on([tmp_path, tmp_path]) as (store, _):
        write(tmp_path, "step_4.tmp-w1-4", **{"model-0": "1", "model-1": "22"})
        claims = [
            answer(store, rank, Directory.prepare, 4, "w1-4", "step_4.tmp-w1-4", files, payload=MANIFEST.to_json())
            for rank, files in ((1, {"model-1": 2}), (0, {"model-0": 1}))
        ]
        assert claims == [True, False]
        with pytest.raises(CheckpointError, match=r"/step_4\.tmp-w1-4/model-2 was written and is gone"):
            prepare(store, 4, expected=[{"model-0": 1}, {"model-2": 2}])


def test_a_step_counts_when_it_is_committed(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    with stores_on(roots) as (store, _):
        store.create_roots("r1")
        write(roots[0], "step_4.tmp-w1-4", model="1")  # the second node has no actor, and no folder yet
        prepare(store, 4)
        listings = store.call_all(Directory.list_steps, "root")
        assert [step.is_committed for listing in listings for step in listing.steps] == [False, False]
        commit(store, 4)
        listings = store.call_all(Directory.list_steps, "root")
    for listing in listings:
        (step,) = listing.steps
        assert (step.step, step.is_committed, step.save_id) == (4, True, "w1-4")
    assert tree(tmp_path) == [
        "a/step_4/COMMITTED",
        "a/step_4/manifest.json",
        "a/step_4/model",
        "b/step_4/COMMITTED",
        "b/step_4/manifest.json",
    ]


@pytest.mark.parametrize("shared", [False, True])
def test_a_step_that_was_never_committed_is_replaced(tmp_path: Path, shared: bool) -> None:
    roots = [tmp_path / "a", tmp_path / ("a" if shared else "b")]
    for root in roots:
        write(root, "step_4", old="1", **{"manifest.json": "of a killed save"})
    with stores_on(roots) as (store, _):
        store.create_roots("r1")
        for root in roots:
            write(root, "step_4.tmp-w1-4", model="2")
        prepare(store, 4)
        commit(store, 4)
    for root in roots:
        assert tree(root) == ["step_4/COMMITTED", "step_4/manifest.json", "step_4/model"]
        assert (root / "step_4" / "model").read_text() == "2"
        assert Manifest.from_json((root / "step_4" / "manifest.json").read_bytes(), "").save_id == "w1-4"


def test_steps_that_are_not_kept_are_removed(tmp_path: Path) -> None:
    with stores_on([tmp_path]) as (store,):
        for step in (2, 4, 6, 20):
            write(tmp_path, f"step_{step}.tmp-w1-{step}", model="1")
            prepare(store, step)
            commit(store, step)
        store.call_all(Directory.remove, "w1-20", [2, 6, 18])
    assert tree(tmp_path) == [
        f"step_{step}/{name}" for step in (20, 4) for name in ("COMMITTED", "manifest.json", "model")
    ]


def test_a_node_that_did_not_place_the_step_neither_commits_nor_removes(tmp_path: Path) -> None:
    """Two nodes on one disk: the second would work on what the first has already replaced."""
    with stores_on([tmp_path, tmp_path]) as (store, _):
        write(tmp_path, "step_2", model="1")
        for rank in (0, 1):
            answer(store, rank, Directory.prepare, 4, "w1-4", "step_4.tmp-w1-4", {}, payload=MANIFEST.to_json())
        answer(store, 1, Directory.commit, 4, "w1-4")
        answer(store, 1, Directory.remove, "w1-4", [2])
        assert tree(tmp_path) == ["step_2/model", "step_4.claim-w1-4", "step_4/manifest.json"]
        answer(store, 0, Directory.commit, 4, "w1-4")
        answer(store, 0, Directory.remove, "w1-4", [2])
        assert tree(tmp_path) == ["step_4/COMMITTED", "step_4/manifest.json"]


def test_nodes_on_one_disk_lose_nothing(tmp_path: Path) -> None:
    """Forty saves by three nodes, two of which share a disk."""
    shared, private = tmp_path / "shared", tmp_path / "private"
    roots = [shared, shared, private]
    with stores_on(roots) as stores:
        stores[0].create_roots("r1")
        for step in range(1, 41):
            start = threading.Barrier(len(roots))

            def write_own(rank: int, step: int = step, start: threading.Barrier = start) -> None:
                start.wait(timeout=10)
                write(roots[rank], f"step_{step}.tmp-w1-{step}", **{f"model-{rank}": f"{step} of {rank}"})

            threads = [threading.Thread(target=write_own, args=(rank,)) for rank in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if step % 5 == 0:
                write(shared, f"step_{step}", left_by="a killed save")
            expected = [{f"model-{rank}": len(f"{step} of {rank}")} for rank in range(3)]
            claimed = prepare(stores[step % 3], step, expected=expected)
            assert (sum(claimed[:2]), claimed[2]) == (1, True)
            commit(stores[step % 3], step)
            stores[step % 3].call_all(Directory.remove, f"w1-{step}", [step - 1])
            assert tree(shared) == [
                f"step_{step}/{name}" for name in ("COMMITTED", "manifest.json", "model-0", "model-1")
            ]
            assert tree(private) == [f"step_{step}/{name}" for name in ("COMMITTED", "manifest.json", "model-2")]
            assert [(shared / f"step_{step}" / f"model-{rank}").read_text() for rank in (0, 1)] == [
                f"{step} of 0",
                f"{step} of 1",
            ]


def test_nodes_on_one_disk_clear_set_aside_and_confirm_together(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with stores_on([root, root, root]) as stores:
        for number in range(40):
            store = stores[number % 3]
            for left in range(6):
                write(root, f"step_{left}.tmp-w0-{left}", a="1", b="2")
            folder = write(root, "step_4", **{"manifest.json": MANIFEST.to_json().decode(), "model": str(number)})
            store.create_roots("r1")
            store.call_all(Directory.confirm, str(folder), "w1-4")
            assert tree(root) == ["step_4/COMMITTED", "step_4/manifest.json", "step_4/model"]
            store.call_all(Directory.rename_root, f"old{number}")
            assert not root.exists()
            assert (tmp_path / f"checkpoints.old{number}" / "step_4" / "model").read_text() == str(number)


def test_what_is_set_aside_is_not_lost(tmp_path: Path) -> None:
    roots = [tmp_path / node / "checkpoints" for node in "ab"]
    write(roots[0], "step_4", model="1")  # the second node has none
    with stores_on(roots) as (store, _):
        store.call_all(Directory.rename_root, "20260101-000000")
    assert tree(tmp_path) == ["a/checkpoints.20260101-000000/step_4/model"]


def test_a_step_that_was_committed_elsewhere_is_confirmed(tmp_path: Path) -> None:
    with stores_on([tmp_path]) as (store,):
        text = MANIFEST.to_json().decode()
        here = write(tmp_path, "step_4", **{"manifest.json": text})
        of_another_save = write(tmp_path, "step_5", **{"manifest.json": text.replace("w1-4", "w0-4")})
        without_manifest = write(tmp_path, "step_6", model="1")
        torn = write(tmp_path, "step_7", **{"manifest.json": text[:40]})
        for folder in (here, here, of_another_save, without_manifest, torn, tmp_path / "step_8"):
            answer(store, 0, Directory.confirm, str(folder), "w1-4")
    assert tree(tmp_path) == [
        "step_4/COMMITTED",
        "step_4/manifest.json",
        "step_5/manifest.json",
        "step_6/model",
        "step_7/manifest.json",
    ]


def test_a_disk_that_is_gone_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with stores_on([root]) as (store,):
        store.create_roots("r1")
        root.rename(tmp_path / "unmounted")
        with pytest.raises(CheckpointError, match=rf"{root} is gone: was it deleted, or its disk unmounted\?"):
            prepare(store, 4)
        (tmp_path / "unmounted").rename(root)
        prepare(store, 4)
        root.rename(tmp_path / "unmounted")
        with pytest.raises(CheckpointError, match=rf"cannot write {root}/step_4/COMMITTED: No such file or directory"):
            commit(store, 4)
        assert not root.exists()


def test_a_disk_that_fails_while_a_step_is_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim stays, so that no second node tries what the first could not."""
    root = tmp_path / "checkpoints"
    with stores_on([root, root]) as (store, _), monkeypatch.context() as patch:
        store.create_roots("r1")
        write(root, "step_4.tmp-w1-4", model="1")

        def fail(handle: int) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(os, "fsync", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            prepare(store, 4)
        time.sleep(0.05)
        assert not (root / "step_4").exists()
        assert (root / "step_4.tmp-w1-4" / "model").read_text() == "1"
