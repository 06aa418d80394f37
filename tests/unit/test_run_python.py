"""The tool run_python: what programs print, and what happens to those that misbehave."""

import time

import pytest

import configs.environments.run_python as tool
from configs.environments.run_python import MAX_CHARS, run_python
from rl.rewards.sandbox import CodeTask, Limits, Sandbox, run_in_sandbox


@pytest.mark.parametrize(
    ("program", "output"),
    [
        ("print(6 * 7)\nprint('two')", "42\ntwo\n"),
        ("import sys; print('bad', file=sys.stderr)", "bad\n"),
        ("x = 1", "The program printed nothing."),
        ("if __name__ == '__main__': print('main')", "main\n"),
        ("print('before'); raise SystemExit(3)", "before\n"),
        ("print('\\ud800 and \\N{BULLET}')", "? and \N{BULLET}\n"),
    ],
)
def test_output(program: str, output: str) -> None:
    assert run_python(program) == output


def test_an_error_comes_after_the_output_with_its_line() -> None:
    assert run_python("print('start')\n\ndef f():\n    return 1 / 0\n\nf()") == (
        'start\nTraceback (most recent call last):\n  File "program", line 6, in <module>\n'
        '  File "program", line 4, in f\nZeroDivisionError: division by zero\n'
    )
    assert run_python("def f(:").endswith("SyntaxError: invalid syntax\n")


@pytest.mark.parametrize(
    "program",
    ["while True: pass", "import time; time.sleep(60)", "import os; os._exit(0)", "x = bytearray(1 << 30)\nx *= 2"],
    ids=["busy", "asleep", "exits", "memory"],
)
def test_a_program_that_does_not_end_well(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "LIMITS", Limits(cpu_s=0.5))
    started = time.monotonic()
    output = run_python(program)
    assert output == "The program was stopped. It may use 0.5 s and 512 MB." or output.endswith("MemoryError\n")
    assert time.monotonic() - started < 30
    assert run_python("print('next')") == "next\n"


def test_gigabytes_of_output_are_cut() -> None:
    output = run_python("for _ in range(3000): print('x' * 1_000_000)\nprint('end')")
    assert output == "x" * MAX_CHARS + "\n[the rest of the output is left out]"
    assert (
        run_python("import os\nfor _ in range(3000): os.write(1, b'x' * 1_000_000)") == "The program printed nothing."
    )


@pytest.mark.parametrize(
    "program",
    [
        "import socket; socket.socket()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        "import subprocess; subprocess.run(['ls'])",
        "import os; os.fork()",
        "open('/etc/passwd')",
    ],
)
def test_a_program_reaches_nothing_outside(program: str) -> None:
    output = run_python(f"{program}\nprint('reached')")
    assert "reached" not in output
    assert "Error" in output


def test_programs_share_no_state() -> None:
    assert run_python("import builtins, random; builtins.left = 1; open('/tmp/left', 'w').write('1'); x = 1") != "1"
    look = "import os, builtins; print(os.listdir('/tmp'), hasattr(builtins, 'left'), 'x' in globals())"
    assert run_python(look) == "[] False False\n"
    assert run_python("import random; print(random.random())") == run_python("import random; print(random.random())")


def test_tests_run_in_the_same_sandbox_afterwards() -> None:
    run_python("print(1)")
    assert run_in_sandbox(CodeTask("def f(): return 1", ["assert f() == 1", "assert f() == 2"]), Limits()) == [
        True,
        False,
    ]


def test_a_program_cannot_pass_for_killed_or_break_the_connection() -> None:
    """It writes to the tester's socket itself. What arrives is at most a wrong output of this program."""
    sandbox = Sandbox()
    try:
        forged = "import os; os.write(3, (9).to_bytes(4, 'little') + b'[\"ok\", 1]')"
        assert sandbox.print(forged, Limits(), 100) in ("1", "")
        assert sandbox.print("print(2)", Limits(), 100) == "2\n"
    finally:
        sandbox.close()
