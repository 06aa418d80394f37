"""Runs whose responses take several rounds, compared with a plain single-process reference (tests/reference_rounds.py).

The runs use the fake engine, unless a test says otherwise.
"""

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rl.data.group_file import groups_from_bytes
from rl.rollout.dispatch import Sampling
from tests.e2e.reward_functions import mostly_equal, varied
from tests.launcher import Result, finish, start
from tests.reference_rounds import TINY, Reference, Setting, Step, fake_engine, make_model, prompts_of, vllm_engine
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
    assert_same_responses,
    assert_same_run,
    assert_trains_once,
    kill_a_rank,
    last_step,
    learnt,
    responses_of,
    run_forked,
    run_named,
    setting_of,
)

pytestmark = pytest.mark.timeout(330)  # the first test waits for the fixture's runs
LIMITS = (0, 3, 5)  # tokens per round; 0: no limit
PARTLY_SHARED = ["placement.rollout=0", "placement.actor,rollout=1", "placement.actor=2"]
# Number of ranks, overrides, and what is broken.
PLACEMENTS: dict[str, tuple[int, list[str], str]] = {
    "collocated": (2, [], ""),
    "disaggregated": (3, ["placement.rollout=0-1", "placement.actor=2"], "slow engine"),
    "tensor parallel, 2 replicas": (2, ["rollout.tensor_parallel_size=2", "actor.num_replicas=2"], ""),
    "one of two actors has an engine": (3, PARTLY_SHARED, ""),
}
ALL = [(placement, limit) for placement in PLACEMENTS for limit in LIMITS]
SLOW = [(placement, limit) for placement, limit in ALL if limit == 5 and placement != "collocated"]
SLOW.append(("one of two actors has an engine", 0))
QUICK = [key for key in ALL if key not in SLOW]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def references(model: Path) -> dict[int, list[Step]]:
    """What the definition of rounds says, by the limit of tokens."""
    return {limit: Reference(setting_of(limit, model), fake_engine, varied).run() for limit in LIMITS}


@pytest.fixture(scope="module")
def runs(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Result]:
    """A run for each placement and limit. The first placement saves every step."""
    return run_placements(QUICK, tmp_path_factory.mktemp("runs"), model)


def run_placements(keys: Sequence[tuple[str, int]], folder: Path, model: Path) -> dict[tuple[str, int], Result]:
    described = {}
    for name, limit in keys:
        num_ranks, overrides, broken = PLACEMENTS[name]
        saves = SAVES if name == "collocated" else []
        described[name, limit] = (num_ranks, [*setting_of(limit, model).overrides, *overrides, *saves], broken)
    return run_named(described, folder)


def test_the_reference_has_carried_queued_and_late_groups(references: dict[int, list[Step]]) -> None:
    """Otherwise the comparisons with it would show little."""
    orders = {limit: [group.number for step in steps for group in step.groups] for limit, steps in references.items()}
    assert orders[0] == list(range(24))
    assert len({tuple(order) for order in orders.values()}) == 3
    for limit in LIMITS[1:]:
        assert max(max(step.lags) for step in references[limit]) >= 2
        assert any(step.num_queued for step in references[limit])
        assert any(len(set(response.versions)) > 2 for step in references[limit] for response in step.responses)


@pytest.mark.parametrize(("placement", "limit"), QUICK)
def test_a_run_equals_the_reference(
    placement: str, limit: int, runs: dict[tuple[str, int], Result], references: dict[int, list[Step]], model: Path
) -> None:
    """Groups, tokens, versions, lags, rewards and losses, whoever samples and trains, and however slowly."""
    assert_same_run(runs[placement, limit], references[limit], setting_of(limit, model))


@pytest.mark.slow
def test_the_other_placements_and_limits_equal_the_reference(
    references: dict[int, list[Step]], model: Path, tmp_path: Path
) -> None:
    for (_, limit), result in run_placements(SLOW, tmp_path, model).items():
        assert_same_run(result, references[limit], setting_of(limit, model))


def test_the_bound_of_the_lag_is_printed(runs: dict[tuple[str, int], Result]) -> None:
    """12 tokens take 4 rounds of 3 tokens, and 3 rounds of 5. The bound is 2 M - 3."""
    output = runs["collocated", 0].output
    for used, num_rounds, bound in ((3, 4, 5), (5, 3, 3)):
        text = f"takes up to {num_rounds} rounds, so a token is trained on at most {bound} updates after"
        assert output.count(text) == sum(limit == used for _, limit in QUICK)


def test_tokens_do_not_depend_on_the_limit(runs: dict[tuple[str, int], Result]) -> None:
    """The fake engine ignores the weights, so this must hold whatever the learning rate is."""
    assert_same_responses([runs["collocated", limit] for limit in LIMITS], num_groups=16)


# Where the run of 2 collocated ranks goes on.
ELSEWHERE: dict[str, Run] = {
    "same ranks": (2, [], ""),
    "1 rank": (1, [], ""),
    "rollout 1, actor 2": (3, ["placement.rollout=0", "placement.actor=1-2"], "slow engine"),
    "rollout 2, actor 1": (3, ["placement.rollout=0-1", "placement.actor=2"], ""),
}


def fork_after(step: int, place: str, whole: Result, setting: Setting) -> Run:
    """Return a run that forks another one after this step, in this placement."""
    num_ranks, overrides, broken = ELSEWHERE[place]
    resume = f"checkpoint.resume={whole.folder / 'checkpoints' / f'step_{step}'}"
    return num_ranks, [*setting.overrides, *overrides, resume], broken


RESUMED = {"same ranks": 2, "rollout 1, actor 2": 4}  # by placement, the step after which the run is forked


@pytest.mark.parametrize("place", RESUMED)
def test_a_resumed_run_continues_its_responses(
    place: str,
    runs: dict[tuple[str, int], Result],
    variants: dict[str, Result],
    references: dict[int, list[Step]],
    model: Path,
) -> None:
    """On the same ranks all numbers are equal. In another placement the data are, and losses but for rounding."""
    whole, steps, setting, after = runs["collocated", 3], references[3], setting_of(3, model), RESUMED[place]
    assert steps[after - 1].num_carried
    assert any(steps[step - 1].num_queued for step in RESUMED.values()), "no checkpoint holds a finished group"
    assert_continues(variants[f"resumed on {place}"], after, place == "same ranks", steps, whole, setting)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_resumes_after_every_step(
    runs: dict[tuple[str, int], Result], references: dict[int, list[Step]], model: Path, tmp_path: Path
) -> None:
    whole, steps, setting = runs["collocated", 3], references[3], setting_of(3, model)
    forks = {(step, place): tmp_path / f"{step} {place}" for step in range(1, 6) for place in ELSEWHERE}
    described = {fork: fork_after(step, place, whole, setting) for (step, place), fork in forks.items()}
    results = run_forked(described, timeout_s=800)
    for (step, place), fork in forks.items():
        assert_continues(results[fork], step, place == "same ranks", steps, whole, setting)


CHANGES = {
    "no limit": ["rollout.max_tokens_per_round=0"],
    "another limit": ["rollout.max_tokens_per_round=5"],
    "smaller batches": ["train.num_prompts_per_step=3", "train.num_steps=9"],
    "larger batches": ["train.num_prompts_per_step=9"],
    "longer responses": ["rollout.max_new_tokens=20", "train.num_steps=9"],
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_fork_with_other_settings_trains_on_every_prompt_once(
    runs: dict[tuple[str, int], Result], model: Path, tmp_path: Path
) -> None:
    """What was in flight is trained on, and no prompt is skipped or repeated."""
    whole, setting = runs["collocated", 3], setting_of(3, model)
    num_ranks, overrides, broken = fork_after(3, "same ranks", whole, setting)
    forks = {name: tmp_path / name for name in CHANGES}
    results = run_forked({forks[name]: (num_ranks, [*overrides, *CHANGES[name]], broken) for name in CHANGES})
    for fork in forks.values():
        assert_trains_once(results[fork], whole, 3, setting)


# Settings that a run with a limit must bear, in which the data are those of the reference.
ALGORITHMS: dict[str, Run] = {
    "mini-batches and epochs": (2, ["algo.num_mini_batches=2", "algo.num_epochs=2", "rollout.max_num_seqs=5"], ""),
    "critic": (2, ["algo.advantage=gae", "critic.lr=1e-3", "critic.warmup_steps=1"], ""),
    "KL, inference rank, evaluation": (
        3,
        [
            *("algo.kl_coef=0.1", "placement.rollout=0", "placement.inference=1", "placement.actor=2"),
            *("eval.interval=2", "eval.num_prompts=5"),
        ],
        "",
    ),
    "decoupled": (
        2,
        ["algo.old_logprobs=always", "algo.correction=token", "algo.mask_truncated=true", "actor.offload=rollout"],
        "",
    ),
    "an engine fails": (2, [], "engine, once"),
    "full KL, one of two actors has an engine": (
        3,
        ["algo.kl_coef=0.1", "algo.kl_estimator=full", *PARTLY_SHARED],
        "",
    ),
    "actor with engine, engine alone": (2, ["placement.rollout=0", "placement.actor,rollout=1"], ""),
}
# Runs whose responses have drawn lengths, without seeds of the tokens.
LENGTHS = ["debug.mean_response_tokens=5", "rollout.deterministic=false"]
DRAWN: dict[str, Run] = {
    "drawn lengths": (1, [*LENGTHS, "rollout.max_tokens_per_round=0", "eval.interval=3", "eval.num_prompts=5"], ""),
    "drawn lengths, rounds": (2, [*LENGTHS, "placement.rollout=0", "placement.actor=1"], ""),
}
DYNAMIC = (2, [f"reward.function={FUNCTIONS}:mostly_equal"], "")
EPOCHS = (2, ["train.num_epochs=2"], "")
METRICS = {f"rollout/{name}" for name in ("lag_mean", "lag_max", "carried", "queue")}


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten prompts."""
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    file.write_text("".join((TINY / "train.jsonl").read_text().splitlines(keepends=True)[:10]))
    return file


def epochs_setting(model: Path, small_data: Path) -> Setting:
    """Two epochs over ten prompts, in 5 steps."""
    return replace(setting_of(3, model), data=small_data, num_groups=20, num_steps=5)


def dynamic_setting(model: Path) -> Setting:
    return replace(setting_of(3, model), is_dynamic=True, num_steps=4)


@pytest.fixture(scope="module")
def variants(
    model: Path,
    small_data: Path,
    runs: dict[tuple[str, int], Result],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Result]:
    """Further runs with a limit of 3 tokens."""
    described: dict[str, Run] = {}
    for name, setting, (num_ranks, overrides, broken) in (
        *((name, replace(setting_of(3, model), num_steps=3), run) for name, run in (ALGORITHMS | DRAWN).items()),
        ("dynamic sampling", dynamic_setting(model), DYNAMIC),
        ("epochs", epochs_setting(model, small_data), EPOCHS),
    ):
        described[name] = (num_ranks, [*setting.overrides, *overrides], broken)
    for place, after in RESUMED.items():
        described[f"resumed on {place}"] = fork_after(after, place, runs["collocated", 3], setting_of(3, model))
    return run_named(described, tmp_path_factory.mktemp("variants"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_bears_a_limit(
    name: str, variants: dict[str, Result], references: dict[int, list[Step]], model: Path
) -> None:
    result = variants[name]
    rows, steps = result.metrics, references[3][:3]
    for number, (row, step) in enumerate(zip(rows, steps, strict=True), start=1):
        assert_same_data(result.rollouts(number), step, setting_of(3, model))
        assert row.keys() >= METRICS
        assert row["rollout/lag_max"] == max(step.lags) <= 5
        assert (row["rollout/carried"], row["rollout/queue"]) == (step.num_carried, step.num_queued)
    assert rows[-1]["optim/grad_norm"] > 0


def test_an_evaluation_ignores_the_limit(variants: dict[str, Result]) -> None:
    """It is no round: only max_new_tokens truncates its responses."""
    lines = (variants["KL, inference rank, evaluation"].folder / "eval/step_2.eval.jsonl").read_text().splitlines()
    responses = [response for line in lines for response in json.loads(line)["responses"]]
    assert max(response["num_tokens"] for response in responses) > 3
    assert all(response["is_truncated"] <= (response["num_tokens"] == 12) for response in responses)


def test_drawn_lengths_are_equal_for_every_limit_and_placement(variants: dict[str, Result], model: Path) -> None:
    sampling = Sampling(3, 1.0, max_new_tokens=12, mean_tokens=5)
    prompts = prompts_of(setting_of(3, model), 40)
    found: dict[str, dict[int, list[int]]] = {}
    for name in DRAWN:
        files = (variants[name].folder / "rollouts").iterdir()
        groups = [group for file in files for group in groups_from_bytes(file.read_bytes())]
        found[name] = {each.number: each.batch.response_lengths.tolist() for each in groups}
        assert len(found[name]) == len(groups) == 3 * 4
        for number, lengths in found[name].items():
            assert lengths == [sampling.length(prompts[number], sample) for sample in range(3)]
        assert {length > 3 for lengths in found[name].values() for length in lengths} == {True, False}
    whole, rounds = found.values()
    assert whole != rounds and whole.keys() & rounds.keys(), "the limit changes which groups are trained on first"
    lines = (variants["drawn lengths"].folder / "eval/step_3.eval.jsonl").read_text().splitlines()
    lengths = [response["num_tokens"] for line in lines for response in json.loads(line)["responses"]]
    assert len(set(lengths)) > 1, "every response of the evaluation is equally long"


def test_dynamic_sampling_keeps_informative_groups_in_the_queue(variants: dict[str, Result], model: Path) -> None:
    result, setting = variants["dynamic sampling"], dynamic_setting(model)
    steps = Reference(setting, fake_engine, mostly_equal).run()
    assert any(step.num_queued for step in steps), "no informative group is left over"
    for number, (row, step) in enumerate(zip(result.metrics, steps, strict=True), start=1):
        assert_same_data(result.rollouts(number), step, setting)
        assert_same_metrics(row, step, setting)
        assert row["rollout/lag_max"] <= 6
        assert all(len(set(group.rewards)) > 1 for group in step.groups)


def test_epochs_are_drained(variants: dict[str, Result], model: Path, small_data: Path) -> None:
    """Each of the 10 prompts is trained on twice, and nothing is left in flight."""
    result, setting = variants["epochs"], epochs_setting(model, small_data)
    steps = Reference(setting, fake_engine, varied).run()
    for number, (row, step) in enumerate(zip(result.metrics, steps, strict=True), start=1):
        assert_same_data(result.rollouts(number), step, setting)
        assert_same_metrics(row, step, setting)
    counts = Counter({prompt: len(samples) for prompt, samples in responses_of(result).items()})
    assert len(counts) == 10
    assert set(counts.values()) == {2 * setting.num_samples}
    assert (result.metrics[-1]["rollout/carried"], result.metrics[-1]["rollout/queue"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ahead", [0, 1])
def test_twenty_kills_change_nothing(ahead: int, model: Path, tmp_path: Path) -> None:
    """Ranks are killed at random moments. Every group is trained on once, in the same order, with the same tokens, and
    all metrics are those of an undisturbed run."""
    setting, source = replace(setting_of(3, model, ahead), num_steps=40), random.Random(0)
    overrides = [*setting.overrides, *SAVES, "placement.rollout=0-1", "placement.actor=2-3"]
    (undisturbed,) = run_forked({tmp_path / "undisturbed": (4, overrides, "")}).values()
    script = ["tests/e2e/broken_train.py", "slow engines", "0", f"run.dir={tmp_path}", "run.name=run", FAKE, *COMMON]
    process = start("--nproc-per-node=4", *script, *overrides, restarts=True)
    result, num_kills = Result("", tmp_path / "run"), 0
    while num_kills < 20:
        last, deadline = last_step(result), time.monotonic() + 200
        while last_step(result) == last:  # a world that has begun, and made progress
            assert process.poll() is None, process.communicate()[0][-5000:]
            assert time.monotonic() < deadline, f"no step after {num_kills} kills"
            time.sleep(0.05)
        time.sleep(source.uniform(0, 0.5))
        num_kills += kill_a_rank(process, source)
        assert last_step(result) < setting.num_steps, f"only {num_kills} kills before the last step; take more steps"
    output = finish(process, 300)
    assert process.returncode == 0, output[-5000:]
    assert output.count("resumes after step") >= 15
    steps = Reference(setting, fake_engine, varied).run()
    for number, (row, step) in enumerate(zip(result.metrics, steps, strict=True), start=1):
        assert_same_data(result.rollouts(number), step, setting)
        assert learnt(row) == learnt(undisturbed.metrics[number - 1])


REAL_PLACEMENTS: dict[str, Run] = {
    "collocated": (2, [], ""),
    "disaggregated": (2, ["placement.rollout=0", "placement.actor=1"], ""),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_engines_equal_the_reference(tmp_path: Path) -> None:
    """The reference samples from the weights of each version with vLLM's noise. So wrong weights, and noise that
    repeats, change tokens."""
    import vllm._C  # noqa: F401  the operator that draws a token

    settings = {limit: Setting(**REAL_SHAPE, max_tokens_per_round=limit) for limit in (0, 1, 2)}
    described = {
        tmp_path / f"{place} {limit}": (num_ranks, [*setting.overrides, *overrides], broken)
        for place, (num_ranks, overrides, broken) in REAL_PLACEMENTS.items()
        for limit, setting in settings.items()
    }
    results = run_forked(described, REAL, timeout_s=800)
    for limit, setting in settings.items():
        steps = Reference(setting, vllm_engine, varied).run()
        assert bool(max(max(step.lags) for step in steps)) == bool(limit)
        for place in REAL_PLACEMENTS:
            result = results[tmp_path / f"{place} {limit}"]
            for number, (row, step) in enumerate(zip(result.metrics, steps, strict=True), start=1):
                # A step of AdamW turns rounding of small gradients into differences of the weights, and so of logprobs.
                assert_same_data(result.rollouts(number), step, setting, tolerance=1e-3)
                assert_same_metrics(row, step, setting, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_tokens_do_not_depend_on_the_limit(tmp_path: Path) -> None:
    """With a learning rate of 0, every round samples from the same weights."""
    described = {}
    for limit in (0, 1, 2, 4):
        setting = Setting(**REAL_SHAPE | {"lr": 0.0}, max_tokens_per_round=limit)
        described[tmp_path / f"{limit}"] = (2, setting.overrides, "")
    results = run_forked(described, REAL, timeout_s=800)
    assert_same_responses([*results.values()], num_groups=8)
    lengths = {len(tokens) for samples in responses_of(results[tmp_path / "0"]).values() for tokens in samples}
    assert len(lengths) > 2, "responses of many lengths are needed"


KEPT_PLACEMENTS = {
    "collocated": [],
    "disaggregated": ["placement.rollout=0-1", "placement.actor=2"],
    "one of two actors has an engine": PARTLY_SHARED,
}
LONG = Setting(**REAL_SHAPE | {"lr": 0.0, "max_new_tokens": 60}, max_tokens_per_round=30)
BLOCK = 32  # tokens of the KV cache; a prompt and 30 tokens fill one block


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kept_kv_caches_are_used_in_every_placement(tmp_path: Path) -> None:
    """All responses take two rounds. Both have the same weights, so tokens are those of a run that computes again."""
    settings = [*LONG.overrides, "debug.mean_response_tokens=60", f"rollout.engine_options={{block_size: {BLOCK}}}"]
    described: dict[Path, Run] = {tmp_path / "again": (2, settings, "")}
    for name, place in KEPT_PLACEMENTS.items():
        described[tmp_path / name] = (2 if not place else 3, [*settings, *place, "rollout.keep_kv=true"], "")
    results = run_forked(described, REAL, timeout_s=500)
    assert_same_responses([*results.values()], num_groups=LONG.num_steps * LONG.num_prompts)
    assert all(row["rollout/kept_kv_tokens"] == 0 for row in results[tmp_path / "again"].metrics)
    for name in KEPT_PLACEMENTS:
        kept = [row["rollout/kept_kv_tokens"] for row in results[tmp_path / name].metrics]
        # An engine that was slow in one round leaves some of its groups to the other one.
        assert sum(kept) > 0.75 * LONG.num_steps * LONG.num_prompts * LONG.num_samples * BLOCK, (name, kept)
