"""Updates of the sharded trainers, compared with a plain single-process reference (tests/update.py)."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.own_functions import write_functions
from tests.update import (
    ALGO,
    CONVERSATIONS,
    CRITIC,
    MODELS,
    VARIANTS,
    Reference,
    check,
    check_lora,
    check_weights,
    conversation_job,
    critic_job,
    job,
    lora_job,
    lora_update,
    make_adapted,
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

pytestmark = pytest.mark.timeout(450)  # the first test waits for the fixture's worlds

# By number of ranks, for every model: tokens a micro-batch, and what must not change the result. `idle`: a rank owns
# nothing.
WAYS = {
    1: [{"max_tokens": 10_000}, {"max_tokens": 25, "recompute": "full"}, {"max_tokens": 25, "at_once": True}],
    2: [
        {"max_tokens": 25, "recompute": "selective"},
        {"max_tokens": 25, "recompute": "selective", "at_once": True},
        {"max_tokens": 25, "offload": "moments", "at_once": True},
        {"max_tokens": 25, "offload": "rollout"},
        {"max_tokens": 25, "offload": "moments", "recompute": "full"},
        {"max_tokens": 25, "offload": "always", "recompute": "selective"},
    ],
    4: [
        {"max_tokens": 40, "recompute": "full"},
        {"max_tokens": 1, "idle": True},
        {"max_tokens": 10, "num_replicas": 2},
        {"max_tokens": 10, "num_replicas": 2, "at_once": True},
        {"max_tokens": 10, "num_replicas": 4},
    ],
}
COMPILED = job("compiled", MODELS[0], compile=True, recompute="selective")  # only once, since tracing is slow
IN_BF16 = {num_ranks: job(f"bf16 {num_ranks}", MODELS[0], "bfloat16", at_once=num_ranks == 2) for num_ranks in (1, 2)}
# By number of ranks: micro-batches with whole groups, with parts of groups, and on one rank without any work.
SHARED_WAYS = {1: {"max_tokens": 10_000}, 2: {"max_tokens": 25, "at_once": True}, 4: {"max_tokens": 40, "idle": True}}
SHARED_JOBS = {num_ranks: shared_job(f"shared prompts {num_ranks}", **way) for num_ranks, way in SHARED_WAYS.items()}
ONE_UPDATE = ALGO | {"num_mini_batches": 1, "num_epochs": 1, "kl_coef": 0.0}
ON_POLICY = [
    job(f"old logprobs {source}", MODELS[0]) | {"algo": ONE_UPDATE, "old_logprobs": source}
    for source in ("none", "by a pass of their own")
]
# Four optimizer steps with the engine's logprobs as old logprobs: taken by the trainer, or given as the batch's own.
LAGS = [(token * 7) % 3 for token in range(make_batch().num_tokens)]
RECORDED = [
    job("recorded logprobs in four steps", MODELS[0])
    | {"algo": ALGO | {"old_logprobs": "rollout"}, "old_logprobs": "none", "lags": LAGS},
    job("recorded logprobs as those of a pass", MODELS[0]) | {"old_logprobs": "the engine's"},
]
# After a resume without a token limit, tokens of older weights are left: their recorded logprobs count, not the pass.
LEFT = job("older tokens", MODELS[0]) | {"lags": [1] * len(LAGS)}
EMPTY = mini_batch_jobs()
FROZEN = [
    job(f"a part is not trained, {offload}", MODELS[0], offload=offload)
    | {"frozen": ["model.layers.0.mlp.up_proj.weight"]}
    for offload in ("none", "moments")
]
OPTIMIZERS = {
    optimizer: [
        job(f"{optimizer}, {offload}", MODELS[0], optimizer=optimizer, offload=offload)
        for offload in ("none", "moments", "rollout", "always")
    ]
    for optimizer in ("sgd", "muon")
}
# A logprob that makes the ratio of one token infinite in float32, in a response that is learnt from or in a masked one.
FAR = -500.0
SPOILT = {
    is_truncated: job(f"an infinite ratio, truncated {is_truncated}", MODELS[0])
    | {"algo": ONE_UPDATE | {"mask_truncated": True}}
    | {"edits": {"old_logprobs": (spoilt_token(make_batch(), is_truncated), FAR)}}
    for is_truncated in (False, True)
}


def first_token_of_lag(lag: int) -> int:
    """Return the first response token of this lag."""
    return next(token for token in make_batch().loss_mask.nonzero().flatten().tolist() if LAGS[token] == lag)


MASKED = job("truncated responses are masked", MODELS[0]) | {"algo": ONE_UPDATE | {"mask_truncated": True}}
REJECTED = job("an infinite ratio, which the correction rejects", MODELS[0]) | {
    "algo": ONE_UPDATE | {"correction": "sequence_mask"},
    "edits": {
        name: (spoilt_token(make_batch(), False), x)
        for name, x in (("old_logprobs", FAR), ("rollout_logprobs", 2 * FAR))
    },
}
# Two mini-batches, of which the second has the infinite ratio.
HALF_SPOILT = job("an infinite ratio in one of two mini-batches", MODELS[0]) | {
    "algo": ONE_UPDATE | {"num_mini_batches": 2},
    "edits": {"old_logprobs": (spoilt_token(make_batch(), False), FAR)},
}
ALL_MASKED = [
    job(f"every response is masked, old logprobs {source}", MODELS[0])
    | {"algo": ONE_UPDATE | {"mask_truncated": True}, "old_logprobs": source, "all_truncated": True}
    for source in ("none", "given")
]
# The mismatch of the tokens of lag 0 is about 0.05. One token has another logprob: the first one of this lag.
DISAGREEING = {
    lag: job(f"a limit on the mismatch, spoilt at lag {lag}", MODELS[0])
    | {"algo": ONE_UPDATE | {"old_logprobs": "rollout"}, "old_logprobs": "none", "lags": LAGS, "max_mismatch_kl": 1.0}
    | {"edits": {"rollout_logprobs": (first_token_of_lag(lag), -20.0)}}
    for lag in (0, 1)
}
POISONED = job("a weight is NaN", MODELS[0]) | {"poisoned": "model.norm.weight"}
MASKED_CRITIC = critic_job("critic without truncated responses", MODELS[0]) | {"algo": ALGO | {"mask_truncated": True}}
ADAPTERS = lora_job("adapters", MODELS[0], offload="rollout")  # tests/distributed/test_learner_lora.py has the others
ALGORITHMS = {name: variant_job(name) for name in VARIANTS}
TALKS = {(num_ranks, name): conversation_job(name, num_ranks) for num_ranks in (1, 2) for name in CONVERSATIONS}
CRITIC_WAYS = {
    1: {"max_tokens": 10_000},
    2: {"offload": "rollout", "at_once": True},
    4: {"recompute": "full", "idle": True},
}
CRITICS = {
    (num_ranks, model): critic_job(f"critic of {model} {num_ranks}", model, **way)
    for num_ranks, way in CRITIC_WAYS.items()
    for model in MODELS
}
EXTRA = {
    1: [COMPILED, IN_BF16[1], SHARED_JOBS[1]],
    2: [
        SHARED_JOBS[2],
        IN_BF16[2],
        *ON_POLICY,
        RECORDED[1],
        LEFT,
        *DISAGREEING.values(),
        *EMPTY,
        *FROZEN,
        *(each for jobs in OPTIMIZERS.values() for each in jobs),
        *SPOILT.values(),
        MASKED,
        REJECTED,
        POISONED,
        MASKED_CRITIC,
        *ALL_MASKED,
        HALF_SPOILT,
        *ALGORITHMS.values(),
        ADAPTERS,
    ],
    4: [SHARED_JOBS[4]],
}


def ways(num_ranks: int) -> list[dict[str, Any]]:
    """Return the jobs of all ways: with both models, or on 4 ranks, where updates are slow, with one model in turn."""
    return [
        job(f"{model} {num_ranks} {n}", model, **way)
        for n, way in enumerate(WAYS[num_ranks])
        for model in (MODELS if num_ranks < 4 else [MODELS[n % len(MODELS)]])
    ]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Compute the reference and run all jobs, in one world for each number of ranks."""
    reference = make_reference(tmp_path_factory.mktemp("learner"))
    jobs = {size: [*ways(size), *EXTRA[size], *(CRITICS[size, model] for model in MODELS)] for size in WAYS}
    for (num_ranks, _), talk in TALKS.items():
        jobs[num_ranks].append(talk)
    own = f"{write_functions(reference.folder / 'own.py')}:clipped_ratio"
    jobs[2].append(RECORDED[0] | {"algo": RECORDED[0]["algo"] | {"loss": own}})
    make_adapted(reference.folder, MODELS[0])
    run_jobs(reference.folder, jobs, timeout_s=400)
    return reference


@pytest.mark.parametrize("num_ranks", WAYS)
def test_one_denominator_and_equal_micro_batch_counts(reference: Reference, num_ranks: int) -> None:
    """The update equals the reference for any number of ranks and any split, with uneven and empty work, and however it
    is computed."""
    for way in ways(num_ranks):
        check(reference, way, loss_tolerance=1e-5, weight_tolerance=2e-5)  # a step moves a weight by up to 1e-3


@pytest.mark.parametrize("num_ranks", SHARED_JOBS)
def test_prompts_that_are_computed_once(reference: Reference, num_ranks: int) -> None:
    """The update equals that of sequences which are computed alone, also if a group is cut."""
    check(reference, SHARED_JOBS[num_ranks], loss_tolerance=1e-5, weight_tolerance=2e-5)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_is_gathered_at_once_gets_the_same_weights(reference: Reference, model: str) -> None:
    """The weights are those of layers that are gathered one by one, bit for bit."""
    one_by_one, at_once = (
        weights_of(reference.folder, each)
        for each in ways(2)
        if each["model"] == model and (each["actor"]["recompute"], each["actor"]["offload"]) == ("selective", "none")
    )
    for name, weight in one_by_one.items():
        assert torch.equal(weight, at_once[name]), name


@pytest.mark.parametrize("name", VARIANTS)
def test_every_loss_equals_the_plain_one(reference: Reference, name: str) -> None:
    """On 2 ranks with uneven micro-batches. AdamW's first step depends on little but the signs of the gradient, so its
    norm is compared too."""
    weights, loss, norm = reference.variants[name]
    values = values_of(reference.folder, ALGORITHMS[name])
    assert values["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    check_weights(weights_of(reference.folder, ALGORITHMS[name]), weights, 2e-5, ALGORITHMS[name])
    if "kl_coef" not in VARIANTS[name][0] and "entropy_coef" not in VARIANTS[name][0]:
        assert values["loss/policy"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(("num_ranks", "name"), TALKS)
def test_credit_and_update_of_conversations_equal_plain_ones(reference: Reference, num_ranks: int, name: str) -> None:
    """Conversations have several turns, with observations between them, in one or several sequences."""
    weights, loss, norm = reference.conversations[name]
    talk = TALKS[num_ranks, name]
    values = values_of(reference.folder, talk)
    assert values["loss/policy"] == pytest.approx(loss, abs=1e-5)
    assert values["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    check_weights(weights_of(reference.folder, talk), weights, 2e-5, talk)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", CRITIC_WAYS)
def test_critic(reference: Reference, num_ranks: int, model: str) -> None:
    """A head of zeros gives values of 0. After an update weights, values, losses and the share of clipped values are
    those of the reference, with uneven and empty work and with offloading."""
    job, wanted, mask = CRITICS[num_ranks, model], reference.critics[model], make_batch().loss_mask
    found = load_file(reference.folder / f"{job['name']}.values.safetensors")
    assert not found["before"].any()
    assert wanted.values.abs().max() > 0.1
    torch.testing.assert_close(found["after"][mask], wanted.values, atol=2e-4, rtol=0)
    assert not found["after"][~mask].any()
    values = values_of(reference.folder, job)
    assert values["critic/loss"] == pytest.approx(wanted.loss, abs=1e-5)
    assert values["critic/grad_norm"] == pytest.approx(wanted.grad_norm, rel=1e-4)
    num_terms = 2 * int(mask.sum())
    assert 0.1 * num_terms < wanted.num_clipped < 0.9 * num_terms
    assert values["critic/clip_fraction"] * num_terms == pytest.approx(wanted.num_clipped, abs=1)
    assert values["critic/lr"] == CRITIC["lr"]
    check_weights(weights_of(reference.folder, job), wanted.weights, 6e-5, job)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_ranks", CRITIC_WAYS)
def test_certainty(reference: Reference, num_ranks: int, model: str) -> None:
    """A scoring pass also computes KL(uniform, policy) at the sampling temperature."""
    found = load_file(reference.folder / f"{CRITICS[num_ranks, model]['name']}.values.safetensors")
    mask = make_batch().loss_mask
    for name, wanted in zip(("old_logprobs", "certainty"), reference.certainties[model], strict=True):
        torch.testing.assert_close(found[name][mask], wanted, atol=1e-5, rtol=0)
        assert not found[name][~mask].any()


def test_compiled_layers(reference: Reference) -> None:
    check(reference, COMPILED, loss_tolerance=1e-5, weight_tolerance=2e-5)


def test_on_policy_data_need_no_pass_for_old_logprobs(reference: Reference) -> None:
    """One update without old logprobs gives the same weights and losses as with old logprobs from a separate pass, and
    it measures the mismatch between engine and learner."""
    none, passed = (values_of(reference.folder, each) for each in ON_POLICY)
    for name in ("loss/policy", "optim/grad_norm", "policy/entropy", "policy/clip_fraction"):
        assert none[name] == pytest.approx(passed[name], abs=1e-5), name
    assert none["policy/clip_fraction"] == none["policy/kl_old_new"] == 0.0
    assert passed["policy/kl_old_new"] < 1e-9  # other micro-batches
    assert none["policy/mismatch_kl"] > 0.01 and "policy/mismatch_kl" not in passed  # the engine's logprobs are random
    without, with_pass = (weights_of(reference.folder, each) for each in ON_POLICY)
    for name, tensor in without.items():
        assert (tensor - with_pass[name]).abs().max() < 2e-5, name


def test_recorded_logprobs_need_no_pass_in_several_steps(reference: Reference) -> None:
    """Every step compares the new policy with the logprobs that the engine recorded, with a loss of the user too."""
    recorded, passed = (values_of(reference.folder, each) for each in RECORDED)
    names = ("loss/policy", "loss/kl", "optim/grad_norm", "policy/entropy", "policy/clip_fraction", "policy/kl_old_new")
    for name in names:
        assert recorded[name] == passed[name], name
    assert passed["policy/clip_fraction"] > 0.1
    assert not {"policy/mismatch_kl", "policy/staleness_kl"} & passed.keys()
    first, second = (weights_of(reference.folder, each) for each in RECORDED)
    check_weights(first, second, 0.0, RECORDED[0])
    check_weights(weights_of(reference.folder, LEFT), second, 0.0, LEFT)


def test_the_first_step_measures_fresh_and_older_tokens_apart(reference: Reference) -> None:
    """On 2 ranks, over the first of two mini-batches: later steps have another policy than the engine had."""
    batch, values = make_batch(), values_of(reference.folder, RECORDED[0])
    logprobs, mask = reference.certainties[MODELS[0]][0], batch.loss_mask
    difference = (logprobs - batch.rollout_logprobs[mask]).double()
    kl, lags = torch.exp(difference) - 1 - difference, torch.tensor(LAGS)[mask]
    is_first = batch.group_ids[batch.response_segment_ids] < 3  # position * 2 // 5
    fresh, older = kl[is_first & (lags == 0)].mean().item(), kl[is_first & (lags > 0)].mean().item()
    assert abs(fresh - older) > 1e-3
    assert values["policy/mismatch_kl"] == pytest.approx(fresh, abs=1e-5)
    assert values["policy/staleness_kl"] == pytest.approx(older, abs=1e-5)


def test_older_tokens_do_not_count_as_mismatch(reference: Reference) -> None:
    """A wrong logprob of a fresh token ends the run before the first step, one of an older token does not."""
    errors = [reference.folder / f"{DISAGREEING[0]['name']}.{rank}.error" for rank in range(2)]
    assert all("engine and learner disagree: policy/mismatch_kl is" in error.read_text() for error in errors)
    values = values_of(reference.folder, DISAGREEING[1])
    assert values["policy/mismatch_kl"] < 1.0 < values["policy/staleness_kl"]


def test_an_empty_mini_batch_moves_nothing(reference: Reference) -> None:
    five, eight = (weights_of(reference.folder, each) for each in EMPTY)
    check_weights(eight, five, 1e-6, EMPTY[1])


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(reference: Reference) -> None:
    """Without a clip that bounds it, an infinite ratio makes the gradient infinite, and no weight changes."""
    values = values_of(reference.folder, SPOILT[False])
    assert (values["optim/skipped_steps"], values["optim/grad_norm"]) == (1, 0)
    begun = load_file(reference.folder / MODELS[0] / "model.safetensors")
    check_weights(weights_of(reference.folder, SPOILT[False]), begun, 0.0, SPOILT[False])
    assert values_of(reference.folder, MASKED)["optim/skipped_steps"] == 0


def test_a_skipped_step_leaves_the_others_alone(reference: Reference) -> None:
    """One of two steps is skipped: the mean of the gradient norms is that of the other."""
    values = values_of(reference.folder, HALF_SPOILT)
    assert values["optim/skipped_steps"] == 1 and 0 < values["optim/grad_norm"] < 100
    begun = load_file(reference.folder / MODELS[0] / "model.safetensors")
    assert any((tensor - begun[name]).any() for name, tensor in weights_of(reference.folder, HALF_SPOILT).items())


def test_a_batch_in_which_every_response_is_masked_moves_nothing(reference: Reference) -> None:
    """It has all the metrics of an update, and the worker checks that the probe was computed."""
    begun = load_file(reference.folder / MODELS[0] / "model.safetensors")
    for each in ALL_MASKED:
        values = values_of(reference.folder, each)
        assert (values["policy/tokens"], values["loss/policy"], values["optim/skipped_steps"]) == (0, 0, 0)
        assert ("policy/mismatch_kl" in values) == (each["old_logprobs"] == "none")
        check_weights(weights_of(reference.folder, each), begun, 0.0, each)
    assert values_of(reference.folder, MASKED)["policy/tokens"] > 0


def test_a_masked_response_has_no_gradient_however_wrong_it_is(reference: Reference) -> None:
    assert values_of(reference.folder, SPOILT[True]) == values_of(reference.folder, MASKED)
    check_weights(weights_of(reference.folder, SPOILT[True]), weights_of(reference.folder, MASKED), 0.0, SPOILT[True])


def test_a_response_that_the_correction_rejects_has_no_gradient(reference: Reference) -> None:
    values = values_of(reference.folder, REJECTED)
    assert values["optim/skipped_steps"] == 0 and 0 < values["optim/grad_norm"] < 100
    assert abs(values["loss/policy"]) < 10


def test_logprobs_that_are_not_finite_end_the_run(reference: Reference) -> None:
    for rank in range(2):
        said = (reference.folder / f"{POISONED['name']}.{rank}.error").read_text()
        assert "logprobs of the policy are not finite" in said


def test_the_critic_does_not_learn_from_masked_responses(reference: Reference) -> None:
    wanted, values = reference.critic_without_truncated, values_of(reference.folder, MASKED_CRITIC)
    assert values["critic/loss"] == pytest.approx(wanted.loss, abs=1e-5)
    assert values["critic/grad_norm"] == pytest.approx(wanted.grad_norm, rel=1e-4)
    check_weights(weights_of(reference.folder, MASKED_CRITIC), wanted.weights, 6e-5, MASKED_CRITIC)


def test_moments_of_a_part_that_is_not_trained(reference: Reference) -> None:
    on_device, offloaded = (weights_of(reference.folder, each) for each in FROZEN)
    check_weights(offloaded, on_device, 1e-6, FROZEN[1])
    begun = load_file(reference.folder / MODELS[0] / "model.safetensors")
    for name, tensor in on_device.items():
        assert torch.equal(tensor, begun[name]) == (name in FROZEN[0]["frozen"]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_of_an_optimizer_that_is_offloaded(reference: Reference, optimizer: str) -> None:
    """tests/distributed/test_optimizers.py compares the optimizers with those of torch."""
    plain, *others = (weights_of(reference.folder, each) for each in OPTIMIZERS[optimizer])
    begun = load_file(reference.folder / MODELS[0] / "model.safetensors")
    assert not any(torch.equal(plain[name], begun[name]) for name in plain)
    for other, each in zip(others, OPTIMIZERS[optimizer][1:], strict=True):
        check_weights(other, plain, 0.0, each)


@pytest.mark.parametrize("num_ranks", IN_BF16)
def test_bfloat16_keeps_float32_masters(reference: Reference, num_ranks: int) -> None:
    """Losses in bfloat16 are close to those in float32, and updates smaller than its precision are not lost."""
    check(reference, IN_BF16[num_ranks], loss_tolerance=2e-2, weight_tolerance=4e-3)
    for name, tensor in weights_of(reference.folder, IN_BF16[num_ranks]).items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float()), f"{name} was rounded to bfloat16"


def test_adapters_are_trained_as_by_peft(reference: Reference) -> None:
    wanted = lora_update(make_adapted(reference.folder, MODELS[0]), make_batch())
    check_lora(reference.folder, wanted, ADAPTERS, loss_tolerance=1e-5, weight_tolerance=2e-5)
