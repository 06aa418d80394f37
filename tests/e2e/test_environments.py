"""Conversations in whole runs: who samples, how slowly, in how many rounds and after which faults changes nothing.

The runs use the fake engine, whose tokens depend on seeds and positions alone, unless a test says otherwise.
"""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_phases import (
    ROLLOUT,
    UPDATE,
    Command,
    assert_same_batch,
    assert_same_checkpoint,
    run_all,
)
from tests.environment_runs import (
    FUNCTIONS,
    Conversation,
    Key,
    conversations_of,
    find_server,
    make_chat_model,
    overrides_of,
    versions_of,
)
from tests.launcher import Result, finish, start, until
from tests.rounds_runs import COMMON, REAL, SAVES, Run, kill_a_rank, last_step, learnt, run_forked

pytestmark = pytest.mark.timeout(400)  # the first test waits for the fixture's runs
APART = ["placement.rollout=0-1", "placement.actor=2"]
PAUSES = "environment.options.longest_pause_s=0.05"
ROUNDS = "rollout.max_tokens_per_round=5"
MAX_ROUNDS = 5  # for 24 tokens
RESUMED_AFTER = 2
SLOW = ("tools", "tools, rounds")
FAULTS = [
    *(f"environment.class={FUNCTIONS}:Faulty", "environment.tools=[]", "train.num_prompts_per_step=8"),
    *("environment.timeout_s=2", "environment.num_workers=4"),  # conversations share processes
]
NO_FAULTS = [*FAULTS, "environment.options={is_faulty: false}"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return make_runs(model, tmp_path_factory.mktemp("runs"), are_slow=False)


@pytest.fixture(scope="module")
def slow_runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    return make_runs(model, tmp_path_factory.mktemp("runs"), are_slow=True)


def make_runs(model: Path, folder: Path, are_slow: bool) -> dict[str, Result]:
    described = {name: run for name, run in describe_runs(model, folder).items() if (name in SLOW) == are_slow}
    results = run_forked({folder / name: run for name, run in described.items()}, timeout_s=390)
    return {name: results[folder / name] for name in described}


def describe_runs(model: Path, folder: Path) -> dict[str, Run]:
    """Return runs by the name of what they have. The resumed one needs the files of another one."""
    saved = folder / "class, rounds" / "checkpoints" / f"step_{RESUMED_AFTER}"
    return {
        "class": (1, overrides_of(model, "class", 4), ""),
        "class, apart": (3, [*overrides_of(model, "class", 2), *APART, PAUSES], "slow engine"),
        "class, rounds": (2, [*overrides_of(model, "class", 4), ROUNDS, *SAVES], ""),
        "class, resumed": (1, [*overrides_of(model, "class", 4), ROUNDS, f"checkpoint.resume={saved}"], ""),
        "tools": (1, overrides_of(model, "tools", 4), ""),
        "tools, rounds": (2, [*overrides_of(model, "tools", 4), ROUNDS, "rollout.tensor_parallel_size=2"], ""),
        "rollout": (1, overrides_of(model, "rollout", 4), ""),
        "rollout, ahead": (3, [*overrides_of(model, "rollout", 4), *APART, ROUNDS, "rollout.ahead=1", PAUSES], ""),
        "faults": (1, [*overrides_of(model, "class", 2), *FAULTS], ""),
        "no faults": (1, [*overrides_of(model, "class", 2), *NO_FAULTS], ""),
    }


def test_conversations_use_all_that_they_can(runs: dict[str, Result]) -> None:
    """Otherwise the comparisons would show little."""
    totals = {name: sum_metrics(runs[name]) for name in ("class", "rollout")}
    assert min(totals["class"][f"environment/{name}"] for name in ("unknown_tool", "bad_arguments", "tool_errors")) > 0
    assert min(totals[name]["environment/turns"] for name in totals) > 2 * 4
    for name in totals:
        rewards = {conversation.reward for conversation in conversations_of(runs[name]).values()}
        assert len(rewards) > 3
    endings = {name for name, value in totals["class"].items() if name.startswith("environment/ended_") and value}
    assert endings >= {"environment/ended_done", "environment/ended_tokens"}
    assert all(len(each.tokens) > 1 for each in conversations_of(runs["rollout"]).values()), "one sequence each"


def sum_metrics(result: Result) -> Counter[str]:
    total: Counter[str] = Counter()
    for row in result.metrics:
        total.update({name: value for name, value in row.items() if not isinstance(value, dict)})  # no histograms
    return total


def test_neither_placement_nor_pauses_change_anything(runs: dict[str, Result]) -> None:
    alone, apart = runs["class"], runs["class, apart"]
    assert conversations_of(apart) == conversations_of(alone, [1, 2])
    for row, wanted in zip(apart.metrics, alone.metrics, strict=False):
        assert learnt(row) == pytest.approx(learnt(wanted), rel=1e-4, abs=1e-5)
    assert alone.metrics[1]["optim/grad_norm"] > 0


@pytest.mark.parametrize("name", ["class, rounds", "rollout, ahead"])
def test_rounds_change_no_conversation(name: str, runs: dict[str, Result]) -> None:
    assert_same_conversations(name, runs)


@pytest.mark.slow
def test_rounds_change_no_conversation_with_tools(slow_runs: dict[str, Result]) -> None:
    """The random numbers of a tool go on where they were."""
    assert_same_conversations("tools, rounds", slow_runs)


def assert_same_conversations(name: str, runs: dict[str, Result]) -> None:
    """Conversations are carried in the middle of a turn and between turns, and go on as if nothing had happened."""
    whole, found = conversations_of(runs[name.partition(",")[0]]), conversations_of(runs[name])
    common = whole.keys() & found.keys()
    assert len(common) >= 0.6 * len(found)
    assert {key: found[key] for key in common} == {key: whole[key] for key in common}
    carried_in_turn = carried_between = 0
    for turns in versions_of(runs[name]):
        carried_in_turn += any(len(set(versions)) > 1 for versions in turns.values())
        carried_between += any(turns[number][-1] < turns[number + 1][0] for number in range(len(turns) - 1))
    assert carried_in_turn > 3 and carried_between > 3
    is_ahead = "ahead" in name
    for row in runs[name].metrics:
        assert row["rollout/lag_max"] <= 2 * MAX_ROUNDS - 3 + 2 * is_ahead
    assert max(row["rollout/lag_max"] for row in runs[name].metrics) > 0


def test_a_resumed_run_goes_on_with_its_conversations(runs: dict[str, Result]) -> None:
    """The checkpoint of two ranks has unfinished conversations. One rank trains on the same data after it."""
    whole, resumed = runs["class, rounds"], runs["class, resumed"]
    assert whole.metrics[RESUMED_AFTER - 1]["rollout/carried"] > 0
    assert [row["step"] for row in resumed.metrics] == [3, 4]
    assert conversations_of(resumed) == conversations_of(whole, [3, 4])
    for row, wanted in zip(resumed.metrics, whole.metrics[RESUMED_AFTER:], strict=True):
        assert learnt(row) == pytest.approx(learnt(wanted), rel=1e-4, abs=1e-5)


def test_a_fault_costs_its_own_sample(runs: dict[str, Result]) -> None:
    """Some samples hang, exit, allocate all memory or raise. Others print a gigabyte or leak processes, which costs
    nothing. The fixture `runs` checks that no process is left."""
    disturbed, calm = conversations_of(runs["faults"]), conversations_of(runs["no faults"])
    totals = sum_metrics(runs["faults"])
    lost = {key for key, conversation in disturbed.items() if conversation.reward == 0}
    assert all(conversation.reward > 0 for conversation in calm.values()) and len(calm) == 48
    assert {key: each for key, each in disturbed.items() if key not in lost} == {
        key: each for key, each in calm.items() if key not in lost
    }
    counts = {ending: totals[f"environment/ended_{ending}"] * 24 for ending in ("error", "timeout", "crash")}
    assert min(counts.values()) >= 1 and sum(counts.values()) == pytest.approx(len(lost))
    assert totals["reward/errors"] + totals["reward/timeouts"] == len(lost) < 40
    assert runs["faults"].output.count("the environment failed: LookupError: planted for ") == 1
    assert runs["faults"].output.count("the environment failed: its process ended with exit code 3") == 1


# Further features, each with a run that it must equal. By name: a door, two runs, and the steps that are compared.
ONE_ENGINE = ["placement.rollout=0", "placement.actor=1"]
TALLY = [f"environment.class={FUNCTIONS}:Tally", "environment.tools=[]"]
DYNAMIC = ["algo.dynamic_sampling=true", f"environment.class={FUNCTIONS}:OftenEqual"]
CRITIC = ["algo.advantage=gae", "critic.lr=1e-3", "algo.lam=0.9"]
PHASES = [*COMMON[:2], *SAVES, "algo.num_mini_batches=2"]
EVALUATION = ["eval.interval=2", "eval.num_prompts=5", "eval.num_samples=3", "eval.temperature=0.7"]
PAIRS: dict[str, tuple[Run, Run]] = {
    "two ranks": ((1, [], ""), (2, [], "")),
    "tensor parallel": ((1, [], ""), (2, ["rollout.tensor_parallel_size=2"], "")),
    "two ranks, tools": ((1, ["door=tools"], ""), (2, ["door=tools"], "")),
    "apart, tools": ((1, ["door=tools"], ""), (3, ["door=tools", *APART], "slow engine")),
    "two ranks, rollout function": ((1, ["door=rollout"], ""), (2, ["door=rollout", PAUSES], "")),
    "asynchronous": ((1, TALLY, ""), (2, [*TALLY, f"environment.class={FUNCTIONS}:PatientTally", PAUSES], "")),
    "engines fail": ((1, [], ""), (2, [PAUSES], "all engines, once")),
    "engines fail, tools": ((1, ["door=tools"], ""), (2, ["door=tools"], "all engines, once")),
    "engines fail, rollout function": ((1, ["door=rollout"], ""), (2, ["door=rollout"], "all engines, once")),
    "engines fail in a round": ((1, [ROUNDS], ""), (2, [ROUNDS], "all engines, once")),
    "overlap": ((2, ONE_ENGINE, ""), (2, [*ONE_ENGINE, "actor.overlap=true", "rollout.max_num_seqs=6"], "")),
    "critic": ((1, CRITIC, ""), (3, [*CRITIC, *APART, PAUSES], "slow engine")),
    "dynamic sampling": ((1, DYNAMIC, ""), (3, [*DYNAMIC, *APART, PAUSES], "slow engine")),
    "evaluation": ((1, EVALUATION, ""), (3, [*EVALUATION, *APART, PAUSES], "slow engine")),
}


@pytest.fixture(scope="module")
def pairs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Result, Result]]:
    folder = tmp_path_factory.mktemp("pairs")
    described: dict[str, Run] = {}
    for num_ranks, arguments, broken in (run for pair in PAIRS.values() for run in pair):
        described[name_of(num_ranks, arguments, broken)] = (num_ranks, settings_of(model, arguments), broken)
    folders = {name: folder / str(number) for number, name in enumerate(described)}
    results = run_forked({folders[name]: run for name, run in described.items()}, timeout_s=800)
    return {
        name: (results[folders[name_of(*first)]], results[folders[name_of(*second)]])
        for name, (first, second) in PAIRS.items()
    }


def name_of(num_ranks: int, arguments: Sequence[str], broken: str) -> str:
    return f"{num_ranks} {broken} {' '.join(arguments)}"


def settings_of(model: Path, arguments: Sequence[str]) -> list[str]:
    doors = [argument.removeprefix("door=") for argument in arguments if argument.startswith("door=")]
    others = [argument for argument in arguments if not argument.startswith("door=")]
    return [*overrides_of(model, *(doors or ["class"]), num_steps=2), *others]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAIRS)
def test_what_must_not_change_anything_does_not(name: str, pairs: dict[str, tuple[Result, Result]]) -> None:
    first, second = pairs[name]
    assert conversations_of(second) == conversations_of(first)
    for row, wanted in zip(second.metrics, first.metrics, strict=True):
        assert learnt(row) == pytest.approx(learnt(wanted), rel=1e-4, abs=1e-5)
        assert row["optim/grad_norm"] > 0
    if name == "evaluation":
        files = [sorted((result.folder / "eval").glob("step_2.*.jsonl")) for result in pairs[name]]
        assert [file.name for file in files[0]] == [file.name for file in files[1]] and files[0]
        assert [file.read_text() for file in files[0]] == [file.read_text() for file in files[1]]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("limit", [0, 5])
def test_phases_give_the_weights_of_both(limit: int, model: Path, tmp_path: Path) -> None:
    settings = [*overrides_of(model, num_steps=2), f"rollout.max_tokens_per_round={limit}", *PHASES]
    both, phases = tmp_path / "both", tmp_path / "phases"
    turns = [Command(phases, 2, [*ROLLOUT, *settings]), Command(phases, 2, [*UPDATE, *settings])]
    run_all([Command(both, 2, settings), *turns * 2])
    for step in (1, 2):
        assert_same_batch(phases, both, step)
        assert_same_checkpoint(phases, both, step)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_ranks_cost_time_and_nothing_else(model: Path, runs: dict[str, Result], tmp_path: Path) -> None:
    """Ranks die at random moments. The world is restarted from its checkpoints, with carried conversations."""
    folder, source = tmp_path / "run", random.Random(5)
    settings = [*overrides_of(model, "class", 4), ROUNDS, *SAVES, PAUSES, "rollout.engine=fake", *COMMON[:2]]
    script = ["tests/e2e/broken_train.py", "slow engines", "0", f"run.dir={tmp_path}", "run.name=run"]
    process = start("--nproc-per-node=2", "--max-restarts=9", *script, *settings, restarts=True)
    killed, result = 0, Result("", folder)
    for step in (1, 2, 3):
        until(lambda step=step: last_step(result) >= step or process.poll() is not None, f"step {step}", 120)
        time.sleep(source.random() / 2)
        killed += process.poll() is None and kill_a_rank(process, source)
    output = finish(process, 200)
    assert process.returncode == 0 and killed >= 2, output[-4000:]
    assert conversations_of(result) == conversations_of(runs["class, rounds"])
    for row, wanted in zip(result.metrics, runs["class, rounds"].metrics, strict=True):
        assert learnt(row) == pytest.approx(learnt(wanted), rel=1e-4, abs=1e-5)


BLOCK = 32  # tokens in a block of the prefix cache
LONG_TURNS = ["environment.options.turn_tokens=12", "environment.max_tokens_per_turn=14", "rollout.max_new_tokens=60"]
REAL_RUNS: dict[str, Run] = {
    "one rank": (1, [], ""),
    "two ranks": (2, [PAUSES], ""),
    "apart": (2, [*ONE_ENGINE, PAUSES], ""),
    "tensor parallel": (2, ["rollout.tensor_parallel_size=2"], ""),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("door", ["class", "tools", "rollout"])
def test_placement_equality_on_vllm(door: str, model: Path, tmp_path: Path) -> None:
    """Each sampled token depends on the weights here. The prefix cache holds the turns before the last one."""
    described = {}
    for number, (num_ranks, overrides, broken) in enumerate(REAL_RUNS.values()):
        kept = [each for each in overrides if door != "tools" or each != PAUSES]
        longer = LONG_TURNS if door == "rollout" else []
        settings = [*overrides_of(model, door, 2), f"rollout.engine_options={{block_size: {BLOCK}}}", *longer, *kept]
        described[tmp_path / str(number)] = (num_ranks, settings, broken)
    first, *others = run_forked(described, engine=REAL, timeout_s=800).values()
    whole = conversations_of(first)
    assert max(max(map(max, each.turns)) for each in whole.values()) >= 2
    for other in others:
        assert without_logprobs(conversations_of(other)) == without_logprobs(whole)
        for row, wanted in zip(other.metrics, first.metrics, strict=True):
            for metric in ("reward/mean", "loss/policy", "optim/grad_norm", "environment/turns"):
                assert row[metric] == pytest.approx(wanted[metric], rel=1e-4, abs=1e-5), metric
            assert row["policy/mismatch_kl"] < 1e-6
    for result in (first, *others):
        for step, row in enumerate(result.metrics, start=1):
            assert row["rollout/prefix_hit_rate"] >= least_hit_rate(conversations_of(result, [step])) - 1e-6
    assert least_hit_rate(whole) > (0.2 if door == "class" else 0.0)


def without_logprobs(conversations: Mapping[Key, Conversation]) -> dict[Key, Conversation]:
    """Leave out vLLM's logprobs: their last bits depend on which other requests a decode step has."""
    return {key: conversation._replace(logprobs=()) for key, conversation in conversations.items()}


def least_hit_rate(conversations: Mapping[Key, Conversation]) -> float:
    """Return the share of prompts in the prefix cache if each turn finds the whole blocks of those before it."""
    num_read = num_cached = 0
    for conversation in conversations.values():
        for turns in conversation.turns:  # of a sequence
            end = 0  # of the turn before
            for number in sorted(set(turns) - {-1}):
                begin = turns.index(number)
                num_read += begin
                num_cached += max(0, end - 1) // BLOCK * BLOCK  # the last token was sampled, but never read
                end = begin + turns.count(number)
    return num_cached / num_read


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_killed_in_conversations_on_vllm_costs_time_only(model: Path, tmp_path: Path) -> None:
    """The world is restarted from its checkpoint, and samples the same tokens as a run that was not disturbed."""
    hold, result = tmp_path / "hold", Result("", tmp_path / "killed")
    options = f"environment.options={{longest_pause_s: 0.3, hold: {hold}}}"
    settings = [*overrides_of(model), *SAVES, f"environment.class={FUNCTIONS}:Held", options]
    (calm,) = run_forked({tmp_path / "calm": (2, settings, "")}, engine=REAL, timeout_s=400).values()
    arguments = ["train.py", f"run.dir={tmp_path}", "run.name=killed", REAL, *COMMON[:2], *settings]
    process = start("--nproc-per-node=2", "--max-restarts=2", *arguments, restarts=True)
    until(lambda: last_step(result) >= 1 or process.poll() is not None, "step 1", 300)
    hold.touch()
    until(lambda: hold.with_suffix(".reached").exists() or process.poll() is not None, "a call", 100)
    server = find_server(process.pid)
    assert server is not None, finish(process, 5)
    os.kill(psutil.Process(server).ppid(), signal.SIGKILL)  # the rank of the engine
    hold.unlink()
    output = finish(process, 400)
    assert process.returncode == 0, output[-4000:]
    assert re.search("stage rollout, step [23]: its process was killed by signal 9", output), output[-4000:]
    assert without_logprobs(conversations_of(result)) == without_logprobs(conversations_of(calm))
    for row, wanted in zip(result.metrics, calm.metrics, strict=True):
        assert learnt(row) == pytest.approx(learnt(wanted), rel=1e-4, abs=1e-5)
