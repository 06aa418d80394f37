"""Tests of rl/watch/tee.py: the console and the log of a process, which may be killed."""

import os
import pty
import signal
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

from rl.watch.tee import MAX_ATTEMPTS, next_attempt, remove_old_attempts

PROGRAM = """
import ctypes, os, signal, subprocess, sys, time
from pathlib import Path
from rl.watch.tee import start_tee
line = start_tee()
print("early", sys.stdout.isatty(), flush=True)
line.write_log(Path(sys.argv[1]))
print("python", flush=True)
print("error", file=sys.stderr, flush=True)
ctypes.CDLL(None).dprintf(2, b"C++\\n")
subprocess.run(["echo", "child"])
if sys.stdout.isatty():
    print("\\rstep 1", os.get_terminal_size().columns, end="", flush=True)
    print("\\rstep 2", end="", flush=True)
os.write(1, b"last " * 10_000)
os.kill(os.getpid(), signal.SIGKILL)
"""
LINES = b"python\nerror\nC++\nchild\n"
LAST = b"last " * 10_000


def test_a_killed_process_has_said_everything_on_the_console_and_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank_0.log"
    command = [sys.executable, "-c", PROGRAM, str(log)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b"early False\n" + LINES + LAST
    assert log.read_bytes() == done.stdout


def test_two_consoles_stay_two(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(log)], capture_output=True, timeout=30)
    assert done.stdout == b"early False\npython\nchild\n" + LAST
    assert done.stderr == b"error\nC++\n"
    assert sorted(log.read_bytes()) == sorted(done.stdout + done.stderr)


def test_a_terminal_stays_one(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 77))
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(log)], stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # the end of a pseudo-terminal
        pass
    assert process.wait(10) == -signal.SIGKILL
    said = b"early True\n" + LINES + b"\rstep 1 77\rstep 2" + LAST
    assert log.read_bytes() == said
    assert shown == said.replace(b"\n", b"\r\n"), "which the terminal itself makes of it, once"


def test_what_is_too_long_for_the_tee_does_not_end_it() -> None:
    """Without a tee, the next line that the rank prints would end the rank."""
    program = """
import time
from rl.watch.screen import Size, ViewFrame
from rl.watch.tee import MAX_PACKET, start_tee
tee = start_tee()
tee.show(ViewFrame(("x" * MAX_PACKET,), Size(80, 24)))
time.sleep(0.5)
print("still here", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, b"still here\n")


def test_a_bar_that_is_drawn_often_is_seen_while_it_grows() -> None:
    """tqdm draws every 0.1 s, without the end of a line."""
    program = """
import os, time
from rl.common.waiting import wait_until_readable
from rl.watch.tee import start_tee
start_tee()
for number in range(200):
    os.write(2, b"\\r%d of 200" % number)
    if wait_until_readable([0], 0.1):
        break
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", program], **pipes)
    assert process.stderr is not None
    first = os.read(process.stderr.fileno(), 1 << 16)
    assert first.startswith(b"\r0 of 200") and b"199 of 200" not in first
    process.communicate(b"seen", timeout=30)


@pytest.mark.parametrize("before", ["\\rstep 1", "done\\n"])
def test_our_messages_begin_on_a_line_of_their_own(before: str) -> None:
    """A terminal shows progress in a line that has no end yet."""
    program = f"""
import os, sys, time
from rl.watch.tee import start_tee
start_tee()
os.write(1, b"{before}")
input()
os.write(2, b"oneworld: stopped\\n")
"""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    assert process.stdin is not None
    process.stdin.write(b"seen\n")
    process.stdin.close()
    with suppress(OSError):  # the end of a pseudo-terminal
        while part := os.read(ours, 1 << 16):
            shown += part
    assert process.wait(10) == 0
    assert shown == (b"\rstep 1\r\noneworld: stopped\r\n" if "step" in before else b"done\r\noneworld: stopped\r\n")


def test_the_log_goes_on_when_the_console_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(log)], stdout=writer, stderr=writer)
    os.close(reader)
    os.close(writer)
    assert process.wait(30) == -signal.SIGKILL, "printing to nobody is no error"
    for _ in range(100):
        if log.stat().st_size == len(b"early False\n" + LINES + LAST):
            break
        subprocess.run(["sleep", "0.05"])
    assert log.read_bytes() == b"early False\n" + LINES + LAST


def test_attempts_are_counted(tmp_path: Path) -> None:
    assert next_attempt(tmp_path / "logs") == 1
    for name in ("attempt_1", "attempt_10", "attempt_9", "attempt_x"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert next_attempt(tmp_path / "logs") == 11


def test_a_log_that_hangs_leaves_the_console_alone(tmp_path: Path) -> None:
    """A pipe that nobody reads takes 64 KB and then nothing more."""
    log = tmp_path / "rank_0.log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    program = PROGRAM.replace("line = start_tee()", "import rl.watch.tee as tee; tee.HANG_S = 0.5; line = start_tee()")
    program = program.replace("os.kill(", "os.write(1, b'x' * 200_000 + b' the end'); os.kill(")
    done = subprocess.run([sys.executable, "-c", program, str(log)], stdout=subprocess.PIPE, timeout=30)
    os.close(reader)
    assert done.stdout.endswith(LAST + b"x" * 200_000 + b" the end")


def test_a_log_is_bounded_and_keeps_the_newest_output(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    program = """
import os, sys
from pathlib import Path
from rl.watch import tee
tee.MAX_LOG = 100_000
line = tee.start_tee()
line.write_log(Path(sys.argv[1]))
for number in range(50_000):
    os.write(1, b"%07d\\n" % number)
"""
    done = subprocess.run([sys.executable, "-c", program, str(log)], stdout=subprocess.PIPE, timeout=60)
    assert len(done.stdout) == 400_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank_0.log", "rank_0.log.1"]
    kept = (tmp_path / "rank_0.log.1").read_bytes() + log.read_bytes()
    assert 100_000 <= len(kept) < 100_000 + 2 * 65_536 + 100_000
    assert done.stdout.endswith(kept)


def test_only_the_logs_of_the_newest_attempts_stay(tmp_path: Path) -> None:
    for number in (1, 2, 3, 30, 51, 52):
        (tmp_path / f"attempt_{number}").mkdir()
        (tmp_path / f"attempt_{number}" / "rank_0.log").write_text("x")
    (tmp_path / "attempt_x").mkdir()
    remove_old_attempts(tmp_path, 52)
    left = [f"attempt_{number}" for number in (3, 30, 51, 52, "x")]
    assert MAX_ATTEMPTS == 50 and sorted(path.name for path in tmp_path.iterdir()) == sorted(left)
    assert next_attempt(tmp_path) == 53


def test_a_console_that_takes_nothing_does_not_hold_up_the_rank(tmp_path: Path) -> None:
    """As after Ctrl-S. When it takes output again, it gets what was kept, and a line about the rest."""
    log = tmp_path / "rank_0.log"
    program = """
import sys, time
from pathlib import Path
from rl.watch import console, tee
console.MAX_UNSHOWN = 1_000_000
line = tee.start_tee()
line.write_log(Path(sys.argv[1]))
for number in range(300_000):
    sys.stdout.write(f"{number:09}\\n")
Path(sys.argv[1]).with_suffix(".done").touch()
"""
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program, str(log)], stdout=writer, stderr=subprocess.DEVNULL)
    os.close(writer)
    assert process.wait(30) == 0
    assert log.with_suffix(".done").exists()
    with os.fdopen(reader) as console:
        shown = console.read().splitlines()
    assert log.read_text().splitlines() == [f"{number:09}" for number in range(300_000)]
    kept, (_, note) = shown[:-2], shown[-2:]
    assert kept == [f"{number:09}" for number in range(len(kept))] and 100_000 <= len(kept) < 200_000
    missing = 3_000_000 - 10 * len(kept)
    why = "because this console took no output; the log has them"
    assert note == f"oneworld: {missing / 1e6:.2f} MB are not shown, {why}"


def test_lines_of_two_processes_do_not_mix() -> None:
    """Python may write a line and its end separately (python -u), and torchrun starts ranks this way."""
    program = """
import os, sys, time
from rl.watch import tee
tee.HOLD_S = 30.0  # however busy this machine is
tee.start_tee()
for number in range(200):
    os.write(1, f"{sys.argv[1]} {number} end".encode())
    time.sleep(0.001)
    os.write(1, b"\\n")
"""
    reader, writer = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", program, name], stdout=writer) for name in "ab"]
    os.close(writer)
    with os.fdopen(reader) as console:
        lines = console.read().splitlines()
    assert [process.wait(10) for process in processes] == [0, 0]
    assert sorted(lines) == sorted(f"{name} {number} end" for name in "ab" for number in range(200))
