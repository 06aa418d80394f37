"""tools/suggest_placement.py: estimates that can be worked out by hand, files of runs that it reads, and refusals."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.config.values import with_values
from rl.data.batch import batch_of_responses
from rl.data.group_file import StoredGroup, groups_to_bytes
from rl.placement.roles import plan
from rl.rollout.simulate import Setup, SimulatedTask, Speeds, Workload, estimate_step, time_round
from rl.run.derive import SLOTS, derive_for_cpu, open_settings
from rl.run.slots import count_slots
from rl.run.suggest import SuggestionError, read_run, suggest
from tools.suggest_placement import describe

SPEEDS = Speeds(decode_step=0.02, decode_sequence=0.001, prefill_token=0.0, score=0.0, train_token=0.0004, sync=0.1)
LENGTH, PROMPT, NUM_PROMPTS, NUM_SAMPLES = 40, 10, 16, 4
NUM_TOKENS = NUM_PROMPTS * NUM_SAMPLES * (LENGTH + PROMPT)


def task(*lengths: int, num_read: float = 0, occupancy: float = 1.0) -> SimulatedTask:
    return SimulatedTask(list(lengths), num_read, occupancy)


def test_a_round_takes_the_time_of_its_decode_steps() -> None:
    speeds = Speeds(1.0, 0.5, 0.25, 0.0, 0.0)
    groups = [task(3, 1), task(2)]
    # Steps with 3, 2 and 1 sequences.
    assert time_round(groups, 1, 9, speeds) == 2.5 + 2.0 + 1.5
    # One group after the other: steps with 2, 1, 1, 1, 1 sequences.
    assert time_round(groups, 1, 1, speeds) == 2.0 + 4 * 1.5
    # One group on each engine. The first is slower.
    assert time_round(groups, 2, 9, speeds) == 2.0 + 2 * 1.5
    assert time_round([task(3, 1, num_read=4), task(2)], 2, 9, speeds) == 2.0 + 2 * 1.5 + 1.0
    # The first engine may hold two of three groups at a time, and takes them: steps with 2, 1, 1 and 1 sequences.
    assert time_round([task(1), task(4), task(2)], 2, 9, speeds) == 2.0 + 3 * 1.5
    # With room for one group, the engine that ends first takes the third.
    assert time_round([task(1), task(4), task(2)], 2, 1, speeds) == 4 * 1.5
    # There is room for two groups, or for three if only half of the responses of carried ones are left.
    assert time_round([task(2)] * 3, 1, 2, speeds) == 2 * 2.0 + 2 * 1.5
    assert time_round([task(2, occupancy=0.5)] * 3, 1, 2, speeds) == 2 * 2.5
    assert time_round([], 2, 9, speeds) == 0.0


def workload(**changes: Any) -> Workload:
    groups = [[LENGTH] * NUM_SAMPLES]
    return replace(Workload(NUM_PROMPTS, groups, PROMPT, LENGTH, max_num_groups=64), **changes)


def sampling_s(num_engines: int) -> float:
    num_sequences = -(-NUM_PROMPTS // num_engines) * NUM_SAMPLES  # of an engine with one group more than others
    return LENGTH * (SPEEDS.decode_step + SPEEDS.decode_sequence * num_sequences)


def training_s(num_actors: int) -> float:
    return NUM_TOKENS * SPEEDS.train_token / num_actors


def test_a_step_is_the_sum_of_its_parts_or_the_longer_one() -> None:
    turns = estimate_step(workload(), SPEEDS, Setup(2, 2), 4)
    assert turns == pytest.approx(sampling_s(2) + training_s(2) + SPEEDS.sync)
    ahead = estimate_step(workload(), SPEEDS, Setup(2, 2, ahead=1), 4)
    assert ahead == pytest.approx(max(sampling_s(2), training_s(2)) + SPEEDS.sync)
    speeds = replace(SPEEDS, logprob_token=0.0001, score=0.5, handover=0.25)
    scored = estimate_step(workload(overlap=0.5), speeds, Setup(2, 2, num_scorers=2), 4)
    assert scored == pytest.approx(sampling_s(2) + training_s(2) / 2 + SPEEDS.sync + NUM_TOKENS * 0.0001 / 2 + 0.75)
    # Half of the groups are kept, so every update needs two rounds.
    dynamic = estimate_step(workload(informative=0.5), SPEEDS, Setup(2, 2), 4)
    assert dynamic == pytest.approx(2 * sampling_s(2) + training_s(2) + SPEEDS.sync, rel=0.05)


def test_carried_groups_are_spread_over_the_engines_as_by_the_dispatcher() -> None:
    """Each round has two new groups, and two that read 2 tokens again. Each engine gets one of both."""
    work = Workload(2, [[4]], prompt_tokens=0, max_new_tokens=4, max_num_groups=9)
    speeds = Speeds(decode_step=0.0, decode_sequence=1.0, prefill_token=1.0, score=0.0, train_token=0.0)
    assert estimate_step(work, speeds, Setup(2, 1, limit=2), 4) == pytest.approx(2.0 + 2 * 2)


def test_short_rounds_do_not_wait_for_the_longest_response() -> None:
    """One response in 64 is ten times as long as the others. With Q, it takes ten rounds beside others."""
    groups = [[10, 10, 10, 10] for _ in range(16)]
    groups[3] = [10, 10, 10, 100]
    work, speeds = workload(groups=groups, max_new_tokens=100), replace(SPEEDS, train_token=0.0)
    whole, short = (estimate_step(work, speeds, Setup(2, 2, limit=limit), 32) for limit in (0, 10))
    assert whole > 100 * SPEEDS.decode_step and short < 12 * (SPEEDS.decode_step + 0.04) + SPEEDS.sync


def write_run(
    folder: Path, *overrides: str, num_ranks: int = 8, num_steps: int = 8, step_s: float | None = None, gpu: str = ""
) -> Path:
    """Write the files of a run whose ranks have SPEEDS, and whose responses all have LENGTH tokens. On a GPU, its slots
    are derived."""
    settings = [f"train.num_prompts_per_step={NUM_PROMPTS}", f"rollout.num_samples_per_prompt={NUM_SAMPLES}"]
    given = load_config(None, [*settings, f"rollout.max_new_tokens={LENGTH}", *overrides])
    config, derived = derive_for_cpu(given), open_settings(given)
    tp = config.rollout.tensor_parallel_size
    placement = plan(config.placement, 1, num_ranks, tp, config.actor.num_replicas)
    num_engines, num_actors = len(placement.engines), len(placement.actors)
    rollout_s, update_s = sampling_s(num_engines), training_s(num_actors)
    folder.mkdir(parents=True)
    if gpu and SLOTS in derived:
        config = with_values(config, {SLOTS: count_slots(config, num_engines).number})
    nodes = [{"gpus": [gpu] * num_ranks if gpu else []}]
    (folder / "run.json").write_text(json.dumps({"config": asdict(config), "derived": derived, "nodes": nodes}))
    if step_s is None:
        turns = max(rollout_s, update_s) if config.rollout.ahead else rollout_s + update_s
        step_s = turns + SPEEDS.sync
    sizes, decode = (NUM_PROMPTS * NUM_SAMPLES // num_engines, 1), [0.0] * 5
    for size in sizes:  # two steps with different numbers of sequences are enough for a line
        seconds = SPEEDS.decode_step + SPEEDS.decode_sequence * size
        decode = [a + b for a, b in zip(decode, (1, size, size**2, seconds, size * seconds))]
    edges, counts = list(range(0, LENGTH + 1, 10)), [0] * (LENGTH // 10 - 1) + [NUM_PROMPTS * NUM_SAMPLES]
    metrics, accounts = [], []
    for step in range(1, num_steps + 1):
        row: dict[str, Any] = {"step": step, "version": step + 1, "time/step": step_s, "time/sync": SPEEDS.sync}
        row |= {"rollout/tokens": NUM_PROMPTS * NUM_SAMPLES * LENGTH, "rollout/length_mean": LENGTH}
        row |= {"rollout/truncated": 1.0, "rollout/lengths": {"edges": edges, "counts": counts}}
        metrics.append(row)
        engine_s = {"busy/rollout": sum(decode[3:4]) / num_engines, "wait/actor": 1.0}
        actor_s = {"busy/update": update_s, "wait/rollout": rollout_s}
        names = {",".join(roles).replace(",", "_") for roles in placement.roles}
        seconds_of = {name: actor_s if "actor" in name else engine_s for name in names}
        roles = {name: {"ranks": 1, "seconds": seconds} for name, seconds in seconds_of.items()}
        account = {"step": step, "bound": "a bound", "prompt_tokens": PROMPT, "nodes": [num_ranks], "roles": roles}
        accounts.append(account | {"engine": {"decode": decode}, "ranks": []})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "accounting.jsonl").write_text("".join(json.dumps(row) + "\n" for row in accounts))
    return folder


SPLIT = ["placement.rollout=2 ranks", "placement.actor=rest"]


def test_speeds_and_lengths_are_those_of_the_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", *SPLIT))
    assert asdict(run.speeds) == pytest.approx(asdict(SPEEDS))
    assert {length for group in run.work.groups for length in group} == {LENGTH}
    assert {len(group) for group in run.work.groups} == {NUM_SAMPLES}
    assert run.step_s == pytest.approx(sampling_s(2) + training_s(6) + SPEEDS.sync)


def test_derived_slots_follow_the_number_of_engines_and_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 11 engines gets 2 of 16 groups, and so 8 slots. With 3 groups on each of 7, actors would be faster."""
    monkeypatch.setattr(sys.modules[__name__], "SPEEDS", replace(SPEEDS, train_token=0.002))
    many = ["placement.rollout=11 ranks", "placement.actor=rest", "eval.interval=0"]
    derived = write_run(tmp_path / "derived", *many, num_ranks=12, gpu="H100")
    run = read_run(derived)
    assert run.config.rollout.max_num_seqs == 8 and run.work.max_num_groups == 2
    pairs = [(engines, limit) for engines in (2, 4) for limit in (0, 8)]
    found = [run.work_of(Setup(engines, 12 - engines, limit=limit)).max_num_groups for engines, limit in pairs]
    assert found == [8, 16, 4, 8], "twice as many with rounds"
    given = write_run(tmp_path / "given", *many, "rollout.max_num_seqs=8", num_ranks=12, gpu="H100")
    on_cpu = write_run(tmp_path / "cpu", *many, num_ranks=12)
    (best, slower, same) = (suggest(folder).best for folder in (derived, given, on_cpu))
    assert best is not None and slower is not None and best == same
    assert (best.candidate.setup.num_engines, slower.candidate.setup.num_engines) == (7, 8), "8 slots stay 8"


def test_the_best_split_and_its_gain(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", *SPLIT)
    found = suggest(folder)
    assert found.best is not None and found.modelled_s == pytest.approx(found.run.step_s)
    times = {engines: max(sampling_s(engines), training_s(8 - engines)) + SPEEDS.sync for engines in range(1, 8)}
    fastest = min(times, key=times.__getitem__)
    assert times[fastest] < times[2] / 1.3, "otherwise there is nothing to find"
    assert found.best.changes == [f"placement.rollout={fastest} ranks", "placement.actor=rest", "rollout.ahead=1"]
    assert found.best.gain == pytest.approx(found.run.step_s / times[fastest])
    assert found.best.seconds == pytest.approx(times[fastest]) and found.best.max_lag == 1
    text = "\n".join(describe(found, folder))
    assert "'placement.rollout=" in text and "times as fast" in text and "--max-lag" in text
    # Without older tokens, ranks only move. Then both sides take turns.
    on_policy = suggest(folder, max_lag=0).best
    turns = {engines: sampling_s(engines) + training_s(8 - engines) for engines in range(1, 8)}
    best = min(turns, key=turns.__getitem__)
    assert on_policy is not None and on_policy.max_lag == 0
    assert on_policy.changes == [f"placement.rollout={best} ranks", "placement.actor=rest"]


def test_nothing_is_suggested_if_nothing_is_better(tmp_path: Path) -> None:
    times = {engines: max(sampling_s(engines), training_s(8 - engines)) for engines in range(1, 8)}
    best = min(times, key=times.__getitem__)
    settings = [f"placement.rollout={best} ranks", "placement.actor=rest", "rollout.ahead=1"]
    found = suggest(write_run(tmp_path / "run", *settings))
    assert found.best is None and "nothing is better" in "\n".join(describe(found, tmp_path))


def test_only_allowed_placements_are_suggested(tmp_path: Path) -> None:
    """Engines have two ranks, and the actors are two replicas, so both need even numbers of ranks."""
    settings = ["rollout.tensor_parallel_size=2", "actor.num_replicas=2", *SPLIT]
    found = suggest(write_run(tmp_path / "run", *settings))
    assert found.best is not None
    numbers = [
        int(c.split("=")[1].split()[0]) for o in [found.best, *found.options] for c in o.changes if "rollout=" in c
    ]
    assert numbers and all(number % 2 == 0 for number in numbers)


def test_shared_ranks_get_no_round_ahead(tmp_path: Path) -> None:
    found = suggest(write_run(tmp_path / "run", "placement.actor,rollout=all"))
    options = [*found.options, *([found.best] if found.best is not None else [])]
    assert all("rollout.ahead=1" not in o.changes or "placement.actor=rest" in o.changes for o in options)


def test_saved_rollouts_tell_the_lengths_of_whole_groups(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", *SPLIT)
    (folder / "rollouts").mkdir()
    sizes = [3, 5, 7, 9]
    num_tokens = sum(sizes) + 4 * PROMPT
    batch = batch_of_responses(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        lengths=torch.tensor(sizes) + PROMPT,
        prompt_lengths=torch.full((4,), PROMPT),
        versions=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.zeros(num_tokens),
        rewards=torch.zeros(4),
        group_ids=torch.tensor([0, 0, 1, 1]),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    (folder / "rollouts" / "step_1.rank_0.safetensors").write_bytes(groups_to_bytes([StoredGroup(0, batch)]))
    assert read_run(folder).work.groups == [[3, 5], [7, 9]]


def damage(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def damaged(folder: Path) -> None:
        (folder / name).write_text(change((folder / name).read_text()))

    return damaged


def first_lines(count: int) -> Callable[[str], str]:
    return lambda text: "".join(text.splitlines(keepends=True)[:count])


REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no settings": (lambda folder: (folder / "run.json").unlink(), "there is no .*run.json"),
    "broken settings": (damage("run.json", lambda text: text[:100]), "run.json cannot be read .*JSONDecodeError"),
    "other settings": (damage("run.json", lambda text: '{"config": {"rollout": 3}}'), "run.json cannot be read"),
    "few steps": (damage("metrics.jsonl", first_lines(4)), "has 4 steps in both .*at least 5 are needed"),
    "no accounting": (lambda folder: (folder / "accounting.jsonl").unlink(), "has 0 steps in both"),
    "no lengths": (
        damage("metrics.jsonl", lambda text: text.replace("rollout/lengths", "rollout/other")),
        "has no lengths of responses",
    ),
    "no decode steps": (
        damage("accounting.jsonl", lambda text: text.replace('"decode"', '"other"')),
        "has no decode steps",
    ),
    "unsteady": (
        damage("metrics.jsonl", lambda text: text.replace('"time/step": ', '"time/step": 3')),
        "its measured parts explain",
    ),
    "another world": (
        damage("accounting.jsonl", lambda text: text.replace('"nodes": [8]', '"nodes": [1]')),
        "does not fit",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_why(tmp_path: Path, name: str) -> None:
    spoil, message = REFUSALS[name]
    folder = write_run(tmp_path / "run", *SPLIT)
    spoil(folder)
    with pytest.raises(SuggestionError, match=message):
        suggest(folder)


def test_conversations_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", *SPLIT)
    settings = json.loads((folder / "run.json").read_text())
    settings["config"]["environment"]["tools"] = ["my/tools.py:add"]
    (folder / "run.json").write_text(json.dumps(settings))
    with pytest.raises(SuggestionError, match="a run with environments"):
        suggest(folder)


def test_the_program(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", *SPLIT)

    def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "tools/suggest_placement.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)

    told = ask(str(folder), "--json")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["changes"][-1] == "rollout.ahead=1" and found["gain"] > 1.3
    missing = ask(str(tmp_path / "elsewhere"))
    assert missing.returncode == 1 and "there is no directory" in missing.stderr and "Traceback" not in missing.stderr
