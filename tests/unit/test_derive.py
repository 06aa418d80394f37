"""Settings that are derived from model, lengths, placement and GPU: tables of expected values, and rules for all."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from rl.checkpoint.settings import changed_settings
from rl.common.notices import NOTICES
from rl.common.text import format_bytes
from rl.config.load import load_config
from rl.config.schema import ROOT, Config
from rl.config.values import with_values
from rl.model.activations import EngineMemory, engine_memory
from rl.model.memory import estimate
from rl.model.shape import AdaptedLayers, ModelShape, ModelSize
from rl.placement.roles import Placement, plan
from rl.run import agree
from rl.run.agree import DerivedSettings, DeviceMemory, agree_on_settings
from rl.run.checks import check_settings
from rl.run.derive import (
    FRACTION,
    OFFLOAD,
    ON_CPU,
    RECOMPUTE,
    SLEEP,
    SLOTS,
    TOKENS,
    Derived,
    derive,
    derive_for_cpu,
    nominal_bytes,
    open_settings,
    read_models,
)
from rl.run.peaks import ModelFacts, Models
from rl.world.messages import Letter
from tests.public_models import QWEN_7B, write_model

SHAPES = {
    "135M": ModelShape(30, 576, 1536, 9, 3, 64, 49_152, is_tied=True),  # SmolLM2
    "0.6B": ModelShape(28, 1024, 3072, 16, 8, 128, 151_936, is_tied=True, has_qk_norm=True),  # Qwen3
    "1.7B": ModelShape(24, 2048, 8192, 32, 32, 64, 49_152, is_tied=True),  # SmolLM2, without grouped queries
    "7B": ModelShape(28, 3584, 18_944, 28, 4, 128, 152_064, is_tied=False),  # Qwen2.5
    "14B": ModelShape(48, 5120, 13_824, 40, 8, 128, 152_064, is_tied=False),
}
LORA = ["model.lora.rank=16"]
PPO = ["algo.advantage=gae"]
KL = ["algo.kl_coef=0.1"]
# 64 prompts of up to 128 tokens x 8 samples of 512 tokens
WORK = [
    *("model.dtype=bfloat16", "eval.interval=0", "data.max_prompt_tokens=128", "rollout.max_new_tokens=512"),
    "train.num_prompts_per_step=64",
]
TOOLS = [
    *("environment.tools=[configs/environments/sums.py:add]", "data.chat_template=true"),
    "environment.max_conversation_tokens=99999",
]
MANY_AT_ONCE = [
    "inference.max_tokens_per_micro_batch=999999",
    "train.num_prompts_per_step=128",
    "actor.offload=moments",
]
FEW_LARGE_GROUPS = ["train.num_prompts_per_step=8", "rollout.num_samples_per_prompt=16"]
H200 = 150_110_000_000  # bytes that CUDA reports


def placed(config: Config, num_ranks: int) -> Placement:
    sizes = max(1, num_ranks // 8), min(8, num_ranks)
    return plan(config.placement, *sizes, config.rollout.tensor_parallel_size, config.actor.num_replicas)


def models_of(name: str, config: Config) -> Models:
    shape, size = SHAPES[name], SHAPES[name].size
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if config.model.lora.is_set:
        inputs = shape.num_layers * (5 * shape.hidden + shape.num_heads * shape.head_dim + shape.intermediate)
        outputs = shape.num_layers * (2 * shape.hidden + heads + 2 * shape.intermediate)
        size = ModelSize(*size[:2], AdaptedLayers(7 * shape.num_layers, inputs, outputs))
    facts = ModelFacts(size, shape)
    return Models(facts, facts if config.algo.has_critic else None)


@cache
def configured(*settings: str) -> Config:
    return load_config(overrides=[*WORK, *settings])


def found(name: str, num_ranks: int, gpu: float, *settings: str, trains: bool = True) -> Derived:
    """Derive settings for GPUs of so many GB, or bytes."""
    config = configured(*settings)
    device_bytes = nominal_bytes(gpu) if gpu < 10_000 else int(gpu)
    return derive(config, placed(config, num_ranks), models_of(name, config), device_bytes, trains)


def values_of(derived: Derived) -> tuple[Any, ...]:
    return tuple(derived.values[name] for name in (SLOTS, FRACTION, TOKENS, OFFLOAD, RECOMPUTE))


@pytest.mark.parametrize(
    ("name", "num_ranks", "gpu", "settings", "expected"),
    [
        # One GPU has all 512 sequences. Small models have room for everything.
        # Tiny models have larger micro-batches, so that the GPU does not wait for the host.
        ("135M", 1, 141, [], (512, 0.06, 48_640, "none", "none")),
        ("135M", 1, 24, [], (512, 0.36, 37_888, "none", "head")),
        ("0.6B", 1, 141, [], (512, 0.25, 20_480, "none", "none")),
        ("0.6B", 1, 80, [], (512, 0.44, 20_480, "none", "none")),
        ("1.7B", 1, 141, [], (512, 0.42, 20_480, "none", "none")),
        # 20.5 GB of weights and moments and 62 GB of engine are too much for 80 GB, so moments leave.
        ("1.7B", 1, 80, [], (512, 0.74, 20_480, "moments", "none")),
        # 24 GB: the engine needs 36 GB for all sequences, and gets what is left. 8,192 tokens fit only without moments.
        ("0.6B", 1, 24, [], (512, 0.73, 10_752, "moments", "head")),
        # 27.4 GB of training state do not fit into 24 GB.
        ("1.7B", 1, 24, [], (512, 0.88, 10_240, "always", "none")),
        # 8 engines share the sequences. The state is an eighth.
        ("0.6B", 8, 80, [], (64, 0.09, 20_480, "none", "none")),
        ("1.7B", 8, 24, [], (64, 0.51, 8192, "none", "none")),
        ("0.6B", 32, 24, [], (16, 0.18, 14_848, "none", "none")),
        # 122 GB of state fit one H200 only if activations and moments take turns: 61 GB, and 69 GB for 19,968 tokens.
        ("7B", 1, H200, [], (512, 0.24, 19_968, "moments", "head")),
        # With several optimizer steps per batch, moments stay for the later ones.
        ("7B", 1, H200, ["algo.num_mini_batches=2"], (512, 0.24, 16_896, "none", "full")),
        ("7B", 1, 80, [], (512, 0.41, 19_456, "always", "head")),
        ("7B", 4, 80, [], (128, 0.26, 10_752, "none", "head")),
        ("7B", 8, 80, [], (64, 0.23, 14_848, "none", "head")),
        ("7B", 32, 80, [], (16, 0.22, 18_432, "none", "none")),
        ("14B", 8, 80, [], (64, 0.46, 9216, "moments", "head")),
        ("14B", 32, 80, [], (16, 0.4, 10_240, "none", "none")),
        ("14B", 8, 64, [], (64, 0.58, 10_240, "moments", "selective")),
        ("7B", 8, 48, [], (64, 0.39, 9216, "none", "selective")),
        ("14B", 8, 141, [], (64, 0.26, 17_920, "none", "head")),
        # Adapters have no state to speak of: 15.9 GB with the frozen weights, which the engine has again.
        ("7B", 1, 80, LORA, (512, 0.41, 16_384, "none", "head")),
        ("7B", 1, 24, LORA, (512, 0.83, 20_480, "always", "full")),
        # A critic has a state of its own, which is there during the policy's update too.
        ("7B", 8, 80, PPO, (64, 0.23, 11_776, "none", "head")),
        ("7B", 8, 80, [*PPO, "algo.num_mini_batches=4", *KL], (64, 0.23, 10_752, "none", "head")),
        # A reference takes 3.8 GB.
        ("7B", 8, 80, KL, (64, 0.23, 13_824, "none", "head")),
        # Responses of up to 8,192 tokens: the engine takes what is left, but nothing is moved for that.
        ("1.7B", 1, 141, ["rollout.max_new_tokens=8192"], (512, 0.81, 20_480, "none", "none")),
        # A sequence of 16,512 tokens must fit, so micro-batches cannot be smaller.
        ("7B", 8, 80, ["rollout.max_new_tokens=16384"], (64, 0.9, 17_408, "moments", "head")),
        # Ranks of their own: the engine fills its GPU, and nothing can be offloaded for it.
        ("14B", 8, 80, ["placement.rollout=0-3", "placement.actor=4-7"], (128, 0.9, 10_240, "none", "full")),
    ],
)
def test_values(name: str, num_ranks: int, gpu: float, settings: list[str], expected: tuple[Any, ...]) -> None:
    derived = found(name, num_ranks, gpu, *settings)
    assert values_of(derived) == expected
    assert not derived.problem


def test_the_largest_model_of_one_h200_fits() -> None:
    """The peak of the update: weights and gradients of 61 GB, what a sleeping engine keeps, and the larger of moments
    (61 GB) and activations. All at once would not fit."""
    derived = found("7B", 1, H200)
    (role,) = estimate(derived.config, placed(derived.config, 1), SHAPES["7B"].size)
    state = role.states["policy"]
    assert state.weights + state.gradients + state.moments == pytest.approx(121.8e9, rel=0.01)
    assert derived.use == "at most 68.15 GB in the rollout, 142.59 GB in the update of 143.27 GB"
    together = found("7B", 1, H200, "actor.offload=none", "actor.recompute=none", f"{TOKENS}=19968")
    remedy = f"leave actor.offload and actor.recompute out, lower {TOKENS}, or give the learner more ranks"
    assert together.problem == f"an update needs 206.58 GB; {remedy}"


@pytest.mark.parametrize(
    ("settings", "num_ranks", "expected"),
    [
        ([], 1, (512, "the sequences of a step per engine")),
        ([], 3, (176, "the sequences of a step per engine")),  # 22 prompts x 8
        (["rollout.tensor_parallel_size=2"], 4, (256, "the sequences of a step per engine")),
        (["rollout.max_tokens_per_round=100"], 2, (512, "twice the sequences of a step per engine, for responses")),
        (["rollout.max_tokens_per_round=512"], 2, (256, "the sequences of a step per engine")),  # one round
        (["train.num_prompts_per_step=2", "rollout.num_samples_per_prompt=2"], 1, (8, "the sequences of a step")),
        (["train.num_prompts_per_step=300"], 1, (1024, "the most that is derived; a step has 2,400 per engine")),
        (["placement.rank_weights=3,1"], 16, (48, "the sequences of a step per engine")),  # 3/4 of 64 over 8 engines
        (["eval.interval=5"], 8, (256, "those of an evaluation, which has more than a step")),
        (["eval.interval=5", "eval.num_prompts=100", "eval.num_samples=8", "eval.temperature=1"], 8, (104, "those of")),
        # 200 sequences are 12.5 groups of 16 samples. 13 groups have room for all of them at once.
        ([*FEW_LARGE_GROUPS, "eval.interval=5", "eval.num_prompts=200"], 1, (208, "those of an evaluation")),
        ([*FEW_LARGE_GROUPS, "eval.interval=5"], 1, (256, "those of an evaluation")),
        (["eval.interval=5", "eval.num_prompts=8"], 8, (64, "the sequences of a step per engine")),
        (["placement.rollout=0", "placement.actor=1-7"], 8, (512, "the sequences of a step per engine")),
    ],
)
def test_slots(settings: list[str], num_ranks: int, expected: tuple[int, str]) -> None:
    derived = found("0.6B", num_ranks, 80, *settings)
    assert derived.values[SLOTS] == expected[0] and derived.reasons[SLOTS].startswith(expected[1])


CARDS = [16, 24, 32, 40, 48, 64, 80, 96, 141, 180, 288]
CASES = [
    (name, num_ranks, settings)
    for name in SHAPES
    for num_ranks in (1, 2, 8, 32)
    for settings in ([], LORA, PPO, KL, ["algo.num_epochs=2"], ["rollout.max_new_tokens=8192"])
]
COST = {"none": 0, "head": 0, "moments": 1, "rollout": 2, "always": 10, "selective": 3, "full": 6}


@pytest.mark.parametrize(("name", "num_ranks", "settings"), CASES)
def test_rules_for_all_cards(name: str, num_ranks: int, settings: list[str]) -> None:
    """All settings are filled in and allowed. What fits a card fits a larger one, which is never slower: it offloads
    and recomputes no more layers and, if both choose the same, has micro-batches at least as large. With micro-batches
    of the same size, it keeps the logits if the smaller card does, or its engine stays awake for that."""
    longest = 128 + (8192 if "rollout.max_new_tokens=8192" in settings else 512)
    before: Derived | None = None
    for gpu in CARDS:
        derived = found(name, num_ranks, gpu, *settings)
        assert not open_settings(derived.config) and set(derived.values) == set(ON_CPU)
        slots, fraction, tokens, offload, recompute = values_of(derived)
        assert 8 <= slots <= 1024 and slots % 8 == 0 and 0 < fraction <= 0.9
        assert longest <= tokens <= (48_640 if name == "135M" else 20_480)
        peaks = [float(peak) for peak in re.findall(r"([\d.]+) GB in the", derived.use)]
        assert len(peaks) == 2 and (derived.problem or max(peaks) < 0.97 * gpu * 1.074)
        usable = float(derived.use.split()[-2])
        assert derived.values[SLEEP] == "always" or peaks[1] <= 0.401 * usable
        if before is not None and not before.problem:
            assert not derived.problem
            _, _, less, *cheaper = values_of(before)
            assert COST[offload] + COST[recompute] <= sum(COST[each] for each in cheaper), gpu
            if [COST[offload], COST[recompute]] == [COST[each] for each in cheaper]:
                assert tokens >= less, gpu
                sleeps_as_before = derived.values[SLEEP] == before.values[SLEEP]
                assert (recompute, cheaper[1]) != ("head", "none") or tokens > less or not sleeps_as_before, gpu
        before = derived
    assert before is not None and not before.problem


@pytest.mark.parametrize("name", SHAPES)
def test_more_ranks_never_make_it_worse(name: str) -> None:
    costs = [sum(COST[each] for each in values_of(found(name, count, 80))[3:]) for count in (1, 2, 4, 8, 32)]
    assert costs == sorted(costs, reverse=True)


def test_given_values_are_used_as_given() -> None:
    given = [f"{SLOTS}=100", f"{FRACTION}=0.3", f"{TOKENS}=4000", f"{OFFLOAD}=rollout", f"{RECOMPUTE}=full"]
    given.append(f"{SLEEP}=always")
    derived = found("7B", 1, 80, *given)
    assert derived.values == {} and derived.config == load_config(overrides=[*WORK, *given])
    for setting in given:
        name, value = setting.split("=")
        one = found("0.6B", 1, 80, setting)
        assert name not in one.values and set(one.values) == set(ON_CPU) - {name}
        assert str(getattr(getattr(one.config, name.split(".")[0]), name.split(".")[1])) == value
    # The others are chosen to fit: 40,960 tokens need more than 20,480.
    assert values_of(found("1.7B", 1, 80))[3:] == ("moments", "none")
    more = found("1.7B", 1, 80, f"{TOKENS}=40960")
    assert (more.values[OFFLOAD], more.values[RECOMPUTE]) == ("moments", "selective") and not more.problem


LARGE_PASSES = ["inference.max_tokens_per_micro_batch=9999999"]
SHORT = ["rollout.num_samples_per_prompt=16", "rollout.max_new_tokens=24"]


@pytest.mark.parametrize(
    ("name", "num_ranks", "gpu", "settings", "expected"),
    [
        ("135M", 1, H200, SHORT, ("never", "engine and learner need 34.22 GB together")),
        ("135M", 1, 24, SHORT, ("always", "engine and learner need 25.08 GB together, more than 8.98 GB")),
        # More than 0.4 of 143.3 GB.
        ("0.6B", 1, H200, [], ("always", "engine and learner need 80.33 GB together, more than 57.31 GB")),
        ("0.6B", 8, H200, [], ("never", "engine and learner need 40.50 GB together")),
        ("0.6B", 8, H200, [f"{OFFLOAD}=moments"], ("always", "state is offloaded while the engine")),
        ("135M", 1, H200, [*SHORT, *PPO, "critic.offload=moments"], ("always", "state is offloaded while")),
        ("135M", 1, H200, [*SHORT, *KL, "reference.offload=rollout"], ("always", "state is offloaded while")),
        ("135M", 1, H200, [*SHORT, *KL, "reference.offload=always"], ("always", "state is offloaded while")),
        ("135M", 1, H200, [*SHORT, "critic.offload=moments"], ("never", "engine and learner need 34.22 GB together")),
        ("14B", 8, 80, ["placement.rollout=0-3", "placement.actor=4-7"], ("never", "no engine shares a GPU with a")),
        ("135M", 1, H200, [*SHORT, f"{TOKENS}=8192"], ("never", "engine and learner need 14.47 GB together")),
        # The same update, but logprobs of 5 M tokens at once.
        (
            *("135M", 1, H200, [*SHORT, f"{TOKENS}=8192", *LARGE_PASSES, "train.num_prompts_per_step=2000"]),
            ("always", "engine and learner need 99.66 GB together, more than 57.31 GB"),
        ),
    ],
)
def test_small_engines_and_learners_keep_their_memory(
    name: str, num_ranks: int, gpu: float, settings: list[str], expected: tuple[str, str]
) -> None:
    derived = found(name, num_ranks, gpu, *settings)
    assert (derived.values[SLEEP], derived.reasons[SLEEP].startswith(expected[1])) == (expected[0], True), (
        derived.reasons[SLEEP]
    )
    assert not derived.problem


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([f"{OFFLOAD}=rollout"], [OFFLOAD]),
        (
            [f"{OFFLOAD}=none", *PPO, "critic.offload=rollout", *KL, "reference.offload=rollout"],
            ["critic.", "reference."],
        ),
        ([f"{OFFLOAD}=moments"], []),  # they come back when activations are freed
        ([f"{OFFLOAD}=always"], []),  # the weights stay in host memory
        (["critic.offload=rollout", "reference.offload=rollout"], []),  # there are none
        ([f"{OFFLOAD}=rollout", "placement.rollout=0", "placement.actor=1"], []),
    ],
)
def test_weights_that_make_room_for_an_engine_that_needs_none(settings: list[str], expected: list[str]) -> None:
    never, always = (configured(f"{SLEEP}={sleep}", *settings) for sleep in ("never", "always"))
    warnings = check_settings(never, placed(never, 2))
    assert [text.startswith(name) for text, name in zip(warnings, expected, strict=True)] == [True] * len(expected)
    assert all(f"leave {SLEEP} or " in text for text in warnings)
    assert check_settings(always, placed(always, 2)) == []


KEPT = ["rollout.max_new_tokens=8192", "rollout.max_tokens_per_round=1024", "rollout.keep_kv=true"]


def test_an_engine_that_keeps_its_kv_cache_stays_awake() -> None:
    """It gets what the update leaves free. The update has micro-batches of its usual size if it can, and keeps logits
    if the engine still has enough."""
    usual, kept = found("135M", 1, H200, *KEPT[:2]), found("135M", 1, H200, *KEPT)
    assert (usual.values[SLEEP], kept.values[SLEEP]) == ("always", "never")
    assert kept.reasons[SLEEP] == "rollout.keep_kv, and an engine that sleeps loses its KV cache"
    assert values_of(kept)[2:] == values_of(usual)[2:] == (48_640, "none", "none")
    assert 0.4 < kept.values[FRACTION] < usual.values[FRACTION]
    assert kept.reasons[FRACTION].startswith("what micro-batches of ")
    assert not kept.problem
    without = found("135M", 1, H200, *KEPT, f"{RECOMPUTE}=head")
    assert without.values[FRACTION] > kept.values[FRACTION], "logits take memory from the engine"
    small = found("135M", 1, 56, *KEPT)
    assert values_of(small)[2:] == (48_640, "none", "head") and not small.problem
    assert found("135M", 1, H200, *KEPT, trains=False).values[SLEEP] == "always", "no update follows"
    for places in (["placement.rollout=0"], ["placement.rollout,inference=0", *KL, f"{SLEEP}=never"]):
        apart = found("135M", 2, H200, *KEPT, *places, "placement.actor=1")
        assert apart.reasons.get(SLEEP, "") in ("no engine shares a GPU with a learner", "")


def test_a_kv_cache_is_not_worth_weights_in_host_memory() -> None:
    kept = found("1.7B", 1, 80, *KEPT)
    assert kept.values[OFFLOAD] in ("none", "moments") and not kept.problem
    unknown = derive(kept.config, placed(kept.config, 1), None, H200)
    assert unknown.config.rollout.sleep == "never"
    settings = configured(*KEPT)
    assert derive(settings, placed(settings, 1), None, H200).values[SLEEP] == "never"


@pytest.mark.parametrize(("sleep", "words"), [("auto", ""), ("never", f" and leave {SLEEP} out")])
def test_a_run_that_does_not_fit_may_let_the_kv_cache_go(sleep: str, words: str) -> None:
    given = [f"{SLEEP}={sleep}", f"{FRACTION}=0.6", f"{OFFLOAD}=none", f"{RECOMPUTE}=full"]
    assert f"; set rollout.keep_kv=false{words}" in found("1.7B", 1, 80, *KEPT, *given).problem
    assert not found("1.7B", 1, 80, *KEPT[:2], *given[1:]).problem, "so it helps"
    assert "keep_kv" not in found("7B", 1, 24, *KEPT).problem, "there it would not help"


def test_an_engine_that_must_stay_awake_leaves_less_to_the_update() -> None:
    """On 56 GB, an engine of 34 GB and a state of 14 GB leave no room for micro-batches as large as usual."""
    usual, awake = (found("1.7B", 2, 56, *settings) for settings in ([], [f"{SLEEP}=never"]))
    assert awake.config.rollout.sleep == "never" and SLEEP not in awake.values and not awake.problem
    assert (usual.values[TOKENS], usual.values[RECOMPUTE]) == (20_480, "none")
    assert awake.values[TOKENS] < 20_480 and awake.values[RECOMPUTE] == "selective"
    (peak,) = re.findall(r"([\d.]+) GB in the update", awake.use)
    assert 50 < float(peak) < 55.8, "it includes the engine"
    tight = found("1.7B", 1, 80, f"{SLEEP}=never", f"{OFFLOAD}=none", f"{RECOMPUTE}=none", f"{TOKENS}=30720")
    assert f"leave {SLEEP} out" in tight.problem


@pytest.mark.parametrize(
    ("name", "gpu", "offload"),
    [("1.7B", 24, "always"), ("7B", 48, "always"), ("14B", 141, "always"), ("7B", 141, "none")],
)
def test_an_evaluation_with_an_engine_that_stays_awake_has_room_for_both(name: str, gpu: float, offload: str) -> None:
    derived = found(name, 1, gpu, f"{SLEEP}=never", trains=False)
    assert derived.values[OFFLOAD] == offload and not derived.problem
    learner = 0 if offload == "always" else 4 * SHAPES[name].size.num_parameters
    assert learner + derived.values[FRACTION] * nominal_bytes(gpu) < 0.97 * nominal_bytes(gpu) - 1.5e9
    given = found(name, 1, gpu, f"{SLEEP}=never", f"{OFFLOAD}=rollout", f"{FRACTION}=0.8", trains=False)
    assert given.problem.startswith("the loading of the models needs")
    assert given.problem.endswith(f"; leave {SLEEP} out, set {OFFLOAD}=always, or give the learner more ranks")


def test_logprobs_are_computed_beside_an_engine_that_stays_awake() -> None:
    """The engine gets less, so that a pass of 65,536 tokens fits. A share that is given leaves too little."""
    passes = "inference.max_tokens_per_micro_batch=65536"
    usual, large = (found("7B", 1, 48, f"{SLEEP}=never", *settings) for settings in ([], [passes]))
    assert large.values[FRACTION] < usual.values[FRACTION] and not large.problem
    derived = found("7B", 1, 48, f"{SLEEP}=never", f"{FRACTION}=0.61", passes)
    remedies = f"leave {SLEEP} out, lower inference.max_tokens_per_micro_batch, or give the learner more ranks"
    assert derived.problem == f"the computation of logprobs needs 49.02 GB; {remedies}"


def test_a_critic_that_has_micro_batches_of_its_own_does_not_limit_those_of_the_policy() -> None:
    """The critic keeps more activations per token than the policy, whose layers are recomputed."""
    alone, small = (
        found("7B", 8, 80, *PPO, *settings, f"{OFFLOAD}=none", f"{RECOMPUTE}=full", "critic.recompute=none")
        for settings in ([], ["critic.max_tokens_per_micro_batch=1024"])
    )
    assert small.values[TOKENS] > alone.values[TOKENS]


def test_micro_batches_that_a_critic_is_given_must_fit() -> None:
    """65,536 tokens at once are more than the part of an actor in a step, 41,600. They fit only if recomputed."""
    derived = found("7B", 8, 80, *PPO, "critic.max_tokens_per_micro_batch=65536")
    assert (derived.values[OFFLOAD], derived.values[RECOMPUTE]) == ("none", "full") and not derived.problem
    assert "55.11 GB in the update" in derived.use


def test_a_derived_share_is_not_rounded_up_to_more_than_is_left() -> None:
    """The engine needs between 82 and 83 % of the card, and less than 83 % are left."""
    derived = found("0.6B", 2, 40, "rollout.max_new_tokens=1024")
    assert derived.values[FRACTION] == 0.82 and not derived.problem


def test_engines_beside_scorers_leave_room_for_their_models() -> None:
    """A rank that samples and scores holds a float32 copy of the policy, and its engine does not sleep meanwhile."""
    ranks = ["placement.rollout,inference=0", "placement.actor=1"]
    shared = found("7B", 2, 80, *ranks, "rollout.max_new_tokens=8192")
    alone = found("7B", 2, 80, "placement.rollout=0", "placement.actor=1", "rollout.max_new_tokens=8192")
    assert alone.values[FRACTION] == 0.9 and alone.reasons[FRACTION] == "no other role uses the GPU"
    copy = 4 * SHAPES["7B"].size.num_parameters / nominal_bytes(80)
    assert shared.values[FRACTION] < 0.9 - copy and "what the learner leaves free" in shared.reasons[FRACTION]


def test_ranks_on_one_gpu_share_it() -> None:
    """debug.share_gpu: two ranks have half of the GPU each."""
    shared = found("0.6B", 2, 141, "debug.share_gpu=true")
    half = found("0.6B", 2, 141 / 2)
    assert shared.values[FRACTION] == pytest.approx(half.values[FRACTION] / 2, abs=0.011)
    assert values_of(shared)[2:] == values_of(half)[2:]


def test_what_does_not_fit_is_said() -> None:
    derived = found("14B", 1, 24)
    assert values_of(derived)[3:] == ("always", "full")
    assert derived.problem.startswith("an engine needs at least 32.") and "tensor_parallel_size" in derived.problem
    long = found("14B", 2, 24, "rollout.max_new_tokens=32768", "rollout.tensor_parallel_size=2")
    assert long.problem.startswith("an update needs") and "give the learner more ranks" in long.problem
    full = found("1.7B", 1, 24, f"{FRACTION}=0.95", f"{OFFLOAD}=rollout", f"{RECOMPUTE}=full", f"{TOKENS}=640")
    assert "an update needs" in full.problem, "27.4 GB of training state"
    large = found("0.6B", 1, 24, f"{FRACTION}=0.9", f"{OFFLOAD}=none")
    assert large.problem.startswith("a rollout needs") and "lower rollout.gpu_memory_fraction" in large.problem
    evaluation = derive(*problem_of_evaluation(), trains=False)
    assert evaluation.values[OFFLOAD] == "always" and not evaluation.problem, "29.5 GB of weights on each card of 25.5"
    alone = found("14B", 1, 24, f"{SLEEP}=never", trains=False)
    assert "left for it; raise rollout.tensor" in alone.problem, "turns would not help"


@pytest.mark.parametrize(
    ("name", "gpu", "settings", "num_models", "expected"),
    [
        ("14B", 80, [], 1, "none"),
        ("14B", 48, [], 1, "always"),
        ("7B", 24, [], 1, "always"),
        ("7B", 48, PPO, 2, "always"),
    ],
)
def test_an_evaluation_loads_weights_that_fit_the_card(
    name: str, gpu: float, settings: list[str], num_models: int, expected: str
) -> None:
    """The weights are offloaded only once they are loaded, so the whole model must fit before."""
    derived = found(name, 1, gpu, *settings, "rollout.gpu_memory_fraction=0.1", trains=False)
    assert derived.values[OFFLOAD] == expected
    given = found(name, 1, gpu, *settings, f"{OFFLOAD}=rollout", trains=False)
    loaded = format_bytes(num_models * 4 * SHAPES[name].size.num_parameters + 2_500_000_000)  # and a sleeping engine
    assert f"{loaded} in the loading of the models" in given.use
    needs = f"the loading of the models needs {loaded}; set actor.offload=always, or give the learner more"
    assert given.problem.startswith(needs) == (expected == "always")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # 65,536 given tokens do not fit, though a sequence of 640 would.
        (
            ("1.7B", 1, 24, f"{TOKENS}=65536"),
            f"an update needs 22.71 GB; lower {TOKENS}, or give the learner more ranks",
        ),
        # Kept logits add 2.7 GB. It would fit without them.
        (
            ("0.6B", 1, 24, f"{OFFLOAD}=moments", f"{RECOMPUTE}=none", f"{TOKENS}=9216"),
            "an update needs 23.04 GB; set actor.recompute=head, leave actor.offload and actor.recompute out, ",
        ),
        (
            ("7B", 8, 80, *PPO, "actor.recompute=none", "critic.max_tokens_per_micro_batch=65536"),
            "recompute out, lower critic.max_tokens_per_micro_batch, or give the learner more ranks",
        ),
        (
            ("7B", 8, 24, "rollout.max_new_tokens=99999"),
            "; lower rollout.max_new_tokens, or give the learner more ranks",
        ),
        (("7B", 8, 24, *TOOLS), "; lower environment.max_conversation_tokens, or give the learner more ranks"),
        # 27.4 GB of training state do not fit with any length.
        (("1.7B", 1, 24, f"{OFFLOAD}=rollout", f"{RECOMPUTE}=none"), "recompute out, or give the learner more ranks"),
        (("1.7B", 1, 24, f"{OFFLOAD}=rollout"), "; leave actor.offload and actor.recompute out, or give the learner"),
        # 15.24 GB of weights and 2.8 GB besides do not fit into a twentieth of the card, though 80 GB are left.
        (("7B", 1, 141, f"{FRACTION}=0.05"), f"7.46 GB are left for it; raise {FRACTION}, or raise rollout.tensor"),
        # 640 tokens and two blocks of 57,344 bytes each are 36.75 MiB.
        (
            ("7B", 1, 141, "rollout.kv_cache_mb=10"),
            "rollout.kv_cache_mb: got 10, but one sequence of full length needs 37; raise",
        ),
        (("7B", 1, 141, "rollout.kv_cache_mb=36"), "got 36, but one sequence of full length needs 37; raise it"),
        (("7B", 1, 141, "rollout.kv_cache_mb=37"), ""),
        (("14B", 8, 24, "placement.rollout=0-3", "placement.actor=4-7"), "for it; raise rollout.tensor_parallel_size"),
        # A learner of 22 GB fits beside an engine of 32.4 GB only if they take turns.
        (("14B", 1, 48, f"{SLEEP}=never"), f"25.86 GB are left for it; leave {SLEEP} out, raise rollout.tensor"),
        (
            ("7B", 1, H200, *MANY_AT_ONCE),
            "of logprobs needs 182.88 GB; lower inference.max_tokens_per_micro_batch, or give",
        ),
        (("7B", 1, H200, "inference.max_tokens_per_micro_batch=262144"), ""),
    ],
)
def test_remedies_name_what_helps(arguments: tuple[Any, ...], expected: str) -> None:
    problem = found(*arguments).problem
    assert expected in problem and bool(expected) == bool(problem)
    if expected.endswith(("ranks", "size")):
        assert problem.endswith(expected), problem


def problem_of_evaluation() -> tuple[Config, Placement, Models, int]:
    """Return a run that can be evaluated, but not trained: 14 B on two GPUs of 48 GB."""
    config = load_config(overrides=[*WORK, "rollout.max_new_tokens=16384", "rollout.tensor_parallel_size=2"])
    arguments = config, placed(config, 2), models_of("14B", config), nominal_bytes(24)
    assert derive(*arguments).problem
    return arguments


def test_cards_of_one_kind_give_the_same_values() -> None:
    """Two H200 that report slightly different sizes."""
    assert values_of(found("7B", 1, H200)) == values_of(found("7B", 1, H200 - 30_000_000))
    assert nominal_bytes(141) // 2**30 == H200 // 2**30 == 139, "--gpu-memory-gb 141 is an H200"


def test_on_a_cpu_all_is_as_it_was() -> None:
    config = load_config(overrides=WORK)
    derived = derive(config, placed(config, 1), None, 0)
    assert values_of(derived) == (256, 0.85, 8192, "none", "head") and not derived.problem
    assert derived.config == derive_for_cpu(config)
    assert derive_for_cpu(derived.config) == derived.config


def test_a_model_without_known_sizes_gets_cautious_values(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    config = load_config(overrides=WORK)
    assert read_models(config, {"model.path": tmp_path}) is None
    derived = derive(config, placed(config, 1), None, H200)
    assert values_of(derived) == (512, 0.5, 8192, "rollout", "head")
    assert "config.json of the model has no known sizes" in derived.reasons[OFFLOAD]


def test_models_are_read_from_their_folders(tmp_path: Path) -> None:
    write_model(tmp_path / "qwen", QWEN_7B)
    config = load_config(overrides=PPO)
    models = read_models(config, {"model.path": tmp_path / "qwen"})
    assert models is not None and models.critic == models.policy and models.policy.shape == SHAPES["7B"]
    assert models.policy.size.num_parameters == 7_615_616_512
    (tmp_path / "qwen" / "model.safetensors").unlink()  # as in a dry run
    counted = read_models(load_config(), {"model.path": tmp_path / "qwen"})
    assert counted is not None and counted.critic is None
    assert counted.policy.size.num_parameters == pytest.approx(7_615_616_512, rel=1e-3)
    other = load_config(overrides=[*PPO, "critic.path=configs/tiny"])
    mixed = read_models(other, {"model.path": tmp_path / "qwen", "critic.path": ROOT / "configs/tiny"})
    assert mixed is not None and mixed.critic is not None and mixed.critic.shape.num_layers == 2


class LoopbackMail:
    """Deliver what all ranks send to the leader, and what the leader sends to each rank."""

    def __init__(self, sizes: Sequence[int], models: Sequence[str] = ("", "", "")):
        self.inbox = [Letter(rank, DeviceMemory(*about)) for rank, about in enumerate(zip(sizes, models, strict=False))]
        self.answers: dict[int, Any] = {}

    def send(self, rank: int, message: Any) -> None:
        if isinstance(message, DerivedSettings):
            self.answers[rank] = msgspec.json.decode(msgspec.json.encode(message), type=DerivedSettings)

    def receive(self, kind: type) -> Letter[Any]:
        return self.inbox.pop() if kind is DeviceMemory else Letter(0, self.answers[0])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([H200, H200], (256, 0.18, 20_480, "none", "none")),
        ([H200, 85_000_000_000], (256, 0.31, 18_432, "none", "head")),  # the smallest GPU decides for all
        ([H200, 0], (256, 0.85, 8192, "none", "head")),
    ],
)
def test_all_ranks_get_what_the_leader_derives(
    sizes: list[int],
    expected: tuple[Any, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_model(tmp_path / "qwen", QWEN_7B)
    config = load_config(overrides=[*WORK, *LORA])
    mail: Any = LoopbackMail(sizes)
    monkeypatch.setattr(agree, "device_bytes", lambda device: sizes[0])
    world: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), mail=mail)
    values_of_leader = agree_on_settings(world, placed(config, 2), config, {"model.path": tmp_path / "qwen"})
    assert values_of_leader == agree_on_settings(
        SimpleNamespace(rank=1, device=torch.device("cpu"), mail=mail),  # type: ignore[arg-type]
        placed(config, 2),
        config,
        {},
    )
    values = tuple(values_of_leader[name] for name in (SLOTS, FRACTION, TOKENS, OFFLOAD, RECOMPUTE))
    assert values == expected and mail.answers[0] == mail.answers[1]
    names = (SLOTS, FRACTION, TOKENS, OFFLOAD, RECOMPUTE)
    line = " ".join(f"{name}={value}" for name, value in zip(names, expected, strict=True))
    assert (line in capsys.readouterr().out) == bool(min(sizes)), "on a CPU nothing is derived"


@pytest.mark.parametrize(
    ("models", "settings", "slots"),
    [
        (["H100", "H100", "H100"], [], 176),  # 22 of 64 groups
        (
            ["H100", "A100", "A100"],
            [],
            344,
        ),  # 43 groups, so that an engine that is twice as fast has room for its share
        (["H100", "A100", "A100"], ["placement.rollout=1-2", "placement.actor=0"], 256),  # the engines are alike
        (["H100", "A100"], ["rollout.tensor_parallel_size=2"], 512),  # one engine has them all
        (["H100", "A100", "A100"], ["rollout.max_tokens_per_round=100"], 688),
        (["H100", "A100", "A100"], ["placement.rank_weights=[1]"], 176),  # shares are stated
        (["H100", "A100", "A100"], ["eval.interval=5", "train.num_prompts_per_step=3", "eval.num_prompts=99"], 72),
    ],
)
def test_engines_that_may_be_faster_than_others_have_slots_for_more_than_an_even_share(
    models: list[str], settings: list[str], slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "qwen", QWEN_7B)
    monkeypatch.setattr(agree, "device_bytes", lambda device: H200)
    config, mail = configured(*settings), LoopbackMail([H200] * len(models), models)
    world: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), mail=mail)
    values = agree_on_settings(world, placed(config, len(models)), config, {"model.path": tmp_path / "qwen"})
    assert values[SLOTS] == slots


def test_a_run_that_is_not_expected_to_fit_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "qwen", QWEN_7B)
    warnings: list[str] = []
    monkeypatch.setattr(NOTICES, "warn", warnings.append)
    monkeypatch.setattr(agree, "device_bytes", lambda device: nominal_bytes(8))
    config, mail = load_config(overrides=WORK), LoopbackMail([nominal_bytes(8)])
    world: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), mail=mail)
    agree_on_settings(world, placed(config, 1), config, {"model.path": tmp_path / "qwen"})
    (warning,) = warnings
    assert warning.startswith("by its estimate, this run does not fit into the memory of its GPUs: an update needs")


def test_another_card_is_no_change_of_the_user() -> None:
    """Checkpoints hold derived values, so that a run can be repeated elsewhere by giving them."""
    before, now = (asdict(found("7B", 1, gpu).config) for gpu in (H200, 80))
    assert changed_settings(before, now, derived=[*ON_CPU]) == []
    changes = changed_settings(before, now, derived=[FRACTION])  # the others were given by the user
    assert changes == [f"{TOKENS} 19968 -> 19456", f"{OFFLOAD} moments -> always"]
    assert msgspec.convert(json.loads(json.dumps(before)), Config) == found("7B", 1, H200).config


def engine_of(settings: list[str], num_sequences: int = 8) -> EngineMemory:
    shape = SHAPES["0.6B"]
    return engine_memory(configured(*settings), shape, shape.size, num_sequences, num_sequences)


def test_an_engine_has_room_for_the_longest_response_of_an_evaluation() -> None:
    """vLLM refuses to start if its cache cannot hold one sequence of the maximum length."""
    short, long = (engine_of([f"eval.max_new_tokens={number}"]) for number in (512, 32768))
    of_token = 2 * 2 * 28 * 8 * 128
    assert short.kv < of_token * 32768 <= min(long.kv, long.enough_kv, long.least_kv)
    assert found("0.6B", 8, 80, "eval.max_new_tokens=32768").values[FRACTION] * 80e9 > long.least


def test_long_sequences_need_memory_for_the_results_of_their_parts() -> None:
    short, long = (engine_of([f"rollout.max_new_tokens={number}"]).other for number in (1024, 8192))
    assert long - short == 4 * 8 * 16 * 129 * 5  # 8,320 tokens have 5 parts


def test_engines_of_several_ranks_have_buffers_for_their_collectives() -> None:
    """1 GB. In return, a step of 4,096 tokens has half of the activations of the MLP: 3 x 3,072 of 2 bytes."""
    limit = "rollout.engine_options={max_num_batched_tokens: 4096}"
    alone, pair = (engine_of([limit, f"rollout.tensor_parallel_size={size}"]).other for size in (1, 2))
    assert pair - alone == 1_000_000_000 - 4096 * 2 * 3 * 3072 // 2


def test_offloaded_moments_of_the_policy_are_away_while_the_critic_is_trained() -> None:
    """With `moments`, those of the critic return when activations are freed, and those of the policy after that. The
    update of the critic is the peak with the activations of 7,500 tokens, and that of the policy with 1,000."""

    def saved_gb(num_tokens: int) -> float:
        settings = [*PPO, f"{RECOMPUTE}=full", "critic.recompute=none", f"{TOKENS}={num_tokens}"]
        uses = [found("7B", 8, 80, *settings, f"{OFFLOAD}={offload}").use for offload in ("none", "moments")]
        none, away = (float(re.findall(r"([\d.]+) GB in the update", use)[0]) for use in uses)
        return none - away

    moments = 8 * SHAPES["7B"].size.num_parameters / 8 / 1e9
    assert saved_gb(7500) == pytest.approx(2 * moments, abs=0.02), "of policy and critic"
    assert saved_gb(1000) == pytest.approx(0.52, abs=0.02), "only activations, since all moments are back by then"


def test_a_given_cache_is_what_an_engine_takes() -> None:
    """vLLM ignores the share of the GPU then, so it is no reason to offload."""
    given = found("7B", 4, 70, "rollout.kv_cache_mb=8000", f"{FRACTION}=0.9")
    assert given.values[OFFLOAD] == found("7B", 4, 70, "rollout.kv_cache_mb=8000").values[OFFLOAD] == "moments"
    too_large = found("7B", 4, 80, "rollout.kv_cache_mb=70000").problem
    assert "lower rollout.kv_cache_mb" in too_large
    # 15.2 GB of weights, 57.7 GB of cache and 2.3 GB besides: moments are not enough to leave 75.2 GB.
    large = found("7B", 4, 80, "rollout.kv_cache_mb=55000")
    assert large.values[OFFLOAD] == "rollout" and not large.problem
    assert large.use.startswith("at most 75.67 GB in the rollout"), "75.20 GB, and 0.47 GB to sample"


def test_an_evaluation_alone_has_slots_for_itself() -> None:
    settings = ["train.num_prompts_per_step=1", "eval.interval=0"]
    assert found("0.6B", 1, 80, *settings).values[SLOTS] == 8
    assert found("0.6B", 1, 80, *settings, trains=False).values[SLOTS] == 256


def test_a_phase_without_engines_derives_nothing_for_them() -> None:
    config = configured()
    placement = plan(config.placement, 1, 8, 1, 1, "update")
    derived = derive(config, placement, models_of("0.6B", config), nominal_bytes(80))
    assert not placement.engines and set(derived.values) == {TOKENS, OFFLOAD, RECOMPUTE}
    assert not open_settings(derived.config)


def test_in_a_phase_without_engines_no_setting_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run.json, checkpoints and tools expect a number for each."""
    write_model(tmp_path / "qwen", QWEN_7B)
    monkeypatch.setattr(agree, "device_bytes", lambda device: H200)
    config, mail = configured(), LoopbackMail([H200])
    world: Any = SimpleNamespace(rank=0, device=torch.device("cpu"), mail=mail)
    placement = plan(config.placement, 1, 1, 1, 1, "update")
    values = agree_on_settings(world, placement, config, {"model.path": tmp_path / "qwen"})
    assert (values[SLOTS], values[FRACTION]) == (256, 0.85), "as on a CPU, since no engine uses them"
    assert not open_settings(with_values(config, values))
