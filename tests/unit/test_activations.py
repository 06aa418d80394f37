"""The estimates of rl/model/activations.py, compared with peaks that were measured on an H200."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.config.load import load_config
from rl.config.schema import ROOT, Config, LoraConfig, Recompute
from rl.model.activations import (
    FRAGMENTS,
    LOGITS_BYTES,
    engine_memory,
    max_batched_tokens,
    scoring_bytes,
    update_memory,
)
from rl.model.shape import ModelShape, ModelSize, measure_size, read_shape

GB, GIB = 1e9, 2**30
LLAMA_1_7B = ModelShape(24, 2048, 8192, 32, 32, 64, 49_152, is_tied=True)
QWEN3_1_7B = ModelShape(28, 2048, 6144, 16, 8, 128, 151_936, is_tied=True, has_qk_norm=True)
QWEN3_0_6B = ModelShape(28, 1024, 3072, 16, 8, 128, 151_936, is_tied=True, has_qk_norm=True)
QWEN2_5_1_5B = ModelShape(28, 1536, 8960, 12, 2, 128, 151_936, is_tied=True)
SMOLLM_135M = ModelShape(30, 576, 1536, 9, 3, 64, 49_152, is_tied=True)
WHOLE = LoraConfig()


def config_of(*settings: str) -> Config:
    return load_config(overrides=["model.dtype=bfloat16", *settings])


@pytest.mark.parametrize(
    ("shape", "num_tokens", "recompute", "settings", "measured", "error"),
    [
        # peak_allocated_gib of benchmarks/learner.py without 16 bytes per parameter, commit 4650326, 2026-11-19: 70
        # sequences of 575 tokens in two or three micro-batches
        (LLAMA_1_7B, 20_125, "none", [], 54.2 * GIB - 16 * 1.711 * GB, 0.06),
        (LLAMA_1_7B, 13_800, "head", [], 44.4 * GIB - 16 * 1.711 * GB, 0.14),
        (LLAMA_1_7B, 13_800, "head", ["actor.compile=false"], 61.3 * GIB - 16 * 1.711 * GB, 0.10),
        (QWEN3_1_7B, 20_125, "none", [], 60.6 * GIB - 16 * 1.721 * GB, 0.05),
        (QWEN3_0_6B, 20_125, "head", [], 29.5 * GIB - 16 * 0.596 * GB, 0.05),
        (QWEN3_0_6B, 13_800, "none", [], 25.7 * GIB - 16 * 0.596 * GB, 0.13),
        (QWEN2_5_1_5B, 20_125, "none", [], 56.2 * GIB - 16 * 1.544 * GB, 0.06),
        # gpu/memory_gb/other of a run of benchmarks/step.py, the same commit
        (LLAMA_1_7B, 20_125, "none", [], 30.75 * GB, 0.06),
        (QWEN3_1_7B, 20_125, "none", [], 37.49 * GB, 0.05),
        (QWEN2_5_1_5B, 20_480, "head", [], 31.19 * GB, 0.08),
    ],
)
def test_activations_of_an_update(
    shape: ModelShape, num_tokens: int, recompute: Recompute, settings: list[str], measured: float, error: float
) -> None:
    """What torch's allocator has reserved besides is not in these figures, so FRAGMENTS is left out."""
    memory = update_memory(config_of(*settings), shape, recompute, WHOLE)
    estimated = memory.fixed + memory.per_token / FRAGMENTS * num_tokens
    assert estimated / measured - 1 == pytest.approx(error, abs=0.01)


def test_bytes_of_a_token() -> None:
    """One layer of width 8 with 2 heads of 4, one of them for keys, and 16 in between, in bfloat16: it keeps
    2 x 8 + 2 x 12 + 2 x 16 = 72 elements, and its gradients are 12 + 6 x 8 + 3 x 16 = 108. Kept logits are freed before
    there are any."""
    shape = ModelShape(4, 8, 16, 2, 1, 4, 100, is_tied=True)
    settings: list[Recompute] = ["none", "head", "selective", "full"]
    none, head, selective, full = (update_memory(config_of(), shape, recompute, WHOLE) for recompute in settings)
    assert head.per_token == int(1.1 * 2 * (4 * 72 + 108))
    assert none.per_token == head.per_token, "there are only 100 logits"
    large = update_memory(config_of(), shape._replace(vocabulary=200), "none", WHOLE)
    assert large.per_token == int(1.1 * 2 * 4 * 72) + int(1.1 * 2 * 200)
    assert selective.per_token == int(1.1 * 2 * (2 * 72 + 2 * 8 + 72 + 108)), "one layer is computed again"
    assert full.per_token == int(1.1 * 2 * (4 * 8 + 72 + 108))
    assert none.fixed == head.fixed == selective.fixed == full.fixed
    wide = update_memory(load_config(overrides=["model.dtype=float32"]), shape, "head", WHOLE)
    assert wide.per_token == int(1.1 * 4 * (4 * 72 + 108))
    critic = update_memory(config_of(), shape, "none", WHOLE, is_critic=True)
    assert critic.per_token == head.per_token, "a critic has no logits"
    normed = update_memory(config_of(), shape._replace(has_qk_norm=True), "head", WHOLE)
    assert normed.per_token == int(1.1 * 2 * (4 * (72 + 12) + 108))


def test_bytes_whatever_the_number_of_tokens() -> None:
    """A layer has (2 x 3 x 4 + 3 x 16) x 8 = 576 parameters, embedding and head together 800. A model that is as small
    as this is gathered as a whole."""
    shape = ModelShape(4, 8, 16, 2, 1, 4, 100, is_tied=True)
    logits = LOGITS_BYTES
    gathered = 2 * (800 + 4 * 576)
    assert update_memory(config_of(), shape, "none", WHOLE).fixed == gathered + logits + 8 * 4 * 576 + 6 * 800
    adapters = LoraConfig(rank=4)
    assert update_memory(config_of(), shape, "none", adapters).fixed == gathered + logits, "the head has no gradient"
    critic = update_memory(config_of(), shape._replace(is_tied=False), "none", WHOLE, is_critic=True)
    assert critic.fixed == gathered + 8 * 4 * 576, "a critic has no logits, and no head of the vocabulary's size"
    full_kl = config_of("algo.kl_coef=0.1", "algo.kl_estimator=full")
    assert update_memory(full_kl, shape, "none", adapters).fixed == gathered + 2 * logits
    wide = ModelShape(4, 4096, 16_384, 32, 8, 128, 100, is_tied=True)
    in_layer, root = (2 * 40 * 128 + 3 * 16_384) * 4096, 100 * 4096
    large = update_memory(config_of(), wide, "none", WHOLE)
    assert large.fixed == 2 * (root + 3 * in_layer) + logits + 8 * in_layer + 6 * root


def test_a_scoring_pass_needs_less_than_an_update_of_as_many_tokens() -> None:
    config = config_of("inference.max_tokens_per_micro_batch=16384")
    assert scoring_bytes(config, QWEN3_0_6B, 16_384) < update_memory(config, QWEN3_0_6B, "full", WHOLE).of(16_384)


def test_memory_of_an_engine() -> None:
    """The KV cache of a token of Qwen3-0.6B has 28 x 2 x 8 x 128 elements. 8 samples share their prompt."""
    config = config_of("data.max_prompt_tokens=128", "rollout.max_new_tokens=512")
    size, of_token = ModelSize(596_049_920), 28 * 2 * 8 * 128 * 2
    engine = engine_memory(config, QWEN3_0_6B, size, 512, 512)
    assert engine.weights == 2 * size.num_parameters
    assert engine.kv == engine.enough_kv == of_token * (512 * (512 + 32) + 64 * 128)
    assert engine.least_kv == of_token * (128 + 512 + 32)
    assert engine.beside == 24 * 512 * 151_936
    # Measured: a share of 0.26 of 150.1 GB left 37.37 GB to the KV cache, so vLLM took 1.66 GB for the rest.
    assert 1.66 * GB < engine.weights + engine.other < 4 * GB
    alone = config_of(
        *("data.max_prompt_tokens=128", "rollout.max_new_tokens=512"),
        "rollout.engine_options={enable_prefix_caching: false}",
    )
    assert engine_memory(alone, QWEN3_0_6B, size, 512, 512).kv == of_token * 512 * (512 + 32 + 128)
    given = config_of("rollout.kv_cache_mb=100")
    assert engine_memory(given, QWEN3_0_6B, size, 512, 512).kv == 100 << 20
    two = config_of("data.max_prompt_tokens=128", "rollout.max_new_tokens=512", "rollout.tensor_parallel_size=2")
    half = engine_memory(two, QWEN3_0_6B, size, 512, 512)
    assert (half.weights, half.kv) == (size.num_parameters, engine.kv // 2)


@pytest.mark.parametrize(("longest", "enough"), [(512, 512), (2048, 2048), (8192, 2048), (32_768, 8192)])
def test_few_responses_reach_a_high_limit(longest: int, enough: int) -> None:
    config = config_of(f"rollout.max_new_tokens={longest}", "data.max_prompt_tokens=16")
    engine = engine_memory(config, SMOLLM_135M, ModelSize(1), 64, 64)
    of_token = 30 * 2 * 3 * 64 * 2
    assert engine.kv == of_token * (64 * (longest + 32) + 8 * 16)
    assert engine.enough_kv == of_token * (64 * (enough + 32) + 8 * 16)
    assert engine.least < engine.enough <= engine.total


def test_a_step_of_an_engine_has_room_for_all_sequences() -> None:
    assert [max_batched_tokens(count, None, 2, 1) for count in (8, 1024, 5000)] == [4096, 4096, 5000]


def test_a_step_of_a_small_engine_has_many_prompts() -> None:
    """512 MiB hold 17,476 tokens of (6 x 1,024 + 3 x 3,072) x 2 bytes, and half as many in float32."""
    assert max_batched_tokens(8, QWEN3_0_6B, 2, 1) == 16_384
    assert max_batched_tokens(8, QWEN3_0_6B, 4, 1) == 8192
    assert max_batched_tokens(8, QWEN3_0_6B, 4, 2) == 12_288, "with half of the MLP: 12,483 tokens"
    wide = QWEN3_0_6B._replace(hidden=8192, intermediate=28_672)
    assert max_batched_tokens(8, wide, 2, 1) == 4096


def test_the_shape_of_the_shipped_model() -> None:
    shape, size = read_shape(ROOT / "configs/tiny"), measure_size(ROOT / "configs/tiny")
    assert shape is not None and size is not None
    assert shape.size.num_in_matrices == size.num_in_matrices == 294_912
    assert abs(shape.size.num_parameters - size.num_parameters) < 2000, "only norms are not counted"


@pytest.mark.parametrize(
    ("about", "shape"),
    [
        (
            {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257, "tie_word_embeddings": True},
            ModelShape(12, 768, 3072, 12, 12, 64, 50_257, is_tied=True),
        ),
        (
            {"text_config": {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 10, "num_attention_heads": 4}},
            ModelShape(2, 64, 256, 4, 4, 16, 10, is_tied=False),
        ),
        (
            {
                **{"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 10, "num_attention_heads": 4},
                **{"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 999, "model_type": "qwen3_moe"},
                **{"num_experts_per_tok": 8, "moe_intermediate_size": 24},
            },
            ModelShape(2, 64, 192, 4, 2, 32, 10, is_tied=False, has_qk_norm=True),
        ),
        ({"num_hidden_layers": 2, "hidden_size": 64}, None),
        ({"num_hidden_layers": "two", "hidden_size": 64, "vocab_size": 10}, None),
        ({}, None),
        ([], None),
        (None, None),
        ({"text_config": "two layers"}, None),
    ],
)
def test_sizes_in_config_json(about: Any, shape: ModelShape | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert read_shape(tmp_path) == shape


@pytest.mark.parametrize(
    ("about", "is_tied"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "gemma2"}, True),  # transformers writes the key only if it is not the default of the family
        ({"model_type": "smollm3", "tie_word_embeddings": None}, True),
        ({"model_type": "gemma2", "tie_word_embeddings": False}, False),
        ({"text_config": {"model_type": "llama"}, "tie_word_embeddings": True}, True),
        ({"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": True}, False),
        ({"text_config": {"model_type": "gemma3_text"}}, True),
    ],
)
def test_whether_the_output_layer_has_the_weights_of_the_embedding(
    about: dict[str, Any], is_tied: bool, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 10}
    about |= {"text_config": sizes | about["text_config"]} if "text_config" in about else sizes
    (tmp_path / "config.json").write_text(json.dumps(about))
    shape = read_shape(tmp_path)
    assert shape is not None and shape.is_tied == is_tied


def test_a_folder_without_config_json_has_no_shape(tmp_path: Path) -> None:
    assert read_shape(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert read_shape(tmp_path) is None
