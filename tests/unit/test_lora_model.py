"""Models with adapters: what is added, stored and trained, and the reference inside of them."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from rl.checkpoint.base import Share, digest_base
from rl.config.schema import (
    ActorConfig,
    AlgoConfig,
    Config,
    ConfigError,
    CriticConfig,
    DebugConfig,
    LoraConfig,
    ModelConfig,
)
from rl.learner.critic import CriticTrainer
from rl.learner.optimizers import MOMENTS
from rl.learner.policy import PolicyTrainer
from rl.learner.sharded_trainer import ShardedModel
from rl.model.adapter_names import adapters_of, is_adapter
from rl.model.base_digest import BaseDigests, digest_tensors
from rl.model.head import token_scores
from rl.model.load import PLAIN, Compute, load_model
from rl.model.logprobs import score_responses
from rl.model.lora import Adapters, BaseModel, has_adapters, inject, trained_slices
from rl.model.shards import local_slices, named_parameters
from rl.placement.groups import make_groups
from rl.run import models
from rl.run.derive import derive_for_cpu
from rl.run.open import Run
from rl.run.replay import ALONE, SavedStep, _why_no_loss
from rl.world.world import World
from tests.update import MODELS, SHAPE, make_batch, make_model

CPU = torch.device("cpu")
TIED, UNTIED = MODELS
RANK, SEED = 3, 7
LORA = LoraConfig(rank=RANK, alpha=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in MODELS:
        make_model(folder / kind, kind)
    return folder


def load(folder: Path, mesh: DeviceMesh, dtype: str = "float32", compute: Compute = PLAIN, **options: Any) -> Any:
    return load_model(folder, mesh, CPU, dtype, Adapters(LORA, SEED), compute=compute, **options)


def shake(model: nn.Module) -> None:
    """Give adapters values that change what the model computes. At first they do not, since B is 0."""
    generator = torch.Generator().manual_seed(0)
    for part in local_slices(model):
        if is_adapter(part.info.name):
            part.data.uniform_(-0.3, 0.3, generator=generator)


@torch.no_grad()
def logprobs(model: nn.Module) -> Tensor:
    return score_responses(model, make_batch(), 1.0, CPU).logprobs


@pytest.mark.parametrize("kind", MODELS)
def test_every_linear_layer_but_the_head_gets_adapters(kind: str, folder: Path, mesh: DeviceMesh) -> None:
    """The weights under them have the names of the model's files, are frozen, and are stored in model.dtype."""
    model, files = load(folder / kind, mesh, "bfloat16"), load_file(folder / kind / "model.safetensors")
    found = {part.info.name: part for part in local_slices(model)}
    adapted = [name for name in files if ".layers." in name and "proj" in name]
    assert len(adapted) == 2 * 7 and found.keys() == {*files, *(name for each in adapted for name in adapters_of(each))}
    for name in adapted:
        first, second = (found[each] for each in adapters_of(name))
        assert first.info.shape == (RANK, files[name].shape[1]) and second.info.shape == (files[name].shape[0], RANK)
    for name, parameter in named_parameters(model):
        assert parameter.requires_grad == is_adapter(name), name
        assert parameter.dtype == (torch.float32 if is_adapter(name) else torch.bfloat16), name
        assert is_adapter(name) or torch.equal(found[name].data, files[name].bfloat16()), name
    assert [part.info.name for part in trained_slices(model)] == [name for name in found if is_adapter(name)]
    assert not has_adapters(load_model(folder / kind, mesh, CPU, "float32", trainable=True))


def test_a_critic_trains_its_head_too(folder: Path, mesh: DeviceMesh) -> None:
    model = load(folder / TIED, mesh, "bfloat16", as_critic=True)
    trained = {part.info.name: part for part in trained_slices(model)}
    assert {name for name in trained if not is_adapter(name)} == {"lm_head.weight"}
    assert trained["lm_head.weight"].info.dtype == "float32" and not trained["lm_head.weight"].data.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_new_policy_is_the_model_without_adapters(kind: str, dtype: str, folder: Path, mesh: DeviceMesh) -> None:
    plain = load_model(folder / kind, mesh, CPU, dtype, trainable=True)
    assert torch.equal(logprobs(load(folder / kind, mesh, dtype)), logprobs(plain))


@pytest.mark.parametrize("recomputed", ["none", "selective"])
def test_the_reference_is_the_model_without_adapters(recomputed: str, folder: Path, mesh: DeviceMesh) -> None:
    """It has no parameters of its own, and leaves those of the policy as trainable as they were."""
    wanted = logprobs(load_model(folder / UNTIED, mesh, CPU, "float32", trainable=True))
    model = load(folder / UNTIED, mesh, compute=Compute(recomputed=recomputed))
    base, trainable = BaseModel(model), [parameter.requires_grad for parameter in model.parameters()]
    assert not list(base.parameters()) and base.config is model.config
    shake(model)
    torch.testing.assert_close(logprobs(base), wanted, atol=1e-6, rtol=0)
    trained = score_responses(model, make_batch(), 1.0, CPU).logprobs
    trained.sum().backward()
    assert (trained - wanted).abs().max() > 0.1, "the adapters change nothing"
    assert all((each.grad is not None) == each.requires_grad for each in model.parameters())
    torch.testing.assert_close(logprobs(base), wanted, atol=1e-6, rtol=0)
    assert torch.equal(logprobs(model), trained)
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable


def test_compiled_layers_notice_that_adapters_are_off(
    tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the reference would be the policy. tests/distributed/test_learner_lora.py has backward passes too."""
    torch._dynamo.reset()  # other tests may have used up the number of graphs that a layer may have
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_hidden_layers": 1})).save_pretrained(tmp_path)
    wanted = logprobs(load_model(tmp_path, mesh, CPU, "float32", trainable=True))
    model = load(tmp_path, mesh, compute=Compute(compiled=True))
    shake(model)
    base = BaseModel(model)
    torch.testing.assert_close(logprobs(base), wanted, atol=1e-6, rtol=0)
    assert (logprobs(model) - wanted).abs().max() > 0.1
    torch.testing.assert_close(logprobs(base), wanted, atol=1e-6, rtol=0)


def test_adapters_are_on_again_after_a_pass_that_fails(folder: Path, mesh: DeviceMesh) -> None:
    model = load(folder / TIED, mesh)
    shake(model)
    before = logprobs(model)
    with pytest.raises(TypeError):
        BaseModel(model)(no="such input")
    assert torch.equal(logprobs(model), before)


def first_values(folder: Path, rank: int, num_ranks: int, seed: int = SEED) -> dict[str, Tensor]:
    """Load a model as one rank of several, and return the rows of its adapters."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        assert dist.group.WORLD is not None
        pg = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        model = load_model(folder, pg, CPU, "float32", Adapters(LORA, seed))
        return {part.info.name: part.data.clone() for part in trained_slices(model)}
    finally:
        dist.destroy_process_group()


def test_first_values_do_not_depend_on_the_number_of_ranks(folder: Path) -> None:
    """With 5 ranks, two of them hold no row of A."""
    alone = first_values(folder / TIED, 0, 1)
    assert all(torch.equal(alone[name], value) for name, value in first_values(folder / TIED, 0, 1).items())
    for num_ranks in (2, 5):
        ranks = [first_values(folder / TIED, rank, num_ranks) for rank in range(num_ranks)]
        for name, value in alone.items():
            assert torch.equal(torch.cat([of_rank[name] for of_rank in ranks]), value), name
    firsts = {name: value for name, value in alone.items() if ".lora_A." in name}
    assert not any(value.any() for name, value in alone.items() if name not in firsts), "B is not 0"
    for name, value in firsts.items():
        bound = value.shape[1] ** -0.5
        assert 0.8 * bound < value.abs().max() <= bound and value.min() < 0 < value.max(), name
    others = first_values(folder / TIED, 0, 1, seed=SEED + 1)
    assert not any(torch.equal(others[name], value) for name, value in firsts.items()), "the seed changes nothing"
    assert len({tuple(value.flatten()[:4].tolist()) for value in firsts.values()}) == len(firsts), "two are equal"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("o_project", "no module of LlamaForCausalLM"),
        ("lm_head", "a Linear of LlamaForCausalLM"),
        ("embed_tokens", "a Embedding of LlamaForCausalLM"),
        ("self_attn", "a LlamaAttention of LlamaForCausalLM"),
    ],
)
def test_targets_that_are_no_linear_layers_are_refused(target: str, said: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    with pytest.raises(ConfigError, match=f"model.lora.targets: got {target}, which is {said}; .*: down_proj, gate_"):
        inject(model, dataclasses.replace(LORA, targets=["q_proj", target]), "float32")


def test_only_targets_get_adapters() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE))
    inject(model, dataclasses.replace(LORA, targets=["q_proj", "v_proj"]), "float32")
    adapted = {name.rpartition(".lora_A")[0] for name, _ in named_parameters(model) if ".lora_A." in name}
    assert adapted == {f"model.layers.{n}.self_attn.{leaf}" for n in range(2) for leaf in ("q_proj", "v_proj")}


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["c_attn"], "model.lora.targets: got c_attn, which is a Conv1D"),
        (["all-linear"], "no linear layers besides its head"),
    ],
)
def test_transposed_layers_are_refused(targets: list[str], said: str) -> None:
    """gpt2's Conv1D stores [in, out], so that merged weights would be wrong."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
    with pytest.raises(ConfigError, match=said):
        inject(model, dataclasses.replace(LORA, targets=targets), "float32")


class Shapes(TorchDispatchMode):
    """Keeps the shapes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.seen |= {tuple(made.shape)} if isinstance(made, Tensor) else set()
        return made


def test_a_frozen_head_has_no_gradient() -> None:
    """In a large model it would be the largest tensor of all. The gradient of the hidden states is the same."""
    hidden, weight, targets = torch.randn(5, 8), torch.randn(37, 8), torch.arange(5)
    gradients, shapes = {}, {}
    for is_trained in (True, False):
        inputs, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_(is_trained)
        scores = token_scores(inputs, head, targets, 0.7)
        with Shapes() as watched:
            (scores.logprobs.sum() + scores.entropy.sum()).backward()
        gradients[is_trained], shapes[is_trained] = inputs.grad, watched.seen
        assert (head.grad is not None) == is_trained
    assert torch.equal(gradients[True], gradients[False])
    assert (37, 8) in shapes[True] and (37, 8) not in shapes[False]


def config_of(folder: Path, **sections: Any) -> Config:
    return derive_for_cpu(Config(model=ModelConfig(path=str(folder), dtype="float32", lora=LORA), **sections))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_checkpoint_takes_only_what_is_trained(optimizer: str, folder: Path, mesh: DeviceMesh) -> None:
    """A weight sync takes everything."""
    actor, files = ActorConfig(optimizer=cast(Any, optimizer)), load_file(folder / TIED / "model.safetensors")
    config = config_of(folder / TIED, actor=actor)
    learner = PolicyTrainer(ShardedModel(load(folder / TIED, mesh), mesh.get_group(), CPU), config, 1)
    learner.restore_schedule(3)
    moments = {*MOMENTS} if optimizer == "adamw" else {"momentum"}
    saved, everything = learner.state_slices(with_frozen=False), learner.state_slices()
    assert {kind for kind, _ in saved} == {"model"} | moments
    assert all(is_adapter(part.info.name) and part.info.dtype == "float32" for _, part in saved)
    assert {part.info.name for kind, part in everything if kind == "base"} == files.keys()
    assert len(everything) == len(saved) + len(files)
    assert {part.info.name for part in learner.weight_slices()} == {part.info.name for _, part in everything}


def test_kinds_of_a_critic(folder: Path, mesh: DeviceMesh) -> None:
    model = load(folder / TIED, mesh, as_critic=True)
    critic = CriticTrainer(ShardedModel(model, mesh.get_group(), CPU), config_of(folder / TIED))
    kinds = {kind for kind, _ in critic.state_slices()}
    assert kinds == {"critic", "critic_base", *(f"critic_{of}" for of in MOMENTS)}
    assert "critic_base" not in {kind for kind, _ in critic.state_slices(with_frozen=False)}


def run_of(config: Config, mesh: DeviceMesh, resume: Any = None) -> Run:
    """Return a run of one rank, as far as its models need it."""
    groups = dataclasses.replace(make_groups(ALONE, 0, "cpu", 20.0), actor_mesh=mesh)
    world, store = cast(World, SimpleNamespace(rank=0, device=CPU)), cast(Any, None)
    return Run(world, config, ALONE, groups, Path(), {"model.path": Path(config.model.path)}, store, resume)


def test_a_resumed_run_reads_the_frozen_weights_from_the_model(folder: Path, mesh: DeviceMesh) -> None:
    """A checkpoint has none of them. The reference is inside the policy, so that nothing else is loaded."""
    run = run_of(config_of(folder / TIED), mesh, Mock(has_critic=True))
    policy, files = models.load_policy(run), load_file(folder / TIED / "model.safetensors")
    found = {part.info.name: part.data for part in local_slices(policy)}
    assert all(torch.equal(found[name], tensor) for name, tensor in files.items())
    reference = models.reference_of(run, policy)
    assert isinstance(reference(), BaseModel) and reference() is reference()


def test_a_run_without_adapters_loads_a_reference_at_the_first_call(folder: Path, mesh: DeviceMesh) -> None:
    config = config_of(folder / TIED)
    run = run_of(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig())), mesh)
    policy = models.load_policy(run)
    reference = models.reference_of(run, policy)()
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert reference is not policy and not any(parameter.requires_grad for parameter in reference.parameters())


@pytest.mark.parametrize("has_lora", [True, False])
def test_the_critic_may_be_trained_as_a_whole(has_lora: bool, folder: Path, mesh: DeviceMesh) -> None:
    algo, critic = AlgoConfig(advantage="gae"), CriticConfig(lora=has_lora)
    trainer = models.build_critic(run_of(config_of(folder / TIED, algo=algo, critic=critic), mesh))
    assert trainer is not None and has_adapters(trainer.model) == has_lora
    trained = [parameter.requires_grad for parameter in trainer.model.parameters()]
    assert all(trained) != has_lora


def test_a_scorer_leaves_the_frozen_weights_to_the_learner(folder: Path, mesh: DeviceMesh) -> None:
    """They are those of the policy, which the learner offloads."""
    actor, algo = ActorConfig(offload="rollout", compile=False), AlgoConfig(kl_coef=0.1, num_epochs=2)
    run = run_of(config_of(folder / TIED, actor=actor, algo=algo), mesh)
    policy = models.load_policy(run)
    reference = models.reference_of(run, policy)
    learner = models.build_learner(run, policy, reference)
    scorer: Any = models.build_scorer(run, learner, reference)
    scored = scorer.score(make_batch(), version=1)
    assert scored.ref_logprobs is not None and torch.equal(scored.ref_logprobs, scored.old_logprobs)
    scorer.offload()
    sizes = [part.data.untyped_storage().nbytes() for part in local_slices(policy)]
    assert all(sizes), "the scorer has offloaded weights of the policy"
    learner.offload()
    assert not any(part.data.untyped_storage().nbytes() for part in local_slices(policy))
    held = {part.info.name: part.data for part in learner.weight_slices()}
    assert held.keys() == {part.info.name for part in local_slices(policy)}
    files = load_file(folder / TIED / "model.safetensors")
    assert all(torch.equal(held[name], tensor) for name, tensor in files.items()), "the host copy is another"
    scorer.reload()
    learner.reload()
    assert torch.equal(scorer.score(make_batch(), version=1).ref_logprobs, scored.ref_logprobs)


def test_every_node_reads_its_own_copy_of_the_base_model(
    folder: Path, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of a node would be a mixture if the copies differed, whichever tensor it is. Two ranks share a node."""
    shutil.copytree(folder / TIED, tmp_path / "copy")
    tensors = load_file(tmp_path / "copy/model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, tmp_path / "copy/model.safetensors")
    model, sent = load(folder / TIED, mesh), dict[Any, list[Tensor]]()

    def digest(where: Path, index: int) -> BaseDigests:
        found = digest_base(model, "x", where, mesh.get_group(), Share(index, 2))
        assert found is not None
        return found

    def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        """Reduce over all ranks that have called this, which run one after the other."""
        each = sent.setdefault(op, [])
        each.append(tensor.clone())
        tensor.copy_(torch.stack(each).amin(0) if op == dist.ReduceOp.MIN else torch.stack(each).amax(0))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(ConfigError):  # half of the tensors are missing yet
        digest(folder / TIED, 0)
    assert {name: tensor.digest for name, tensor in digest(folder / TIED, 1).tensors.items()} == digest_tensors(
        folder / TIED, tensors
    )
    found = [raised(ConfigError, digest, tmp_path / "copy", index) for index in (0, 1)]
    assert any("the nodes have different models" in text and "is in model.norm.weight;" in text for text in found)


def raised(kind: type[Exception], function: Callable[..., object], *arguments: object) -> str:
    """Return the message of the error that a call raises, or "" if it raises none."""
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    return ""


def test_a_dry_run_without_weights(folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    """It makes up the frozen weights, and adapters start as in a run."""
    (tmp_path / "config.json").write_bytes((folder / TIED / "config.json").read_bytes())
    run = run_of(config_of(tmp_path, debug=DebugConfig(dry_run=True)), mesh, Mock())
    found = {part.info.name: part.data for part in local_slices(models.load_policy(run))}
    assert not any(tensor.any() for name, tensor in found.items() if ".lora_B." in name)
    assert all(tensor.any() for name, tensor in found.items() if ".lora_B." not in name)


def test_a_replay_needs_the_model_under_the_adapters(tmp_path: Path) -> None:
    config = config_of(tmp_path / "moved")
    saved = SavedStep(tmp_path, 3, config, [], {}, None, 0.0, Mock())
    assert "holds only adapters to the model of model.path, and there is no folder" in _why_no_loss(saved)
    whole = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=LoraConfig()))
    assert not _why_no_loss(dataclasses.replace(saved, config=whole))
