"""The memory that each role needs, calculated by hand, and the number of parameters from the headers of files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from launch.checks.memory import check_placement
from launch.checks.results import FAILED, OK, WARNING
from rl.config.load import load_config
from rl.config.schema import ROOT, Config, ConfigError, LoraConfig
from rl.learner.optimizers import MIN_BLOCK, block_size
from rl.model import memory
from rl.model.lora import inject
from rl.model.memory import (
    LIBRARIES,
    checkpoint_bytes,
    estimate,
    host_bytes,
    moment_bytes,
    num_adapter_parameters,
    num_kept,
)
from rl.model.shape import AdaptedLayers, ModelSize, check_model, local_folder, measure_size
from rl.placement.roles import Placement, plan
from tests.public_models import QWEN_7B, write_model

BILLION = 10**9
# Cards of a few MB are too small to derive settings for them.
GIVEN = [
    *("rollout.max_num_seqs=256", "rollout.gpu_memory_fraction=0.85", "actor.max_tokens_per_micro_batch=8192"),
    *("actor.offload=none", "actor.recompute=none", "rollout.sleep=always"),
]


def planned(config: Config, num_nodes: int, num_local: int) -> Placement:
    sizes = (config.rollout.tensor_parallel_size, config.actor.num_replicas)
    return plan(config.placement, num_nodes, num_local, *sizes)


def test_a_collocated_recipe() -> None:
    """rloo.yaml: 7.616 billion parameters on 8 ranks, with a reference, swapped out while the engine works. Its head
    says 15.2 GB of state, 3.8 GB of the reference, 15.2 GB of weights."""
    config = load_config("configs/rloo.yaml", ["actor.offload=rollout"])
    (need,) = estimate(config, planned(config, 1, 8), ModelSize(7_616_000_000))
    assert need.ranks == tuple(range(8)) and need.offloaded == need.learner
    assert need.learner == 16 * 952_000_000 + 4 * 952_000_000
    assert need.engine == 2 * 7_616_000_000
    assert need.host == LIBRARIES + (12 + 4) * 952_000_000 + 12 * 952_000_000  # gradients are freed, not moved
    assert need.on_device(56 * BILLION) == 56 * BILLION
    assert checkpoint_bytes(config, planned(config, 1, 8), ModelSize(BILLION)) == [14 * BILLION]
    part = load_config("configs/rloo.yaml", ["actor.offload=moments"])
    (need,) = estimate(part, planned(part, 1, 8), ModelSize(7_616_000_000))
    assert need.offloaded == 8 * 952_000_000 and need.host == LIBRARIES + (8 + 12) * 952_000_000
    assert need.on_device(56 * BILLION) == 56 * BILLION + (4 + 4) * 952_000_000
    always = load_config("configs/rloo.yaml", ["actor.offload=always"])
    (need,) = estimate(always, planned(always, 1, 8), ModelSize(7_616_000_000))
    assert (need.learner, need.offloaded, need.host) == (0, 0, LIBRARIES + (16 + 4 + 12) * 952_000_000)


@pytest.mark.parametrize(
    ("offload", "on_device", "offloaded"), [("none", 8, 0), ("moments", 8, 0), ("rollout", 8, 8), ("always", 0, 0)]
)
def test_evaluation_alone_needs_weights_and_no_copy_of_a_checkpoint(
    offload: str, on_device: int, offloaded: int
) -> None:
    """4 bytes a parameter of the policy and 4 of the reference, of a shard of 952 million."""
    config = load_config("configs/rloo.yaml", [f"actor.offload={offload}"])
    (need,) = estimate(config, planned(config, 1, 8), ModelSize(7_616_000_000), trains=False)
    assert (need.learner, need.offloaded) == (on_device * 952_000_000, offloaded * 952_000_000)
    assert need.host == LIBRARIES + (8 if offload == "always" else offloaded) * 952_000_000


def test_disaggregated_roles_need_different_things() -> None:
    """1.6 billion parameters: 20 ranks with an engine each, 4 that hold a float32 copy, 8 with 16 bytes a parameter."""
    config = load_config("configs/math_r1_distill_1.5b_disaggregated.yaml")
    needs = estimate(config, planned(config, 4, 8), ModelSize(1_600_000_000))
    assert {need.roles: (need.learner, need.engine) for need in needs} == {
        ("rollout",): (0, 3_200_000_000),
        ("inference",): (1_600_000_000, 0),
        ("actor",): (3_200_000_000, 0),
    }
    assert [need.host - LIBRARIES for need in needs] == [0, 0, 12 * 200_000_000]
    assert not any(need.offloaded for need in needs)


def test_a_critic_replicas_and_a_cpu() -> None:
    """4 actors in 2 replicas: each shard is half of policy and critic. On a CPU engine and learner share one memory."""
    settings = ["algo.advantage=gae", "actor.num_replicas=2", "rollout.kv_cache_mb=100"]
    config = load_config(overrides=settings)
    placement = planned(config, 2, 2)
    (need,) = estimate(config, placement, ModelSize(1000), ModelSize(600))
    assert (need.learner, need.engine, need.host) == (16 * 800, 4 * 1000, LIBRARIES + 12 * 800)
    assert need.host_on_cpu == LIBRARIES + 12 * 800 + 16 * 800 + 4000 + (100 << 20)
    assert checkpoint_bytes(config, placement, ModelSize(1000), ModelSize(600)) == [12 * 800, 12 * 800]
    assert host_bytes([need], placement, has_gpus=True) == [2 * need.host] * 2
    assert host_bytes([need], placement, has_gpus=False) == [2 * need.host_on_cpu] * 2
    swapped = load_config(overrides=[*settings, "actor.offload=rollout"])
    (other,) = estimate(swapped, planned(swapped, 2, 2), ModelSize(1000), ModelSize(600))
    assert other.host > need.host and other.host_on_cpu == need.host_on_cpu


def test_number_of_checkpoints_on_disk_at_once() -> None:
    keep = ["checkpoint.keep_last=3", "checkpoint.keep_every=10", "train.num_steps=45"]
    assert num_kept(load_config(overrides=keep[:1])) == 4
    assert num_kept(load_config(overrides=keep)) == 8
    best = ["checkpoint.best_metric=eval/accuracy", "eval.interval=5"]
    assert num_kept(load_config(overrides=[*keep, *best])) == 9


def test_each_node_writes_what_its_actors_hold() -> None:
    config = load_config(overrides=["placement.rollout=0-4,8-10", "placement.actor=5-7,11"])
    assert checkpoint_bytes(config, planned(config, 3, 4), ModelSize(100)) == [0, 900, 300]


def test_parameters_are_counted_from_the_headers_of_files(tmp_path: Path) -> None:
    assert measure_size(ROOT / "configs/tiny") == ModelSize(307_840, 294_912)
    assert measure_size(tmp_path) is None and local_folder(str(tmp_path)) is None
    for number in (1, 2):
        save_file({f"t{number}": torch.zeros(3, number)}, tmp_path / f"part{number}.safetensors", metadata={"a": "b"})
    index = {"weight_map": {"t1": "part1.safetensors", "t2": "part2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert measure_size(tmp_path) == ModelSize(9)
    (tmp_path / "part2.safetensors").write_bytes(b"torn")
    assert measure_size(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("nobody/no-such-model") is None


def test_a_placement_that_does_not_fit_fails() -> None:
    gpus = [{"total": 80 * BILLION}] * 2
    config = load_config()
    row, host, disk = check_placement(config, 1, 2, [{}] * 2)
    assert row.state == OK and host[0] > 2 * LIBRARIES and disk == [12 * 307_840] and "2 ranks on 1 node:" in row.text
    assert row.details[0].startswith("rollout,actor (ranks 0-1): each at least 1.")
    assert check_placement(config, 1, 2, gpus)[0].state == OK
    row, *needs = check_placement(load_config(overrides=["model.path=nobody/no-such-model"]), 1, 2, gpus)
    assert (row.state, needs) == (WARNING, [[], []])
    assert "nobody/no-such-model cannot be read here yet, so memory and disk were not estimated" in row.text
    row, *needs = check_placement(load_config(overrides=["placement.actor,rollout=0-3"]), 1, 2, gpus)
    assert (row.state, needs) == (FAILED, [[], []]) and "got rank 3 in a world of 2 ranks" in row.text
    row, *_ = check_placement(load_config(overrides=["data.max_prompt_tokens=500"]), 1, 2, gpus)
    assert row.state == FAILED and "has 128 positions" in row.text


@pytest.mark.parametrize(
    ("card", "settings", "state", "text"),
    [
        (
            10_000_000,
            [],
            FAILED,
            "at once; lower rollout.gpu_memory_fraction, or set actor.offload=rollout, or give the",
        ),
        (2_400_000, [], FAILED, "would be in use at once; set actor.offload=always, or give the learner more ranks"),
        (2_400_000, ["actor.offload=rollout"], FAILED, "2.46 MB would be in use at once; set actor.offload=always, or"),
        (2_600_000, ["actor.offload=rollout"], WARNING, "for activations; set actor.offload=always, or give the learn"),
        (2_400_000, ["actor.offload=always"], OK, "each 1.23 MB engine's weights"),
        (10_000_000, ["actor.offload=rollout"], OK, "each 2.46 MB policy, 1.23 MB engine's weights"),
        (15_000_000, [], WARNING, "little is left for activations"),
        (20_000_000, [], OK, "each 2.46 MB policy, 1.23 MB engine's weights"),
        (1_000_000, [], FAILED, "of which the engine may fill 850.00 kB; raise rollout.tensor_parallel_size"),
    ],
)
def test_a_model_must_fit_its_gpus(card: int, settings: list[str], state: str, text: str) -> None:
    """The shipped model on 2 ranks: 16 * 307,840 / 2 = 2.46 MB of state; an engine may fill 85 % of the card."""
    row, *_ = check_placement(load_config(overrides=[*GIVEN, *settings]), 1, 2, [{"total": card}] * 2)
    assert row.state == state and any(text in line for line in [row.text, *row.details]), row


def test_a_model_too_large_to_train_can_be_evaluated() -> None:
    """16 * 307,840 / 2 = 2.46 MB of state beside 85 % of the card; 4 * 307,840 / 2 = 616 kB of weights."""
    gpus, config = [{"total": 4_200_000}] * 2, load_config(overrides=GIVEN)
    states = [check_placement(config, 1, 2, gpus, trains)[0].state for trains in (True, False)]
    assert states == [FAILED, WARNING]
    (line,) = check_placement(config, 1, 2, [{}] * 2, trains=False)[0].details
    assert "615.68 kB policy" in line


def test_a_scorer_beside_an_engine_is_not_told_to_offload_an_actor() -> None:
    settings = ["placement.actor=0", "placement.rollout,inference=1", "rollout.gpu_memory_fraction=0.9"]
    row, *_ = check_placement(load_config(overrides=settings), 1, 2, [{"total": 9_000_000}] * 2)
    (line,) = [line for line in [row.text, *row.details] if "rollout,inference" in line and "at once" in line]
    assert row.state == FAILED and line.endswith("lower rollout.gpu_memory_fraction, or give inference more ranks")


def test_a_phase_counts_only_its_own_roles() -> None:
    """A card that cannot hold learner and engine at once holds each alone."""
    gpus, spec = [{"total": 4_200_000}] * 2, load_config(overrides=[*GIVEN, "placement.rollout=all"])
    assert check_placement(spec, 1, 2, gpus)[0].state == FAILED  # there is no actor
    row, *_ = check_placement(spec, 1, 2, gpus, phase="rollout")
    assert row.state == OK and all("learner" not in line for line in row.details), row
    row, *_ = check_placement(load_config(overrides=GIVEN), 1, 2, gpus, phase="update")
    assert row.state == OK and all("engine" not in line for line in row.details), row


LORA = ["model.lora.rank=16", "model.dtype=bfloat16"]
# 1.7 billion parameters; adapters of rank 16 have 16 x (500,000 + 600,000) = 17.6 million.
SIZE, NUM_IN_ADAPTERS = ModelSize(1_700_000_000, 1_500_000_000, AdaptedLayers(168, 500_000, 600_000)), 17_600_000


def test_adapters_of_a_collocated_policy() -> None:
    """2 bytes a frozen parameter, 16 a trained one. The reference is the policy without adapters."""
    config = load_config(overrides=[*LORA, "algo.kl_coef=0.1"])
    (need,) = estimate(config, planned(config, 1, 2), SIZE)
    assert need.models == {"policy": 1_700_000_000 + 8 * NUM_IN_ADAPTERS}
    assert need.engine == 2 * 1_700_000_000
    assert need.host == LIBRARIES + 6 * NUM_IN_ADAPTERS, "only adapters and moments are copied for a checkpoint"
    assert checkpoint_bytes(config, planned(config, 1, 2), SIZE) == [12 * NUM_IN_ADAPTERS]
    full = load_config(overrides=["model.dtype=bfloat16", "algo.kl_coef=0.1"])
    (whole,) = estimate(full, planned(full, 1, 2), SIZE)
    assert need.models["policy"] < 0.35 * whole.models["policy"] and "reference" in whole.models
    wide = load_config(overrides=["model.lora.rank=16"])
    (need,) = estimate(wide, planned(wide, 1, 2), SIZE)
    assert need.models == {"policy": 2 * 1_700_000_000 + 8 * NUM_IN_ADAPTERS}, "frozen weights are in model.dtype"
    (need,) = estimate(config, planned(config, 1, 2), SIZE, trains=False)
    assert need.models == {"policy": 1_700_000_000 + 2 * NUM_IN_ADAPTERS} and need.host == LIBRARIES


@pytest.mark.parametrize(
    ("offload", "on_device", "offloaded", "on_host"),
    [
        ("none", (2, 16), (0, 0), (0, 0)),
        ("moments", (2, 16), (0, 8), (0, 8)),
        ("rollout", (2, 16), (2, 16), (2, 12)),
        ("always", (0, 0), (0, 0), (2, 16)),
    ],
)
def test_offloaded_adapters(
    offload: str, on_device: tuple[int, int], offloaded: tuple[int, int], on_host: tuple[int, int]
) -> None:
    """Bytes of a frozen and of a trained parameter. Host memory also has 12 for the copy of a checkpoint."""
    config = load_config(overrides=[*LORA, f"actor.offload={offload}"])
    (need,) = estimate(config, planned(config, 1, 1), SIZE)
    found = need.learner, need.offloaded, need.host - LIBRARIES - 12 * NUM_IN_ADAPTERS
    assert found == tuple(a * 1_700_000_000 + b * NUM_IN_ADAPTERS for a, b in (on_device, offloaded, on_host))


def test_adapters_beside_inference_ranks_and_a_critic() -> None:
    """Inference ranks hold the merged policy and the reference in float32. A critic has adapters, or is whole."""
    ranks = ["placement.rollout=0", "placement.inference=1", "placement.actor=2"]
    config = load_config(overrides=[*LORA, *ranks, "algo.kl_coef=0.1", "algo.advantage=gae"])
    _, inference, actor = estimate(config, planned(config, 1, 3), SIZE, SIZE)
    assert inference.models == dict.fromkeys(["copy of the policy", "reference"], 4 * 1_700_000_000)
    state = 2 * 1_700_000_000 + 16 * NUM_IN_ADAPTERS
    assert actor.models == {"policy": state, "critic": state}
    assert checkpoint_bytes(config, planned(config, 1, 3), SIZE, SIZE) == [24 * NUM_IN_ADAPTERS]
    config = load_config(overrides=[*LORA, *ranks, "algo.advantage=gae", "critic.lora=false"])
    *_, actor = estimate(config, planned(config, 1, 3), SIZE, SIZE)
    assert actor.models == {"policy": state, "critic": 16 * 1_700_000_000}
    saved = 12 * NUM_IN_ADAPTERS + 14 * 1_700_000_000
    assert checkpoint_bytes(config, planned(config, 1, 3), SIZE, SIZE) == [saved]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["actor.optimizer=adamw"], 8 * NUM_IN_ADAPTERS),
        (["actor.optimizer=sgd"], 4 * NUM_IN_ADAPTERS),
        (["actor.optimizer=sgd", "actor.beta1=0"], 0),
        (["actor.optimizer=muon"], 4 * NUM_IN_ADAPTERS),  # adapters are matrices of layers
        (["actor.optimizer=adamw_8bit"], 16 * (500_000 * 2 + 500_000 * 8 // 256 + 600_000 * 8)),
        (["actor.optimizer=adamw_8bit", "model.lora.rank=64"], 64 * (1_100_000 * 2 + 1_100_000 * 8 // 256)),
    ],
)
def test_moments_of_adapters(settings: list[str], expected: int) -> None:
    """8-bit AdamW keeps float32 moments for B, whose rows are as short as the rank, and quantizes longer rows."""
    config = load_config(overrides=[*LORA, *settings])
    assert moment_bytes(config, SIZE, config.model.lora) == pytest.approx(expected, abs=100)
    assert memory.MIN_BLOCK == MIN_BLOCK
    assert bool(block_size((3584, config.model.lora.rank))) == (config.model.lora.rank == 64)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"]])
def test_adapters_are_counted_as_peft_makes_them(targets: list[str]) -> None:
    folder, lora = ROOT / "configs/tiny", LoraConfig(rank=3, targets=targets)
    size = measure_size(folder, targets)
    assert size is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    inject(model, lora, "float32")
    adapters = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert num_adapter_parameters(lora, size) == sum(adapters)
    assert size.adapted.num_layers == len(adapters) / 2 == (14 if targets == ["all-linear"] else 4)


@pytest.mark.parametrize("target", ["q_project", "lm_head", "embed_tokens", "input_layernorm"])
def test_targets_are_compared_with_the_files_of_the_model(target: str) -> None:
    config = load_config(overrides=["model.lora.rank=4", f"model.lora.targets=[q_proj,{target}]"])
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ConfigError, match=f"model.lora.targets: got {target}, but no linear .* fit these: {names}"):
        check_model(config, ROOT / "configs/tiny")
    row, *_ = check_placement(config, 1, 2, [{}] * 2)
    assert row.state == FAILED and target in row.text
    check_model(load_config(overrides=[f"model.lora.targets=[{target}]"]), ROOT / "configs/tiny")


@pytest.mark.parametrize("text", ["[]", "null"])
def test_a_config_json_without_settings_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json has no settings of a model; give the folder of a"):
        check_model(load_config(), tmp_path)


def test_7_billion_parameters_fit_one_card_with_adapters(tmp_path: Path) -> None:
    """15.2 GB of frozen weights and 0.65 GB of adapters beside an engine that fills half of 80 GB. All of it would
    need 122 GB."""
    write_model(tmp_path / "qwen", QWEN_7B)
    settings = [f"model.path={tmp_path / 'qwen'}", "model.dtype=bfloat16", "rollout.gpu_memory_fraction=0.5"]
    gpus = [{"total": 80 * BILLION}]
    row, _, disk = check_placement(load_config(overrides=[*settings, "model.lora.rank=16"]), 1, 1, gpus)
    assert row.state == OK, row
    assert "adapters of rank 16 on 196 linear layers: 40.37 M of 7,655.99 M parameters are trained" in row.text
    assert any("each 15.88 GB policy, 15.23 GB engine's weights" in line for line in row.details), row
    assert disk == [12 * 40_370_176]
    whole = load_config(overrides=[*settings, "actor.offload=none"])
    assert check_placement(whole, 1, 1, gpus)[0].state == FAILED
