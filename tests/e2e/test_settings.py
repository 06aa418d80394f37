"""Settings of whole runs, as a user types them: evaluation and saving switched off, optimizers, keys of critic and
reference, and writers of metrics."""

import importlib.util
import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from rl.config.load import load_config
from rl.model.memory import LIBRARIES, estimate
from rl.model.shape import ModelSize
from rl.placement.roles import plan
from rl.report.events import read_events
from tests import fake_wandb
from tests.launcher import ROOT, command_of, finish, run_forked_runs, start, steps_on, train, until

pytestmark = pytest.mark.timeout(250)
FAKE = ["rollout.engine=fake", "train.num_prompts_per_step=6", "eval.num_prompts=6"]
PPO = ["algo.advantage=gae", "algo.kl_coef=0.1", "algo.num_mini_batches=2"]
NEVER = ["checkpoint.save_interval=-1"]
TINY = json.loads((ROOT / "configs/tiny/config.json").read_text())
VARIED = "reward.function=tests/e2e/reward_functions.py:varied"
OWN_KEYS = [
    *("critic.offload=moments", "critic.recompute=full", "critic.max_tokens_per_micro_batch=40"),
    *("reference.offload=always", "reference.max_tokens_per_micro_batch=50"),
]


def installed(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def test_a_run_that_neither_evaluates_first_nor_saves(tmp_path: Path) -> None:
    """It also has an optimizer, keys of critic and reference, and a writer."""
    settings = [*FAKE, *PPO, *OWN_KEYS, *NEVER, "train.num_steps=3", "eval.interval=2", "eval.before_training=false"]
    settings += ["actor.optimizer=sgd", "metrics.writers=[wandb]", "run.project=mine"]
    arguments = [f"run.dir={tmp_path}", "run.name=run", *settings]
    process = start("--nproc-per-node=2", "train.py", *arguments, **fake_wandb.install(tmp_path))
    output = finish(process, 200)
    assert process.returncode == 0, output[-6000:]
    # 6 prompts x 8 samples x (16 + 6) tokens over 2 actors
    share = "oneworld: data-parallel size 2 (1 replica of 2 shards): a step has at most 528 tokens per actor on average"
    assert output.count(f"{share}, in micro-batches of up to 8,192\n") == 1, output
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["config"]
    assert recorded["rollout"]["max_num_seqs"] == 256, "settings that are derived are recorded"
    actor = [recorded["actor"][name] for name in ("max_tokens_per_micro_batch", "offload", "recompute")]
    assert actor == [8192, "none", "head"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [("eval/accuracy" in row) for row in rows if row["step"]] == [False, True, True]
    assert not any("eval/accuracy" in row for row in rows if row["step"] == 0)
    assert not [*(tmp_path / "run" / "checkpoints").glob("step_*")]
    (begun,) = (note["init"] for note in fake_wandb.notes(tmp_path) if "init" in note)
    assert (begun["project"], begun["name"]) == ("mine", "run")
    sent = [note for note in fake_wandb.notes(tmp_path) if "step" in note]
    assert [row["step"] for row in sent] == [row["step"] for row in rows]
    assert sent[-1]["values"]["critic/loss"] == rows[-1]["critic/loss"]


def test_settings_that_are_derived_from_gpus(tmp_path: Path) -> None:
    """A dry run derives what the run does, also for evaluations and rounds, which it leaves out. A resume names only
    what the user has changed. The first two commands believe to have GPUs of 80 GB, and the last one has none."""
    place = [f"run.dir={tmp_path}", "run.name=run", *FAKE, "checkpoint.save_interval=1"]
    settings = [*place, "rollout.max_tokens_per_round=3", "eval.interval=5", "eval.num_prompts=200"]
    described: list[dict[str, Any]] = [
        {"num_ranks": 1, "overrides": ["--dry-run", *settings], "broken": "GPUs of 80 GB"},
        {"num_ranks": 1, "overrides": [*settings, "train.num_steps=1"], "broken": "GPUs of 80 GB"},
        {"num_ranks": 1, "overrides": [*settings, "train.num_steps=2"]},
    ]
    output = run_forked_runs(described, 200)
    tried, used = re.findall(r"^oneworld: derived for GPUs of 85.04 GB: (.*)$", output, re.M)
    assert tried == used and "rollout.max_num_seqs=200 " in used
    names = [word.partition("=")[0] for word in used.partition(" (")[0].split()]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["derived"] == names and record["config"]["rollout"]["max_num_seqs"] == 256, "that of a CPU"
    assert "run/checkpoints: resumes after step 1; settings changed since then: train.num_steps 1 -> 2\n" in output
    changed = [event.text for event in read_events(tmp_path / "run") if "changed: " in event.text]
    assert len(changed) == 1 and changed[0].endswith("changed: train.num_steps 1 -> 2"), changed


@pytest.mark.slow
def test_keys_of_critic_and_reference_change_no_result(tmp_path: Path) -> None:
    """They change only how passes are cut and where the state is, so that losses differ by rounding."""
    common = [*FAKE, *PPO, "train.num_steps=3", "eval.interval=0", "actor.lr=0.001", "critic.lr=0.001", VARIED]
    plain = train(tmp_path / "plain", 2, *common)
    assert all(row[metric] for row in plain.metrics for metric in ("critic/loss", "loss/policy", "loss/kl"))
    for name, settings in {
        "own": OWN_KEYS,
        "always": ["critic.offload=always", "reference.offload=rollout"],
        "inference": [*OWN_KEYS, "placement.inference=2", "placement.actor,rollout=0-1"],
    }.items():
        other = train(tmp_path / name, 3 if name == "inference" else 2, *common, *settings)
        for one, two in zip(plain.metrics, other.metrics, strict=True):
            for metric in ("critic/loss", "critic/grad_norm", "loss/policy", "loss/kl", "policy/entropy"):
                assert two[metric] == pytest.approx(one[metric], rel=1e-4), (name, metric)
        is_cut_anew = [one["critic/loss"] != two["critic/loss"] for one, two in zip(plain.metrics, other.metrics)]
        assert any(is_cut_anew) == (name != "always"), name


@pytest.mark.slow
def test_orders_to_a_run_that_never_saves(tmp_path: Path) -> None:
    """SIGUSR1 is an order to save, which it obeys. SIGTERM stops it, and it says that nothing was saved."""
    settings = [*FAKE, "train.num_steps=100000", "eval.interval=0", *NEVER]
    for name, ordered in (("asked", True), ("stopped", False)):
        process = start("--nproc-per-node=1", "train.py", f"run.dir={tmp_path}", f"run.name={name}", *settings)
        metrics, folder = tmp_path / name / "metrics.jsonl", tmp_path / name
        until(lambda m=metrics: m.exists() and '"step": 2,' in m.read_text(), "step 2", 120)
        if ordered:
            children = psutil.Process(process.pid).children()
            (rank,) = (each for each in children if any(part.endswith("train.py") for part in command_of(each)))
            rank.send_signal(signal.SIGUSR1)
            until(lambda f=folder: steps_on(f), "a checkpoint", 60)
        process.send_signal(signal.SIGTERM)
        output = finish(process, 60)
        assert len(steps_on(folder)) == int(ordered), output[-3000:]
        said = r"step \d+ is saved" if ordered else r"no step is saved, because checkpoint.save_interval=-1"
        assert re.search(rf"{said} \(run.name={name}\)", output), output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "muon", pytest.param("adamw_8bit", marks=installed("torchao"))])
def test_an_optimizer_in_a_run_that_resumes_on_other_ranks(optimizer: str, tmp_path: Path) -> None:
    """Another optimizer cannot use its state, and is refused by name before anything is loaded."""
    common = [*FAKE, "eval.interval=0", "actor.lr=0.01", VARIED]
    chosen = [*common, f"actor.optimizer={optimizer}"]
    train(tmp_path / "run", 2, *chosen, "train.num_steps=2")
    resumed = train(tmp_path / "run", 1, *chosen, "train.num_steps=4")
    assert "resumes after step 2" in resumed.output
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4]
    assert resumed.metrics[-1]["optim/grad_norm"] > 0
    before, after = (
        load_file(next((tmp_path / "run/checkpoints" / f"step_{step}").glob("model-00000-of-*.safetensors")))
        for step in (2, 4)
    )
    name = "model.norm.weight"
    assert not before[name].equal(after[name][: len(before[name])])
    arguments = [f"run.dir={tmp_path}", "run.name=run", *common, "train.num_steps=6"]
    process = start("--nproc-per-node=2", "train.py", *arguments)
    output = finish(process, 100)
    refusal = f"actor.optimizer: got adamw, but step 4 was saved with {optimizer}"
    assert process.returncode and output.count(refusal) == 1, output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "files"),
    [
        pytest.param("wandb", "wandb/offline-run-*/run-*.wandb", marks=installed("wandb")),
        pytest.param("swanlab", "swanlab/run-*/*", marks=installed("swanlab")),
    ],
)
def test_a_real_writer_without_a_network(package: str, files: str, tmp_path: Path) -> None:
    key = "0123456789abcdef0123456789abcdef01234567"
    variables = {f"{package.upper()}_MODE": "offline", f"{package.upper()}_API_KEY": key}
    common = [f"run.dir={tmp_path}", "run.name=run", *FAKE, "eval.interval=0", f"metrics.writers=[{package}]"]
    for num_steps in (2, 4):
        process = start("--nproc-per-node=1", "train.py", *common, f"train.num_steps={num_steps}", **variables)
        output = finish(process, 120)
        assert process.returncode == 0 and "has failed" not in output, output[-3000:]
        assert json.loads((tmp_path / "run" / f"{package}.json").read_text())["step"] == num_steps
    assert [*(tmp_path / "run").glob(files)]
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path for path in written if key.encode() in path.read_bytes()] == []


# A model that is large enough to be seen beside the libraries: 24 layers with 3.4 million parameters each.
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 8}
LARGE |= {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 128}
SEPARATE = ["placement.rollout=0", "placement.actor=1", "rollout.num_samples_per_prompt=2"]


def measured_actor(folder: Path, shape: dict[str, int], optimizer: str) -> float:
    """Return the bytes of host memory that a dry run measures for the only actor of a model without weights."""
    folder.mkdir()
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((ROOT / "configs/tiny" / file).read_bytes())
    (folder / "config.json").write_text(json.dumps(TINY | shape))
    settings = [f"run.dir={folder}/runs", f"model.path={folder}", f"actor.optimizer={optimizer}", *FAKE, *SEPARATE]
    process = start("--nproc-per-node=2", "train.py", "--dry-run", *settings, "train.num_prompts_per_step=1")
    output = finish(process, 240)
    found = re.search(r"rank 1 \(actor\): at most ([\d.]+) ([MG])B of host memory", output)
    assert process.returncode == 0 and found, output[-4000:]
    return float(found[1]) * {"M": 1e6, "G": 1e9}[found[2]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_memory_estimate_is_what_a_dry_run_measures(tmp_path: Path) -> None:
    """Compare the growth from the tiny to a large model, so that what both need does not count. The estimate is a
    lower bound: gathered layers, buckets of the weight sync and activations come on top. Measured: 9 % with adamw and
    32 % with sgd. With one moment more or less, neither estimate would hold."""
    per_layer = 4 * 512 * 512 + 3 * 512 * 1536
    size = ModelSize(24 * (per_layer + 2 * 512) + (TINY["vocab_size"] + 1) * 512, 24 * per_layer)
    tiny, grown = measured_actor(tmp_path / "tiny", {}, "adamw"), {}
    for optimizer in ("adamw", "sgd"):
        config = load_config(overrides=[f"actor.optimizer={optimizer}", *NEVER, *SEPARATE])
        *_, role = estimate(config, plan(config.placement, 1, 2), size)
        assert role.roles == ("actor",)
        estimated = role.host_on_cpu - LIBRARIES
        grown[optimizer] = measured_actor(tmp_path / optimizer, LARGE, optimizer) - tiny
        assert estimated <= grown[optimizer] <= 1.4 * estimated, (optimizer, estimated, grown, tiny)
