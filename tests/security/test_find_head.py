"""A worker takes the secret only from a file of its own user, and the launch only from a head that knows the secret."""

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from launch import find_head
from launch.environment import ROOT
from rl.common.handshake import Listener, Refusals, derive_key
from tests.security.raw import frame, json_frame

pytestmark = pytest.mark.timeout(60)
PROGRAM = str(ROOT / "launch" / "find_head.py")
HOST, SECRET = "127.0.0.1", "ONEWORLD_SECRET"
CLEAN = {name: value for name, value in os.environ.items() if name != SECRET}
FILE_SECRET = "5" * 64


def find(folder: Path, seconds: float = 0.3, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a worker. It must end by itself soon after `seconds`."""
    command = [sys.executable, PROGRAM, "find", str(folder), str(seconds)]
    return subprocess.run(command, env=CLEAN | extra, capture_output=True, text=True, timeout=15)


@contextmanager
def head(folder: Path, **extra: str) -> Iterator[subprocess.Popen[str]]:
    """Run a head, and wait until it answers. Its secret is in the first line."""
    command = [sys.executable, PROGRAM, "serve", str(folder), "launch-7", "2", "0", HOST]
    with subprocess.Popen(command, env=CLEAN | extra, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=10)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def plant(folder: Path, port: int, secret: str = FILE_SECRET) -> Path:
    """Write the file of a head at this port."""
    facts = {"launch": "forged", "nnodes": "2", "port": 1, "word": "x"}  # a file had these once
    file = folder / "head.json"
    file.touch(mode=0o600)
    file.write_text(json.dumps({"addresses": [HOST], "answer_port": port, "secret": secret} | facts))
    return file


@contextmanager
def server_that(act: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a server that does this with each connection. Yield its port."""
    server = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                connection = server.accept()[0]
            except OSError:
                return
            with connection, suppress(OSError):
                act(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        server.close()


def stream(connection: socket.socket) -> None:
    while True:
        connection.sendall(bytes(1 << 16))


def drip(connection: socket.socket) -> None:
    for _ in range(20):
        connection.sendall(b"x")
        time.sleep(0.5)


@pytest.mark.parametrize("act", [stream, pytest.param(drip, marks=pytest.mark.slow)])
def test_a_listener_that_never_stops_sending_is_left(act: Callable[[socket.socket], None], tmp_path: Path) -> None:
    with server_that(act) as port:
        plant(tmp_path, port)
        done = find(tmp_path)
    assert done.returncode == 1 and "found no head" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_worker_and_head_share_a_new_secret_in_a_private_file(tmp_path: Path) -> None:
    with head(tmp_path) as process:
        secret, file = first_line(process), tmp_path / "head.json"
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600 and list(tmp_path.iterdir()) == [file]
        with ExitStack() as stack:  # strangers keep nobody waiting
            for _ in range(200):
                stack.enter_context(socket.create_connection((HOST, json.loads(file.read_text())["answer_port"])))
            done = find(tmp_path, 5)
        assert done.stdout.split() == ["launch-7", "2", HOST, "0", secret], done.stderr
        assert secret not in done.stderr
        assert secret not in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.kill()  # leaves its file
    with head(tmp_path) as process:
        assert first_line(process) == secret, "workers of a killed head recognize the next one"
    assert not file.exists()
    with head(tmp_path) as process:
        assert first_line(process) != secret


def test_a_secret_that_the_nodes_have_is_not_written(tmp_path: Path) -> None:
    given = {SECRET: "a secret that all nodes have"}
    with head(tmp_path, **given) as process:
        first_line(process)
        assert given[SECRET] not in (tmp_path / "head.json").read_text()
        (tmp_path / "head.json").chmod(0o644)  # it holds no secret, so this is harmless
        assert find(tmp_path, 5, **given).stdout.split()[:2] == ["launch-7", "2"]
        other = find(tmp_path, **{SECRET: "another secret of one node"})
        assert other.returncode == 1 and f"set the same {SECRET} on every node" in other.stderr
        (tmp_path / "head.json").chmod(0o600)
        none = find(tmp_path)
        assert none.returncode == 1 and f"set the same {SECRET} here" in none.stderr


def make_unsafe(how: str, file: Path) -> None:
    if how == "readable by others":
        file.chmod(0o644)
    elif how == "of another user":
        os.chown(file, 1234, 1234)
    elif how == "a symbolic link":
        file.rename(file.with_suffix(".real"))
        file.symlink_to(file.with_suffix(".real"))
    elif how == "a pipe":
        file.unlink()
        os.mkfifo(file, 0o600)
    elif how == "large":
        file.write_text(json.dumps({"addresses": ["a" * 100] * 10**6}))
    elif how == "deep":
        file.write_text('{"addresses": ' + "[" * 50_000)
    elif how == "of wrong types":
        file.write_text(json.dumps({"addresses": HOST, "answer_port": "1", "secret": 5}))


UNSAFE = {
    "readable by others": "can be read or changed by others (mode 644)",
    "of another user": "belongs to the user 1234",
    "a symbolic link": "is a symbolic link",
    "a pipe": "is not the file of a head: no regular file",
    "large": "is not the file of a head",
    "deep": "is not the file of a head",
    "of wrong types": "is not the file of a head: Expected `array`",
}


def test_a_file_that_somebody_else_may_have_written_is_not_used(tmp_path: Path) -> None:
    with head(tmp_path) as process:
        secret, file = first_line(process), tmp_path / "head.json"
        content = file.read_text()
        for how, error in UNSAFE.items():
            if how == "of another user" and os.getuid():
                continue  # only root can give files away
            make_unsafe(how, file)
            done = find(tmp_path, 0.0)
            assert done.returncode == 1 and error in done.stderr and "Traceback" not in done.stderr, (how, done.stderr)
            assert done.stdout == "" and secret not in done.stderr
            file.unlink()
            file.touch(mode=0o600)
            file.write_text(content)
        assert find(tmp_path, 5).returncode == 0


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o777])
def test_a_head_does_not_write_a_secret_where_modes_do_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Some file systems, such as vfat, show one mode for all files. Here only the answer of fstat is replaced."""
    file, real = tmp_path / "head.json", os.fstat

    def fstat(handle: int) -> os.stat_result:
        about = list(real(handle))
        about[stat.ST_MODE] = stat.S_IFREG | mode
        return os.stat_result(about)

    with monkeypatch.context() as patch:
        patch.setattr(find_head.os, "fstat", fstat)
        with pytest.raises(SystemExit, match=f"it would hold the secret; .*set the same {SECRET} on every node"):
            find_head.write_privately(file, find_head.HeadFile([HOST], 1, FILE_SECRET))
        assert list(tmp_path.iterdir()) == []
    find_head.write_privately(file, find_head.HeadFile([HOST], 1, FILE_SECRET))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and FILE_SECRET in file.read_text()


FACTS = {"kind": "head", "launch": "7", "nnodes": "2", "port": 29500}
BAD_FACTS = {
    "a line break, which would shift the lines that the launcher reads": FACTS | {"launch": "7\n9\n10.0.0.1"},
    "an option": FACTS | {"nnodes": " --print"},
    "a port as text": FACTS | {"port": "29500"},
    "a port that is none": FACTS | {"port": 1 << 20},
    "no launch": {"kind": "head", "nnodes": "2", "port": 29500},
}


def test_what_a_head_says_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, FILE_SECRET)
    frames = [json_frame(**facts) for facts in BAD_FACTS.values()] + [frame(b"[" * 200_000)]
    for data in frames:
        server, connections = socket.create_server((HOST, 0)), []

        def send(connection: socket.socket, host: str, data: bytes = data, kept: list = connections) -> None:
            kept.append(connection)
            connection.sendall(data)

        listener = Listener(server, derive_key("find head"), send, Refusals(print))
        plant(tmp_path, server.getsockname()[1])
        done = find(tmp_path, 0.0)
        listener.close()
        assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
        assert f"the head at {HOST} sent a message that cannot be read" in done.stderr, (data, done.stderr)


@pytest.mark.slow
def test_a_head_that_does_not_answer_is_left(tmp_path: Path) -> None:
    with head(tmp_path) as process:
        first_line(process)
        process.send_signal(signal.SIGSTOP)
        assert "does not answer" in find(tmp_path).stderr
        process.send_signal(signal.SIGCONT)
        assert find(tmp_path, 5).returncode == 0
