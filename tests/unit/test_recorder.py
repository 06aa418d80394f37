"""Tests of rl/watch/recorder.py: NCCL's flight recorder."""

import os
import pickle
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl.common.waiting import wait_until_readable
from rl.watch import recorder
from rl.watch.board import DIAGNOSIS_S
from rl.watch.culprit import RankState
from rl.watch.heart import Heart
from rl.watch.monitor import RankMonitor
from rl.watch.stacks import Stacks


def diagnose(folder: Path) -> tuple[RankState, float]:
    """Diagnose this process, and return how long that took."""
    process: Any = SimpleNamespace(state="S")  # that of a process that waits
    monitor = RankMonitor(Heart(), process, Stacks())
    monitor.rank, monitor.world = 7, "0123"
    monitor.folder, monitor.collectives = folder, str(folder / "nccl_rank_")
    started = time.monotonic()
    monitor.start_diagnosis()
    while (state := monitor.finished_diagnosis()) is None:
        time.sleep(0.05)
    assert monitor.finished_diagnosis() is None, "it is returned once"
    return state, time.monotonic() - started


def trace(enqueued: int, completed: int) -> dict[str, Any]:
    """Return a trace as torch writes it, without what is not read."""
    done = {"last_enqueued_collective": 9, "last_started_collective": -1, "last_completed_collective": 9}
    last = {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
    return {"version": "2.10", "entries": [], "pg_status": {"0": done, "1": done | last}}


def test_a_byte_in_the_pipe_asks_for_the_last_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "PIPES", tmp_path)
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    stem = recorder.keep_collectives(tmp_path / "run", "0123", 500)
    assert Path(stem).parent.is_dir()
    assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) == int(os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"]) == 500
    assert not recorder.ask_for_collectives("0123", 7), "nobody listens"
    pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}7.pipe"  # as torch names it
    os.mkfifo(pipe)
    assert not recorder.ask_for_collectives("0123", 7), "still nobody"
    listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert recorder.ask_for_collectives("0123", 7)
    assert os.read(listener, 10) == b"1"


@pytest.mark.parametrize("is_pending", [True, False])
def test_the_files_show_whether_a_device_has_unfinished_collectives(
    is_pending: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack of a main thread that waits for its device does not show it."""
    monkeypatch.setattr(recorder, "PIPES", tmp_path)
    pipe, file = tmp_path / "oneworld-0123-nccl_7.pipe", tmp_path / "nccl_rank_7"
    os.mkfifo(pipe)
    listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    file.write_bytes(pickle.dumps(trace(4, 4 - (not is_pending))))  # of an earlier silence: the opposite
    recording = recorder.Recording("0123", 7, str(tmp_path / "nccl_rank_"))
    recording.start()
    assert wait_until_readable([listener], 5) and os.read(listener, 10) == b"1"
    assert not file.exists()
    data = pickle.dumps(trace(6, 6 - is_pending))
    file.write_bytes(data[:-20])  # torch is writing
    time.sleep(0.3)
    assert recording.is_alive()
    file.write_bytes(data)
    recording.join(10)
    assert (recording.path, recording.is_pending) == (str(file), is_pending)
    os.close(listener)


def test_a_recorder_that_does_not_listen_or_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "PIPES", tmp_path)
    monkeypatch.setattr(recorder, "READ_S", 0.3)
    deaf = recorder.Recording("0123", 7, str(tmp_path / "nccl_rank_"))
    for idle in (recorder.Recording("0123", 7, ""), deaf):  # there is no recorder, or it does not listen
        idle.start()
        idle.join(10)
        assert not idle.is_alive() and idle.path == ""
    os.mkfifo(tmp_path / "oneworld-0123-nccl_7.pipe")
    listener = os.open(tmp_path / "oneworld-0123-nccl_7.pipe", os.O_RDONLY | os.O_NONBLOCK)
    mute = recorder.Recording("0123", 7, str(tmp_path / "nccl_rank_"))
    mute.start()
    mute.join(10)
    assert not mute.is_alive(), "nobody answers"
    assert (deaf.path, mute.path) == ("", str(tmp_path / "nccl_rank_7"))
    assert not deaf.is_pending and not mute.is_pending
    os.close(listener)


@pytest.mark.parametrize("is_pending", [True, False])
def test_a_diagnosis_has_the_collectives(is_pending: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "PIPES", tmp_path)
    pipe = tmp_path / "oneworld-0123-nccl_7.pipe"
    os.mkfifo(pipe)
    listener = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def record() -> None:
        wait_until_readable([listener], 5)
        (tmp_path / "nccl_rank_7").write_bytes(pickle.dumps(trace(6, 6 - is_pending)))

    threading.Thread(target=record, daemon=True).start()
    diagnosis, _ = diagnose(tmp_path)
    assert (diagnosis.is_pending, diagnosis.collectives) == (is_pending, str(tmp_path / "nccl_rank_7"))
    assert Path(diagnosis.stacks).read_text()
    os.close(listener)


def test_a_folder_that_hangs_does_not_delay_a_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: is_over.wait())
    monkeypatch.setattr(Path, "mkdir", lambda *args, **kwargs: is_over.wait())
    diagnosis, seconds = diagnose(tmp_path)
    is_over.set()
    assert (diagnosis.stacks, diagnosis.collectives) == ("", "")
    assert seconds < DIAGNOSIS_S - 0.5


def test_the_recorder_may_be_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert recorder.keep_collectives(tmp_path, "0123", 0) == ""
    assert os.environ == {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}


def test_what_the_user_has_set_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/trace_"})
    assert recorder.keep_collectives(tmp_path, "0123", 500) == "/mine/trace_"
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ
