"""The reward function `code`: right programs pass, forged ones do not, and nothing gets out of the sandbox."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl.config.schema import ROOT, ConfigError, RewardConfig
from rl.rewards import sandbox as sandbox_module
from rl.rewards.code import code, find_program, read_limits
from rl.rewards.find import check_rewards, read_rules
from rl.rewards.launch import launch
from rl.rewards.pool import RewardPool
from rl.rewards.sandbox import CodeTask, Limits, MachineError, Sandbox, SandboxError, check_sandbox, run_in_sandbox
from tests.launcher import command_of
from tests.reward_attacks import BOMBS, ESCAPES, FORGERIES, SUM, SUM_ROW, Results, escape

pytestmark = pytest.mark.timeout(60)
QUICK = {"timeout_s": 0.2}  # of CPU; a second is the least that the kernel counts, so the time limit of 0.6 s acts


@pytest.fixture(autouse=True, scope="module")
def sandbox_of_this_process() -> Iterator[None]:
    """End the sandbox of this process after the tests. There must be nothing left of it."""
    yield
    if sandbox_module._current is not None:
        sandbox_module._current.close()
        sandbox_module._current = None
    assert processes() == []


def processes() -> list[psutil.Process]:
    """Return the processes of sandboxes below this process."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if any("sandbox_child" in part for part in command_of(process))]


def score(response: str, row: dict[str, Any] = SUM_ROW, **options: Any) -> float:
    return code("", response, row, **options)["score"]


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


def test_a_right_program_and_a_wrong_one() -> None:
    assert code("", fenced(SUM), SUM_ROW) == {"score": 1.0, "passed": 1.0}
    assert code("", fenced("def add(a, b):\n    return 5 if a == 2 else 0"), SUM_ROW) == {"score": 0.0, "passed": 0.5}
    assert code("", fenced("def add(a, b):\n    return 5 if a == 2 else 0"), SUM_ROW, score="share")["score"] == 0.5
    assert score("I do not know.") == 0.0
    assert score("") == 0.0


STARTER = """
import math
from typing import List

def poly(xs: List[float], x: float):
    return sum(c * x ** i for i, c in enumerate(xs))

def find_zero(xs: List[float]):
    '''Find a zero.'''
"""
CHECK = """
METADATA = {}

def check(candidate):
    import math
    cases = [[2, 1], [6, -2]]
    for case in cases:
        assert math.fabs(poly(case, candidate(case))) < 1e-4
    assert candidate([0, 1]) == 0
"""
HUMAN_EVAL: dict[str, Any] = {"prompt": STARTER, "entry_point": "find_zero", "test": CHECK}
BODY = "    return -xs[0] / xs[1]\n"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (fenced("def find_zero(xs: List[float]):\n" + BODY), 1.0),  # needs the import of the prompt
        (fenced(HUMAN_EVAL["prompt"] + BODY), 1.0),
        (fenced(BODY), 1.0),  # only the rest of the function
        (BODY, 1.0),  # as a model without chat continues the prompt
        (fenced("def find_zero(xs):\n    return 1"), 0.0),
        (fenced("def poly(xs, x):\n    return 0\ndef find_zero(xs):\n    return 0"), 0.0),  # the tests have their own
        (fenced("pass"), 0.0),  # only the prompt's stub is there
    ],
)
def test_rows_of_human_eval(response: str, expected: float) -> None:
    assert score(response, HUMAN_EVAL) == expected


def test_rows_of_mbpp() -> None:
    trees = {
        "test_setup_code": "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(4)",
        "test_list": ["assert (height(root)) == 3", "assert root.left.value == 2", "assert height(Node(7)) == 1"],
    }
    program = (
        "class Node:\n    def __init__(self, value):\n        self.value, self.left, self.right = value, None, None\n"
        "def height(node):\n    return 0 if node is None else 1 + max(height(node.left), height(node.right))\n"
    )
    assert score(fenced(program), trees) == 1.0
    assert code("", fenced(program.replace("1 + max", "max")), trees)["passed"] == 1 / 3
    numbers = {
        "test_imports": ["import math"],
        "test_list": [
            "assert math.isclose(area(2), 12.566370614359172, rel_tol=0.001)",
            "assert set(f((1, 2))) == {1}",
        ],
    }
    right = "import math\ndef area(r):\n    return math.pi * r * r\ndef f(x):\n    return (y for y in x if y == 1)"
    assert score(fenced(right), numbers) == 1.0


VALUES = ["None", "True", "2**100", "1.5", "float('inf')", "'\\ud800 ä'", "b'\\x00\\xff'", "1+2j", "frozenset({1})"]
VALUES += [
    "[1, (2, {3}), {'a': [None]}]",
    "{(1, 2): {3: 4}}",
    "range(3)",
    "Fraction(1, 3)",
    "Decimal('0.10')",
    "{1} & {2}",
]


@pytest.mark.parametrize("value", VALUES)
def test_values_survive_the_way(value: str) -> None:
    imports = "from fractions import Fraction\nfrom decimal import Decimal\n"
    row = {"tests": [f"assert same({value}) == {value}", f"assert make() == {value}"], "test_setup_code": imports}
    assert score(imports + f"def same(x):\n    return x\ndef make():\n    return {value}", row) == 1.0


def test_subclasses_become_plain_values_and_arguments_are_copies() -> None:
    program = "from collections import *\nP = namedtuple('P', 'x y')\n"
    program += "def f(xs):\n    xs.append(1)\n    return Counter('aab'), P(1, 2)"
    row = {"tests": ["xs = [0]\nassert f(xs) == ({'a': 2, 'b': 1}, (1, 2))\nassert xs == [0]"]}
    assert score(program, row) == 1.0


def test_results_are_the_same_every_time() -> None:
    program = "import random\ndef f():\n    return list({'a', 'b', 'c', 'd', 'e'}) + [random.random()]"
    row = {"tests": ["found = f()\nassert found == f()[:5] + found[5:]\nraise ValueError(found)"]}
    assert score(program, row) == 0.0
    sandbox, seen = Sandbox(), set()
    for _ in range(3):
        for guess in range(32):
            test = f"import hashlib\nassert hashlib.sha256(repr(f()).encode()).digest()[0] % 32 == {guess}"
            if sandbox.run(CodeTask(program, [test]), Limits()) == [True]:
                seen.add(guess)
                break
    sandbox.close()
    assert len(seen) == 1


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_success_scores_0(name: str) -> None:
    assert code("", fenced(FORGERIES[name]), SUM_ROW, score="share") == {"score": 0.0, "passed": 0.0}
    assert score(fenced(SUM)) == 1.0


@pytest.mark.parametrize(
    ("test", "program"),
    [
        ("assert abs(f(1) - 3) < 1e-6", "abs = lambda x: 0\ndef f(x):\n    return 9"),
        ("assert math.isclose(f(1), 3)", "class math:\n    isclose = lambda *_: True\ndef f(x):\n    return 9"),
        ("assert all(map(f, [1, 2]))", "def f(x):\n    raise StopIteration"),
        ("assert [f(x) for x in [1]] == [3]", "def f(x):\n    raise StopIteration"),
        ("try:\n    assert f(1) == 3\nexcept Exception:\n    assert True", "import os\ndef f(x):\n    os._exit(0)"),
        ("assert f(1) in [3]", "class A:\n    __eq__ = lambda *_: True\ndef f(x):\n    return A()"),
        ("assert not f(1) != 3", "class A:\n    __ne__ = lambda *_: False\ndef f(x):\n    return A()"),
        ("assert f(1)", "def f(x):\n    return 0"),
    ],
)
def test_forgeries_that_fit_a_test(test: str, program: str) -> None:
    assert score(fenced(program), {"test_list": [test]}) == 0.0


@pytest.fixture(scope="module")
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user outside of the sandbox."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process:
        yield process
        assert process.poll() is None
        process.kill()


def seen_in_home() -> list[str]:
    library = Path(os.__file__).resolve()
    return [library.relative_to(Path.home()).parts[0]] if library.is_relative_to(Path.home()) else []


@pytest.mark.parametrize("name", ESCAPES)
def test_a_program_cannot_get_out(name: str, victim: subprocess.Popen[bytes]) -> None:
    os.environ["CANARY"] = "a secret"
    program = escape(ESCAPES[name], victim.pid, seen_in_home())
    compile(program, name, "exec")
    assert score(fenced(program)) == 0.0
    assert victim.poll() is None


def test_what_a_program_may_do() -> None:
    """The control of the test above: the same frame, with attempts that are allowed."""
    allowed = [
        "pass",
        "open('/tmp/x', 'w').write('x')",
        "[open(f'/tmp/{n}', 'wb').write(bytes(3 << 20)) for n in range(3)]",
    ]
    allowed += [
        "bytearray(200 << 20)",
        "import threading; t = threading.Thread(target=len, args=('',)); t.start(); t.join()",
    ]
    allowed += [
        "os.urandom(8); open('/dev/null').close()",
        "import asyncio, hashlib, sqlite3, zlib; asyncio.run(asyncio.sleep(0))",
    ]
    for attempt in allowed:
        assert score(fenced(escape(attempt, 1, []))) == 1.0, attempt


def test_no_program_sees_another() -> None:
    assert score(fenced(escape("open('/tmp/left', 'w').write('5')", 1, []))) == 1.0
    assert score(fenced(escape("open('/tmp/left').read()", 1, []))) == 0.0


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_its_own_sample_only(name: str) -> None:
    started = time.monotonic()
    assert score(fenced(BOMBS[name]), **QUICK) == 0.0
    assert time.monotonic() - started < 40
    assert score(fenced(SUM)) == 1.0
    assert len(processes()) == 2  # the starter and init


def test_hanging_tests_end_too() -> None:
    task = CodeTask(SUM, ["assert add(1, 2) == 3", "while True: pass", "assert 1"])
    assert run_in_sandbox(task, Limits(0.5)) == [True, False, False]


def test_tests_are_confined_too(tmp_path: Path) -> None:
    """They come from a data file, which may come from the hub."""
    target = tmp_path / "file"
    for attack in (f"open({str(target)!r}, 'w')", "import socket; socket.socket()", "import os; os.fork()"):
        assert score(fenced(SUM), {"tests": [attack]}, **QUICK) == 0.0
    assert not target.exists()


@pytest.mark.parametrize(
    ("row", "error", "text"),
    [
        ({"answer": "1"}, KeyError, "tests .or test_list"),
        ({"tests": []}, KeyError, "tests .or test_list"),
        ({"tests": ["assert ("]}, ValueError, "its tests are not Python"),
        ({"tests": [1]}, ValueError, "the column 'tests' holds"),
        ({"tests": ["assert 1"], "test_setup_code": ["x", 2]}, ValueError, "test_setup_code"),
    ],
)
def test_a_row_without_tests_is_an_error(row: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        score(fenced(SUM), row)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("x = 1", "x = 1"),
        ("<think>\n```python\nb\n```\n</think>\n```py\na\n```", "a\n"),
        ("```\na\n```\nand\n```python\nb\n```", "b\n"),
        ("```python\ndef add(): pass\n```\nUse it:\n```python\nprint(add())\n```", "def add(): pass\n"),
        ("```python\nadd = 1\n```\n```bash\nls\n```", "add = 1\n"),
        ("```bash\nls\n```", ""),
        ("```python\na", "a"),
        ("````python\n```\na\n````", "```\na\n"),
        ("  ```Python title\n  a\n  ```  ", "  a\n"),
        ("<answer>\n```python\na\n```\n</answer>", "a\n"),
    ],
)
def test_finding_the_program(response: str, program: str) -> None:
    assert find_program(response, {"add"}) == program


def test_wrong_options() -> None:
    for options, text in [
        ({"score": "some"}, "score: got 'some'; choose one of all, share"),
        ({"timeout_s": 0}, "timeout_s: got 0"),
        ({"memory_mb": 1}, "memory_mb: got 1"),
        ({"cpu": 1}, "unexpected keyword argument 'cpu'|got an unexpected"),
    ]:
        with pytest.raises(ConfigError, match=f"reward.options.code: .*({text})"):
            check_rewards(RewardConfig(function="code", options={"code": options}))
    with pytest.raises(ConfigError, match=r"reward.timeout_s: got 10, but .*timeout_s = 5 a call may take 17 s"):
        read_rules(RewardConfig(function="code", options={"code": {"timeout_s": 5}}))
    assert read_limits(timeout_s=1, memory_mb=64) == Limits(1.0, 64 << 20)


def test_in_the_pool() -> None:
    """Calls run on workers, a killed worker takes its sandbox with it, and a sandbox serves many calls."""
    results = Results()
    pool = RewardPool(launch(), RewardConfig(function="code", timeout_s=8.0), 2, results.deliver, results.fail)
    pool.wait_ready()
    for number in range(20):
        pool.submit(number, "", fenced(SUM if number % 2 else "x = 1"), SUM_ROW)
    results.wait(20, timeout_s=40)
    assert [results.by_key[number]["score"] for number in range(20)] == [0.0, 1.0] * 10
    assert results.by_key[1]["parts"] == {"code": 1.0, "code/passed": 1.0}
    own = psutil.Process(pool._server.process.pid).children(recursive=True)
    kept = [process for process in processes() if process in own]
    assert len(kept) == 4  # a starter and an init for each of the two workers, which still live
    pool.close()
    deadline = time.monotonic() + 20
    while (left := [process for process in kept if process.is_running()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_a_machine_without_namespaces_is_refused() -> None:
    """Namespaces are forbidden in the user namespace of the command, as some machines do for all users."""
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    outer = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh"]
    command = [*outer, sys.executable, "train.py", "--plan", "reward.function=code"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    text = "oneworld: reward.function: code: this machine does not allow to isolate programs: unshare: "
    assert result.returncode == 2 and result.stderr.startswith(text), result
    assert "As root, run: sysctl user.max_user_namespaces=10000. Or choose another reward function" in result.stderr


OTHER_PYTHON = Path("/usr/bin/python3")  # other users may be unable to read the one that runs the tests


@pytest.mark.skipif(os.geteuid() != 0 or not OTHER_PYTHON.exists(), reason="needs root and the system's Python")
def test_as_another_user() -> None:
    """Root gives its sandboxes the user nobody. Others can only give them their own id."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom rl.rewards.sandbox import *\n"
        "check_sandbox(Limits())\nsandbox = Sandbox()\n"
        "print(sandbox.run(CodeTask('def f(): return 1', ['assert f() == 1', 'assert f() == 2']), Limits()))\n"
        "sandbox.run(CodeTask('import os\\nos.kill(0, 9)\\nos.kill(-1, 9)', ['assert True']), Limits())\n"
        "print('alive')\nsandbox.close()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(ROOT / "rl" / "rewards", Path(folder) / "rl" / "rewards")
        command = [
            "setpriv",
            "--reuid",
            "1234",
            "--regid",
            "1234",
            "--clear-groups",
            str(OTHER_PYTHON),
            "-c",
            script,
            folder,
        ]
        result = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=50)
    assert result.stdout.splitlines() == ["[True, False]", "alive"], result.stderr


@contextmanager
def broken_sandbox(folder: Path, old: str, new: str) -> Iterator[None]:
    """Let sandboxes run other code, with a line of sandbox_child.py replaced."""
    shutil.copytree(ROOT / "rl" / "rewards", folder / "rl" / "rewards")
    child = folder / "rl" / "rewards" / "sandbox_child.py"
    source = child.read_text()
    assert source.count(old) == 1
    child.write_text(source.replace(old, new))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox_module, "ROOT", folder)
        patch.setattr(sandbox_module, "_current", None)
        try:
            yield
        finally:
            if sandbox_module._current is not None:
                sandbox_module._current.close()


def test_walls_that_do_not_work_are_refused(tmp_path: Path) -> None:
    """Without the filter of system calls, the probe gets out, and says how."""
    with (
        broken_sandbox(tmp_path, "    filter_calls(machine())\n", ""),
        pytest.raises(MachineError, match="a program can start a process and open a socket"),
    ):
        check_sandbox(Limits())


@pytest.mark.parametrize(
    "line",
    [
        '    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, TMP)\n',  # the tester cannot start
        "            confine(memory, cpu_s)\n",  # the program cannot
    ],
)
def test_a_program_that_could_not_be_started_is_an_error_and_not_wrong(line: str, tmp_path: Path) -> None:
    indent = line[: len(line) - len(line.lstrip())]
    with (
        broken_sandbox(tmp_path, line, f"{indent}raise OSError\n"),
        pytest.raises(SandboxError, match="could not start"),
    ):
        score(fenced(SUM))
    assert score(fenced(SUM)) == 1.0


@pytest.mark.parametrize("name", ["searches frames", "searches memory"])
def test_the_searches_find_tests_that_are_in_memory(name: str, tmp_path: Path) -> None:
    """The control of two forgeries: they work if the tests are read before the program is forked."""
    old = "    ours, theirs = socket.socketpair()\n"
    early = "    global early\n    early = socket.socket(fileno=os.dup(job)).recv(1 << 16, socket.MSG_PEEK).decode()\n"
    with broken_sandbox(tmp_path, old, early + old):
        assert score(fenced(FORGERIES[name])) == 1.0
