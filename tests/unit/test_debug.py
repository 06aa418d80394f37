"""tools/debug.py and rl/world/debugger.py in one process, with two threads and a socket."""

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl.watch.heart import HEART
from rl.world.debugger import Debugger
from tests.launcher import until
from tools import debug


@pytest.fixture
def people(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of what people will type. `^C` and `^D` are keys."""
    typed: list[str] = []

    def read(prompt: str) -> str:
        print(prompt, end="")
        key = typed.pop(0)
        if key in ("^C", "^D"):
            raise KeyboardInterrupt if key == "^C" else EOFError
        return key

    monkeypatch.setattr("builtins.input", read)
    return typed


def work(debugger: Debugger, seen: list[Any]) -> None:
    number = 1
    for number in range(2):
        debugger._break()
        seen.append(number)
    beat = HEART.read()
    assert beat is not None
    seen.append(beat.is_in_debugger)


def in_thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread


def test_a_person_can_detach_and_attach_again(
    tmp_path: Path, people: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    opened = threading.Event()
    debugger = Debugger(3, lambda text: (said.append(text), opened.set())[1])  # type: ignore[func-returns-value]
    debugger.begin_run(tmp_path, None)
    seen: list[Any] = []
    thread = in_thread(work, debugger, seen)
    assert opened.wait(10)
    beat = HEART.read()
    assert beat is not None and beat.is_in_debugger
    people += ["garbage", "^C", "p number", "^D"]
    debug.main([str(tmp_path)])
    shown = capsys.readouterr()
    assert "in work()" not in shown.out and "test_debug.py" in shown.out and "(Pdb) 0\n" in shown.out
    assert "NameError: name 'garbage' is not defined" in shown.out
    assert "the rank keeps waiting, and you may attach again" in shown.err
    opened.clear()
    people += ["number = 7", "interact", "c"]
    debug.main([str(tmp_path), "--rank", "3"])
    assert "interact needs a terminal of its own" in capsys.readouterr().out
    assert opened.wait(10)
    people += ["c"]
    debug.main([str(tmp_path)])
    thread.join(10)
    assert seen == [7, 1, False]
    assert len(said) == 2 and said[0].endswith(f"; to debug it type there: python tools/debug.py {tmp_path} --rank 3")
    assert not any((tmp_path / "debug").iterdir())


def test_the_socket_can_be_given_before_a_run_has_a_directory(people: list[str]) -> None:
    said: list[str] = []
    opened = threading.Event()
    debugger = Debugger(0, lambda text: (said.append(text), opened.set())[1])  # type: ignore[func-returns-value]
    thread = in_thread(work, debugger, [])
    for _ in range(2):
        assert opened.wait(10)
        opened.clear()
        people.append("c")
        debug.main([said[-1].rpartition(" ")[2]])
    thread.join(10)
    assert not thread.is_alive()


def test_a_thread_continues_while_another_one_reads_from_its_terminal(tmp_path: Path) -> None:
    opened, lines = threading.Event(), list[str]()
    debugger = Debugger(0, lambda text: opened.set())
    debugger.begin_run(tmp_path, None)
    first = in_thread(debugger._break)
    assert opened.wait(10)
    terminal = debugger.terminal
    with socket.socket(socket.AF_UNIX) as person:
        person.connect(str(tmp_path / "debug" / "rank_0.sock"))
        until(lambda: terminal._connection is not None, "the first thread's reading")
        other = in_thread(lambda: lines.append(terminal.readline()))
        time.sleep(0.3)  # until it waits too
        person.sendall(b"c\n")
        first.join(10)
        assert not first.is_alive()
        person.sendall(b"next\n")
        other.join(10)
    assert lines == ["next\n"]


def test_a_terminal_that_nobody_can_find_is_not_open(tmp_path: Path) -> None:
    (tmp_path / "debug" / "rank_0.json").mkdir(parents=True)
    debugger = Debugger(0, lambda text: None)
    debugger.begin_run(tmp_path, None)
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            debugger.open("train.py:1")


def test_a_failed_attachment_says_why(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there is no directory nowhere; give the directory of a run"):
        debug.main(["nowhere"])
    with pytest.raises(SystemExit, match=r"no debugger is open in .*; breakpoint\(\) in the code opens one"):
        debug.main([str(tmp_path)])
    (tmp_path / "debug").mkdir()
    for rank, host in ((1, "elsewhere"), (2, socket.gethostname())):
        sign = {"host": host, "place": "train.py:1", "socket": str(tmp_path / "gone")}
        (tmp_path / "debug" / f"rank_{rank}.json").write_text(json.dumps(sign))
    with pytest.raises(SystemExit, match=r"give --rank in .*\n  --rank 1: train.py:1, on elsewhere\n  --rank 2: "):
        debug.main([str(tmp_path)])
    with pytest.raises(SystemExit, match=r"rank 1 is on elsewhere, this is .*: run the same command there"):
        debug.main([str(tmp_path), "--rank", "1"])
    with pytest.raises(SystemExit, match=r"no debugger listens at .*: its process has ended"):
        debug.main([str(tmp_path), "--rank", "2"])
    with pytest.raises(SystemExit, match="rank 5 has no debugger open"):
        debug.main([str(tmp_path), "--rank", "5"])
