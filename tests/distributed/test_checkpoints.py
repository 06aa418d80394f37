"""Checkpoints between real processes: every rank is a node, with a disk of its own unless it says otherwise.

The worlds train a tiny model without engines (checkpoint_world.py); tests/e2e/test_resume.py has whole runs.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl.checkpoint.manifest import MANIFEST, Manifest
from tests.distributed.checkpoint_world import Job
from tests.independent_merge import assert_same_bytes, load_merged, merge_shards
from tests.launcher import ROOT, activated_environment
from tools.merge_checkpoint import main

pytestmark = pytest.mark.timeout(150)
SHAPE = {
    "vocab_size": 37,  # divides by no number of ranks
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,  # Qwen3's q_norm and k_norm have fewer rows than there are actors
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}

EIGHT_BIT = {f"{moment}{part}" for moment in ("exp_avg", "exp_avg_sq") for part in ("", "_codes", "_scales")}
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(folder / "llama")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)).save_pretrained(folder / "qwen3")
    wide = SHAPE | {"hidden_size": 64, "intermediate_size": 128}  # 8-bit AdamW quantizes its matrices
    LlamaForCausalLM(LlamaConfig(**wide, tie_word_embeddings=True)).save_pretrained(folder / "wide")
    return folder


def worlds(*jobs: Job) -> list[dict[str, Any]]:
    """What came of each, one after the other."""
    command = [sys.executable, "tests/distributed/checkpoint_world.py", json.dumps([asdict(job) for job in jobs])]
    done = subprocess.run(command, cwd=ROOT, env=activated_environment(), capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout)


def run(*jobs: Job) -> None:
    for outcome in worlds(*jobs):
        assert outcome["ended"], outcome["output"][-4000:]


def log_of(job: Job) -> list[dict]:
    return [json.loads(line) for line in Path(job.log).read_text().splitlines()]


def disks(folder: Path, *names: str) -> list[str]:
    return [str(folder / name) for name in names]


def manifest_of(folder: str, step: int) -> Manifest:
    path = Path(folder) / "checkpoints" / f"step_{step}" / MANIFEST
    return Manifest.from_json(path.read_bytes(), str(path))


def files_of(folder: str, step: int) -> set[str]:
    place = Path(folder) / "checkpoints" / f"step_{step}"
    return {path.name for path in place.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("optimizer", "kinds"),
    [
        ("adamw", {"exp_avg", "exp_avg_sq"}),
        pytest.param("sgd", {"momentum"}, marks=pytest.mark.slow),
        pytest.param("muon", {"momentum", "exp_avg", "exp_avg_sq"}, marks=pytest.mark.slow),
        pytest.param("adamw_8bit", EIGHT_BIT, marks=[pytest.mark.slow, needs_torchao]),
    ],
)
def test_resume_at_any_number_of_ranks_with_the_same_state(
    optimizer: str, kinds: set[str], models: Path, tmp_path: Path
) -> None:
    """4 actors, then 1 of 2 ranks, 2 replicas of 2, 2 of 3: after every change of the world the state is what was
    saved, bit for bit, and the losses are those of a world that never stopped."""
    model, shared = str(models / ("wide" if optimizer == "adamw_8bit" else "qwen3")), str(tmp_path / "run")
    chosen = [f"actor.optimizer={optimizer}"]
    whole = Job(model, disks(tmp_path, *["whole"] * 4), 8, str(tmp_path / "whole.log"), settings=chosen)
    placements = [
        (4, {"actor,rollout": "all"}, 1),
        (2, {"rollout": "0", "actor": "1"}, 1),
        (4, {"actor,rollout": "all"}, 2),
        (3, {"rollout": "0", "actor": "1-2"}, 1),
    ]
    jobs = []
    for index, (num_ranks, placement, replicas) in enumerate(placements):
        settings, log = [f"actor.num_replicas={replicas}", *chosen], str(tmp_path / f"{index}.log")
        jobs.append(Job(model, [shared] * num_ranks, 2 * index + 2, log, placement, replicas, settings))
    run(whole, *jobs)
    expected = {entry["step"]: entry for entry in log_of(whole)}
    before = expected[0]["state"]
    for index, job in enumerate(jobs):
        resumed, *steps = log_of(job)
        assert (resumed["step"], resumed["state"]) == (2 * index, before)
        assert [entry["step"] for entry in steps] == [2 * index + 1, 2 * index + 2]
        for entry in steps:
            assert entry["taken"] == expected[entry["step"]]["taken"]
            assert entry["loss"] == pytest.approx(expected[entry["step"]]["loss"], abs=1e-5)
        before = steps[-1]["state"]
    assert [entry["state"] for entry in log_of(jobs[0])] == [expected[step]["state"] for step in (0, 1, 2)]
    saved = {part.kind for file in manifest_of(shared, 8).files for part in file.slices}
    assert saved == kinds | {"model"}


@pytest.mark.slow
@pytest.mark.timeout(450)  # for eight worlds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_resume_at_any_number_of_ranks(
    dtype: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 actors, then 2, 2 replicas of 2, and 3: adapters of rank 2, fewer than there are actors, and their moments are
    what was saved, bit for bit. The result of a merge is the policy. Another base model is refused."""
    model, shared = str(models / "qwen3"), str(tmp_path / "run")
    chosen = [f"model.path={model}", f"model.dtype={dtype}", "model.lora.rank=2", "model.lora.alpha=4"]
    whole = Job(model, disks(tmp_path, *["whole"] * 4), 8, str(tmp_path / "whole.log"), settings=chosen)
    jobs = []
    for index, (num_ranks, replicas) in enumerate([(4, 1), (2, 1), (4, 2), (3, 1)]):
        settings, log = [f"actor.num_replicas={replicas}", *chosen], str(tmp_path / f"{index}.log")
        jobs.append(Job(model, [shared] * num_ranks, 2 * index + 2, log, num_replicas=replicas, settings=settings))
    run(whole, *jobs)
    expected = {entry["step"]: entry for entry in log_of(whole)}
    before = expected[0]["state"]
    for index, job in enumerate(jobs):
        resumed, *steps = log_of(job)
        assert (resumed["step"], resumed["state"]) == (2 * index, before)
        for entry in steps:
            near = 1e-5 if dtype == "float32" else 1e-2
            assert entry["loss"] == pytest.approx(expected[entry["step"]]["loss"], abs=near)
        before = steps[-1]["state"]
    assert len({entry["state"] for job in jobs for entry in log_of(job)}) == 9, "adapters are trained"
    manifest = manifest_of(shared, 8)
    slices = [part for file in manifest.files for part in file.slices]
    assert {part.kind for part in slices} == {"model", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in part.name and part.dtype == "F32" for part in slices), "nothing of the base model"
    base = manifest.bases["model"]
    assert base == manifest_of(whole.folders[0], 8).bases["model"] and base.path == model
    with safe_open(f"{model}/model.safetensors", "pt") as file:
        assert set(base.tensors) == set(file.keys())

    main([shared, "--verify-logits"])
    main([shared, "--adapter", "--verify-logits"])
    told = [float(part.split()[0]) for part in capsys.readouterr().out.split("relative difference ")[1:]]
    assert len(told) == 2 and max(told) < (1e-5 if dtype == "float32" else 0.03)
    merged, plain = load_merged(tmp_path / "run/merged/step_8"), load_file(f"{model}/model.safetensors")
    changed = {
        name for name in plain if not torch.equal(merged[name].float(), plain[name].to(merged[name].dtype).float())
    }
    assert changed == {name for name in plain if name.endswith("_proj.weight")}

    other = shutil.copytree(model, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors")
    copied = shutil.copytree(model, tmp_path / "copied")
    (copied / "model.safetensors").rename(copied / "renamed.safetensors")
    (copied / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(plain, "renamed.safetensors")})
    )
    first = Job(str(other), [shared] * 2, 9, str(tmp_path / "last.log"), settings=chosen)
    second = replace(first, model=str(copied))
    refused, accepted = worlds(first, second)
    assert not refused["ended"] and accepted["ended"], accepted["output"][-4000:]
    assert "step 8 holds adapters of another base model (its model.norm.weight differs)" in refused["output"]
    (full,) = worlds(replace(second, num_steps=10, settings=[f"model.path={model}", f"model.dtype={dtype}"]))
    assert not full["ended"] and "set model.lora.rank=2" in full["output"]


def test_n_steps_equal_k_steps_a_resume_and_the_rest(models: Path, tmp_path: Path) -> None:
    """Bit for bit, random generators included."""
    model, log = str(models / "llama"), str(tmp_path / "parts.log")
    whole = Job(model, disks(tmp_path, "whole0", "whole1"), 6, str(tmp_path / "whole.log"))
    parts = [Job(model, disks(tmp_path, "node0", "node1"), num_steps, log) for num_steps in (2, 5, 6)]
    run(whole, *parts)
    assert [row for row in log_of(parts[0]) if "loss" in row] == [row for row in log_of(whole) if "loss" in row]
    for one, other in zip(whole.folders, parts[0].folders, strict=True):
        saved = [manifest_of(folder, 6).files for folder in (one, other)]
        slices = [{(part.key, part.offsets): part.digest for file in files for part in file.slices} for files in saved]
        assert slices[0] == slices[1]


@pytest.mark.slow
def test_a_step_is_saved_while_the_learner_lies_in_host_memory(models: Path, tmp_path: Path) -> None:
    """Away and back changes nothing, and what is saved meanwhile is what was trained."""
    kept = Job(str(models / "qwen3"), disks(tmp_path, "a", "a"), 3, str(tmp_path / "kept"))
    moved = Job(kept.model, disks(tmp_path, "b", "b"), 3, str(tmp_path / "moved"), settings=["actor.offload=rollout"])
    resumed = Job(kept.model, disks(tmp_path, "b", "b"), 4, str(tmp_path / "resumed"))
    run(kept, moved, resumed)
    assert [row["state"] for row in log_of(moved)] == [row["state"] for row in log_of(kept)]
    assert log_of(resumed)[0]["state"] == log_of(kept)[-1]["state"]
    for name in files_of(moved.folders[0], 3):
        step = "checkpoints/step_3"
        assert (tmp_path / "b" / step / name).stat().st_size == (tmp_path / "a" / step / name).stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 2])
def test_private_disks(copies: int, models: Path, tmp_path: Path) -> None:
    """Three nodes; the same in another order; one of them gone, with 1 copy (an error) and with 2 (it resumes)."""
    model, log = str(models / "llama"), str(tmp_path / "log")
    nodes = disks(tmp_path, "node0", "node1", "node2")
    turned = [nodes[2], nodes[0], nodes[1]]
    settings = [f"checkpoint.copies={copies}", "checkpoint.keep_last=1"]
    run(Job(model, nodes, 2, log, settings=settings))
    shards = [f"{kind}-0000{index}-of-00003.safetensors" for index in range(3) for kind in ("model", "optimizer")]
    for index, folder in enumerate(nodes):
        own = {name for name in shards if f"-0000{index}-" in name}
        copied = {name for name in shards if f"-0000{(index - 1) % 3}-" in name}
        small = {"probe.safetensors"} if index == 0 or (copies == 2 and index == 1) else set()
        assert files_of(folder, 2) == own | small | (copied if copies == 2 else set())
        assert files_of(folder, 1) == set()  # keep_last
    run(Job(model, turned, 3, log, settings=settings))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    left = Job(model, turned[:2], 4, log, settings=settings)
    (outcome,) = worlds(left)
    entries = log_of(left)
    resumed = [index for index, entry in enumerate(entries) if entry.get("resumed")]
    for index in resumed[1:]:
        before_it = entries[index - 1]
        assert (entries[index]["step"], entries[index]["state"]) == (before_it["step"], before_it["state"])
    if copies == 2:
        assert outcome["ended"], outcome["output"][-4000:]
        assert [entries[index]["step"] for index in resumed] == [0, 2, 3]
        return
    assert not outcome["ended"]
    assert "step 3 was committed, but no reachable disk holds 2 of its " in outcome["output"]
    assert "model-00002-of-00003.safetensors" in outcome["output"]
    assert "optimizer-00002-of-00003.safetensors" in outcome["output"]
    assert "was saved on " in outcome["output"]
    assert [path for path in before if not path.exists()] == []


def test_what_a_checkpoint_holds(models: Path, tmp_path: Path) -> None:
    """bfloat16 export beside float32 masters; what a merge needs, and logits that the exported weights give."""
    job = Job(
        str(models / "qwen3"), disks(tmp_path, "a", "a"), 1, str(tmp_path / "log"), settings=["model.dtype=bfloat16"]
    )
    run(job)
    place = tmp_path / "a" / "checkpoints" / "step_1"
    manifest = manifest_of(job.folders[0], 1)
    shards = [place / file.name for file in manifest.files if file.name.startswith("model-")]
    for shard in shards:
        with safe_open(shard, "pt") as handle:
            about = json.loads(handle.metadata()["oneworld"])
        assert (about["step"], about["run_id"]) == (1, manifest.run_id)
    merged = merge_shards(shards)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    folder = tmp_path / "merged"
    shutil.copytree(place / "hf", folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_config(type(Qwen3Config()).from_pretrained(folder), dtype=torch.bfloat16)
    model.load_state_dict(merged)
    probe = load_file(place / "probe.safetensors")
    logits = model(probe["tokens"].unsqueeze(0)).logits[0].float()
    assert probe["logits"].shape == (len(probe["tokens"]), 37)
    assert (logits - probe["logits"]).abs().max() < 0.05
    masters = {s.name: s.dtype for f in manifest.files for s in f.slices if s.kind == "master"}
    assert set(masters) == set(merged)
    assert set(masters.values()) == {"F32"}
    run(Job(job.model, job.folders, 2, str(tmp_path / "log2"), settings=job.settings))
    assert log_of(Job("", [], 0, str(tmp_path / "log2")))[0]["state"] == log_of(job)[-1]["state"]  # exact masters


@pytest.mark.parametrize(
    ("model", "dtype"), [pytest.param("llama", "float32", marks=pytest.mark.slow), ("qwen3", "bfloat16")]
)
def test_merged_shards_are_the_policy(
    model: str, dtype: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shards of three ranks on private disks: equal to an independent merge, and to the policy's logits at the save."""
    folders = disks(tmp_path, "a", "b", "c")
    run(Job(str(models / model), folders, 2, str(tmp_path / "log"), settings=[f"model.dtype={dtype}"]))
    main([folders[0], "--nodes", ",".join(folders[1:]), "--verify-logits", "--max-shard-size", "2kB"])
    merged = load_merged(tmp_path / "a/merged/step_2")
    assert_same_bytes(merged, merge_shards(sorted(tmp_path.glob("?/checkpoints/step_2/model-*"))))
    assert ("lm_head.weight" in merged) == (model == "qwen3"), "tied weights are there once"
    difference = float(capsys.readouterr().out.partition("relative difference ")[2])
    assert difference < (1e-6 if dtype == "float32" else 0.01)
    config = json.loads((tmp_path / "a/merged/step_2/config.json").read_bytes())
    config["rms_norm_eps"] = 1.0
    (tmp_path / "a/merged/step_2/config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as error:
        main([folders[0], "--nodes", ",".join(folders[1:]), "--verify-logits", "--max-shard-size", "2kB"])
    assert "differ from the policy's at the save" in str(error.value.code)
    (tmp_path / "a/checkpoints/step_2/probe.safetensors").unlink()
    with pytest.raises(SystemExit) as error:
        main([folders[0], "--nodes", ",".join(folders[1:]), "--verify-logits", "--max-shard-size", "2kB"])
    assert "no reachable place holds probe.safetensors of step 2" in str(error.value.code)


def test_kept_checkpoints_and_the_best_one(models: Path, tmp_path: Path) -> None:
    settings = ["checkpoint.keep_last=2", "checkpoint.keep_every=4", "checkpoint.best_metric=loss/policy"]
    job = Job(str(models / "llama"), disks(tmp_path, "a"), 9, str(tmp_path / "log"), settings=settings)
    run(job)
    losses = {entry["step"]: entry["loss"] for entry in log_of(job) if "loss" in entry}
    best = max(losses, key=lambda step: losses[step])
    steps = {int(path.name.removeprefix("step_")) for path in (tmp_path / "a" / "checkpoints").glob("step_*")}
    assert steps == {4, 8, 9} | {best}
    assert best not in (4, 8, 9), "the losses are such that the best step would be kept anyway"
    assert manifest_of(job.folders[0], 9).state["best"] == {"step": best, "value": losses[best]}


def kill(models: Path, folder: Path, num_kills: int, how: str) -> dict:
    command = [
        sys.executable,
        "tests/distributed/kill_saver.py",
        str(models / "llama"),
        str(folder),
        str(num_kills),
        how,
    ]
    done = subprocess.run(command, cwd=ROOT, env=activated_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_killed_saver_leaves_the_last_step_usable(models: Path, tmp_path: Path) -> None:
    assert kill(models, tmp_path, 8, "private")["kills"] == 8


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("how", ["private", "shared"])
def test_a_saver_killed_at_many_moments_leaves_the_last_step_usable(how: str, models: Path, tmp_path: Path) -> None:
    result = kill(models, tmp_path, 50, how)
    assert result["kills"] == 50
    assert result["steps_before_the_last_world"] > 10
