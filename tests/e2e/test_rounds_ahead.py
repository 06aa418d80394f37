"""Runs with rollout.ahead=1: engines sample the next round while the actors train.

They are compared with a plain single-process reference (tests/reference_rounds.py), which samples and trains in turns.
The runs use the fake engine, unless a test says otherwise.
"""

import json
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.e2e.reward_functions import mostly_equal, varied
from tests.launcher import Result, finish, start, steps_on, until
from tests.reference_rounds import TINY, Reference, Setting, Step, fake_engine, make_model, vllm_engine
from tests.rounds_runs import (
    COMMON,
    FAKE,
    FUNCTIONS,
    REAL,
    REAL_SHAPE,
    SAVES,
    Run,
    assert_continues,
    assert_same_data,
    assert_same_metrics,
    assert_same_run,
    assert_trains_once,
    last_step,
    learnt,
    responses_of,
    run_forked,
    run_named,
    setting_of,
)

pytestmark = pytest.mark.timeout(330)  # the first test waits for the fixture's runs
LIMITS = (0, 3, 5)  # tokens per round; 0: no limit
# Number of ranks, overrides, and what is broken.
PLACEMENTS: dict[str, Run] = {
    "1 actor, 2 engines": (3, ["placement.rollout=0-1", "placement.actor=2"], "slow engine"),
    "1 engine, 2 actors": (3, ["placement.rollout=0", "placement.actor=1-2"], "slow engine"),
    # The inference rank computes the old logprobs of decoupled PPO.
    "2 actors, inference, engine": (
        4,
        ["placement.rollout=0", "placement.inference=1", "placement.actor=2-3"],
        "slow engine",
    ),
    "2 actors, 2 engines": (4, ["placement.actor=0-1", "placement.rollout=2-3"], ""),
    "1 engine, 1 actor": (2, ["placement.rollout=0", "placement.actor=1"], ""),
    "tensor parallel, 2 replicas": (
        4,
        [
            *("placement.rollout=0-1", "rollout.tensor_parallel_size=2"),
            *("placement.actor=2-3", "actor.num_replicas=2"),
        ],
        "slow engine",
    ),
}
FIRST = "1 actor, 2 engines"  # its runs save every step
QUICK = [(FIRST, 0), (FIRST, 3), ("2 actors, inference, engine", 3)]
SLOW = [
    *((FIRST, 5), ("2 actors, inference, engine", 0), ("2 actors, inference, engine", 5)),
    *(("tensor parallel, 2 replicas", limit) for limit in LIMITS),
]
DYNAMIC = f"reward.function={FUNCTIONS}:mostly_equal"
RESUMED = {FIRST: 2, "1 engine, 2 actors": 4}  # by placement, the step after which the run is forked
Key = tuple[str, int]  # placement, and limit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def setting_in(placement: str, limit: int, model: Path) -> Setting:
    setting = setting_of(limit, model, ahead=1)
    return replace(setting, old_logprobs="always") if "inference" in placement else setting


def describe(placement: str, setting: Setting, *overrides: str) -> Run:
    num_ranks, places, broken = PLACEMENTS[placement]
    return num_ranks, [*setting.overrides, *places, *overrides], broken


def fork_after(step: int, place: str, whole: Result, setting: Setting) -> Run:
    """Return a run that forks another one after this step, in this placement."""
    return describe(place, setting, f"checkpoint.resume={whole.folder / 'checkpoints' / f'step_{step}'}")


@pytest.fixture(scope="module")
def references(model: Path) -> dict[Key, list[Step]]:
    """What the definition of rounds says."""
    return {key: Reference(setting_in(*key, model), fake_engine, varied).run() for key in QUICK}


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Key, Result]:
    described = {
        (placement, limit): describe(
            placement, setting_in(placement, limit, model), *(SAVES if (placement, limit) == (FIRST, 3) else [])
        )
        for placement, limit in QUICK
    }
    return run_named(described, tmp_path_factory.mktemp("runs"))


def test_the_reference_has_carried_queued_and_late_groups(references: dict[Key, list[Step]]) -> None:
    """Otherwise the comparisons with it would show little."""
    lags = {key: [max(step.lags) for step in steps] for key, steps in references.items()}
    assert lags[FIRST, 0] == [0, 1, 1, 1, 1, 1]
    assert max(lags[FIRST, 3]) > 2
    steps = references[FIRST, 3]
    assert any(step.num_carried for step in steps) and any(step.num_queued for step in steps)
    assert any(len(set(response.versions)) > 2 for step in steps for response in step.responses)


@pytest.mark.parametrize(("placement", "limit"), QUICK)
def test_a_run_equals_the_reference(
    placement: str, limit: int, runs: dict[Key, Result], references: dict[Key, list[Step]], model: Path
) -> None:
    """Whoever samples and trains, and however slowly."""
    assert_same_run(runs[placement, limit], references[placement, limit], setting_in(placement, limit, model))


@pytest.mark.slow
def test_every_placement_and_limit_equals_the_reference(model: Path, tmp_path: Path) -> None:
    settings = {key: setting_in(*key, model) for key in SLOW}
    results = run_named({key: describe(key[0], settings[key]) for key in SLOW}, tmp_path)
    for key, setting in settings.items():
        assert_same_run(results[key], Reference(setting, fake_engine, varied).run(), setting)


def test_the_bound_of_the_lag_is_printed(runs: dict[Key, Result]) -> None:
    """12 tokens take 4 rounds of 3 tokens. The bound is 2 M - 3 + K."""
    output = runs[FIRST, 3].output
    reason = "engines sample while actors train, so a token is trained on at most"
    assert output.count(f"oneworld: {reason} 1 update after it was sampled") == 1
    assert output.count(f"oneworld: a response takes up to 4 rounds and {reason} 6 updates after it was sampled") == 2


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten prompts."""
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    file.write_text("".join((TINY / "train.jsonl").read_text().splitlines(keepends=True)[:10]))
    return file


def epochs_setting(model: Path, small_data: Path, limit: int = 3) -> Setting:
    """Two epochs over ten prompts, in 5 steps."""
    return replace(setting_of(limit, model, ahead=1), data=small_data, num_groups=20, num_steps=5)


def dynamic_setting(model: Path, limit: int) -> Setting:
    return replace(setting_of(limit, model, ahead=1), is_dynamic=True, num_steps=5)


@pytest.fixture(scope="module")
def variants(
    model: Path, small_data: Path, runs: dict[Key, Result], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    described = {
        "dynamic sampling": describe("1 engine, 2 actors", dynamic_setting(model, 3), DYNAMIC),
        "epochs": describe("1 engine, 2 actors", epochs_setting(model, small_data), "train.num_epochs=2"),
    }
    setting = setting_of(3, model, ahead=1)
    for place, after in RESUMED.items():
        described[f"resumed in {place}"] = fork_after(after, place, runs[FIRST, 3], setting)
    return run_named(described, tmp_path_factory.mktemp("variants"))


def assert_same_dynamic_run(result: Result, setting: Setting) -> None:
    steps = Reference(setting, fake_engine, mostly_equal).run()
    assert any(step.num_queued for step in steps), "no informative group is left over"
    assert_same_run(result, steps, setting)


def test_dynamic_sampling_keeps_informative_groups_in_the_queue(variants: dict[str, Result], model: Path) -> None:
    assert_same_dynamic_run(variants["dynamic sampling"], dynamic_setting(model, 3))


@pytest.mark.slow
def test_dynamic_sampling_with_other_limits(model: Path, tmp_path: Path) -> None:
    settings = {f"{limit}": dynamic_setting(model, limit) for limit in (0, 5)}
    results = run_named({name: describe(FIRST, settings[name], DYNAMIC) for name in settings}, tmp_path)
    for name, setting in settings.items():
        assert_same_dynamic_run(results[name], setting)


def test_epochs_are_drained(variants: dict[str, Result], model: Path, small_data: Path) -> None:
    """Each of the 10 prompts is trained on twice, and nothing is left in flight."""
    result, setting = variants["epochs"], epochs_setting(model, small_data)
    assert_same_run(result, Reference(setting, fake_engine, varied).run(), setting)
    counts = Counter({prompt: len(samples) for prompt, samples in responses_of(result).items()})
    assert len(counts) == 10
    assert set(counts.values()) == {2 * setting.num_samples}
    assert (result.metrics[-1]["rollout/carried"], result.metrics[-1]["rollout/queue"]) == (0, 0)


@pytest.mark.parametrize("place", RESUMED)
def test_a_resumed_run_continues_its_responses(
    place: str, runs: dict[Key, Result], variants: dict[str, Result], references: dict[Key, list[Step]], model: Path
) -> None:
    """On the same ranks all numbers are equal. In another placement the data are, and losses but for rounding."""
    whole, steps, after = runs[FIRST, 3], references[FIRST, 3], RESUMED[place]
    resumed, setting = variants[f"resumed in {place}"], setting_of(3, model, ahead=1)
    assert_continues(resumed, after, place == FIRST, steps, whole, setting)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_resumes_after_every_step(
    runs: dict[Key, Result], references: dict[Key, list[Step]], model: Path, tmp_path: Path
) -> None:
    whole, steps, setting = runs[FIRST, 3], references[FIRST, 3], setting_of(3, model, ahead=1)
    assert any(step.num_carried for step in steps[1:]) and any(step.num_queued for step in steps[1:])
    places = [FIRST, "1 engine, 2 actors", "2 actors, 2 engines", "1 engine, 1 actor"]
    described = {
        (place, step): fork_after(step, place, whole, setting) for step in range(1, len(steps)) for place in places
    }
    results = run_named(described, tmp_path, timeout_s=800)
    for (place, step), result in results.items():
        assert_continues(result, step, place == FIRST, steps, whole, setting)


CHANGES: dict[str, Run] = {
    "no round ahead": (2, ["rollout.ahead=0"], ""),
    "no round ahead, no limit": (3, [*PLACEMENTS[FIRST][1], "rollout.ahead=0", "rollout.max_tokens_per_round=0"], ""),
    "no limit": (3, [*PLACEMENTS[FIRST][1], "rollout.max_tokens_per_round=0"], "slow engine"),
    "smaller batches": (3, [*PLACEMENTS[FIRST][1], "train.num_prompts_per_step=3", "train.num_steps=9"], ""),
    "larger batches": (3, [*PLACEMENTS[FIRST][1], "train.num_prompts_per_step=9"], "slow engine"),
}


@pytest.mark.slow
def test_a_fork_with_other_settings_trains_on_every_prompt_once(
    runs: dict[Key, Result], model: Path, tmp_path: Path
) -> None:
    """Also where all ranks sample and train in turns. A run that took turns may continue one round ahead."""
    whole, setting = runs[FIRST, 3], setting_of(3, model, ahead=1)
    resume = f"checkpoint.resume={whole.folder / 'checkpoints/step_3'}"
    described = {
        name: (count, [*setting.overrides, *more, resume], what) for name, (count, more, what) in CHANGES.items()
    }
    forks = run_named(described, tmp_path / "forks")
    for fork in forks.values():
        assert_trains_once(fork, whole, 3, setting)
    back = replace(setting, num_steps=9)
    resume = f"checkpoint.resume={forks['no round ahead'].folder / 'checkpoints/step_6'}"
    (again,) = run_named({"again": describe(FIRST, back, resume)}, tmp_path / "back").values()
    assert [row["step"] for row in again.metrics] == [7, 8, 9]
    both = {**responses_of(whole, [1, 2, 3]), **responses_of(forks["no round ahead"])}
    assert not both.keys() & responses_of(again).keys()
    assert again.metrics[-1]["rollout/lag_max"] > 0


# Settings that a run must bear, in which the data are those of the reference.
ALGORITHMS: dict[str, tuple[str, list[str]]] = {
    "mini-batches and epochs": ("1 engine, 2 actors", ["algo.num_mini_batches=2", "algo.num_epochs=2"]),
    "critic": ("1 engine, 2 actors", ["algo.advantage=gae", "critic.lr=1e-3", "critic.warmup_steps=1"]),
    "critic, and a KL of an inference rank": (
        "2 actors, inference, engine",
        ["algo.advantage=gae", "critic.lr=1e-3", "algo.kl_coef=0.1", "algo.kl_place=reward"],
    ),
    "KL and evaluation": (
        "2 actors, inference, engine",
        ["algo.kl_coef=0.1", "eval.interval=2", "eval.num_prompts=5", "actor.offload=rollout"],
    ),
    "few slots": ("1 engine, 1 actor", ["rollout.max_num_seqs=5", "algo.mask_truncated=true"]),
}


@pytest.mark.slow
def test_every_algorithm_bears_a_round_ahead(references: dict[Key, list[Step]], model: Path, tmp_path: Path) -> None:
    steps, setting = references[FIRST, 3][:4], replace(setting_of(3, model, ahead=1), num_steps=4)
    described = {name: describe(place, setting, *overrides) for name, (place, overrides) in ALGORITHMS.items()}
    results = run_named(described, tmp_path)
    for name, result in results.items():
        for number, (row, step) in enumerate(zip(result.metrics, steps, strict=True), start=1):
            assert_same_data(result.rollouts(number), step, setting)
            assert row["rollout/lag_max"] == max(step.lags) <= 6, name
            assert (row["rollout/carried"], row["rollout/queue"]) == (step.num_carried, step.num_queued), name
        assert result.metrics[-1]["optim/grad_norm"] > 0, name
    lines = (results["KL and evaluation"].folder / "eval/step_2.eval.jsonl").read_text().splitlines()
    lengths = [response["num_tokens"] for line in lines for response in json.loads(line)["responses"]]
    assert max(lengths) > 3, "an evaluation is no round, and has no limit"


REAL_PLACEMENTS: dict[str, Run] = {
    "1 engine, 1 actor": (2, ["placement.rollout=0", "placement.actor=1"], "traced"),
    "2 actors, inference, engine": PLACEMENTS["2 actors, inference, engine"],
    "tensor parallel, 2 replicas": PLACEMENTS["tensor parallel, 2 replicas"],
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_engines_equal_the_reference(tmp_path: Path) -> None:
    """The reference samples from the weights of each version with vLLM's noise. So weights of another version, and
    noise that repeats, change tokens."""
    import vllm._C  # noqa: F401  the operator that draws a token

    settings, described = {}, {}
    for place, (num_ranks, overrides, broken) in REAL_PLACEMENTS.items():
        for limit in (0, 1, 2):
            setting = Setting(**REAL_SHAPE, max_tokens_per_round=limit, ahead=1)
            setting = replace(setting, old_logprobs="always") if "inference" in place else setting
            folder = tmp_path / place / f"{limit}"
            settings[folder] = setting
            described[folder] = (num_ranks, [*setting.overrides, *overrides], broken if broken == "traced" else "")
    results = run_forked(described, REAL, timeout_s=1100)
    for folder, setting in settings.items():
        steps = Reference(setting, vllm_engine, varied).run()
        assert max(max(step.lags) for step in steps) >= 1
        for number, (row, step) in enumerate(zip(results[folder].metrics, steps, strict=True), start=1):
            # A step of AdamW turns rounding of small gradients into differences of the weights, and so of logprobs.
            assert_same_data(results[folder].rollouts(number), step, setting, tolerance=1e-3)
            assert_same_metrics(row, step, setting, tolerance=1e-5)
            assert row["policy/probe_gap"] < 1e-5


def spans_of(folder: Path, rank: int, name: str) -> list[tuple[float, float]]:
    """Return when each update or engine step of a traced run began and ended."""
    lines = [json.loads(line) for line in Path(f"{folder}.{rank}.spans.jsonl").read_text().splitlines()]
    return [(began, ended) for what, began, ended in lines if what == name]


@pytest.mark.slow
def test_real_engines_step_during_updates(tmp_path: Path) -> None:
    """Engine steps begin and end during an update with rollout.ahead=1, and never without it."""
    described = {
        tmp_path / f"{ahead}": (
            2,
            ["placement.rollout=0", "placement.actor=1", "train.num_steps=8", f"rollout.ahead={ahead}"],
            "traced",
        )
        for ahead in (0, 1)
    }
    results = run_forked(described, REAL)
    inside: dict[int, list[int]] = {}
    for ahead, (folder, result) in enumerate(results.items()):
        updates, steps = spans_of(folder, 1, "update"), spans_of(folder, 0, "engine step")
        assert len(updates) == len(result.metrics) == 8
        assert len(steps) >= 8 * 3
        inside[ahead] = [sum(began < start and end < ended for start, end in steps) for began, ended in updates]
    assert sum(inside[0]) == 0, inside
    assert sum(count > 0 for count in inside[1]) >= 6, inside


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes of the ranks, in their order."""
    return sorted(child.pid for child in psutil.Process(process.pid).children())


SIGNALS: dict[str, Callable[[subprocess.Popen[str]], None]] = {
    "SIGUSR1": lambda process: os.kill(ranks_of(process)[-1], signal.SIGUSR1),
    "SIGTERM": lambda process: process.terminate(),
    "Ctrl-C": lambda process: os.killpg(process.pid, signal.SIGINT),
    "SIGTERM to an engine": lambda process: os.kill(ranks_of(process)[0], signal.SIGTERM),
}


def has_trained(process: subprocess.Popen[str], result: Result, step: int) -> bool:
    assert process.poll() is None, process.communicate()[0][-5000:]
    return last_step(result) >= step


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_signals_while_a_round_is_in_flight(model: Path, tmp_path: Path) -> None:
    """SIGUSR1, SIGTERM and Ctrl-C arrive while engines sample and actors train, or wait for the round. Whatever is
    saved continues as the undisturbed run."""
    setting = replace(setting_of(3, model, ahead=1), num_steps=20)
    places = ["placement.rollout=0-1", "placement.actor=2-3", "rollout.max_num_seqs=4"]
    places += ["eval.interval=2", "eval.num_prompts=3"]
    folder, overrides = tmp_path / "run", [*setting.overrides, *places]
    (undisturbed,) = run_forked({tmp_path / "undisturbed": (4, overrides, "")}).values()
    script = ["tests/e2e/broken_train.py", "slow engines", "0", f"run.dir={tmp_path}", "run.name=run", FAKE, *COMMON]
    script += [*overrides, "checkpoint.save_interval=0", "checkpoint.keep_last=99"]
    result, num_postponed = Result("", folder), 0
    for way in SIGNALS:
        process = start("--nproc-per-node=4", *script)
        until(partial(has_trained, process, result, 2 + last_step(result)), "two steps", 100)
        SIGNALS[way](process)
        if way == "SIGUSR1":
            until(partial(steps_on, folder), "a checkpoint")
            saved = steps_on(folder)[0]
            process.terminate()
        output, last = finish(process, 60), last_step(result)
        num_postponed += bool(re.search(rf"at step {last}, stage \w+: step {last} is saved", output))
        assert process.returncode != 0
        assert f"step {last} is saved" in output, output[-3000:]
        assert last == steps_on(folder)[-1] < 20
    assert num_postponed, "no signal arrived after an update had begun, and before its round had ended"
    process = start("--nproc-per-node=4", *script)
    output = finish(process, 200)
    assert process.returncode == 0, output[-5000:]
    steps = Reference(setting, fake_engine, varied).run()
    fork = (4, [*overrides, f"checkpoint.resume={folder / 'checkpoints' / f'step_{saved}'}"], "")
    (forked,) = run_forked({tmp_path / "fork": fork}).values()
    for run, numbers in ((result, range(1, 21)), (forked, range(saved + 1, 21))):
        rows: dict[int, dict[str, float]] = {}  # a resumed run adds the evaluation that a signal has prevented
        for row in run.metrics:
            rows[int(row["step"])] = rows.get(int(row["step"]), {}) | learnt(row)
        assert set(numbers) <= set(rows)
        for number in numbers:
            assert_same_data(run.rollouts(number), steps[number - 1], setting)
            assert rows[number] == learnt(undisturbed.metrics[number - 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("ranks 0-1 have roles besides rollout", []),
        ("rank 1 has roles besides rollout", ["placement.rollout=0", "placement.actor,rollout=1"]),
    ],
    ids=["collocated", "hybrid"],
)
def test_shared_ranks_refuse_it(name: str, places: list[str], tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path}", "run.name=run", FAKE, "rollout.ahead=1", *places]
    process = start("--nproc-per-node=2", "train.py", *settings, restarts=True)
    output = finish(process, 100)
    assert process.returncode != 0
    remedy = "Set rollout.ahead=0, or separate the roles, for example placement.rollout=75% placement.actor=rest"
    assert output.count(f"rollout.ahead: got 1, but {name}; ") == output.count(remedy) == 1, output
    assert output.count("oneworld: fatal, will not be restarted") == 1
    assert "Traceback" not in output
