"""Whole runs of algorithms that carry more than a policy from step to step: a critic, an adapted coefficient, a prompt
stream that advances by what rewards say. On the fake engine; test_placement_equality has the real one."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rl.algo.advantages import is_informative
from rl.checkpoint.manifest import MANIFEST, Manifest
from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.data.batch import Batch
from rl.data.group_file import groups_from_bytes, groups_to_bytes, step_from_bytes
from rl.data.sources import read_data
from tests.independent_merge import assert_same_bytes, load_merged, merge_shards
from tests.launcher import Result, finish, start, train
from tests.own_functions import write_functions
from tests.rounds_runs import learnt
from tools.merge_checkpoint import main
from tools.replay import main as replay_step

pytestmark = pytest.mark.timeout(300)  # the fixtures' runs count for whoever comes first
FUNCTIONS = "tests/e2e/reward_functions.py"
NUM_PROMPTS, NUM_SAMPLES = 6, 4
SETTINGS = [
    *("rollout.engine=fake", f"train.num_prompts_per_step={NUM_PROMPTS}", "eval.interval=0", "actor.lr=3e-4"),
    *(f"rollout.num_samples_per_prompt={NUM_SAMPLES}", "checkpoint.save_interval=1", "checkpoint.keep_last=9"),
    *("debug.save_rollouts=true", f"reward.function={FUNCTIONS}:varied"),
]
PPO = [
    *(*SETTINGS, "algo.advantage=gae", "algo.lam=0.95", "critic.lr=1e-3", "critic.warmup_steps=1"),
    *("algo.num_mini_batches=2", "algo.kl_coef=0.5", "algo.kl_place=reward", "algo.kl_estimator=k1"),
    "algo.kl_target=1e-3",
]
DYNAMIC = [*SETTINGS, f"reward.function={FUNCTIONS}:mostly_equal", "algo.dynamic_sampling=true"]
MISTAKES = """
def mean(new_logprobs):
    return new_logprobs.mean()

def nan(new_logprobs):
    return new_logprobs / 0 * 0
"""
APART = ["placement.rollout=0", "placement.actor=1-2"]


def manifest_of(result: Result, step: int) -> Manifest:
    file = result.folder / "checkpoints" / f"step_{step}" / MANIFEST
    return Manifest.from_json(file.read_bytes(), str(file))


def shards(result: Result, step: int, kind: str = "model") -> list[Path]:
    return sorted((result.folder / "checkpoints" / f"step_{step}").glob(f"{kind}-*.safetensors"))


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("ppo") / "whole", 2, *PPO, "train.num_steps=4")


def killed_after(step: int, result: Result, folder: Path) -> Path:
    """A copy of the run as it would stand there."""
    shutil.copytree(result.folder, folder, ignore=shutil.ignore_patterns("rollouts", "merged"))
    for later in range(step + 1, len(result.metrics) + 1):
        shutil.rmtree(folder / "checkpoints" / f"step_{later}")
    return folder


def test_a_run_with_a_critic_resumes_with_the_same_numbers(ppo: Result, tmp_path: Path) -> None:
    """4 steps equal 2, a resume and 2, to the last bit: policy, critic, both optimizers, and the coefficient of the KL,
    which has moved. The second half uses a copy of the loss in a file of the user."""
    loss = f"{write_functions(tmp_path / 'own.py')}:clipped_ratio"
    resumed = train(killed_after(2, ppo, tmp_path / "run"), 2, *PPO, "train.num_steps=4", f"algo.loss={loss}")
    assert f"resumes after step 2; settings changed since then: algo.loss clip -> {loss}\n" in resumed.output
    assert [row["step"] for row in ppo.metrics] == [1, 2, 3, 4]
    for ours, theirs in zip(resumed.metrics, ppo.metrics, strict=True):
        assert learnt(ours) == learnt(theirs)
    for kind in ("model", "optimizer"):
        assert_same_bytes(merge_shards(shards(resumed, 4, kind)), merge_shards(shards(ppo, 4, kind)))
    coefficients = [row["policy/kl_coef"] for row in ppo.metrics[1:]]
    assert len({0.5, *coefficients}) == 4
    assert manifest_of(ppo, 4).state["kl_coef"] == coefficients[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "placement"), [(1, []), (3, APART)], ids=["1 rank", "apart"])
def test_and_in_another_placement(num_ranks: int, placement: list[str], ppo: Result, tmp_path: Path) -> None:
    """2 collocated ranks, then another world: the same tokens, values and losses."""
    other = train(killed_after(2, ppo, tmp_path / "run"), num_ranks, *PPO, "train.num_steps=4", *placement)
    assert "resumes after step 2" in other.output
    for step in (3, 4):
        got, expected = other.rollouts(step), ppo.rollouts(step)
        assert got.tokens.tolist() == expected.tokens.tolist()
        for name in ("values", "returns", "advantages"):
            assert getattr(got, name).tolist() == pytest.approx(getattr(expected, name).tolist(), abs=2e-4), name
    for ours, theirs in zip(other.metrics, ppo.metrics, strict=True):
        assert learnt(ours) == pytest.approx(learnt(theirs), rel=1e-3, abs=1e-4)


def test_a_critic_warms_up_alone(ppo: Result) -> None:
    """In the first step, for which it expects nothing yet. The policy is still the model's, to the bit, and so are its
    moments; in the second step the critic has learnt and the policy moves."""
    first, second = ppo.metrics[:2]
    assert "loss/policy" not in first and "optim/grad_norm" not in first
    assert first["critic/loss"] > 0 and second["critic/loss"] > 0 and second["optim/grad_norm"] > 0
    before = load_file(ROOT / "configs/tiny/model.safetensors")
    assert_same_bytes(merge_shards(shards(ppo, 1)), before)
    after = merge_shards(shards(ppo, 2))
    assert any(not tensor.equal(before[name]) for name, tensor in after.items())
    moments = merge_shards(shards(ppo, 1, "optimizer"))
    assert not any(tensor.any() for name, tensor in moments.items() if name.startswith("exp_avg"))
    assert moments["critic_exp_avg/lm_head.weight"].any()
    assert not ppo.rollouts(1).values.any()
    values = ppo.rollouts(2).values
    assert values.abs().max() > 1e-3
    assert [manifest_of(ppo, step).state["num_updates"] for step in (1, 2)] == [0, 2]
    assert [manifest_of(ppo, step).state["num_critic_updates"] for step in (1, 2)] == [2, 4]


def test_a_step_is_recomputed_from_its_files(ppo: Result, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, a critic, two mini-batches and a KL whose coefficient moves: one process gets the same numbers."""
    command = [sys.executable, "tools/replay.py", str(ppo.folder), "--step", "3"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, ""), shown
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines() if line.endswith("  equal")}
    for name in ("advantages", "returns", "reward/kl", "loss/policy", "optim/grad_norm", "critic/loss"):
        recorded, recomputed, _ = rows[name]
        assert float(recomputed) == pytest.approx(float(recorded), rel=1e-3) != 0, name
    assert float(rows["loss/policy"][0]) == pytest.approx(ppo.metrics[2]["loss/policy"], rel=1e-6)
    assert shown.stdout.endswith("match\n")
    places = [line.split()[0] for line in shown.stdout.splitlines()[3 : 3 + NUM_PROMPTS]]
    assert places == [str(number) for number in range(2 * NUM_PROMPTS, 3 * NUM_PROMPTS)], "places in the prompt stream"
    assert replay_step([str(ppo.folder), "--step", "1", "--json"]) == 0, "from model.path, with the critic alone"
    result = json.loads(capsys.readouterr().out)
    values = {each["name"]: each["recomputed"] for each in result["metrics"]}
    assert result["matches"] and values["critic/loss"] > 0 and "loss/policy" not in values


def test_a_replay_says_what_differs(ppo: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(ppo.folder, run, ignore=shutil.ignore_patterns("step_[134]", "logs"))
    metrics, file = run / "metrics.jsonl", run / "rollouts" / "step_3.rank_1.safetensors"
    recorded = metrics.read_text()
    rows = [json.loads(line) for line in recorded.splitlines()]
    rows[3]["loss/policy"] *= 1.01
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert replay_step([str(run), "--step", "3"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERS: ")]
    assert len(lines) == 1 and lines[0].startswith("DIFFERS: loss/policy: "), lines
    metrics.write_text(recorded)
    data = file.read_bytes()
    first, *others = groups_from_bytes(data)
    better = dataclasses.replace(first, batch=first.batch.replace(rewards=first.batch.rewards + 1))
    file.write_bytes(groups_to_bytes([better, *others], step_from_bytes(data)))
    assert replay_step([str(run), "--step", "3"]) == 1
    output = capsys.readouterr().out
    found = {line.split(": ")[1] for line in output.splitlines() if line.startswith("DIFFERS: ")}
    of_rewards = {"reward/mean", "reward/std", "advantages", "returns", "critic/return_mean"}
    assert of_rewards | {"critic/explained_variance"} == found, "the loss is that of the stored ones"
    file.unlink()
    assert replay_step([str(run), "--step", "3"]) == 2
    assert f"{file} is missing: the actors of step 3 were the ranks 0-1." in capsys.readouterr().err


def test_a_critic_is_not_merged(ppo: Result) -> None:
    main([str(ppo.folder), "--verify-logits"])
    merged = load_merged(ppo.folder / "merged" / "step_4")
    assert merged.keys() == load_file(ROOT / "configs/tiny/model.safetensors").keys()
    assert_same_bytes(merged, merge_shards(shards(ppo, 4)))


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return train(tmp_path_factory.mktemp("dynamic") / "whole", 1, *DYNAMIC, "train.num_steps=3")


def prompts_of(batch: Batch) -> list[list[int]]:
    """By group."""
    starts, lengths = batch.cu_lengths.tolist(), batch.prompt_lengths.tolist()
    sequences = range(0, batch.num_sequences, NUM_SAMPLES)
    return [batch.tokens[starts[s] : starts[s] + lengths[s]].tolist() for s in sequences]


def test_dynamic_sampling_keeps_the_first_informative_groups(dynamic: Result) -> None:
    """The prompts that should be kept, and how many are drawn for them, follow from the data alone."""
    config = load_config(None, [])
    stream = read_data(config, AutoTokenizer.from_pretrained(ROOT / config.model.path)).stream
    position = 0
    for row in dynamic.metrics:
        sampled, kept, count = 0, [], NUM_PROMPTS
        while len(kept) < NUM_PROMPTS:
            if sampled:  # as many as fill the batch if the share of informative groups stays the same
                count = min(NUM_PROMPTS, math.ceil((NUM_PROMPTS - len(kept)) * sampled / max(len(kept), 1)))
            taken = [stream.at(place) for place in range(position, position + count)]
            kept += [prompt.tokens for prompt in taken if int(prompt.answer) % 3 == 0]
            sampled, position = sampled + count, position + count
        batch = dynamic.rollouts(int(row["step"]))
        assert prompts_of(batch) == kept[:NUM_PROMPTS]
        assert batch.group_ids.tolist() == [place for place in range(NUM_PROMPTS) for _ in range(NUM_SAMPLES)]
        assert is_informative(batch.rewards, batch.group_ids).all()
        assert row["rollout/sampled_prompts"] == sampled > NUM_PROMPTS
        assert row["rollout/informative_prompts"] == len(kept)
        assert manifest_of(dynamic, int(row["step"])).state["position"] == position
        # the batch's rewards, and the function's of all that was sampled
        assert row["reward/mean"] == pytest.approx(batch.rewards.mean().item(), abs=1e-6)
        assert row["reward/mostly_equal"] != pytest.approx(row["reward/mean"], abs=1e-6)


def test_an_own_copy_of_an_advantage_gives_the_same_on_two_ranks(dynamic: Result, tmp_path: Path) -> None:
    own = f"{write_functions(tmp_path / 'own.py')}:group_relative"
    options = ["algo.options={group_relative: {normalize_std: true}}", "train.num_steps=2"]
    other = train(tmp_path / "run", 2, *DYNAMIC, f"algo.advantage={own}", *options)
    got, expected = other.rollouts(1), dynamic.rollouts(1)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.advantages.any() and got.advantages.equal(expected.advantages)
    for ours, theirs in zip(other.metrics, dynamic.metrics[:2], strict=True):
        assert learnt(ours) == pytest.approx(learnt(theirs), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean", "returned a tensor of shape []; it must return one loss per token, ["),
        pytest.param("nan", "returned NaN for ", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_loss_of_the_user_is_reported_once(name: str, message: str, tmp_path: Path) -> None:
    loss = f"{write_functions(tmp_path / 'own.py', MISTAKES)}:{name}"
    run = [f"run.dir={tmp_path}", "run.name=run", *SETTINGS, f"algo.loss={loss}"]
    process = start("--nproc-per-node=2", "train.py", *run)
    output = finish(process, 100)
    assert process.returncode != 0
    reports = [line for line in output.splitlines() if line.startswith("oneworld: ") and f"{loss} {message}" in line]
    assert len(reports) == 1, output
    assert ((tmp_path / "run" / "FATAL").exists()) == (name == "mean"), "a restart cannot help against a wrong shape"


@pytest.mark.slow
def test_dynamic_sampling_resumes_in_another_placement(dynamic: Result, tmp_path: Path) -> None:
    """A rank that does it all, then an engine apart: the same prompts, tokens, rewards and losses."""
    apart = ["placement.rollout=0", "placement.actor=1"]
    other = train(killed_after(1, dynamic, tmp_path / "run"), 2, *DYNAMIC, "train.num_steps=3", *apart)
    assert "resumes after step 1" in other.output
    for step in (2, 3):
        got, expected = other.rollouts(step), dynamic.rollouts(step)
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got.rewards.tolist() == expected.rewards.tolist()
        assert manifest_of(other, step).state["position"] == manifest_of(dynamic, step).state["position"]
    for ours, theirs in zip(other.metrics, dynamic.metrics, strict=True):
        assert learnt(ours) == pytest.approx(learnt(theirs), rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_run_that_had_no_critic_goes_on_with_a_fresh_one(dynamic: Result, tmp_path: Path) -> None:
    """Also: only one round is allowed, so the batch has fewer groups than there are mini-batches."""
    settings = ["algo.advantage=gae", "algo.max_sampling_rounds=1", "algo.num_mini_batches=6"]
    fork = [f"checkpoint.resume={dynamic.folder}", "train.num_steps=4", *settings]
    result = train(tmp_path / "fork", 1, *DYNAMIC, *fork)
    assert "resumes after step 3" in result.output
    (row,) = result.metrics
    batch = result.rollouts(4)
    assert not batch.values.any(), "its head starts at 0"
    assert row["critic/loss"] > 0
    assert row["rollout/sampled_prompts"] == NUM_PROMPTS
    assert 0 < row["rollout/informative_prompts"] < NUM_PROMPTS
    assert batch.num_sequences == NUM_SAMPLES * row["rollout/informative_prompts"]
    names = {part.kind for file in manifest_of(result, 4).files for part in file.slices}
    assert names == {"model", "exp_avg", "exp_avg_sq", "critic", "critic_exp_avg", "critic_exp_avg_sq"}


@pytest.mark.slow
def test_a_run_in_which_every_response_is_masked_goes_on(tmp_path: Path) -> None:
    """Responses of one token, which is hardly ever the stop token: nothing is learnt where all are masked, and the
    checkpoint of such a step is whole."""
    settings = ["algo.mask_truncated=true", "rollout.max_new_tokens=1", "train.num_steps=2", "run.seed=3"]
    result = train(tmp_path / "run", 2, *SETTINGS, "train.num_prompts_per_step=1", *settings)
    assert [row["rollout/truncated"] for row in result.metrics] == [1.0, 1.0], "choose another seed"
    assert [(row["policy/tokens"], row["loss/policy"]) for row in result.metrics] == [(0, 0), (0, 0)]
    first, second = (load_file(shards(result, step)[0]) for step in (1, 2))
    assert all(tensor.equal(second[name]) for name, tensor in first.items())
