"""Every shipped config is valid for its world, its model and its rewards, and its header is correct.

tests/unit/test_plan_command.py runs `--plan` with each of them.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import OmegaConf

from rl.config.differences import flatten
from rl.config.load import load_config
from rl.config.modes import for_evaluation
from rl.config.schema import ROOT, Config
from rl.evaluation.best_metric import check_best_metric
from rl.model.memory import estimate
from rl.model.shape import AdaptedLayers, ModelShape, ModelSize, check_model
from rl.placement.roles import Placement, plan
from rl.rewards.find import check_rewards
from rl.run.derive import Derived, derive, nominal_bytes
from rl.run.peaks import ModelFacts, Models

FILES = sorted((ROOT / "configs").glob("*.yaml"))
TINY = ("default", "tiny_calculator", "tiny_guess")  # on any machine, with a model in this repository
RECIPES = [file for file in FILES if file.stem not in TINY]
every_recipe = pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


class Shape(NamedTuple):
    """The shape of a public model, from its config.json and its files."""

    inner: ModelShape
    num_positions: int
    num_parameters: float  # in billions
    num_head_parameters: float = 0.0  # of an untied output layer, which a critic does not have
    adapter_width: int = 0  # inputs and outputs of all linear layers but the head, in all layers together


OF_3B, OF_7B = (
    ModelShape(36, 2048, 11_008, 16, 2, 128, 151_936, is_tied=True),
    ModelShape(28, 3584, 18_944, 28, 4, 128, 152_064, is_tied=False),
)
SHAPES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": Shape(
        ModelShape(30, 576, 1536, 9, 3, 64, 49_152, is_tied=True), 8192, 0.1345, adapter_width=30 * (4992 + 5184)
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(ModelShape(24, 896, 4864, 14, 2, 64, 151_936, is_tied=True), 32768, 0.494),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Shape(
        ModelShape(28, 1536, 8960, 12, 2, 128, 151_936, is_tied=False), 131072, 1.777
    ),
    "Qwen/Qwen2.5-3B": Shape(OF_3B, 32768, 3.086),
    "Qwen/Qwen2.5-3B-Instruct": Shape(OF_3B, 32768, 3.086),
    "Qwen/Qwen2.5-7B-Instruct": Shape(OF_7B, 32768, 7.616, 0.545, adapter_width=28 * (40_448 + 49_664)),
    "Qwen/Qwen2.5-Math-7B": Shape(OF_7B, 4096, 7.616, 0.545),
    "Qwen/Qwen2.5-14B": Shape(ModelShape(48, 5120, 13_824, 40, 8, 128, 152_064, is_tied=False), 131072, 14.77),
}


def derived(config: Config, gpu_gb: int) -> Derived:
    """Return the settings of a run on cards of this size."""
    shape = SHAPES[config.model.path]
    adapted = AdaptedLayers(1, shape.adapter_width) if config.model.lora.is_set else AdaptedLayers()
    policy = ModelFacts(ModelSize(int(1e9 * shape.num_parameters), adapted=adapted), shape.inner)
    critic = ModelFacts(ModelSize(int(1e9 * (shape.num_parameters - shape.num_head_parameters))), shape.inner)
    models = Models(policy, critic if config.algo.has_critic else None)
    return derive(config, planned(config), models, nominal_bytes(gpu_gb))


def planned(config: Config) -> Placement:
    num_nodes = config.placement.get("num_nodes", 1)
    num_ranks = config.placement.get("num_gpus_per_node", 2)
    return plan(config.placement, num_nodes, num_ranks, config.rollout.tensor_parallel_size, config.actor.num_replicas)


def head_of(file: Path) -> str:
    """Return the comment above the settings as one line."""
    lines = file.read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))


@every_file
def test_it_fits_its_own_world(file: Path) -> None:
    config = load_config(file)
    placement = planned(config)
    sizes = dict.fromkeys(TINY, 2) | {
        "gsm8k_smollm2_135m": 1,
        "gsm8k_smollm2_135m_lora": 1,
        "math_qwen2.5_7b_lora": 1,
        "ppo_qwen2.5_7b": 16,
        "ppo_qwen2.5_0.5b": 2,
        "math_qwen2.5_14b": 32,
    }
    sizes |= {"math_r1_distill_1.5b_collocated": 32, "math_r1_distill_1.5b_disaggregated": 32}
    assert placement.world_size == sizes.get(file.stem, 8)
    assert placement.actors and placement.engines
    check_rewards(config.reward)
    check_best_metric(config)
    assert for_evaluation(config).eval.interval == config.eval.interval > 0


@every_file
def test_it_says_only_what_differs_from_the_defaults(file: Path) -> None:
    settings = flatten(OmegaConf.to_container(OmegaConf.load(file)))  # type: ignore[arg-type]
    defaults = flatten(dataclasses.asdict(Config()))
    defaults["environment.class"] = defaults.pop("environment.class_")
    assert settings.keys() <= defaults.keys()
    assert [name for name, value in settings.items() if defaults[name] == value] == []


@every_file
def test_its_head_names_hardware_and_memory_in_lines_that_fit(file: Path) -> None:
    head = head_of(file)
    assert "Hardware: " in head and "Expected memory" in head
    assert [line for line in file.read_text().splitlines() if len(line) > 120] == []


@every_recipe
def test_it_fits_its_model(file: Path, tmp_path: Path) -> None:
    """The ranks of an engine divide the heads, and prompt and response fit into the positions."""
    config = load_config(file)
    shape = SHAPES[config.model.path]
    about = {"num_attention_heads": shape.inner.num_heads, "max_position_embeddings": shape.num_positions}
    (tmp_path / "config.json").write_text(json.dumps(about))
    check_model(config, tmp_path)
    assert config.placement["num_gpus_per_node"] % config.rollout.tensor_parallel_size == 0
    for gpu_gb in (24, 80):
        assert config.max_sequence_tokens <= derived(config, gpu_gb).config.actor.max_tokens_per_micro_batch


@every_recipe
def test_its_head_names_its_world_and_its_data(file: Path) -> None:
    config, head = load_config(file), head_of(file)
    num_nodes, num_gpus = config.placement["num_nodes"], config.placement["num_gpus_per_node"]
    gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    where = "" if num_gpus == 1 else " of one node"
    assert f"Hardware: {f'{gpus}{where}' if num_nodes == 1 else f'{num_nodes} nodes of {gpus}'}." in head
    name = Path(config.data.train).parent
    if file.stem == "search_qa_qwen2.5_3b":
        assert f"{name}/train.jsonl and test.jsonl" in head and config.environment.options["index"] in head
    else:
        assert f"python tools/prepare_data.py {name.name} --output {name}" in head
    assert config.model.path.rpartition("/")[2] in head


@every_recipe
def test_memory_in_its_head_is_what_the_arithmetic_gives(file: Path) -> None:
    """Training state has 16 bytes per trained parameter over the actors and 2 per frozen one, a reference or the model
    of inference ranks 4, an engine 2 over its ranks. With adapters, there is no reference. Host memory holds offloaded
    state, the copy of a checkpoint and 1 GB of libraries. The settings are derived, and fit the named card."""
    config, head = load_config(file), head_of(file)
    placement, shape = planned(config), SHAPES[config.model.path]
    num_actors = len(placement.actors)
    state, lora = 16 * shape.num_parameters / num_actors, config.model.lora
    if lora.is_set:
        assert shape.adapter_width
        state = (2 * shape.num_parameters + 16e-9 * lora.rank * shape.adapter_width) / num_actors
    assert f"{state:.1f} GB of training state" in head
    reference = 4 * shape.num_parameters / num_actors if config.algo.kl_coef and not lora.is_set else 0.0
    assert (f"{reference:.1f} GB of the reference" in head) == bool(reference)
    assert "reference" not in head or reference
    critic = 16 * (shape.num_parameters - shape.num_head_parameters) / num_actors if config.algo.has_critic else 0.0
    assert (f"{critic:.1f} GB of the critic's" in head) == bool(critic)
    if num_actors > 1:
        assert re.search(rf"16 bytes per parameter over {num_actors} ranks", head)
    if weights := re.search(r"([\d.]+) GB of weights", head):
        engine = 2 * shape.num_parameters / config.rollout.tensor_parallel_size
        assert float(weights[1]) == pytest.approx(engine, abs=0.06)
    if held := re.search(r"inference ([\d.]+) GB \(float32 over (\d+) ranks\)", head):
        assert int(held[2]) == len(placement.scorers)
        assert float(held[1]) == pytest.approx(4 * shape.num_parameters / len(placement.scorers), abs=0.06)
    card = re.search(r"[Cc]ards? of (\d+) GB (?:are|is) enough", head)
    assert card
    found = derived(config, int(card[1]))
    assert not found.problem, found.problem
    if host := re.search(r"(\d+) GB of host memory", head):
        policy, value = (int(1e9 * size) for size in (shape.num_parameters, critic * num_actors / 16))
        (role,) = estimate(found.config, placement, ModelSize(policy), ModelSize(value) if value else None)
        assert int(host[1]) == round(role.host / 1e9)
