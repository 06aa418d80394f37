"""Every way to compute an update on a GPU gives the result of the plain reference of the CPU tests: float32 closely,
bfloat16 (with varlen attention) within its rounding."""

from pathlib import Path

import pytest

from tests.update import (
    ALGO,
    MODELS,
    VARIANTS,
    check,
    check_weights,
    job,
    make_batch,
    make_reference,
    mini_batch_jobs,
    run_jobs,
    shared_job,
    spoilt_token,
    values_of,
    variant_job,
    weights_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(560)]
WAYS = [
    {},
    {"recompute": "head"},
    {"recompute": "selective"},
    {"recompute": "full"},
    {"compile": True},
    {"compile": True, "recompute": "full"},
    {"offload": "rollout"},
    {"offload": "moments"},
    {"offload": "always"},
]
LIMITS = {
    "float32": (1e-4, 1e-4),
    "bfloat16": (2e-2, 4e-3),
}  # for losses and weights; a step moves a weight by 1e-3


def test_every_way_to_compute_an_update(tmp_path: Path) -> None:
    reference = make_reference(tmp_path)
    jobs = [
        job(f"{model} {dtype} {number}", model, dtype, device="cuda", **way)
        for model in MODELS
        for dtype in LIMITS
        for number, way in enumerate(WAYS)
    ]
    jobs += [shared_job(f"shared prompts {dtype}", device="cuda", compile=True) | {"dtype": dtype} for dtype in LIMITS]
    losses = {name: variant_job(name) | {"device": "cuda"} for name in VARIANTS}
    with_empty = mini_batch_jobs("cuda")
    run_jobs(tmp_path, {1: [*jobs, *losses.values(), *with_empty]}, timeout_s=500)
    for each in jobs:
        check(reference, each, *LIMITS[each["dtype"]])
    for name, each in losses.items():
        check_weights(weights_of(tmp_path, each), reference.variants[name][0], 1e-4, each)
    five, eight = (weights_of(tmp_path, each) for each in with_empty)
    check_weights(eight, five, 1e-6, with_empty[1])
    for model in MODELS:  # offloading changes no bit of the result
        plain = weights_of(tmp_path, job(f"{model} bfloat16 0", model))
        for offload in ("rollout", "moments"):
            moved = weights_of(tmp_path, job(f"{model} bfloat16 {WAYS.index({'offload': offload})}", model))
            assert all(bool((plain[name] == moved[name]).all()) for name in plain), offload


def test_one_skipped_optimizer_step_among_others(tmp_path: Path) -> None:
    """A step with an infinite gradient is skipped and counted, wherever weights and optimizer state are stored."""
    make_reference(tmp_path)
    edits = {"old_logprobs": (spoilt_token(make_batch(), is_truncated=False), -500.0)}
    algo = ALGO | {"num_epochs": 1, "kl_coef": 0.0}
    jobs = [
        job(f"skipped, {offload}", MODELS[0], device="cuda", offload=offload) | {"algo": algo, "edits": edits}
        for offload in ("none", "moments", "always")
    ]
    run_jobs(tmp_path, {1: jobs}, timeout_s=300)
    for each in jobs:
        values = values_of(tmp_path, each)
        assert values["optim/skipped_steps"] == 1 and 0 < values["optim/grad_norm"] < 100, each
        check_weights(weights_of(tmp_path, each), weights_of(tmp_path, jobs[0]), 1e-4, each)
