"""Who may attach to a rank's debugger: its owner and root, even if its folder is opened to everybody."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rl.world.debugger import Debugger
from tests.launcher import until
from tools import debug

pytestmark = pytest.mark.timeout(60)
NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, which needs root")


class Stopped:
    """A thread of this process that stands in a debugger."""

    def __init__(self, folder: Path):
        self.said: list[str] = []
        self.debugger = Debugger(0, self.said.append)
        self.debugger.begin_run(folder, None)
        self.number = 1
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        until(lambda: bool(self.said), "the debugger")
        self.socket = folder / "debug" / "rank_0.sock"

    def _work(self) -> None:
        stopped = self  # noqa: F841  for the person who attaches
        self.debugger._break()


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Stopped]:
    stopped = Stopped(tmp_path)
    yield stopped
    if stopped.thread.is_alive():
        with socket.socket(socket.AF_UNIX) as person:
            person.settimeout(10)
            person.connect(str(stopped.socket))
            person.sendall(b"c\n")
            stopped.thread.join(10)
    assert not stopped.thread.is_alive()


def open_to_everybody(path: Path) -> None:
    path.chmod(0o666)
    for folder in path.parents:
        if folder == Path("/tmp") or not folder.is_relative_to("/tmp"):
            break
        folder.chmod(0o711)  # not writable, because other tests use folders next to this one


def become(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def as_nobody(action: Callable[[], Any]) -> int:
    """Execute an action in a child process of another user. Return its exit code: 0 if it returned something true."""
    pid = os.fork()
    if not pid:
        code = 3
        try:
            become(NOBODY)
            code = 0 if action() else 1
        except OSError as error:
            print(f"child: {error}", file=sys.stderr)
            code = 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def say(path: Path, data: bytes) -> bytes:
    """Connect, send, and return what comes until the end of the connection."""
    answer = b""
    with socket.socket(socket.AF_UNIX) as person:
        person.connect(str(path))  # waits if others are in front, which a socket with a timeout does not
        person.settimeout(10)
        with suppress(BrokenPipeError):  # it was refused before; the answer says why
            person.sendall(data)
        with suppress(ConnectionResetError):
            while piece := person.recv(1 << 16):
                answer += piece
    return answer


@needs_root
def test_another_user_cannot_attach(stopped: Stopped) -> None:
    open_to_everybody(stopped.socket)
    was_told = as_nobody(lambda: b"refused" in say(stopped.socket, b"stopped.number = 7\nc\n")) == 0
    assert stopped.number == 1 and stopped.thread.is_alive()
    assert was_told


@needs_root
def test_a_refused_connection_does_not_occupy_the_terminal(
    stopped: Stopped, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor do many, which stay open while the owner attaches."""
    open_to_everybody(stopped.socket)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        become(NOBODY)
        people = []
        for _ in range(20):
            person = socket.socket(socket.AF_UNIX)
            person.setblocking(False)
            try:
                person.connect(str(stopped.socket))
            except OSError:
                continue
            people.append(person)
        os.write(writing, b"1")
        time.sleep(30)
        os._exit(0)
    assert os.read(reading, 1) == b"1"
    try:
        answers: list[bytes] = []
        owner = threading.Thread(
            target=lambda: answers.append(say(stopped.socket, b"stopped.number = 7\nc\n")), daemon=True
        )
        owner.start()
        owner.join(10)
        assert not owner.is_alive() and stopped.number == 7
        stopped.thread.join(10)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_line_is_bounded(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who sends bytes without a newline fills no memory."""
    with socket.socket(socket.AF_UNIX) as person:
        person.settimeout(10)
        person.connect(str(stopped.socket))
        num_sent = 0
        try:
            for _ in range(4096):
                num_sent += person.send(b"x" * 65536)
        except (ConnectionError, TimeoutError):
            pass
    assert num_sent < 64 << 20
    assert b"(Pdb)" in say(stopped.socket, b"stopped.number = 8\nc\n")
    stopped.thread.join(10)
    assert stopped.number == 8


@needs_root
@pytest.mark.parametrize("kind", ["folder", "symlink"])
def test_a_planted_folder_is_not_used(kind: str, tmp_path: Path) -> None:
    """Whoever owns the folder can replace the socket, and a symlink would have another folder's mode changed."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    path = tmp_path / "run" / "debug"
    path.parent.mkdir()
    path.symlink_to(theirs) if kind == "symlink" else path.mkdir()
    for each in (theirs, path):
        os.chown(each, NOBODY, NOBODY, follow_symlinks=False)
    stopped = Stopped(tmp_path / "run")
    command = stopped.said[0].rpartition("python tools/debug.py ")[2]
    assert Path(command).is_socket(), command
    assert not any(theirs.iterdir()) and theirs.stat().st_mode & 0o777 == 0o755
    say(Path(command), b"c\n")
    stopped.thread.join(10)
    assert not stopped.thread.is_alive() and not Path(command).parent.exists()


def test_a_sign_that_vanishes_or_is_damaged_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "debug"
    folder.mkdir()
    sign = {"host": socket.gethostname(), "place": "train.py:1", "socket": str(tmp_path / "gone")}
    for rank, text in enumerate(["", "[", "[]", "{}", '{"host": 1, "place": 2, "socket": 3}', json.dumps(sign)]):
        (folder / f"rank_{rank}.json").write_text(text)
    (folder / "rank_x.json").write_text("{}")
    (folder / "rank_6.json").write_text(json.dumps(sign))
    read_text = Path.read_text

    def read_after_its_end(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.name == "rank_6.json":
            path.unlink()
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_after_its_end)
    assert debug.find(tmp_path, None) == tmp_path / "gone"
    with pytest.raises(SystemExit, match="rank 3 has no debugger open"):
        debug.find(tmp_path, 3)


@needs_root
def test_a_person_does_not_type_into_another_users_program(tmp_path: Path) -> None:
    """A planted file could lead a person there."""
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:2]:
        folder.chmod(0o755)
    (tmp_path / "debug").mkdir()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        become(NOBODY)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "trap"))
        os.chmod(tmp_path / "trap", 0o777)
        listener.listen(1)
        os.write(writing, b"1")
        connection, _ = listener.accept()
        connection.sendall(b"Password: \x05")
        time.sleep(30)
        os._exit(0)
    assert os.read(reading, 1) == b"1"
    child = os.fork()  # another user who is not root either: uid 65533
    if not child:
        code = 3
        try:
            become(NOBODY - 1)
            debug.main([str(tmp_path / "trap")])
        except SystemExit as error:
            code = 0 if "another user" in str(error.code) else 1
        except BaseException:
            code = 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.kill(pid, 9)
    os.waitpid(pid, 0)
