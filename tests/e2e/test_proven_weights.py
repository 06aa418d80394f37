"""Proven weights, on real vLLM: an engine that does not compute with what was published never samples a token of it."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl.config.schema import ROOT
from tests.launcher import Result, finish, start, train

pytestmark = pytest.mark.timeout(200)
SETTINGS = ["train.num_steps=3", "train.num_prompts_per_step=6", "eval.interval=0", "actor.lr=1e-3"]


def run_broken(folder: Path, what: str, num_ranks: int, *overrides: str, fails: bool = True) -> Result:
    """A run with this fault on rank 0."""
    run = [f"run.dir={folder}", "run.name=run", *SETTINGS, *overrides]
    process = start(f"--nproc-per-node={num_ranks}", "tests/e2e/broken_train.py", what, "0", *run)
    output = finish(process, 150)
    assert (process.returncode != 0) == fails, output[-4000:]
    return Result(output, folder / "run")


def make_qwen3(folder: Path, tied: bool) -> Path:
    """A random model with the demo's tokenizer."""
    model = folder / "model"
    shutil.copytree(ROOT / "configs" / "tiny", model)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=96,  # slices of 48 columns
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(model)
    return model


def test_proven_weights(tmp_path: Path) -> None:
    """The engine stops taking weights after version 1: version 2 is refused, and nothing is sampled from version 1 as
    if it were version 2."""
    output = run_broken(tmp_path, "loads once", 3, "placement.rollout=0-1", "placement.actor=2").output
    assert "version 2 of the weights, not transferred everywhere: " in output
    assert "rank 0 (engine 0): holds other values than it received of model.embed_tokens.weight" in output
    assert "rank 1 (engine 1)" not in output
    assert "step 1/3" not in output
    assert "step 2/3" not in output


def test_packed_copy_of_a_tied_head_is_caught_by_the_probe(tmp_path: Path) -> None:
    """vLLM's oneDNN layers repack on a reload, all but a tied head: every parameter is right, the logits are not."""
    output = run_broken(tmp_path, "packed layers", 1).output
    assert "cannot be read back exactly" in output
    assert "version 1 of the weights, not probed everywhere: rank 0 (engine 0): its logprobs of the probe" in output
    assert "step 0/3" not in output


@pytest.mark.slow
def test_repacking_engine_is_fed_through_its_loader(tmp_path: Path) -> None:
    """The same packed layers with a head of its own, which a reload packs again."""
    options = [f"model.path={make_qwen3(tmp_path, tied=False)}", "sync.probe_interval=1"]
    result = run_broken(tmp_path, "packed layers", 1, *options, fails=False)
    assert "computes with a packed copy of its weight, so what it holds cannot be read back exactly" in result.output
    assert len(result.metrics) == 3
    assert max(row["policy/mismatch_kl"] for row in result.metrics) < 1e-6


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tensor_parallel_engine_of_qwen3(tied: bool, tmp_path: Path) -> None:
    """Fused and sliced parameters, with and without a head of their own; two actors send."""
    options = [f"model.path={make_qwen3(tmp_path, tied)}", "rollout.tensor_parallel_size=2", "debug.save_rollouts=true"]
    options += ["placement.rollout=0-1", "placement.actor=2-3", "sync.probe_interval=1", "sync.bucket_mb=1"]
    options += ["algo.old_logprobs=always"]
    result = train(tmp_path / "run", 4, *SETTINGS, *options)
    assert "cannot be read back" not in result.output
    for step in (1, 2, 3):
        batch = result.rollouts(step)
        mask = batch.loss_mask
        assert batch.old_logprobs is not None
        torch.testing.assert_close(batch.rollout_logprobs[mask], batch.old_logprobs[mask], atol=1e-4, rtol=0)
