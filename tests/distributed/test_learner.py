"""Loss and gradient of the sharded learner against a plain single-process reference (tests/update.py)."""

import pytest
import torch

from tests.update import ALGO, MODELS, Reference, check, job, make_reference, run_jobs, values_of, weights_of

# By number of ranks: tokens a micro-batch, and what must not change the result. `idle`: a rank owns nothing.
WAYS = {
    1: [
        {"max_tokens": 10_000},
        {"max_tokens": 25, "recompute": "full"},
        {"max_tokens": 25, "compile": True, "recompute": "selective"},
    ],
    2: [
        {"max_tokens": 25, "recompute": "selective"},
        {"max_tokens": 25, "offload": "rollout"},
        {"max_tokens": 25, "offload": "always", "recompute": "selective"},
    ],
    4: [{"max_tokens": 40, "recompute": "full"}, {"max_tokens": 1, "idle": True}],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("learner"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_ranks", WAYS)
def test_one_denominator_and_equal_micro_batch_counts(reference: Reference, num_ranks: int) -> None:
    """The update equals the reference for any number of ranks, any split, with uneven and empty work, and every way to
    compute it."""
    jobs = [
        job(f"{model} {num_ranks} {number}", model, **way)
        for model in MODELS
        for number, way in enumerate(WAYS[num_ranks])
    ]
    run_jobs(reference.folder, num_ranks, jobs)
    for each in jobs:
        check(reference, each, loss_tolerance=1e-5, weight_tolerance=2e-5)  # a step moves a weight by up to 1e-3


@pytest.mark.timeout(120)
def test_on_policy_data_need_no_pass_for_old_logprobs(reference: Reference) -> None:
    """One update: the same weights and losses as with old logprobs from a pass of their own, and without any the update
    itself measures how far the engine is from the learner."""
    folder = reference.folder
    algo = ALGO | {"num_mini_batches": 1, "num_epochs": 1, "kl_coef": 0.0}
    jobs = [
        job(f"old logprobs {source}", MODELS[0]) | {"algo": algo, "old_logprobs": source}
        for source in ("none", "by a pass of their own")
    ]
    run_jobs(folder, 2, jobs)
    none, passed = (values_of(folder, each) for each in jobs)
    for name in ("loss/policy", "optim/grad_norm", "policy/entropy", "policy/clip_fraction"):
        assert none[name] == pytest.approx(passed[name], abs=1e-5), name
    assert none["policy/clip_fraction"] == 0.0
    assert none["policy/mismatch_kl"] > 1 and "policy/mismatch_kl" not in passed  # the batch has no engine's logprobs
    without, with_pass = (weights_of(folder, each) for each in jobs)
    for name, tensor in without.items():
        assert (tensor - with_pass[name]).abs().max() < 2e-5, name


@pytest.mark.timeout(120)
def test_bfloat16_keeps_float32_masters(reference: Reference) -> None:
    """Passes in bfloat16 come close to the float32 losses, and updates smaller than its precision are not lost."""
    in_bf16 = job("bf16", MODELS[0], "bfloat16")
    run_jobs(reference.folder, 2, [in_bf16])
    check(reference, in_bf16, loss_tolerance=2e-2, weight_tolerance=4e-3)
    for name, tensor in weights_of(reference.folder, in_bf16).items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float()), f"{name} was rounded to bfloat16"
