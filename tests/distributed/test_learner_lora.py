"""Updates of adapters, compared with those of a plain peft model in one process (tests/update.py)."""

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.update import (
    CRITIC,
    MODELS,
    VARIANTS,
    CriticResult,
    LoraResult,
    certainties,
    check_likeness,
    check_lora,
    check_weights,
    critic_update,
    lora_job,
    lora_update,
    make_adapted,
    make_batch,
    make_model,
    run_jobs,
    trained_weights,
    values_of,
    variant_job,
    variant_update,
    weights_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the fixture's worlds

TIED, UNTIED = MODELS
# By number of ranks: what must not change the result. `idle`: a rank owns nothing. `at_once`: as all small models are.
WAYS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"max_tokens": 10_000},
        {"recompute": "full"},
        {"compile": True},
        {"compile": True, "recompute": "selective"},
        {"offload": "always"},
        {"at_once": True},
    ],
    2: [
        {"recompute": "selective"},
        {"offload": "rollout"},
        {"offload": "moments"},
        {"offload": "moments", "recompute": "full"},
        {"offload": "always", "recompute": "selective"},
        {"offload": "moments", "recompute": "selective", "at_once": True},
    ],
    4: [
        {"max_tokens": 40, "recompute": "full"},
        {"max_tokens": 1, "idle": True},
        {"max_tokens": 10, "num_replicas": 2},
        {"max_tokens": 10, "num_replicas": 2, "offload": "rollout", "recompute": "full"},
        {"max_tokens": 10, "num_replicas": 4, "offload": "moments"},
        {"max_tokens": 10, "offload": "always"},
        {"max_tokens": 10, "num_replicas": 2, "at_once": True},
    ],
}
JOBS = {
    num_ranks: [
        lora_job(f"adapters {num_ranks} {n} {model}", model, **({"max_tokens": 25} | way))
        for n, way in enumerate(ways)
        for model in (MODELS if num_ranks < 4 else [MODELS[n % len(MODELS)]])
    ]
    for num_ranks, ways in WAYS.items()
}
BF16_WAYS = {1: [{}], 2: [{"offload": "rollout", "recompute": "full"}, {"offload": "always"}], 4: [{"num_replicas": 2}]}
IN_BF16 = {
    num_ranks: [lora_job(f"bf16 {num_ranks} {n}", TIED, "bfloat16", **way) for n, way in enumerate(ways)]
    for num_ranks, ways in BF16_WAYS.items()
}
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
OFFLOADS = ("none", "moments", "rollout", "always")
OPTIMIZERS = {
    (name, num_ranks): [
        lora_job(f"{name} {offload} {num_ranks}", UNTIED, optimizer=name, offload=offload, num_replicas=num_ranks // 2)
        for offload in OFFLOADS
    ]
    for name in ("sgd", "muon")
    for num_ranks in (2, 4)
}
FULL_KL = {
    num_ranks: lora_job(f"full KL {num_ranks}", TIED, offload=offload) | {"algo": variant_job("full KL")["algo"]}
    for num_ranks, offload in ((1, "none"), (2, "rollout"), (4, "always"))
}
CRITIC_WAYS = {1: {"max_tokens": 10_000}, 2: {"offload": "rollout"}, 4: {"recompute": "full", "idle": True}}
CRITICS = {
    (num_ranks, model): lora_job(f"critic of {model} {num_ranks}", model, **way) | {"critic": CRITIC}
    for num_ranks, way in CRITIC_WAYS.items()
    for model in MODELS
}
BF16_CRITIC = lora_job("critic in bf16", TIED, "bfloat16", offload="rollout") | {"critic": CRITIC}
EIGHT_BITS = [lora_job(f"8 bits {offload}", UNTIED, optimizer="adamw_8bit", offload=offload) for offload in OFFLOADS]


class Wanted(NamedTuple):
    """What plain models in one process compute."""

    folder: Path  # of the models and the batch, and of what jobs write
    updates: dict[tuple[str, str], LoraResult]  # by model and optimizer
    full_kl: tuple[dict[str, Tensor], float]  # weights, and norm of the gradient
    critics: dict[str, CriticResult]  # by model
    ref_logprobs: dict[str, Tensor]  # by model: those of the response tokens without adapters


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Compute what is wanted, and run all jobs in one world for each number of ranks."""
    folder, batch = tmp_path_factory.mktemp("lora"), make_batch()
    (folder / "batch.safetensors").write_bytes(batch.to_bytes())
    used = [(model, "adamw") for model in MODELS] + [(UNTIED, "sgd"), (UNTIED, "muon")]
    updates = {(model, name): lora_update(make_adapted(folder, model), batch, name) for model, name in used}
    adapted = make_adapted(folder, TIED)
    _, norm = variant_update(adapted, make_model(folder / TIED, TIED), batch, "full KL")
    critics = {model: critic_update(make_adapted(folder, model), batch) for model in MODELS}
    ref_logprobs = {model: certainties(make_model(folder / model, model), batch)[0] for model in MODELS}
    jobs = {size: [*JOBS[size], *IN_BF16[size], FULL_KL[size]] for size in WAYS}
    for (_, num_ranks), of_optimizer in OPTIMIZERS.items():
        jobs[num_ranks] += of_optimizer
    for (num_ranks, _), critic in CRITICS.items():
        jobs[num_ranks].append(critic)
    jobs[2].append(BF16_CRITIC)
    if importlib.util.find_spec("torchao") is not None:
        jobs[2] += EIGHT_BITS
    run_jobs(folder, jobs, timeout_s=800)
    return Wanted(folder, updates, (trained_weights(adapted), norm), critics, ref_logprobs)


@pytest.mark.parametrize("num_ranks", WAYS)
def test_an_update_equals_that_of_peft(wanted: Wanted, num_ranks: int) -> None:
    """Gradients, losses and weights do not depend on the number of ranks, or on how layers are computed and stored."""
    for job in JOBS[num_ranks]:
        check_lora(wanted.folder, wanted.updates[job["model"], "adamw"], job, 1e-5, weight_tolerance=2e-5)


@pytest.mark.parametrize("num_ranks", WAYS)
def test_the_reference_is_the_model_without_adapters(wanted: Wanted, num_ranks: int) -> None:
    """Also with compiled layers, which must notice that adapters are switched off and on again."""
    mask = make_batch().loss_mask
    for job in JOBS[num_ranks]:
        found = load_file(wanted.folder / f"{job['name']}.values.safetensors")["ref_logprobs"]
        torch.testing.assert_close(found[mask], wanted.ref_logprobs[job["model"]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_ranks", WAYS)
def test_bfloat16_is_for_forward_passes_and_frozen_weights(wanted: Wanted, num_ranks: int) -> None:
    """Adapters are float32 masters, and their gradients are close to those in float32."""
    for job in IN_BF16[num_ranks]:
        check_lora(wanted.folder, wanted.updates[TIED, "adamw"], job, 2e-2, weight_tolerance=4e-3)
        for name in wanted.updates[TIED, "adamw"].weights:
            tensor = weights_of(wanted.folder, job)[name]
            assert tensor.dtype == torch.float32
            assert not torch.equal(tensor, tensor.bfloat16().float()), f"{name} was rounded to bfloat16"


@pytest.mark.parametrize(("optimizer", "num_ranks"), OPTIMIZERS)
def test_other_optimizers(wanted: Wanted, optimizer: str, num_ranks: int) -> None:
    """Muon computes in bfloat16, so it amplifies differences in the last bits of gradients."""
    tolerance = {"sgd": 2e-6, "muon": 1e-3}[optimizer]
    for job in OPTIMIZERS[optimizer, num_ranks]:
        check_lora(wanted.folder, wanted.updates[UNTIED, optimizer], job, 1e-4, weight_tolerance=tolerance)


@needs_torchao
def test_moments_of_8_bits(wanted: Wanted) -> None:
    """These adapters are too small to be quantized, so the result is that of AdamW."""
    for job in EIGHT_BITS:
        check_lora(wanted.folder, wanted.updates[UNTIED, "adamw"], job, 1e-5, weight_tolerance=2e-5)


@pytest.mark.parametrize("num_ranks", FULL_KL)
def test_a_kl_over_the_whole_vocabulary(wanted: Wanted, num_ranks: int) -> None:
    """The reference runs inside of the policy, between its own forward passes."""
    weights, norm = wanted.full_kl
    job = FULL_KL[num_ranks]
    assert VARIANTS["full KL"][0]["kl_coef"] > 0 and job["algo"]["kl_estimator"] == "full"
    assert values_of(wanted.folder, job)["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    found = weights_of(wanted.folder, job)
    check_weights({name: found[name] for name in weights}, weights, 2e-5, job)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", CRITIC_WAYS)
def test_a_critic_with_adapters(wanted: Wanted, num_ranks: int, model: str) -> None:
    """Its head is trained as a whole. tests/distributed/test_learner.py has critics without adapters."""
    job, of_plain, mask = CRITICS[num_ranks, model], wanted.critics[model], make_batch().loss_mask
    found = load_file(wanted.folder / f"{job['name']}.values.safetensors")
    assert not found["before"].any() and of_plain.values.abs().max() > 0.1
    torch.testing.assert_close(found["after"][mask], of_plain.values, atol=2e-4, rtol=0)
    values = values_of(wanted.folder, job)
    assert values["critic/loss"] == pytest.approx(of_plain.loss, abs=1e-5)
    assert values["critic/grad_norm"] == pytest.approx(of_plain.grad_norm, rel=1e-4)
    weights = weights_of(wanted.folder, job)
    check_weights(weights, of_plain.weights, 6e-5, job)
    base = load_file(wanted.folder / model / "model.safetensors")
    frozen = [name for name in weights if name in base and name != "lm_head.weight"]
    assert len(frozen) > 10 and all(torch.equal(weights[name], base[name]) for name in frozen)


def test_a_critic_with_adapters_in_bfloat16(wanted: Wanted) -> None:
    """Its head is float32, among frozen weights of bfloat16."""
    weights, of_plain = weights_of(wanted.folder, BF16_CRITIC), wanted.critics[TIED]
    base = load_file(wanted.folder / TIED / "model.safetensors")
    for name, tensor in weights.items():
        is_frozen = name in base and name != "lm_head.weight"
        assert tensor.dtype == (torch.bfloat16 if is_frozen else torch.float32), name
        assert not is_frozen or torch.equal(tensor, base[name].bfloat16()), f"{name} has changed"
    assert values_of(wanted.folder, BF16_CRITIC)["critic/loss"] == pytest.approx(of_plain.loss, abs=2e-2)
    begun = load_file(wanted.folder / f"{TIED}.adapters.safetensors")
    begun["lm_head.weight"] = torch.zeros_like(weights["lm_head.weight"])
    moves, expected = ({name: of[name] - begun[name] for name in begun} for of in (weights, of_plain.weights))
    # Merged weights are rounded, so small gradients may have another sign, and AdamW moves a weight by it: 0.984.
    check_likeness(moves, expected, 0.97, BF16_CRITIC)
