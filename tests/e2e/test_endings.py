"""Every way to end a run: cleanly, an exception, Ctrl-C, a lost process, a fatal error; with restarts off and on.

Each world is real torchrun with the fake engine. `finish` fails on orphans. The last tests look at the terminals of one
and of two nodes, which must end with our line.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pexpect
import psutil
import pytest

from launch.environment import ROOT, TORCHRUN, activated_environment
from tests.launcher import finish, start, status_line, torchrun_train
from tests.ports import free_port
from tests.terminal import CTRL_C, terminal
from tools.install import PATH_FILE

pytestmark = pytest.mark.timeout(150)
SETTINGS = ["rollout.engine=fake", "train.num_steps=3", "train.num_prompts_per_step=6", "eval.num_prompts=6"]
COLLOCATED = ["placement.actor,rollout=all"]
DISAGGREGATED = ["placement.rollout=0", "placement.inference=1", "placement.actor=2", "algo.old_logprobs=always"]
MAX_END_S = 10.0
LAST_REPORT = re.compile(r"^(oneworld: .*(?:\n  .*)*)\s*\Z", re.MULTILINE)  # at the end of a console
KILLED = r"its process was killed by signal 9 \(SIGKILL\), perhaps because the machine ran out of memory"


def launch(
    folder: Path, num_ranks: int, what: str, rank: int, *overrides: str, restarts: bool = False
) -> subprocess.Popen:
    script = ["tests/e2e/broken_train.py", what, str(rank)]
    run = [f"run.dir={folder}", "run.name=run", *SETTINGS, *overrides]
    return start(f"--nproc-per-node={num_ranks}", *script, *run, restarts=restarts)


def last_report(console: str) -> str:
    """Return our report, with its details, if nothing follows it on a console."""
    found = LAST_REPORT.search(console)
    assert found, f"something else stands last:\n{console[-3000:]}"
    return found[1]


def wait_for_step(folder: Path, process: subprocess.Popen, step: int) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"no step {step}: {finish(process, 5)[-4000:]}")
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "placement"), [(1, COLLOCATED), (3, DISAGGREGATED[:-1])])
def test_clean_end(num_ranks: int, placement: list[str], tmp_path: Path) -> None:
    result = torchrun_train(tmp_path / "run", num_ranks, *SETTINGS, *placement)
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    assert "in 3 steps" in result.output
    assert result.output.count("oneworld: the inference ranks have nothing to compute") == (num_ranks == 3)
    assert result.output.rstrip().endswith("engine fake")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("what", "rank", "placement", "place"),
    [
        ("update", 2, DISAGGREGATED, "rank 2 (actor)"),
        pytest.param("update", 0, COLLOCATED, "rank 0 (rollout,actor)", marks=pytest.mark.slow),
        pytest.param("rollout", 0, DISAGGREGATED, "rank 0 (rollout)", marks=pytest.mark.slow),
        pytest.param("update, others hang", 1, COLLOCATED, "rank 1 (rollout,actor)", marks=pytest.mark.slow),
    ],
)
def test_exception_ends_every_rank(what: str, rank: int, placement: list[str], place: str, tmp_path: Path) -> None:
    process = launch(tmp_path, 3, what, rank, *placement)
    if "update" in what:
        wait_for_step(tmp_path, process, 1)
    started = time.monotonic()
    output = finish(process, 100)
    assert process.returncode != 0
    assert output.count("ZeroDivisionError: planted") == 2, (
        output
    )  # the first line of the report, the last of its traceback
    stage = what.split(",")[0]
    assert f"oneworld: {place} on " in output
    assert f", stage {stage}, step " in output
    assert output.count("oneworld: rank ") == 1, output
    if "update" in what:
        assert time.monotonic() - started < MAX_END_S


@pytest.mark.slow
def test_failed_load_ends_the_sync_on_every_rank(tmp_path: Path) -> None:
    process = launch(tmp_path, 3, "load", 0, *DISAGGREGATED)
    output = finish(process, 100)
    assert process.returncode != 0
    assert "SyncError: version 2 of the weights, not transferred everywhere: " in output
    assert "rank 0 (engine 0): ZeroDivisionError: planted" in output
    assert output.count("oneworld: rank ") == 1, output


@pytest.mark.alone
@pytest.mark.slow
def test_failed_exchange_ends_every_rank_at_once(tmp_path: Path) -> None:
    """A rank that fails inside the transfer is out of step with the group: no collective may follow there."""
    process = launch(tmp_path, 3, "exchange", 0, *DISAGGREGATED, "sync.bucket_mb=1")
    output = finish(process, 60)  # the limit on a collective is 300 s
    assert process.returncode != 0
    assert "oneworld: rank 0 (rollout) on " in output, output
    assert "stage sync, step 0: ZeroDivisionError: planted" in output, output  # the second bucket of version 1


@pytest.mark.alone
@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_rank_is_named(rank: int, tmp_path: Path) -> None:
    process = launch(tmp_path, 3, "killed", rank, *COLLOCATED)
    wait_for_step(tmp_path, process, 1)
    started = time.monotonic()
    output = finish(process, 60)
    assert process.returncode != 0
    assert re.match(rf"oneworld: rank {rank} \(.*, stage update, step 2: {KILLED}", last_report(output))
    assert time.monotonic() - started < MAX_END_S
    assert status_line(tmp_path / "run").startswith(f"rank {rank} was lost at step 2: its process ")


@pytest.mark.slow
def test_a_killed_rank_leaves_no_shared_memory(tmp_path: Path) -> None:
    process = launch(tmp_path, 2, "killed with shared memory", 1)
    output = finish(process, 60)
    assert re.search(KILLED, output), output
    assert not Path(f"/dev/shm/test-{process.pid}").exists()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("what", "restarts"),
    [
        ("all hang", True),
        pytest.param("nothing", False, marks=pytest.mark.slow),
        pytest.param("nothing", True, marks=pytest.mark.slow),
        pytest.param("all hang", False, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c(what: str, restarts: bool, tmp_path: Path) -> None:
    process = launch(tmp_path, 2, what, 0, "train.num_steps=100000", "eval.interval=0", restarts=restarts)
    wait_for_step(tmp_path, process, 1)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    started = time.monotonic()
    if what == "all hang":  # nothing can be saved; who does not want to wait types it again
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGINT)
    output = finish(process, 60)
    assert process.returncode != 0
    assert time.monotonic() - started < MAX_END_S
    assert output.count("oneworld: interrupted at step ") == 1, output
    assert last_report(output).startswith("oneworld: interrupted at step ")
    assert (" is saved (run.name=run)" in output) == (what == "nothing"), output
    assert "ZeroDivisionError" not in output
    assert not (tmp_path / "run" / "FATAL").exists()
    assert status_line(tmp_path / "run").startswith("ended by Ctrl-C at step ")


@pytest.mark.alone
@pytest.mark.slow
def test_a_sigterm_does_not_wait_for_what_cannot_be_saved(tmp_path: Path) -> None:
    """The limit of 25 s is 1 s here; torchrun itself would kill its ranks only after 30 s."""
    process = launch(tmp_path, 2, "all hang + short notice", 0, "train.num_steps=100000", "eval.interval=0")
    wait_for_step(tmp_path, process, 1)
    time.sleep(1.0)
    process.terminate()
    started = time.monotonic()
    output = finish(process, 60)
    assert process.returncode == 1
    assert time.monotonic() - started < 20.0
    late = "told to end by SIGTERM, and the checkpoint was not committed within 1 s"
    assert output.count(late) == output.count("oneworld: rank ") == 1, output
    assert not (tmp_path / "run" / "FATAL").exists()


@pytest.mark.alone
@pytest.mark.slow
def test_interrupt_of_one_rank_stops_all_with_restarts_on(tmp_path: Path) -> None:
    """As when Ctrl-C is typed on one node of several: the others must not wait for it to come back."""
    process = launch(tmp_path, 2, "nothing", 0, "train.num_steps=100000", "eval.interval=0", restarts=True)
    wait_for_step(tmp_path, process, 1)
    ranks = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()]
    os.kill(max(ranks), signal.SIGINT)
    started = time.monotonic()
    output = finish(process, 60)
    assert process.returncode != 0
    assert time.monotonic() - started < MAX_END_S
    assert output.count("oneworld: interrupted at step ") == 1, output


@pytest.mark.parametrize(
    ("what", "error"),
    [pytest.param("update", "ZeroDivisionError", marks=pytest.mark.slow), ("update, details", "MemoryError")],
)
def test_repeated_exception_is_fatal_with_restarts_on(what: str, error: str, tmp_path: Path) -> None:
    process = launch(tmp_path, 2, what, 1, restarts=True)
    output = finish(process, 100)
    assert process.returncode != 0
    assert output.count(f"{error}: ") == 5, output  # twice in each of two attempts, no third, and in the last line
    assert output.count("oneworld: fatal, will not be restarted") == 1
    assert last_report(output).startswith("oneworld: fatal, will not be restarted: rank 1 failed again in stage update")
    assert output.count("oneworld: step 1 is done again, because no checkpoint was saved") == 1, output
    fatal = (tmp_path / "run" / "FATAL").read_text()
    assert "rank 1 (rollout,actor)" in fatal
    assert f"{error}: " in fatal


@pytest.mark.slow
def test_an_exception_that_does_not_come_back_is_survived(tmp_path: Path) -> None:
    """The checkpoint is that of step 1, and step 3 fails once."""
    torchrun_train(tmp_path / "run", 2, *SETTINGS, "train.num_steps=1")
    process = launch(tmp_path, 2, "update, once", 1, restarts=True)
    output = finish(process, 100)
    assert process.returncode == 0, output
    assert output.count("ZeroDivisionError: planted") == 2
    assert output.count("oneworld: step 2 is done again, because the last checkpoint is that of step 1") == 1, output
    assert "in 3 steps" in output
    assert not (tmp_path / "run" / "FATAL").exists()
    assert not (tmp_path / "run" / "last_error.json").exists()
    logs = [tmp_path / "run" / "logs" / f"attempt_{attempt}" / "rank_0.log" for attempt in (2, 3)]
    assert ["ZeroDivisionError: planted" in log.read_text() for log in logs] == [True, False]
    assert "in 3 steps" in logs[1].read_text()


@pytest.mark.alone
@pytest.mark.slow
def test_a_crash_loop_slows_down_and_ends(tmp_path: Path) -> None:
    """A lost rank is no repeated error, but attempts in which no step is done are limited."""
    process = launch(tmp_path, 2, "killed at once", 1, "world.max_fruitless_attempts=3", restarts=True)
    output = finish(process, 120)
    assert process.returncode != 0
    assert len(re.findall(KILLED, output)) == 3, output
    assert output.count("2 attempts in a row got no further than those before; the next in 1 s") == 1
    assert output.count("3 attempts in a row got no further than those before (world.max_fruitless_attempts)") == 1
    assert "3 attempts in a row" in (tmp_path / "run" / "FATAL").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["not importable", "killed early"])
def test_a_rank_that_cannot_even_start_is_not_started_for_ever(what: str, tmp_path: Path) -> None:
    """Rank 0 tells its watchdog that it has joined before it knows that rank 1 never will."""
    process = launch(tmp_path, 2, what, 1, restarts=True)
    output = finish(process, 120)
    assert process.returncode != 0
    assert "3 starts in a row ended before the ranks had met; torchrun is told to stop" in output


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
def test_config_error_is_fatal_and_printed_once(restarts: bool, tmp_path: Path) -> None:
    process = launch(tmp_path, 3, "nothing", 0, "placement.rollout=0", "placement.actor=1", restarts=restarts)
    output = finish(process, 100)
    assert process.returncode != 0
    assert output.count("rank 2 of 3 ranks has no role") == 1, output
    assert output.count("oneworld: fatal, will not be restarted") == 1
    assert last_report(output).startswith("oneworld: placement: rank 2 of 3 ranks has no role")
    assert "Traceback" not in output
    assert "rank 2 of 3 ranks has no role" in (tmp_path / "run" / "FATAL").read_text()


@pytest.mark.parametrize("arguments", [["--plan"], ["--help"]])
def test_what_needs_no_world_is_printed_once(arguments: list[str], tmp_path: Path) -> None:
    process = start("--nproc-per-node=2", "train.py", *arguments, f"run.dir={tmp_path}", restarts=True)
    output = finish(process, 100)
    assert process.returncode == 0, output
    assert output.count("placement; run.dir=") == arguments.count("--plan"), output
    assert output.count("usage: train.py") == arguments.count("--help"), output
    assert "oneworld:" not in output, "nothing went wrong"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--bogus"], "oneworld: train.py: error: unrecognized arguments: --bogus"),
        (["--plan", "algo.losss=2"], "oneworld: unknown config key algo.losss; did you mean algo.loss?"),
    ],
)
def test_bad_arguments_are_printed_once_and_never_tried_again(arguments: list[str], line: str, tmp_path: Path) -> None:
    process = start("--nproc-per-node=2", "train.py", *arguments, f"run.dir={tmp_path}", restarts=True)
    output = finish(process, 100)
    assert process.returncode == 1, output
    assert output.count("oneworld:") == output.count(line) == 1, output
    assert output.count("usage: train.py") == arguments.count("--bogus"), output
    assert last_report(output).startswith(line)


@pytest.mark.slow
def test_run_folder_that_cannot_be_made_is_fatal(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = launch(tmp_path / "file", 2, "nothing", 0, restarts=True)
    output = finish(process, 100)
    assert process.returncode != 0
    assert output.count("oneworld: run.dir: cannot make ") == 1, output


@pytest.mark.slow
def test_bad_data_is_fatal_and_leaves_the_reason_in_the_run_folder(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n{"question": "1+2="}\n')
    process = launch(tmp_path, 2, "nothing", 0, f"data.train={prompts}", restarts=True)
    output = finish(process, 100)
    assert process.returncode != 0
    assert output.count("line 2 has no column 'prompt'; got 'question'") == 1, output
    assert "line 2 has no column" in (tmp_path / "run" / "FATAL").read_text()


@pytest.mark.slow
def test_two_runs_side_by_side_never_meet(tmp_path: Path) -> None:
    """No endpoint on the command line, the same host, the same moment."""
    settings = [*SETTINGS, f"run.dir={tmp_path}"]
    processes = [start("--nproc-per-node=2", "train.py", *settings) for _ in range(2)]
    for process in processes:
        output = finish(process, 100)
        assert process.returncode == 0, output
    folders = list(tmp_path.iterdir())
    assert len(folders) == 2
    for folder in folders:
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [0, 1, 2, 3]


class Terminals:
    """One terminal per node of a run, all on this machine. A shell outlives torchrun in each, as a user's does."""

    def __init__(
        self,
        folder: Path,
        num_nodes: int,
        is_quiet: bool,
        what: str,
        *overrides: str,
        restarts: bool = False,
        **variables: str,
    ):
        """With `is_quiet`, Python reads the path file of our .venv. Otherwise torchrun is that of any environment."""
        site = folder / "site"
        site.mkdir()
        (site / "oneworld.pth").write_text(PATH_FILE)
        (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
        variables |= {"PYTHONPATH": f"{site}:{ROOT}" if is_quiet else str(ROOT), "TERM": "dumb"}
        environment = activated_environment(**variables)
        environment |= {"ONEWORLD_QUIET_TORCHRUN": "1" if is_quiet else "0", "TMPDIR": str(folder)}
        environment |= {} if restarts else {"PET_MAX_RESTARTS": "0"}
        self._port = free_port()
        nodes = ["--nnodes=2", f"--rdzv-endpoint=localhost:{self._port}"] if num_nodes > 1 else []
        words = [*TORCHRUN, *nodes, f"--nproc-per-node={2 // num_nodes}", "tests/e2e/broken_train.py", what, "1"]
        words += [f"run.dir={folder}", "run.name=run", *SETTINGS, "eval.interval=0", *overrides]
        script = f"{shlex.join(words)}; code=$?; sleep 2; exit $code"
        self.folder = folder
        self.shells = [terminal(["bash", "-c", script], 100, **environment) for _ in range(num_nodes)]
        self._shown = [""] * num_nodes

    def expect(self, pattern: str) -> None:
        """Wait until one of the terminals shows the pattern."""
        deadline = time.monotonic() + 100
        while not any(re.search(pattern, shown) for shown in self._shown):
            assert time.monotonic() < deadline, self._shown
            for index, shell in enumerate(self.shells):
                try:
                    self._shown[index] += shell.read_nonblocking(1 << 16, 0.1)
                except pexpect.TIMEOUT:
                    continue
                except pexpect.EOF:
                    pytest.fail(f"ended early:\n{self._shown[index]}{shell.before}")

    def terminate(self) -> None:
        """Send SIGTERM to torchrun on the first node."""
        self.torchrun(0).terminate()

    def torchrun(self, index: int) -> psutil.Process:
        (torchrun,) = psutil.Process(self.shells[index].pid).children()
        return torchrun

    def has_rendezvous(self, index: int) -> bool:
        """Return whether a node's torchrun is the one that all others connect to."""
        listening = [each for each in self.torchrun(index).net_connections() if each.status == psutil.CONN_LISTEN]
        return self._port in [each.laddr.port for each in listening]

    def read(self) -> list[str]:
        """Return what the terminals show in the end."""
        for index, shell in enumerate(self.shells):
            shell.expect(pexpect.EOF)
            self._shown[index] = (self._shown[index] + shell.before).replace("\r\n", "\n")
            shell.close()
        assert not list(self.folder.glob("oneworld-told-*")), "torchrun or a watchdog removes its file"
        return self._shown

    def finish(self) -> list[str]:
        """Return what the terminals show in the end, that of rank 0's node first. All torchruns exit with 1."""
        self.read()
        assert [shell.exitstatus for shell in self.shells] == [1] * len(self.shells), self._shown
        return sorted(self._shown, key=lambda shown: "oneworld: the ranks on " in shown)


def assert_ends_with(pattern: str, consoles: list[str], is_quiet: bool) -> None:
    """Check that every node's console ends with our line, which tells another node's apart."""
    first, *others = consoles
    assert re.match(f"oneworld: {pattern}", last_report(first)), first
    for console in others:
        last = last_report(console)
        assert re.match(rf"oneworld: the ranks on \S+ end: {pattern}", last), console
        most = 1 if is_quiet else 2  # torchrun may print its traceback before the verdict; then there is no repetition
        assert console.count(last) in range(1, most + 1), console
    for console in consoles:
        assert ("torch.distributed.elastic" in console) == (not is_quiet), console


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("is_quiet", [True, False])
@pytest.mark.parametrize("num_nodes", [1, 2])
class TestTheLastLine:
    """What stands last on the terminal of every node. Without our .venv, the line is repeated after torchrun's."""

    def test_bad_settings(self, num_nodes: int, is_quiet: bool, tmp_path: Path) -> None:
        terminals = Terminals(tmp_path, num_nodes, is_quiet, "nothing", "actor.lrr=1", restarts=True)
        assert_ends_with(r".*did you mean actor\.lr\?", terminals.finish(), is_quiet)

    def test_the_same_error_twice(self, num_nodes: int, is_quiet: bool, tmp_path: Path) -> None:
        terminals = Terminals(tmp_path, num_nodes, is_quiet, "update, details", restarts=True)
        pattern = "fatal, will not be restarted: rank 1 failed again in stage update of step 2: MemoryError.*$"
        consoles = terminals.finish()
        assert_ends_with(pattern, consoles, is_quiet)
        assert "".join(consoles).count("oneworld: step 1 is done again, because no checkpoint was saved") == 1

    def test_ctrl_c(self, num_nodes: int, is_quiet: bool, tmp_path: Path) -> None:
        terminals = Terminals(tmp_path, num_nodes, is_quiet, "nothing", "train.num_steps=100000")
        terminals.expect("step 2/")
        terminals.shells[0].send(CTRL_C)
        pattern = r"interrupted at step \d+, stage \w+: step \d+ is saved \(run\.name=run\)$"
        assert_ends_with(pattern, terminals.finish(), is_quiet)

    def test_sigterm(self, num_nodes: int, is_quiet: bool, tmp_path: Path) -> None:
        terminals = Terminals(tmp_path, num_nodes, is_quiet, "nothing", "train.num_steps=100000")
        terminals.expect("step 2/")
        terminals.terminate()
        pattern = r"stopped at step \d+, stage \w+: step \d+ is saved \(run\.name=run\)$"
        assert_ends_with(pattern, terminals.finish(), is_quiet)

    def test_a_killed_rank(self, num_nodes: int, is_quiet: bool, tmp_path: Path) -> None:
        terminals = Terminals(tmp_path, num_nodes, is_quiet, "killed")
        assert_ends_with(rf"rank 1 \(.*, stage update, step 2: {KILLED}", terminals.finish(), is_quiet)


@pytest.mark.alone
@pytest.mark.slow
def test_a_node_that_never_returns_is_the_last_word(tmp_path: Path) -> None:
    """torchrun restarts the ranks that are left, waits for the killed node, and gives up with an error of its own."""
    limits = {"PET_RDZV_CONF": "join_timeout=12,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"}
    terminals = Terminals(tmp_path, 2, True, "nothing", "train.num_steps=100000", restarts=True, **limits)
    terminals.expect("step 2/")
    lost = next(index for index in (0, 1) if not terminals.has_rendezvous(index))
    terminals.torchrun(lost).kill()
    consoles = terminals.read()
    assert terminals.shells[lost].exitstatus == 128 + signal.SIGKILL
    assert terminals.shells[1 - lost].exitstatus == 1
    left = consoles[1 - lost]
    assert re.search("^oneworld: rank [01] ", left, re.MULTILINE), left
    assert last_report(left).startswith("oneworld: torchrun gave up: RendezvousTimeoutError"), left
    assert "Traceback" not in left, left


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("way", ["interrupted", "stopped by SIGTERM"])
def test_a_signal_before_the_ranks_have_met(way: str, tmp_path: Path) -> None:
    terminals = Terminals(tmp_path, 1, True, "slow start")
    terminals.expect("starts slowly(.|\n)*starts slowly")
    if way == "interrupted":
        terminals.shells[0].send(CTRL_C)
    else:
        terminals.terminate()
    (console,) = terminals.finish()
    assert last_report(console) == f"oneworld: {way} before the ranks had met"
    assert "Traceback" not in console
