"""The webhook: one message per run, however it ends, and none about a restart. The address appears nowhere."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl.watch.webhook import VARIABLE
from tests.launcher import finish, members, start, until

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]
SECRET = "T0123/B4567/aVerySecretPath"
SETTINGS = [
    *("rollout.engine=fake", "train.num_prompts_per_step=3", "rollout.num_samples_per_prompt=2", "eval.interval=0"),
    *("checkpoint.save_interval=1", "reward.function=tests/e2e/reward_functions.py:varied"),
]


class Hook:
    """A server on the loopback that keeps what it gets. The first `num_failures` messages are refused."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.num_failures, self.delay_s = 0, 0.0
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                time.sleep(hook.delay_s)
                is_refused, hook.num_failures = hook.num_failures > 0, hook.num_failures - 1
                if not is_refused:
                    hook.bodies.append(body)
                self.send_response(503 if is_refused else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/{SECRET}"


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


def launch(folder: Path, hook: Hook, *more: str, restarts: bool = False) -> Any:
    run = [f"run.dir={folder}", "run.name=run", *SETTINGS, *more]
    return start("--nproc-per-node=2", "train.py", *run, restarts=restarts, **{VARIABLE: hook.url})


def reaches(folder: Path, step: int) -> bool:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.exists() and f'"step": {step},' in metrics.read_text()


def rank_process(launcher: int, rank: int) -> psutil.Process:
    """Return the process of a rank: torchrun's child."""
    for child in psutil.Process(launcher).children():
        if child.environ().get("RANK") == str(rank):
            return child
    raise AssertionError(f"no rank {rank}: {members(launcher)}")


def check_secret(folder: Path, output: str) -> None:
    assert SECRET not in output
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_run_that_ends_is_told_once_even_if_the_first_message_is_refused(hook: Hook, tmp_path: Path) -> None:
    hook.num_failures = 1
    process = launch(tmp_path, hook, "train.num_steps=3")
    output = finish(process, 150)
    assert process.returncode == 0, output[-3000:]
    (body,) = hook.bodies
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    mean = sum(row["reward/mean"] for row in rows if row["step"]) / 3
    assert (body["run"], body["status"], body["step"], body["reason"]) == ("run", "finished", 3, "")
    assert body["reward_first"] == body["reward_last"] == pytest.approx(mean)
    assert 1 < body["duration_s"] < 150
    assert body["text"].startswith("oneworld: run finished at step 3 after ")
    assert body["text"].endswith(f", reward {mean:.2f} -> {mean:.2f}")
    check_secret(tmp_path, output)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_told_at_the_end_and_not_when_it_is_restarted(rank: int, hook: Hook, tmp_path: Path) -> None:
    """The first kill is followed by a restart. The second one is final, because torchrun may restart only once."""
    run = [f"run.dir={tmp_path}", "run.name=run", *SETTINGS, "train.num_steps=500"]
    process = start(
        *("--max-restarts=1", "--nproc-per-node=2", "train.py"), *run, restarts=True, **{VARIABLE: hook.url}
    )
    until(lambda: reaches(tmp_path, 2), "step 2", 100)
    first = rank_process(process.pid, rank)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: len(list((tmp_path / "run" / "logs").glob("attempt_2/*"))) == 2, "a second attempt", 100)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    until(lambda: (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") > lines + 1, "more steps", 100)
    assert hook.bodies == []
    os.kill(rank_process(process.pid, rank).pid, signal.SIGKILL)
    output = finish(process, 60)
    (body,) = hook.bodies
    assert (body["run"], body["status"]) == ("run", "failed") and body["step"] > 2
    assert body["reason"].startswith(f"rank {rank} (rollout,actor) on ")
    assert "its process was killed by signal 9 (SIGKILL)" in body["reason"] and "\n" not in body["reason"]
    assert body["reward_first"] is not None
    check_secret(tmp_path, output)


def test_a_health_rule_and_a_hook_that_hangs(hook: Hook, tmp_path: Path) -> None:
    """The run ends as fast as without a hook, and says that the message was not sent."""
    hook.delay_s = 30.0
    settings = ["train.num_steps=50", "health.actions={mismatch: stop}", "health.num_steps=2"]
    process = launch(tmp_path, hook, *settings, restarts=True)
    until((tmp_path / "run" / "FATAL").exists, "the end", 100)
    started = time.monotonic()
    process.wait(30)
    assert time.monotonic() - started < 10
    assert process.returncode == 1
    until(lambda: not members(process.pid), "the end of the watchdog", 30)
    output = process.communicate()[0]
    assert "oneworld: ONEWORLD_WEBHOOK: the message about the end of the run was not sent: TimeoutError" in output
    check_secret(tmp_path, output)


def test_ctrl_c_is_told_as_a_stop(hook: Hook, tmp_path: Path) -> None:
    process = launch(tmp_path, hook, "train.num_steps=500", restarts=True)
    until(lambda: reaches(tmp_path, 2), "step 2", 100)
    os.kill(process.pid, signal.SIGINT)
    output = finish(process, 60)
    (body,) = hook.bodies
    assert body["status"] == "stopped" and body["reason"].startswith("interrupted at step "), output[-2000:]


def start_nodes(folder: Path, hook: Hook, *more: str, port: int, restarts: bool) -> list[Any]:
    """Start torchrun for two nodes with one rank each, on this machine. Each has a run folder of its own."""
    nodes = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two", "train.py"]
    limits = "join_timeout=12,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    variables = {VARIABLE: hook.url, "PET_RDZV_CONF": limits}
    settings = ["run.name=run", *SETTINGS, *more]
    return [
        start(*nodes, f"run.dir={folder / str(number)}", *settings, restarts=restarts, **variables)
        for number in range(2)
    ]


def rank_of(launcher: Any) -> int | None:
    ranks = [child.environ().get("RANK") for child in psutil.Process(launcher.pid).children()]
    return next((int(rank) for rank in ranks if rank is not None), None)


def lose_node_of_rank_0(launchers: list[Any]) -> Any:
    """Kill all processes of the node of rank 0, with its watchdog. Return torchrun of the other node."""
    first = next(each for each in launchers if rank_of(each) == 0)
    for process in members(first.pid):
        process.kill()
    first.communicate()
    return next(each for each in launchers if each is not first)


@pytest.mark.parametrize("restarts", [False, True])
def test_another_node_tells_that_the_node_of_rank_0_is_lost(restarts: bool, hook: Hook, tmp_path: Path) -> None:
    """With restarts, torchrun waits for the lost node, and the message comes when it gives up."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launchers = start_nodes(tmp_path, hook, "train.num_steps=5000", port=port, restarts=restarts)
    until(lambda: any(reaches(tmp_path / str(number), 2) for number in range(2)), "step 2", 100)
    left = lose_node_of_rank_0(launchers)
    output = finish(left, 90)
    assert left.returncode != 0
    (body,) = hook.bodies
    assert (body["run"], body["status"]) == ("run", "failed") and body["step"] >= 2, output[-3000:]
    assert body["reason"].startswith("rank 0 is gone: its process ended, or its host was cut off (seen by rank 1 on ")
    assert re.fullmatch("run-[0-9a-f]{8}", body["id"])
    assert body["reward_first"] is not None
    check_secret(tmp_path, output)


def test_a_node_that_is_lost_for_a_while_is_not_told(hook: Hook, tmp_path: Path) -> None:
    """Both nodes restart their ranks after the loss of one rank. Only the end of the run is told, by rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launchers = start_nodes(tmp_path, hook, "train.num_steps=12", port=port, restarts=True)
    until(lambda: any(reaches(tmp_path / str(number), 2) for number in range(2)), "step 2", 100)
    first = next(each for each in launchers if rank_of(each) == 0)
    for process in members(first.pid):  # the rank, its watchdog and its servers, but not torchrun
        if process.pid != first.pid:
            process.kill()
    outputs = [finish(each, 120) for each in launchers]
    assert [each.returncode for each in launchers] == [0, 0], outputs
    (body,) = hook.bodies
    assert (body["status"], body["step"]) == ("finished", 12)
