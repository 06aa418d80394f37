"""Tests of the reward pool under attack, with real processes: every call gets a result, an attack costs its own sample
only, and no process is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.config.schema import ROOT, ConfigError, RewardConfig
from rl.rewards import pool as pool_module
from rl.rewards.failure import RewardFailure
from rl.rewards.launch import ServerProcess, launch
from rl.rewards.pool import RewardPool
from tests.reward_attacks import SPEC, Results, marked, members, wait_for_none

pytestmark = pytest.mark.timeout(60)
FILE = SPEC.rpartition(":")[0]


@pytest.fixture
def mark() -> Iterator[str]:
    with marked() as mark:
        yield mark
    left = wait_for_none(mark)
    for process in left:
        process.kill()
    assert not left, f"left behind: {left}"


def make_pool(
    function: object, num_workers: int = 2, timeout_s: float = 10.0, server: ServerProcess | None = None
) -> tuple[RewardPool, Results]:
    results, config = Results(), RewardConfig(function=function, timeout_s=timeout_s)
    pool = RewardPool(server or launch(), config, num_workers, results.deliver, results.fail)
    pool.wait_ready()
    return pool, results


@pytest.mark.usefixtures("mark")
def test_ten_thousand_calls() -> None:
    pool, results = make_pool({f"{FILE}:good": 0.5, f"{FILE}:bad": 2.0})
    for number in range(10_000):
        pool.submit(("a", number), "", "x" * (number % 7), {"answer": str(number % 3)})
    results.wait(10_000)
    pool.close()
    for number in range(10_000):
        length, answer = float(number % 7), float(number % 3)
        parts = {"good": length, "good/row": answer, "bad": 0.0}
        expected = {"status": "ok", "score": 0.5 * length, "parts": parts, "answer": None, "failure": None}
        assert results.by_key["a", number] == expected


@pytest.mark.usefixtures("mark")
def test_calls_that_are_submitted_together_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    pool, results = make_pool(SPEC)
    send = pool._send_frames
    monkeypatch.setattr(pool, "_send_frames", lambda frames: sent.append(len(results.by_key)) or send(frames))
    for turn in range(2):
        with pool.together():
            for number in range(100):
                pool.submit((turn, number), "", str(number), {})
            assert len(sent) == turn, "nothing is sent before the end"
        results.wait(100 * (turn + 1))
    with pool.together():
        pass
    pool.close()
    assert sent == [0, 100]
    assert all(result["score"] == key[1] for key, result in results.by_key.items())


def source_line(failure: RewardFailure) -> str:
    file, _, line = failure.place.rpartition(":")
    return Path(file).read_text().splitlines()[int(line) - 1].strip()


ATTACKS = {
    "loops": "timeout",
    "sleeps": "timeout",
    "loops_in_c": "timeout",
    "ignores_signals": "timeout",
    "stops_itself": "timeout",
    "writes_half_a_frame": "timeout",
    "leaves_children_and_hangs": "timeout",
    "exits": "crash",
    "exits_well": "crash",
    "segfaults": "crash",
    "kills_itself": "crash",
    "ends_by_a_signal_without_a_name": "crash",
    "closes_everything": "crash",
    "writes_without_end": "crash",
    "writes_nonsense": "crash",
    "writes_no_frame": "crash",
    "leaves_children_and_crashes": "crash",
    "bombs": "crash",
    "raises_exit": "error",
    "raises": "error",
    "raises_what_cannot_be_shown": "error",
    "recurses": "error",
    "fills_memory": "error",
    "returns_much": "error",
    "returns_nothing": "error",
    "prints": "ok",
    "leaves_children": "ok",
    "runs_a_program": "ok",
    "leaves_a_thread_that_exits": "ok",
    "leaves_an_alarm": "ok",
    "writes_a_file": "ok",
}


def test_every_attack_costs_its_own_sample_only(mark: str) -> None:
    """Make each attack twice, among calls that must succeed, on three workers."""
    pool, results = make_pool(SPEC, num_workers=3, timeout_s=3.0)
    for turn in range(2):
        for attack in ATTACKS:
            pool.submit((turn, attack), "", attack, {})
            for number in range(5):
                pool.submit((turn, attack, number), "", str(number), {})
    results.wait(2 * 6 * len(ATTACKS), timeout_s=50)
    for key, result in results.by_key.items():
        expected = ATTACKS[key[1]] if len(key) == 2 else "ok"
        assert result["status"] == expected, (key, result)
        if len(key) == 3:
            assert (result["score"], result["parts"]) == (key[2], {"attack": key[2]})
        elif expected != "ok":
            assert (result["score"], result["parts"]) == (0.0, {"attack": 0.0})
            failure: RewardFailure = result["failure"]
            assert (failure.function, failure.error in ("timeout", "crash")) == ("attack", expected != "error")
            assert len(str(failure)) < 2000 and str(failure).isprintable()
            assert failure.place.startswith(f"{FILE}:"), failure
    assert results.by_key[0, "runs_a_program"]["score"] == 0.5
    assert results.by_key[0, "writes_a_file"]["score"] == 1.0
    failures = {attack: results.by_key[0, attack]["failure"] for attack, status in ATTACKS.items() if status != "ok"}
    assert failures["loops"].text == "it took longer than reward.timeout_s = 3 s"
    assert failures["segfaults"].text.endswith("by SIGSEGV")
    assert failures["ends_by_a_signal_without_a_name"].text.endswith(f"by signal {signal.SIGRTMIN + 6}")
    assert failures["fills_memory"].text.startswith("MemoryError")
    assert failures["raises_what_cannot_be_shown"].text == "Strange"
    assert failures["bombs"].text == "it had more than 64 processes"
    # What the attack's code cannot prevent: the line at which it hung or crashed is known.
    assert source_line(failures["loops"]) in ("while True:", "pass")
    assert source_line(failures["sleeps"]) == "time.sleep(1000)"
    assert source_line(failures["loops_in_c"]).startswith("re.match(")
    assert source_line(failures["segfaults"]) == "ctypes.string_at(0)"
    assert source_line(failures["raises"]).startswith("raise RuntimeError")
    assert source_line(failures["returns_nothing"]).startswith("def attack("), "nothing raised in its own code"
    assert source_line(failures["ignores_signals"]).startswith("def attack("), "it writes no stack"
    deadline = time.monotonic() + 20
    while len(members(mark)) > 4 and time.monotonic() < deadline:  # a child may not be ended yet
        time.sleep(0.02)
    assert len(members(mark)) <= 4, "only the server and its workers are left"
    pool.close()


@pytest.mark.usefixtures("mark")
def test_a_failure_names_the_function_that_was_called(tmp_path: Path) -> None:
    """Also if its process crashed, among several functions. A stack of an earlier call is not taken for its own."""
    file = tmp_path / "two.py"
    file.write_text(
        "import ctypes, os\n"
        "def first(prompt, response, row):\n"
        "    if response == 'child' and not os.fork():\n"
        "        ctypes.string_at(0)\n"
        "    if response == 'child':\n"
        "        os.wait()\n"
        "    return 1\n"
        "def second(prompt, response, row):\n"
        "    if response == 'exit':\n"
        "        os._exit(0)\n"
        "    return 2\n"
    )
    pool, results = make_pool({f"{file}:first": 1.0, f"{file}:second": 1.0}, num_workers=1)
    for response in ("child", "exit"):
        pool.submit(response, "", response, {})
    results.wait(2)
    pool.close()
    assert results.by_key["child"]["score"] == 3.0
    failure: RewardFailure = results.by_key["exit"]["failure"]
    assert (failure.function, failure.error, failure.place) == ("second", "crash", f"{file}:8")


@pytest.mark.usefixtures("mark")
def test_malicious_mathematics_is_not_parsed() -> None:
    """Answers that would take minutes to parse are not parsed, so none of them takes until the time limit."""
    pool, results = make_pool("math", timeout_s=10.0)
    responses = {
        "tower": "$9^{9^{9^9}}$",
        "factorial": r"\boxed{99999999999!}",
        "nested": "$" + r"\frac{1}{" * 10_000 + "1" + "}" * 10_000 + "$",
        "braces": r"\boxed" + "{" * 100_000,
        "digits": "$" + "9" * 1_000_000 + "$",
        "sum": r"$\sum_{i=1}^{10^{12}} i^{i}$",
        "dollars": "$" * 50_000,
    }
    for name, response in responses.items():
        pool.submit(name, "", response, {"answer": "7"})
        pool.submit(f"{name}, then right", "", r"\boxed{\frac{14}{2}}", {"answer": "7"})
    results.wait(2 * len(responses), timeout_s=50)
    pool.close()
    assert all(results.by_key[name]["score"] == 0.0 for name in responses), results.by_key
    assert all(results.by_key[f"{name}, then right"]["score"] == 1.0 for name in responses), results.by_key
    assert {results.by_key[name]["status"] for name in responses} == {"ok"}


@pytest.mark.usefixtures("mark")
def test_the_time_limit_counts_from_the_start_of_a_call_and_calls_keep_their_order() -> None:
    """With one worker, calls may wait longer than the time limit before they start."""
    pool, results = make_pool(SPEC, num_workers=1, timeout_s=0.5)
    began = time.monotonic()
    for number in range(4):
        pool.submit(("hangs", number), "", "sleeps", {})
        pool.submit(("good", number), "", str(number), {})
    results.wait(8)
    pool.close()
    assert time.monotonic() - began >= 2.0
    assert results.order == [(kind, number) for number in range(4) for kind in ("hangs", "good")]
    assert [results.by_key["good", number]["score"] for number in range(4)] == [0, 1, 2, 3]


@pytest.mark.usefixtures("mark")
def test_quick_calls_do_not_wait_for_one_that_hangs(tmp_path: Path) -> None:
    """While calls are quick, workers get several at once, but not behind a call that has already run for long."""
    begun, file = tmp_path / "begun", tmp_path / "hangs.py"
    file.write_text(
        "import pathlib, time\n"
        "def score(prompt, response, row):\n"
        "    if response == 'hangs':\n"
        "        time.sleep(0.1)\n"
        f"        pathlib.Path({str(begun)!r}).touch()\n"
        "        time.sleep(1000)\n"
        "    return 1.0\n"
    )
    pool, results = make_pool(f"{file}:score", num_workers=2, timeout_s=2.0)
    for number in range(200):
        pool.submit(number, "", "quick", {})
    results.wait(200)
    pool.submit("hangs", "", "hangs", {})
    while not begun.exists():
        time.sleep(0.001)
    for number in range(200, 400):
        pool.submit(number, "", "quick", {})
    results.wait(401)
    pool.close()
    assert results.order[-1] == "hangs"
    assert results.by_key["hangs"]["status"] == "timeout"


@pytest.mark.usefixtures("mark")
def test_final_answers_on_request_and_large_calls() -> None:
    pool, results = make_pool("gsm8k")
    pool.submit("plain", "", "it is 7", {"answer": "7"})
    pool.submit("asked", "", "it is 7.0", {"answer": "7"}, answer_of="gsm8k")
    pool.submit("none", "", "unknown", {"answer": "7"}, answer_of="gsm8k")
    pool.submit("large", "p" * 1_000_000, "x" * 1_000_000 + " 7", {"answer": "7", "more": "y" * 1_000_000})
    results.wait(4)
    pool.close()
    assert {key: (result["score"], result["answer"]) for key, result in results.by_key.items()} == {
        "plain": (1.0, None),
        "asked": (1.0, "7"),
        "none": (0.0, None),
        "large": (1.0, None),
    }


def test_close_ends_calls_that_hang(mark: str) -> None:
    pool, results = make_pool(SPEC, timeout_s=1000)
    for number in range(10):
        pool.submit(number, "", "leaves_children_and_hangs", {})
    while len(members(mark)) < 1 + 2 + 60:
        time.sleep(0.02)
    began = time.monotonic()
    pool.close()
    assert not members(mark)
    assert time.monotonic() - began < 20.0
    assert (results.by_key, results.failure) == ({}, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_owner(number: int, mark: str) -> None:
    command = [sys.executable, "-m", "tests.reward_attacks", "leaves_children_and_hangs", "2", str(2 + 2 + 60)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = json.loads(owner.stdout.readline())
    assert len(pids) == 2 + 2 + 60, "the owner, its server, two workers, and what those started"
    os.kill(owner.pid, number)
    owner.wait(10)
    owner.stdout.close()
    assert not wait_for_none(mark)


@pytest.mark.usefixtures("mark")
def test_signals_meant_for_the_rank_do_not_end_the_server() -> None:
    server = launch()
    pool, results = make_pool("exact_match", server=server)
    assert os.getsid(server.process.pid) == server.process.pid, "a signal to the rank's group does not reach it"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        server.process.send_signal(number)
    pool.submit("a", "", "1", {"answer": "1"})
    results.wait(1)
    pool.close()


@pytest.mark.usefixtures("mark")
def test_workers_that_cannot_start_are_an_error_soon(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "import os\nos.register_at_fork(after_in_child=lambda: os._exit(7))\ndef f(prompt, response, row): ..."
    )
    pool, results = make_pool(f"{file}:f")
    assert "has ended with exit code 1" in str(results.wait_failure(timeout_s=10))
    assert "5 workers in a row ended before they were ready" in capfd.readouterr().err
    pool.close()


def test_the_end_of_the_server_is_an_error(mark: str) -> None:
    server = launch()
    pool, results = make_pool(SPEC, server=server)
    pool.submit("a", "", "sleeps", {})
    server.process.kill()
    assert str(results.wait_failure()) == "the reward server of this rank has ended with exit code -9"
    pool.submit("b", "", "1", {})  # raises nothing here: `fail` gets the error
    assert not wait_for_none(mark), "workers die with their server"


@pytest.mark.usefixtures("mark")
def test_a_frozen_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "SILENCE_S", 0.5)
    server = launch()
    pool, results = make_pool(SPEC, timeout_s=0.5, server=server)
    server.process.send_signal(signal.SIGSTOP)
    pool.submit("a", "x" * 10_000_000, "1", {})  # returns, although the socket does not hold as much
    assert "has said nothing for 1 s, with 1 calls under way" in str(results.wait_failure())
    server.process.send_signal(signal.SIGCONT)
    pool.close()


@pytest.mark.usefixtures("mark")
def test_config_errors_come_before_the_first_call() -> None:
    results = Results()
    with pytest.raises(ConfigError, match="choose one of exact_match"):
        RewardPool(launch(), RewardConfig(function="last_word"), 1, results.deliver, results.fail)
    pool = RewardPool(launch(), RewardConfig(function=f"{FILE}:nothing"), 1, results.deliver, results.fail)
    with pytest.raises(ConfigError, match="has no function 'nothing'; it has good, bad, attack"):
        pool.wait_ready()
    pool.close()


@pytest.mark.usefixtures("mark")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os; os._exit(7)", "RuntimeError: the reward server of this rank has ended with exit code 7"),
        ("import time; time.sleep(1000)", "ConfigError: reward.function: its import has not ended after 2 s"),
    ],
)
def test_a_file_that_cannot_be_imported(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "READY_S", 2.0)
    file = tmp_path / "file.py"
    file.write_text(source)
    results, server = Results(), launch()
    pool = RewardPool(server, RewardConfig(function=f"{file}:score"), 1, results.deliver, results.fail)
    with pytest.raises(Exception, match="reward") as caught:
        pool.wait_ready()
    assert f"{type(caught.value).__name__}: {caught.value}".startswith(message)
    server.process.kill()  # as its rank's end would
    pool.close()
