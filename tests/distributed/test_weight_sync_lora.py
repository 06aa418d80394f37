"""The weight sync of a model with adapters, between real processes: receivers hold the merged weights bit for bit, only
tensors with adapters are sent again, and every planted fault is found and named on every rank."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.adapted_model import save_exact
from tests.distributed.test_weight_sync import SHAPE
from tests.launcher import run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_RANKS = 6
SOME = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj", "down_proj"]}  # A has fewer rows than there are actors
DIGESTS = {
    "sent without a merge": 3,
    "swapped slices": 1,
    "overwritten fixed tensor": 0,
    "changed frozen weight": 4,
    "flipped byte": 0,
}
PROBE = {
    "no merge": [4, 5],
    "stale A": [4, 5],
    "stale B": [4, 5],
    "swapped rows of A": [4, 5],
    "swapped rows of B": [4, 5],
}
JOBS = {
    "4 actors": {
        "model": "qwen3",
        "dtype": "float32",
        "placement": {"rollout": "0-1", "actor": "2-5"},
        "lora": SOME,
        "faults": DIGESTS,
        "rebuilt": 1,
    },
    "inference ranks": {
        "model": "llama",
        "dtype": "float32",
        "placement": {"rollout": "0", "inference": "1-3", "actor": "4-5"},
        "lora": {"rank": 4, "alpha": 4},
        "faults": PROBE,
    },
    "2 replicas of 2": {
        "model": "qwen3",
        "dtype": "bfloat16",
        "placement": {"rollout": "0-1", "actor": "2-5"},
        "num_replicas": 2,
        "lora": SOME,
        "faults": {"another replica": 4},
        "rebuilt": 0,
    },
    "collocated": {
        "model": "llama",
        "dtype": "bfloat16",
        "placement": {"actor,rollout": "all"},
        "lora": SOME,
        "rebuilt": 3,
    },
    "hybrid, transport": {
        "model": "qwen3",
        "dtype": "float32",
        "placement": {"actor,rollout": "0-1", "rollout": "2-4", "actor": "5"},
        "verify": "transport",
        "lora": SOME,
        "rebuilt": 2,
    },
    "hybrid, off": {
        "model": "llama",
        "dtype": "float32",
        "placement": {"actor,rollout": "0-1", "rollout": "2-4", "actor": "5"},
        "verify": "off",
        "lora": SOME,
    },
}
Seen = dict[str, list[dict]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Run all jobs; return what each rank saw, by job. The worker fails if a receiver holds another weight than the
    files and adapters give in float64."""
    folder = tmp_path_factory.mktemp("sync")
    torch.manual_seed(0)
    save_exact(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)), folder / "llama")
    save_exact(Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=False)), folder / "qwen3")
    jobs = json.dumps(list(JOBS.values()))
    words = ["tests/distributed/sync_worker.py", str(NUM_RANKS), str(folder), jobs]
    code, output = run_program(*words, timeout_s=500)
    assert code == 0, output[-6000:]
    return {
        name: [json.loads((folder / f"{number}.{rank}.json").read_text()) for rank in range(NUM_RANKS)]
        for number, name in enumerate(JOBS)
    }


@pytest.mark.parametrize("name", JOBS)
def test_every_receiver_holds_the_merged_weights(name: str, seen: Seen) -> None:
    job = JOBS[name]
    last = 3 + len(job.get("faults", {}))
    expected = list(range(1, last + 1))
    if "rebuilt" in job:
        expected += [last + 1, last + 1, last + 2, last + 3]
    assert [rank["versions"] for rank in seen[name]] == [expected] * NUM_RANKS


@pytest.mark.parametrize("name", [name for name in JOBS if "rebuilt" in JOBS[name]])
def test_only_tensors_with_adapters_are_sent_again(name: str, seen: Seen) -> None:
    """A version that is published again for a rebuilt engine has all tensors."""
    receivers = [
        rank for rank in seen[name] if rank["broadcast"][0] == max(each["broadcast"][0] for each in seen[name])
    ]
    assert receivers
    for rank in receivers:
        padding = 16 * rank["num_ranges"]
        changing, every = rank["num_merged_bytes"], rank["num_bytes"]
        assert changing + padding < every
        usual, again, *later = rank["broadcast"]
        assert every <= again <= every + padding
        for num_bytes in (usual, *later):
            assert changing <= num_bytes <= changing + padding


@pytest.mark.parametrize(
    ("job", "fault", "texts"),
    [
        ("4 actors", "sent without a merge", ["rank 0 (engine 0): received other bytes than were sent of", "q_proj"]),
        ("4 actors", "swapped slices", ["rank 1 (engine 1): received other bytes than were sent of", "q_proj.weight"]),
        (
            "4 actors",
            "overwritten fixed tensor",
            ["everywhere: rank 0 (engine 0): holds other values than it received of model.embed_tokens.weight\n"],
        ),
        (
            "4 actors",
            "changed frozen weight",
            ["rank 0 (engine 0): received other bytes than were sent of model.norm.weight;", "rank 1 (engine 1)"],
        ),
        ("4 actors", "flipped byte", ["rank 0 (engine 0): received other bytes than were sent of model.layers.0"]),
        ("2 replicas of 2", "another replica", ["holds another replica than rank", "q_proj.weight"]),
        *(
            (
                "inference ranks",
                fault,
                ["not probed everywhere: rank 1: its logprobs of the probe differ", "rank 3: its"],
            )
            for fault in PROBE
        ),
    ],
)
def test_fault_is_named_on_every_rank(job: str, fault: str, texts: list[str], seen: Seen) -> None:
    errors = [rank["errors"].get(fault) for rank in seen[job]]
    assert errors[0], f"{fault} went unnoticed"
    assert errors == [errors[0]] * NUM_RANKS
    for text in texts:
        assert text in errors[0] + "\n"


def test_the_probe_agrees_with_merged_weights(seen: Seen) -> None:
    """The learner computes with adapters beside the weights, and the copies with their sum."""
    gaps = [metrics["policy/probe_gap"] for metrics in seen["inference ranks"][0]["metrics"]]
    assert len(gaps) == 3 + len(PROBE) and all(0 <= gap < 1e-4 for gap in gaps)
