"""The weight sync between real processes. In every placement receivers get exactly what the actors hold. Every planted
fault is found, named and raised on every rank, and the next version arrives.

The engines here are fakes with real memory; test_placement_equality.py and test_proven_weights.py run vLLM.
"""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.launcher import run_program

NUM_RANKS = 6
SHAPE = {
    "vocab_size": 37,  # divides by no number of ranks
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,  # Qwen3's q_norm and k_norm have fewer rows than there are actors
    "max_position_embeddings": 64,
}
FAULTS = {
    "flipped byte": 0,
    "swapped slices": 1,
    "dropped bucket": 0,
    "loads nothing": 1,
    "fails in the middle": 0,
    "spoilt sender": 3,
    "late": 1,
}
JOBS = {
    "4 actors, faults": {
        "model": "qwen3",
        "dtype": "float32",
        "placement": {"rollout": "0-1", "actor": "2-5"},
        "faults": FAULTS,
        "other_plan": 1,
    },
    "inference ranks": {
        "model": "llama",
        "dtype": "bfloat16",
        "placement": {"rollout": "0", "inference": "1-3", "actor": "4-5"},
    },
    "2 replicas of 2": {
        "model": "qwen3",
        "dtype": "bfloat16",
        "placement": {"rollout": "0-1", "actor": "2-5"},
        "num_replicas": 2,
    },
    "collocated": {"model": "llama", "dtype": "float32", "placement": {"actor,rollout": "all"}},
    "collocated, 3 replicas of 2, transport": {
        "model": "qwen3",
        "dtype": "float32",
        "placement": {"actor,rollout": "all"},
        "num_replicas": 3,
        "verify": "transport",
    },
    "hybrid, off": {
        "model": "llama",
        "dtype": "float32",
        "placement": {"actor,rollout": "0-1", "rollout": "2-4", "actor": "5"},
        "verify": "off",
    },
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Run all jobs; return what each rank saw, by job."""
    folder = tmp_path_factory.mktemp("sync")
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False))
    for name, model in (("llama", llama), ("qwen3", qwen3)):
        model.bfloat16().float().save_pretrained(folder / name)  # exact in both dtypes
    jobs = json.dumps(list(JOBS.values()))
    words = ["tests/distributed/sync_worker.py", str(NUM_RANKS), str(folder), jobs]
    code, output = run_program(*words, timeout_s=200)
    assert code == 0, output[-6000:]
    return {
        name: [json.loads((folder / f"{number}.{rank}.json").read_text()) for rank in range(NUM_RANKS)]
        for number, name in enumerate(JOBS)
    }


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", JOBS)
def test_every_receiver_holds_what_the_actors_hold(name: str, seen: dict[str, list[dict]]) -> None:
    """The worker compares every tensor of every receiver with the files, and fails if one differs."""
    expected = [1, 2, 3, *range(4, 4 + len(JOBS[name].get("faults", {})))]
    assert [rank["versions"] for rank in seen[name]] == [expected] * NUM_RANKS


@pytest.mark.timeout(240)
def test_every_rank_knows_the_result_of_the_probe(seen: dict[str, list[dict]]) -> None:
    """All actors decide by the metrics which step is best. The fake engines have no model that could be probed."""
    first, *others = (rank["metrics"] for rank in seen["inference ranks"])
    assert len(first) == 3 and all(0 <= metrics["policy/probe_gap"] < 0.25 for metrics in first)
    assert others == [first] * (NUM_RANKS - 1)
    assert not any("policy/probe_gap" in metrics for rank in seen["collocated"] for metrics in rank["metrics"])


@pytest.mark.timeout(240)
def test_every_rank_knows_how_fast_the_transfer_was(seen: dict[str, list[dict]]) -> None:
    """It is a part of the time that `publish` takes, on every rank."""
    for name in ("inference ranks", "collocated", "2 replicas of 2"):
        for rank in seen[name]:
            for metrics, first, seconds in zip(rank["metrics"], seen[name][0]["metrics"], rank["seconds"], strict=True):
                assert metrics["perf/sync_gb_per_s"] == first["perf/sync_gb_per_s"]
                assert rank["num_bytes"] / 1e9 / seconds < metrics["perf/sync_gb_per_s"] < 100


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("flipped byte", ["rank 0 (engine 0): received other bytes than were sent of model.embed_tokens.weight"]),
        ("swapped slices", ["rank 1 (engine 1): received other bytes than were sent of", "q_proj.weight"]),
        ("dropped bucket", ["rank 0 (engine 0): holds other values than it received of model.layers.0"]),
        ("loads nothing", ["rank 1 (engine 1): holds other values than it received of", "more tensors"]),
        ("fails in the middle", ["transferred everywhere: rank 0 (engine 0): ZeroDivisionError: planted\n"]),
        ("spoilt sender", ["rank 0 (engine 0): received other", "rank 1 (engine 1): received other"]),
        ("late", ["no word from rank 1 (engine 1) within sync.join_timeout_s = 2 s"]),
        ("other plan", ["rank 1 (engine 1) derived another plan for the weight sync than rank 2"]),
    ],
)
def test_fault_is_named_on_every_rank(fault: str, texts: list[str], seen: dict[str, list[dict]]) -> None:
    errors = [rank["errors"].get(fault) for rank in seen["4 actors, faults"]]
    assert errors[0], f"{fault} went unnoticed"
    assert errors == [errors[0]] * NUM_RANKS
    for text in texts:
        assert text in errors[0] + "\n"
    if fault != "other plan":
        assert f"version {4 + list(FAULTS).index(fault)} of the weights" in errors[0]
