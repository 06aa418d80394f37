"""Tests of the processes that run tools, environments and rollout functions. Each test runs in a server of its own: a
fresh process with an event loop, which forks real workers. A fault costs its own call or conversation only."""

import asyncio
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl.config.schema import EnvironmentConfig
from rl.environments import processes, worker
from rl.environments.conversation import LiveConversation
from rl.environments.interface import Generated, Outcome, ParsedTurn, ToolCall
from rl.environments.protocol import Open, Recorded
from rl.environments.workers import EnvironmentWorkers
from rl.rewards.process_tree import children_of, descendants_of
from tests.reward_attacks import MARK, members
from tests.unit.test_live_conversations import Letters, Model, ids

pytestmark = pytest.mark.timeout(60)
FILE = str(Path(__file__).resolve().parent.parent / "environment_code.py")
SERVERS = multiprocessing.get_context("forkserver")
SERVERS.set_forkserver_preload([__name__, "tests.environment_code"])
CASES: dict[str, Callable[[], Awaitable[None]]] = {}
CASE_S = 40.0


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """Mark all processes of these tests."""
    mark = os.environ[MARK] = f"environments-{os.getpid()}"
    SERVERS.Process(target=int).start()  # starts the process that forks servers
    yield mark
    del os.environ[MARK]


def start_server(case: str) -> tuple[Any, Connection]:
    ours, theirs = SERVERS.Pipe()
    process = SERVERS.Process(target=run_case, args=(case, theirs))
    process.start()
    theirs.close()
    return process, ours


def run_case(case: str, connection: Connection) -> None:
    try:
        asyncio.run(CASES[case]())
        connection.send("")
    except BaseException:
        connection.send(traceback.format_exc())


def in_server(case: Callable[[], Awaitable[None]]) -> Callable[[str], None]:
    """Make a test of a case that runs in a server, and check that no process is left."""
    CASES[case.__name__] = case

    def test(mark: str) -> None:
        before = {process.pid for process in members(mark)}
        process, connection = start_server(case.__name__)
        text = connection.recv() if connection.poll(CASE_S) else "it has not ended"
        process.join(5)
        left = wait_for_end(mark, before)
        assert not text, text
        assert not left, f"left behind: {left}"

    test.__name__ = case.__name__
    test.__doc__ = case.__doc__
    return test


def wait_for_end(mark: str, before: set[int], timeout_s: float = 20.0) -> list[psutil.Process]:
    """Wait until no process is left that was not there before. End and return those that are left."""
    deadline = time.monotonic() + timeout_s
    while (left := [each for each in members(mark) if each.pid not in before]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        process.kill()
    return left


def make(
    *tools: str, name: str = "", timeout_s: float = 1.5, num_workers: int = 2, **settings: Any
) -> EnvironmentWorkers:
    tools_ = [f"{FILE}:{tool}" for tool in tools]
    class_ = f"{FILE}:{name}" if name else ""
    config = EnvironmentConfig(tools=tools_, class_=class_, timeout_s=timeout_s, num_workers=num_workers, **settings)
    return EnvironmentWorkers(config)


async def begin(workers: EnvironmentWorkers, *names: str, seed: int = 7, **row: Any) -> None:
    for name in names:
        assert (await workers.reset(name, row, seed)).status == "ok"


def ok(outcome: Outcome) -> Any:
    assert outcome.status == "ok", outcome
    return outcome.value


def num_workers_now() -> int:
    return len(children_of(os.getpid()))


FAULTS = {
    "loops": "timeout",
    "sleeps": "timeout",
    "loops_in_c": "timeout",
    "ignores_signals": "timeout",
    "stops_itself": "timeout",
    "writes_half_a_frame": "timeout",
    "leaves_children_and_hangs": "timeout",
    "exits": "crash",
    "segfaults": "crash",
    "kills_itself": "crash",
    "closes_everything": "crash",
    "writes_without_end": "crash",
    "writes_nonsense": "crash",
    "leaves_children_and_crashes": "crash",
    "bombs": "crash",
    "raises_exit": "error",
    "raises": "error",
    "raises_what_cannot_be_shown": "error",
    "recurses": "error",
    "fills_memory": "error",
    "returns_a_set": "error",
    "returns_two_megabytes": "error",
    "returns_deep_lists": "error",
    "prints": "ok",
    "leaves_children": "ok",
    "leaves_a_thread_that_exits": "ok",
    "leaves_an_alarm": "ok",
}


async def make_faults(timeout_s: float, faults: dict[str, str]) -> dict[str, str]:
    """Make each fault among calls that must succeed, in the same conversations. They all go on. Return the texts."""
    workers = make("fault", "add", timeout_s=timeout_s, num_workers=4)

    async def converse(name: str) -> Outcome:
        await begin(workers, name)
        for number in range(3):
            assert ok(await workers.call(name, ToolCall("add", {"a": number}))) == str(number + 2)
        outcome = await workers.call(name, ToolCall("fault", {"name": name}))
        for number in range(3):
            assert ok(await workers.call(name, ToolCall("add", {"a": number}))) == str(number + 2)
        workers.drop(name)
        return outcome

    outcomes = dict(zip(faults, await asyncio.gather(*map(converse, faults))))
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome.status != faults[name]}
    assert not wrong, wrong
    for name, outcome in outcomes.items():
        assert (outcome.status == "ok") == (not outcome.text), outcome
        assert outcome.status == "ok" or outcome.place.startswith(str(Path(FILE).parent)), (name, outcome)
        assert len(outcome.text) < 1000
    deadline = time.monotonic() + 20
    while len(descendants_of(os.getpid())) > 4 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert len(descendants_of(os.getpid())) <= 4, "only workers are left"
    workers.close()
    assert not children_of(os.getpid())
    return {name: outcome.text for name, outcome in outcomes.items()}


@in_server
async def test_a_tool_that_hangs_costs_its_own_call() -> None:
    hangs = {name: status for name, status in FAULTS.items() if status == "timeout"}
    texts = await make_faults(1.5, hangs)
    assert set(texts.values()) == {"it took longer than environment.timeout_s = 1.5 s"}


@in_server
async def test_other_faults_of_a_tool_cost_its_own_call() -> None:
    texts = await make_faults(20.0, {name: status for name, status in FAULTS.items() if status != "timeout"})
    assert texts["segfaults"] == "its process was ended by SIGSEGV"
    assert texts["bombs"] == "it had more than 64 processes"
    assert texts["fills_memory"].startswith("MemoryError")
    assert texts["returns_a_set"].startswith("fault returned a set that is no JSON")


async def count_up(workers: EnvironmentWorkers, name: str, numbers: range) -> list[str]:
    """A refused call comes first. It must not disturb an instance that is rebuilt."""
    assert (await workers.call(name, ToolCall("lost", {}))).status == "unknown_tool"
    return [ok(await workers.call(name, ToolCall("add", {"number": number}))) for number in numbers]


@in_server
async def test_a_fault_of_an_environment_costs_its_own_conversation() -> None:
    """All instances live in one process. Those of other conversations are rebuilt, with their random numbers."""
    workers = make(name="Counter", num_workers=1)
    names = [f"c{number}" for number in range(5)]
    for number, name in enumerate(names):
        ok(await workers.reset(name, {"start": number}, seed=number))
    expected = {name: await count_up(workers, name, range(3)) for name in names}
    assert len({text for texts in expected.values() for text in texts}) == 15, "all differ"
    first = ok(await workers.call("c0", ToolCall("where", {})))
    for fault, status in [("segfaults", "crash"), ("sleeps", "timeout"), ("exits", "crash")]:
        name = names.pop()
        outcome, others = await asyncio.gather(
            workers.call(name, ToolCall("fault", {"name": fault})),
            asyncio.gather(*[count_up(workers, other, range(3)) for other in names]),  # wait in the same process
        )
        assert outcome.status == status
        assert await workers.call(name, ToolCall("add", {"number": 1})) == outcome, "its instance is gone"
        assert await workers.reward(name) == outcome
        workers.drop(name)
        for other, texts in zip(names, others):
            expected[other] += texts
    assert ok(await workers.call("c0", ToolCall("where", {}))) != first, "it lives elsewhere now"
    workers.close()
    alone = make(name="Counter", num_workers=3)  # nothing goes wrong here
    for number, name in enumerate(names):
        ok(await alone.reset(name, {"start": number}, seed=number))
        texts = [text for _ in range(1) for text in await count_up(alone, name, range(3))]
        if name == "c0":
            await alone.call(name, ToolCall("where", {}))
        for _ in range(3):
            texts += await count_up(alone, name, range(3))
        assert texts == expected[name], name
    alone.close()


@in_server
async def test_environment_methods_and_results() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = make("add", name="SlowReset", options={"file": f"{folder}/file"})
        assert not (workers.has_step or workers.has_reward)
        workers.close()
        workers = make("nap", name="Counter", options={"start": 3, "folder": folder})
        assert (workers.has_step, workers.has_reward) == (True, True)
        names = [schema["function"]["name"] for schema in workers.schemas]
        assert names == ["nap", "add", "where", "fault", "add_and_raise", "hold", "start", "is_running"]
        messages = [{"role": "user", "content": "go"}]
        assert ok(await workers.reset("a", {"start": 4, "reset": messages}, 1)) == messages
        assert ok(await workers.reset("b", {"reset": "begin"}, 1)) == "begin"
        wrong = await workers.reset("c", {"reset": 5}, 1)
        assert (wrong.status, wrong.text.startswith("reset returned a int; return None")) == ("error", True)
        assert ok(await workers.step("a", "four")) == ["11", False]
        assert ok(await workers.step("a", "nothing")) == ["", False]
        outcome = await workers.call("a", ToolCall("add_and_raise", {"number": 2}))
        assert (outcome.status, outcome.text) == ("error", "ValueError: no")
        assert (
            Path(FILE).read_text().splitlines()[int(outcome.place.rpartition(":")[2]) - 1].strip().startswith("raise")
        )
        assert ok(await workers.reward("a")) == 20.0
        outcome = await workers.call("a", ToolCall("add", {"number": 81}))
        assert (outcome.status, outcome.is_done) == ("ok", True)
        assert ok(await workers.reward("a")) == {"score": 151.5, "total": 101.0, "half": 50.5}
        assert not (await workers.call("b", ToolCall("add", {"number": "5"}))).is_done
        for call, status, text in [
            (ToolCall("sub", {}), "unknown_tool", "there is no tool 'sub'; the tools are: nap, add, where"),
            (ToolCall("add", {"number": "x"}), "bad_arguments", "number: Input should be a valid integer"),
            (ToolCall("add", {}, "no JSON"), "bad_arguments", "no JSON"),
            (ToolCall("nap", {"seconds": 100}), "timeout", "it took longer"),
        ]:
            outcome = await workers.call("b", call)
            assert (outcome.status, outcome.text.startswith(text)) == (status, True), outcome
        assert ok(await workers.reward("b")) == 8.0, "a tool that hangs costs the environment nothing"
        assert ok(await workers.call("b", ToolCall("add", {"number": 10**30}))).startswith(str(10**30 + 8))
        assert ok(await workers.step("b", "\ud800"))[1], "half a character"
        for name in "abc":
            workers.drop(name)
        deadline = time.monotonic() + 20
        while len(list(Path(folder).glob("closed_*"))) < 3 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert (Path(folder) / "closed_101").exists()
        assert len(list(Path(folder).glob("closed_*"))) == 3
        with pytest.raises(KeyError, match="call reset first"):
            await workers.step("a", "again")
        workers.close()


@in_server
async def test_random_numbers_depend_on_the_conversation_and_the_call() -> None:
    workers = make("dice", "nap", num_workers=4)
    await begin(workers, "a", "b", seed=1)
    await begin(workers, "c", seed=2)

    async def draw(name: str, count: int) -> list[str]:
        return [ok(await workers.call(name, ToolCall("dice", {}))) for _ in range(count)]

    busy = asyncio.gather(*[workers.call("c", ToolCall("nap", {"seconds": 0.2})) for _ in range(2)])
    drawn = await asyncio.gather(draw("a", 4), draw("b", 4))
    assert drawn[0] == drawn[1], "the same seed, whichever process"
    assert len(set(drawn[0])) == 4
    await busy
    assert not set(await draw("c", 4)) & set(drawn[0])
    await workers.reset("d", {}, 1, num_calls=2)
    assert await draw("d", 2) == drawn[0][2:], "continued elsewhere"
    workers.close()


@in_server
async def test_a_carried_conversation_draws_the_numbers_of_one_that_was_not_carried() -> None:
    """Calls of unknown tools, and calls that cannot be read, use up numbers as all others do."""
    workers = make("dice")

    async def converse(said: list[str], history: list[Recorded], counts: dict[str, int]) -> Model:
        model = Model(*said, "done.")
        opened = Open((1, 2, 3, 0), {}, [{"role": "user", "content": "hi"}], [1], 5, history, counts)
        settings = EnvironmentConfig(tools=[f"{FILE}:dice"], max_turns=9)
        assert (await LiveConversation(opened, settings, 100, Broken(), workers, model.ask).run()).ending == "done"
        return model

    turns = ["!dice!lost!dice.", "!?dice.", "!dice.", "!lost!dice!dice."]
    whole = await converse(turns, [], {})
    drawn = re.findall(r"<(\[.*?\])", whole.read[-1])
    assert len(set(drawn)) == len(drawn) == 5 and "there is no tool 'lost'" in whole.read[-1]
    for after in range(1, 5):  # it is carried after so many turns
        said = [Recorded(ask.prompt, ids(turn), []) for ask, turn in zip(whole.asked, turns[:after], strict=False)]
        history = [*said, Recorded(whole.asked[after].prompt, [], [])]
        carried = await converse(turns[after:], history, whole.asked[after].counts)
        assert carried.read == whole.read[after:], after
    workers.close()


class Broken(Letters):
    """Calls whose name begins with `?` cannot be read."""

    def parse(self, completion: list[int], prompt: Sequence[int]) -> ParsedTurn:
        turn = super().parse(completion, prompt)
        calls = [ToolCall(call.name, {}, "it is broken" * call.name.startswith("?")) for call in turn.calls]
        return ParsedTurn(turn.text, calls=calls)


@in_server
async def test_a_replay_that_hangs_costs_its_own_conversation() -> None:
    with tempfile.TemporaryDirectory() as folder:
        workers = make(name="SlowReset", options={"file": f"{folder}/file"}, num_workers=1)
        await begin(workers, "a", once=True)
        await begin(workers, "b", "c")
        assert (await workers.call("b", ToolCall("go", {"fault": "exits"}))).status == "crash"
        outcome = await workers.call("a", ToolCall("go", {}))
        assert outcome.status == "timeout"
        assert outcome.text.startswith(
            "its state could not be rebuilt by repeating its calls; in reset: it took longer"
        )
        assert ok(await workers.call("c", ToolCall("go", {}))) == "went"
        workers.close()


@in_server
async def test_sleeping_tools_do_not_wait_for_each_other() -> None:
    workers = make("nap", timeout_s=5.0, num_workers=0)
    await begin(workers, "a")
    outcomes = await asyncio.gather(*[workers.call("a", ToolCall("nap", {"seconds": 0.3})) for _ in range(30)])
    assert {outcome.status for outcome in outcomes} == {"ok"}
    assert num_workers_now() == 30, "as many as needed, so none waited for another"
    workers.close()
    limited = make("nap", name="Counter", timeout_s=5.0, num_workers=3)
    await begin(limited, *"abcdefg")
    await asyncio.gather(*[limited.call("a", ToolCall("nap", {"seconds": 0.05})) for _ in range(9)])
    assert num_workers_now() == 3
    pids = [ok(await limited.call(name, ToolCall("where", {}))) for name in "abcdefg"]
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2, 3], "evenly"
    limited.close()


@in_server
async def test_processes_of_an_instance_live_as_long_as_it() -> None:
    workers = make("do_wrong", name="Counter", timeout_s=3.0, num_workers=1)
    await begin(workers, "a", "b")
    one, two = [int(ok(await workers.call(name, ToolCall("start", {})))) for name in "ab"]
    ok(await workers.call("b", ToolCall("do_wrong", {"name": "leaves_children"})))
    assert len(descendants_of(os.getpid())) < 20, "a function may leave none of its 30 behind"
    workers.drop("b")
    assert ok(await workers.call("a", ToolCall("is_running", {}))) == "true"
    assert [psutil.pid_exists(one), psutil.pid_exists(two)] == [True, False]
    workers.drop("a")
    deadline = time.monotonic() + 20
    while psutil.pid_exists(one) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not psutil.pid_exists(one)
    assert num_workers_now() == 1
    workers.close()


@in_server
async def test_memory_that_another_instance_holds() -> None:
    """The limit is that of a process. Who meets it because of others is rebuilt in a process of its own."""
    workers = make(name="Counter", timeout_s=3.0, num_workers=1)
    await begin(workers, "a", "b", "c")
    assert await count_up(workers, "b", range(2)) == await count_up(workers, "c", range(2))
    assert ok(await workers.call("a", ToolCall("hold", {"gigabytes": 1.5}))) == "held"
    assert ok(await workers.call("b", ToolCall("hold", {"gigabytes": 1.0}))) == "held"
    outcome = await workers.call("b", ToolCall("hold", {"gigabytes": 1.5}))
    assert (outcome.status, outcome.text) == ("error", outcome.text), "now it is its own"
    assert "MemoryError" in outcome.text
    assert (await count_up(workers, "a", range(1)))[0].startswith("0 ")
    assert num_workers_now() == 2
    workers.drop("b")
    deadline = time.monotonic() + 20
    while num_workers_now() > 1 and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert num_workers_now() == 1, "it ends with its only instance"
    workers.close()


@in_server
async def test_worn_processes_are_replaced_when_they_hold_nothing() -> None:
    worker.MAX_CALLS = 6
    workers = make("pid", num_workers=1)
    await begin(workers, "a")
    pids = [ok(await workers.call("a", ToolCall("pid", {}))) for _ in range(18)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [6, 6, 6]
    workers.close()
    workers = make(name="Counter", num_workers=2)
    await begin(workers, "a")
    pid = ok(await workers.call("a", ToolCall("where", {})))
    await count_up(workers, "a", range(10))
    assert ok(await workers.call("a", ToolCall("where", {}))) == pid, "it holds an instance"
    workers.drop("a")
    await begin(workers, "b")
    assert ok(await workers.call("b", ToolCall("where", {}))) != pid
    workers.close()


@in_server
async def test_what_a_worker_inherits() -> None:
    """It has neither the server's connections nor those of other workers, but the files that the user's module opened.
    Credentials that it may use do not appear in messages."""
    os.environ["OPENAI_API_KEY"] = "sk-very-secret-1234"
    workers = make("open_files", "nap", "fault")
    await begin(workers, "a")
    naps = [asyncio.ensure_future(workers.call("a", ToolCall("nap", {"seconds": 0.2}))) for _ in range(2)]
    await asyncio.gather(*naps)
    found = ok(await workers.call("a", ToolCall("open_files", {})))
    assert found.count("socket") == 1, found
    assert "anon_inode" not in found, "no event loop, no other process"
    assert found.count(FILE) == 1
    outcome = await workers.call("a", ToolCall("fault", {"name": "tells_a_secret"}))
    assert outcome.text == "ValueError: the key is ***"
    workers.close()


@in_server
async def test_workers_that_cannot_start_are_an_error_soon() -> None:
    os.register_at_fork(after_in_child=lambda: os._exit(7))
    workers = make("add")
    await begin(workers, "a")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="5 workers in a row ended before they were ready"):
            await workers.call("a", ToolCall("add", {"a": 1}))
    workers.drop("a")
    workers.close()


@in_server
async def test_a_call_that_nobody_waits_for_ends() -> None:
    plain = make("nap", "async_nap", "num_tasks", timeout_s=30.0, num_workers=1)
    await begin(plain, "b")
    for name in ("nap", "async_nap"):
        ok(await plain.call("b", ToolCall(name, {"seconds": 0})))  # its process has started
        call = asyncio.ensure_future(plain.call("b", ToolCall(name, {"seconds": 1000})))
        await asyncio.sleep(0.1)
        call.cancel()
        plain.drop("b")
        await begin(plain, "b")
        async with asyncio.timeout(20):
            assert ok(await plain.call("b", ToolCall(name, {"seconds": 0}))) == "slept"
    assert ok(await plain.call("b", ToolCall("num_tasks", {}))) == "2", "the one that serves, and this one"
    plain.close()


# Asynchronous code


@in_server
async def test_many_asynchronous_calls_share_a_process() -> None:
    workers = make("async_nap", "stubborn_nap", timeout_s=3.0)
    await begin(workers, "a")
    began = time.monotonic()
    outcomes = await asyncio.gather(*[workers.call("a", ToolCall("async_nap", {"seconds": 0.3})) for _ in range(1500)])
    assert {outcome.value for outcome in outcomes} == {"slept"}
    assert time.monotonic() - began < 30.0, "450 s if one by one"
    assert num_workers_now() == 1
    workers.close()
    workers = make("async_nap", "stubborn_nap", "async_fault")
    await begin(workers, "a")
    for name in ("async_nap", "stubborn_nap"):
        outcome = await workers.call("a", ToolCall(name, {"seconds": 100}))
        assert (outcome.status, outcome.text) == ("timeout", "it took longer than environment.timeout_s = 1.5 s")
    for name in ("leave_loop", "raises", "returns_a_set", "recurses"):
        outcome = await workers.call("a", ToolCall("async_fault", {"name": name}))
        assert outcome.status == "error", outcome
    outcome = await workers.call("a", ToolCall("async_nap", {"second": 1}))
    assert outcome.status == "bad_arguments"
    workers.close()


@in_server
async def test_who_blocks_the_loop_or_ends_the_process_is_found() -> None:
    """Other calls are repeated in another process, where their instances are rebuilt."""
    workers = make("async_nap", "async_fault", name="AsyncCounter")
    for fault, status, text in [
        (
            "sleeps",
            "timeout",
            "it took longer than environment.timeout_s = 1.5 s; it kept all asynchronous code waiting",
        ),
        ("segfaults", "crash", "its process was ended by SIGSEGV"),
    ]:
        await begin(workers, "a", "b", "c", start=10)
        assert ok(await workers.call("b", ToolCall("subtract", {"number": 3}))) == "7"
        calls = [
            workers.call("a", ToolCall("async_fault", {"name": fault})),
            workers.call("b", ToolCall("add", {"number": 5, "seconds": 0.1})),
            workers.call("c", ToolCall("async_nap", {"seconds": 0.1})),
        ]
        culprit, added, slept = await asyncio.gather(*calls)
        assert (culprit.status, culprit.text.startswith(text)) == (status, True), culprit
        assert (ok(added), ok(slept)) == ("12", "slept")
        assert (await workers.call("a", ToolCall("fault", {"name": fault}))).status == status
        assert (await workers.call("a", ToolCall("add", {"number": 1}))).status == status, "its instance is gone"
        assert ok(await workers.reward("b")) == 12.0
        for name in "abc":
            workers.drop(name)
    workers.close()


@in_server
async def test_time_in_which_others_block_does_not_count() -> None:
    workers = make("async_nap", "block", timeout_s=1.5)
    await begin(workers, "a")
    ok(await workers.call("a", ToolCall("async_nap", {"seconds": 0.0})))  # its process has started
    nap = asyncio.ensure_future(workers.call("a", ToolCall("async_nap", {"seconds": 1.0})))
    await asyncio.sleep(0.8)
    assert ok(await workers.call("a", ToolCall("block", {"seconds": 1.0}))) == "blocked"
    assert ok(await nap) == "slept", "the loop went on after its time limit only"
    workers.close()


@in_server
async def test_if_nobody_knows_who_ended_the_process_each_suspect_runs_alone() -> None:
    processes.MAX_PROCESSES = 8
    workers = make("async_nap", "exit_by_thread", "spawn", timeout_s=2.0)
    await begin(workers, "a")
    for call, text in [
        (ToolCall("exit_by_thread", {}), "its process ended with exit code 5"),
        (ToolCall("spawn", {"count": 50}), "it had more than 8 processes"),
    ]:
        naps = [workers.call("a", ToolCall("async_nap", {"seconds": 0.2})) for _ in range(4)]
        culprit, *others = await asyncio.gather(workers.call("a", call), *naps)
        assert [ok(outcome) for outcome in others] == ["slept"] * 4
        assert (culprit.status, culprit.text) == ("crash", text), culprit
    workers.close()


# Rollout functions


class Engine:
    """Answer generate requests, and note them."""

    def __init__(self, pause_s: float = 0.01):
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.pause_s, self.error = pause_s, ""

    async def __call__(self, ids: list[int], **sampling: Any) -> Generated:
        self.asked.append((ids, sampling))
        await asyncio.sleep(self.pause_s)
        if self.error:
            raise RuntimeError(self.error)
        return Generated([len(ids), len(self.asked)], "stop")


def task(seed: int = 3, **row: Any) -> dict[str, Any]:
    return {"row": row, "messages": [], "prompt": [5, 6], "seed": seed}


@in_server
async def test_rollout_functions() -> None:
    workers = make(rollout=f"{FILE}:rollout", options={"rounds": 3})
    workers.set_chat(17, "tokenizer")
    assert workers.has_reward
    engine = Engine()
    value = ok(await workers.roll_out("a", task(), engine))
    ids = [5, 6]
    for number in (4, 5, 6):
        assert engine.asked[number - 1] == (ids, {})
        ids = [*ids, len(ids), number]
    assert value == {"score": float(sum(ids)), "first": 6.0, "chat": 17.0}
    assert sorted(engine.asked[:3]) == [([1, 3], {"temperature": 0.5})] * 2 + [([2, 3], {"temperature": 0.5})]
    engine.error = "the tokens are used up"
    with pytest.raises(RuntimeError, match="the tokens are used up"):
        await workers.roll_out("b", task(), engine)
    assert (await workers.reward("b")).status == "error"
    slow = Engine(pause_s=1000)
    running = asyncio.ensure_future(workers.roll_out("c", task(), slow))
    while len(slow.asked) < 3:
        await asyncio.sleep(0.01)
    running.cancel()
    workers.drop("c")
    ok(await workers.roll_out("c", task(), Engine()))
    assert len(asyncio.all_tasks()) == 1, "nothing is generated for it any more"
    workers.close()


@in_server
async def test_rollout_functions_are_repeated_with_what_was_generated() -> None:
    workers = make(rollout=f"{FILE}:rollout", options={"rounds": 3})
    workers.set_chat(0, None)
    undisturbed, engines = Engine(), [Engine() for _ in range(4)]
    expected = ok(await workers.roll_out("a", task(pause=0.15), undisturbed))
    good = [workers.roll_out(f"good {n}", task(pause=0.15), engine) for n, engine in enumerate(engines[:3])]
    bad = workers.roll_out("bad", task(pause=0.05, fault="sleeps"), engines[3])
    outcomes = await asyncio.gather(*good, bad)
    assert [ok(outcome) for outcome in outcomes[:3]] == [expected] * 3
    assert outcomes[3].status == "timeout"
    for engine in engines[:3]:
        assert len(engine.asked) == 6, "nothing was generated twice"
    workers.close()


@in_server
async def test_a_rollout_function_that_cannot_be_repeated_is_told_so() -> None:
    workers = make(rollout=f"{FILE}:moody_rollout")
    assert ok(await workers.roll_out("a", task(), Engine())) == 1.0
    engines = [Engine(), Engine(), Engine()]
    one_by_one, at_once, culprit = await asyncio.gather(
        workers.roll_out("a", task(pause=0.5), engines[0]),
        workers.roll_out("b", task(pause=0.5, at_once=True), engines[1]),
        workers.roll_out("c", task(pause=0.1, fault="exits"), engines[2]),
    )
    assert culprit.status == "crash"
    for outcome in (one_by_one, at_once):
        assert (outcome.status, "it is not deterministic" in outcome.text) == ("error", True), outcome
    assert len(engines[0].asked) == 2, "what does not fit is not generated"
    workers.close()


# The end of the server


async def hang() -> None:
    workers = make("async_fault", name="Counter", timeout_s=1000.0, num_workers=3)
    await begin(workers, "a", "b")
    await asyncio.gather(
        workers.call("a", ToolCall("fault", {"name": "ignores_signals"})),
        workers.call("b", ToolCall("async_fault", {"name": "sleeps"})),
    )


CASES["hang"] = hang


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_server_that_is_killed(number: int, mark: str) -> None:
    before = {process.pid for process in members(mark)}
    server, _ = start_server("hang")
    deadline = time.monotonic() + 10
    while len(members(mark)) < len(before) + 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(members(mark)) >= len(before) + 4, "the server, two workers with instances, and the event loop"
    os.kill(server.pid, number)
    server.join(5)
    assert not wait_for_end(mark, before)


@in_server
async def test_close_ends_calls_that_hang() -> None:
    workers = make("fault", timeout_s=1000.0, num_workers=2)
    await begin(workers, "a")
    calls = [
        asyncio.ensure_future(workers.call("a", ToolCall("fault", {"name": "leaves_children_and_hangs"})))
        for _ in range(2)
    ]
    deadline = time.monotonic() + 10
    while len(descendants_of(os.getpid())) < 20 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    began = time.monotonic()
    workers.close()
    assert not children_of(os.getpid())
    assert time.monotonic() - began < 20.0
    for call in calls:
        call.cancel()
