"""debug.debugpy_port: the real debugpy in a process of its own, and a client that speaks as VS Code does."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl.config.load import load_config
from rl.config.schema import ROOT, ConfigError
from rl.placement.roles import plan
from rl.run import checks
from tests.dap import TIMEOUT_S, Client
from tests.launcher import until
from tests.ports import free_port
from tests.security.test_debugger_access import as_nobody, needs_root
from tools import debug

pytestmark = pytest.mark.timeout(90)
needs_debugpy = pytest.mark.skipif(find_spec("debugpy") is None, reason="debugpy is not installed")
PROGRAM = """
import sys, threading, time
from pathlib import Path
from rl.watch.heart import HEART
from rl.world.debugger import Debugger

debugger = Debugger(3, lambda text: print(text, flush=True))
debugger.begin_run(Path(sys.argv[1]), None, int(sys.argv[2]))
debugger.install()
count, turn = 0, threading.Event()

def is_debugged():
    return HEART.read().is_in_debugger

def stop(answer):
    breakpoint()
    print("went on with", answer, "debugged", is_debugged(), flush=True)

def tick():
    global count
    while not turn.is_set():
        count += 1
        time.sleep(0.01)
    stop(1)

def fail():
    reason = "planted"
    raise ZeroDivisionError(reason)

def add(number):
    total = number + 1
    return total

ticker = threading.Thread(target=tick, name="ticker")
ticker.start()
time.sleep(0.2)
stop(42)
turn.set()
ticker.join()
try:
    fail()
except ZeroDivisionError as error:
    debugger.post_mortem(error)
total = add(1)
while is_debugged():  # debugpy says that a thread continues a moment after it does
    time.sleep(0.01)
print("the end,", total, flush=True)
"""


@dataclass
class Program:
    """The program, which stands at a breakpoint most of the time. `debugger` is in the folder of a run."""

    process: subprocess.Popen[str]
    run: Path

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    @property
    def sign(self) -> Path:
        return self.run / "debug" / "rank_3.json"


@contextmanager
def program(run: Path, port: int) -> Iterator[Program]:
    script = run / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(run), str(port)]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield Program(process, run)
    finally:
        process.kill()
        process.communicate()


def line_of(text: str) -> int:
    return PROGRAM.splitlines().index(text) + 1


@needs_debugpy
def test_a_client_attaches_steps_continues_and_attaches_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The heartbeat names the debugger as long as the thread waits or stands, and other threads run meanwhile."""
    port = free_port() - 3
    with program(tmp_path, port) as one:
        place = f"{tmp_path / 'program.py'}:{line_of('    breakpoint()')}"
        assert one.read() == f"stands at {place}; attach a debugpy client there: 127.0.0.1:{port + 3}"
        with pytest.raises(SystemExit) as ending:
            debug.main([str(tmp_path)])
        assert ending.value.code is None
        shown = capsys.readouterr().out
        assert f"ssh -N -L {port + 3}:127.0.0.1:{port + 3} {socket.gethostname()}" in shown
        configuration = json.loads(shown[shown.index("{") :])
        with Client(configuration["connect"]["port"]) as client:
            client.attach()
            thread = client.wait("stopped")["threadId"]
            line = line_of('    print("went on with", answer, "debugged", is_debugged(), flush=True)')
            assert next((frame["name"], frame["line"]) for frame in client.frames(thread)) == ("stop", line)
            assert client.evaluate(thread, "answer, is_debugged()") == "(42, True)"
            before = int(client.evaluate(thread, "count"))
            until(lambda: int(client.evaluate(thread, "count")) > before + 5, "the other thread's work")
            client.evaluate(thread, "answer = 43")
        with Client(port + 3) as client:  # the first one is gone without a word, as after a broken tunnel
            client.attach()
            thread = client.wait("stopped")["threadId"]
            assert client.evaluate(thread, "answer, is_debugged()") == "(43, True)"
            client.request("next", threadId=thread)
            thread = client.wait("stopped")["threadId"]
            assert one.read().startswith("went on with 43 ")
            assert one.sign.exists() and client.evaluate(thread, "is_debugged()") == "True"
            client.request("continue", threadId=thread)
            thread = client.wait("stopped")["threadId"]  # the second breakpoint, in another thread
            assert client.evaluate(thread, "answer, threading.current_thread().name") == "(1, 'ticker')"
            client.request("disconnect", terminateDebuggee=False)
        assert place in one.read()
        assert one.read() == "went on with 1 debugged False"
        assert re.search(r"stands at .*program.py:\d+; attach a debugpy client there: 127.0.0.1:", one.read())
        with Client(port + 3) as client:
            client.attach(**{str(one.run / "program.py"): [line_of("    return total")]})
            stopped = client.wait("stopped")
            assert stopped["reason"] == "exception" and stopped["text"].startswith("ZeroDivisionError")
            assert client.evaluate(stopped["threadId"], "reason", function="fail") == "'planted'"
            client.request("continue", threadId=stopped["threadId"])
            thread = client.wait("stopped")["threadId"]  # at a breakpoint of the editor
            assert client.evaluate(thread, "total, is_debugged()") == "(2, True)"
            client.request("continue", threadId=thread)
            assert one.read() == "the end, 2"
        assert one.process.wait(TIMEOUT_S) == 0
        assert not one.sign.exists()


@needs_debugpy
@needs_root
def test_another_user_cannot_attach_and_a_taken_port_is_replaced(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, program(tmp_path, taken.getsockname()[1] - 3) as one:
        port = int(one.read().rpartition(":")[2])
        assert port != taken.getsockname()[1]

        def is_refused() -> bool:
            with socket.create_connection(("127.0.0.1", port), 10) as stranger:
                try:
                    stranger.sendall(b"Content-Length: 2\r\n\r\n{}")
                    return stranger.recv(1) == b""
                except ConnectionError:
                    return True

        assert as_nobody(is_refused) == 0
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
        assert [where for where in listening if where.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
        with Client(port) as client:
            client.attach()
            assert client.evaluate(client.wait("stopped")["threadId"], "answer") == "42"


def test_bad_settings_are_reported_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(port: int) -> None:
        config = load_config(overrides=[f"debug.debugpy_port={port}"])
        checks.check_settings(config, plan(config.placement, 1, 2, 1, 1))

    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    check(0)
    with pytest.raises(ConfigError, match=r"got 5678, but debugpy is not installed here; run `pip install debugpy`"):
        check(5678)
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    check(65534)
    with pytest.raises(ConfigError, match=r"2 ranks need the ports 65535 to 65536; choose at most 65534, such as 5678"):
        check(65535)
    for port in (80, 70000):
        with pytest.raises(ConfigError, match="0, or 1024 to 65535"):
            check(port)
