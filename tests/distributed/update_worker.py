"""Run for tests/update.py: for each job one update of the policy or the critic on a mesh of all ranks of its world.

`update_worker.py FOLDER`; FOLDER/jobs.json has the jobs of each world by its number of ranks. All worlds run at the
same time, because a small one leaves cores idle. Ranks are forks of this process, so that a start costs no imports.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl.config.schema import ActorConfig, AlgoConfig, Config, CriticConfig, InferenceConfig, LoraConfig, RolloutConfig
from rl.data.batch import Batch
from rl.learner import sharded_trainer
from rl.learner.credit import assign_credit
from rl.learner.critic import CriticTrainer
from rl.learner.policy import PolicyTrainer
from rl.learner.scoring import LocalScorer, ScoringModels
from rl.learner.sharded_trainer import ShardedModel, ShardedTrainer
from rl.model import load
from rl.model.adapter_names import is_adapter
from rl.model.load import Compute, load_model
from rl.model.lora import Adapters, BaseModel
from rl.model.shards import LocalSlice, local_slices, named_parameters
from rl.report.metrics import Measures
from tests.forked_ranks import run_worlds


def update(pg: dist.ProcessGroup, folder: Path, job: dict) -> None:
    rank, size, device = dist.get_rank(pg), dist.get_world_size(pg), torch.device(job["device"])
    actor, algo = ActorConfig(**job["actor"]), AlgoConfig(**job["algo"])
    replicas = actor.num_replicas
    mesh = DeviceMesh.from_group(pg, device.type)
    if replicas > 1:
        mesh = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("replica", "shard"))
    compute = Compute(actor.compile, actor.recompute, on_host=actor.offload == "always")
    choose_gathering(job)
    model = load_model(folder / job["model"], mesh, device, job["dtype"], trained_part(job), compute=compute)
    fill_adapters(model, folder, job, mesh)
    layers = model.model.layers
    if job["at_once"]:
        assert not any(isinstance(layer, FSDPModule) for layer in layers), "layers are gathered one by one"
    else:
        ahead = [layer._get_fsdp_state()._states_to_forward_prefetch for layer in layers[:-1]]
        assert all(ahead), "no layer is prefetched"
    for name in job["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    if job["poisoned"]:
        model.get_parameter(job["poisoned"]).to_local().detach().fill_(float("nan"))
    batch = Batch.from_bytes((folder / job["batch"]).read_bytes())
    for field, (token, value) in job["edits"].items():
        getattr(batch, field)[token] = value
    batch.truncated[:] |= job["all_truncated"]
    if job["lags"] is not None:
        batch = batch.replace(lags=torch.tensor(job["lags"], dtype=torch.int32))
    options = {name: job[name] for name in ("temperature", "max_new_tokens", "max_mismatch_kl")}
    rollout = RolloutConfig(**options)
    config = Config(actor=actor, algo=algo, rollout=rollout)
    reference = BaseModel(model)
    if not job["lora"]:
        reference = load_model(folder / "reference", mesh, device, job["dtype"], trainable=False)
    load_reference = (lambda: reference) if algo.kl_estimator == "full" else None
    learner = PolicyTrainer(ShardedModel(model, pg, device), config, 4, [1, 2, 3], load_reference)
    reduces_once = actor.offload != "always" and (mesh.ndim == 2 or mesh.size() == 1)
    watched = WatchedUpdate(learner, job["at_once"], reduces_once, checks_operators=not actor.compile)
    measures = Measures()
    share = batch.select(owned_by(rank, size, batch, job))
    if share.advantages is None:
        share = assign_credit(share, algo, rollout.max_new_tokens, algo.kl_coef, pg, measures)
    if job["old_logprobs"] != "given":
        share = dataclasses.replace(share, old_logprobs=None)
    if job["old_logprobs"] == "the engine's":
        share = share.replace(old_logprobs=share.rollout_logprobs)
    if job["old_logprobs"] == "by a pass of their own":
        scorer = LocalScorer(scoring_models("old_logprobs", model, job), ["old_logprobs"], pg)
        share = scorer.score(share, version=1)
    if job["lora"]:
        scorer = LocalScorer(scoring_models("ref_logprobs", reference, job), ["ref_logprobs"], pg)
        scored = scorer.score(share, version=1)
        write_tokens(pg, folder, job, batch, {"ref_logprobs": scored.ref_logprobs})
        check_offloading(learner, actor)
    elif learner.offloads:
        models = scoring_models("ref_logprobs", model, job)
        scorer = LocalScorer(models, ["ref_logprobs"], pg, offloads_reference=True)
        scorer.score(share, version=1)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), (
            "the reference's root is still gathered"
        )
        scorer.offload()
        assert not any(on_device(model)), "the reference is not offloaded"
        scorer.reload()
        check_offloading(learner, actor)
    gradients = keep_gradients(learner) if job["lora"] else {}
    try:
        with watched:
            learner.update(share, num_prompts=job["num_prompts"], measures=measures)
    except (FloatingPointError, RuntimeError) as error:
        (folder / f"{job['name']}.{rank}.error").write_text(str(error))
        return
    assert learner.probe_logits is not None, "the probe was not computed"
    check_sizes(learner, actor, job)
    if learner.offloads:
        learner.offload()
        assert watched.num_offloaded() > 0
        learner.reload()
    if gradients and rank == 0:
        save_file(gradients, folder / f"{job['name']}.gradients.safetensors")
    report(pg, folder, job, model, measures)


def choose_gathering(job: dict) -> None:
    """Gather the model of this job at once, or layer by layer as a large one."""
    load.MAX_GATHERED_AT_ONCE = 1 << 28 if job["at_once"] else 0


def trained_part(job: dict) -> bool | Adapters:
    return Adapters(LoraConfig(**job["lora"]), seed=0) if job["lora"] else True


def fill_adapters(model: torch.nn.Module, folder: Path, job: dict, mesh: DeviceMesh) -> None:
    """Give adapters the values that the reference has."""
    values, axis = load_file(folder / f"{job['model']}.adapters.safetensors") if job["lora"] else {}, mesh.ndim - 1
    for part in local_slices(model):
        if is_adapter(part.info.name):
            first, end = part.info.rows(mesh.get_local_rank(axis), mesh.size(axis))
            part.data.copy_(values.pop(part.info.name)[first:end])
    assert not values, f"the model has no {', '.join(values)}"


def keep_gradients(trainer: ShardedTrainer) -> dict[str, torch.Tensor]:
    """Return a dict that the first optimizer step fills with the whole gradients."""
    found, step = dict[str, torch.Tensor](), trainer.optimizer.step

    def keep(lr: float) -> None:
        if not found:
            named = [(name, each.grad) for name, each in named_parameters(trainer.model) if each.grad is not None]
            found.update({name: gradient.full_tensor().cpu() for name, gradient in named})
        step(lr)

    trainer.optimizer.step = keep
    return found


def check_offloading(learner: PolicyTrainer, actor: ActorConfig) -> None:
    """Check which weights leave the device."""
    if learner.offloads:
        learner.offload()
        is_there = set(on_device(learner.model))
        assert is_there == {actor.offload == "moments"}, "actor.offload=moments offloads only moments"
        learner.reload()


def check_sizes(learner: PolicyTrainer, actor: ActorConfig, job: dict) -> None:
    """Compare the sizes of this rank's state with the rows that it holds. Trained ones are in float32. What is always
    in the memory of a GPU's host counts as 0."""
    held = {part.info.name: part.data.nbytes for part in local_slices(learner.model)}
    numbers = {part.info.name: part.data.numel() for part in local_slices(learner.model)}
    names = [name for name in held if name not in job["frozen"] and (is_adapter(name) or not job["lora"])]
    trained = 4 * sum(numbers[name] for name in names)
    expected = {"weights": sum(held.values()), "gradients": trained, "optimizer": 2 * trained}
    if actor.offload == "always" and job["device"] != "cpu":
        expected = dict.fromkeys(expected, 0)
    if learner.num_updates and actor.optimizer == "adamw":
        assert learner.bytes_by_kind() == expected, (learner.bytes_by_kind(), expected)
        assert learner.bytes_present() == expected["weights"] + expected["optimizer"], "gradients are freed"
        if learner.offloads:
            learner.offload()
            assert learner.bytes_present() == expected["weights"], "moments are in host memory"
            learner.reload()


def on_device(model: torch.nn.Module) -> list[bool]:
    """Return for each tensor that this rank has rows of whether its memory on the device exists."""
    return [bool(part.data.untyped_storage().nbytes()) for part in local_slices(model) if part.data.numel()]


def scoring_models(field: str, model: torch.nn.Module, job: dict) -> ScoringModels:
    return ScoringModels({field: model}, {field: 30}, job["temperature"], torch.device(job["device"]))


class CheckedOperators(TorchDispatchMode):
    """Checks that no tensor's value is read by Python, which would wait for the GPU, and that our rotary function is
    used."""

    has_rotated = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default, "a micro-batch waits for the device"
        self.has_rotated |= function is torch.ops.oneworld.rotate_heads.default
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert self.has_rotated or error[0], "the family's own rotary function was used"


class WatchedUpdate:
    """Check the optimizer steps of an update, where the trainer cuts a mini-batch and where it takes micro-batches.

    Moments are offloaded before each step. They stay so until the last backward pass has freed the activations of their
    layer, and moments that belong to no layer until the end. A rank with the whole model, and replicas, reduce
    gradients only after the last micro-batch. A model that is gathered at once stays gathered until then.
    """

    def __init__(self, trainer: ShardedTrainer, at_once: bool, reduces_once: bool, checks_operators: bool):
        self._trainer, self._at_once = trainer, at_once
        self._reduces_once, self._checks_operators = reduces_once, checks_operators
        self._parameters = list(trainer.model.parameters())  # shards; a gathered model shows whole parameters instead
        self._moments: list[LocalSlice] = []  # known after the first step, which makes them
        self._num_offloaded = 0  # before the step
        # After each micro-batch: are there gradients, how many moments are offloaded, and is the model gathered?
        self._after: list[tuple[bool, int, bool]] = []

    def __enter__(self) -> None:
        self._seams = (sharded_trainer.cut_together, sharded_trainer.micro_batches_of)
        sharded_trainer.cut_together, sharded_trainer.micro_batches_of = self._begin_step, self._watch_micro_batches

    def __exit__(self, *error: Any) -> None:
        sharded_trainer.cut_together, sharded_trainer.micro_batches_of = self._seams
        if error[0] is None:
            self._end_step()

    def num_offloaded(self) -> int:
        return sum(each.data.numel() > 0 and not each.data.untyped_storage().nbytes() for each in self._moments)

    def _begin_step(self, *args: Any) -> list[list[int]]:
        self._end_step()
        if self._trainer.offloads:
            self._trainer.offload()
            self._trainer.reload()
        self._num_offloaded, self._sizes = self.num_offloaded(), self._trainer.bytes_by_kind()
        return self._seams[0](*args)

    def _watch_micro_batches(self, *args: Any) -> Iterator[Batch]:
        for number, micro_batch in enumerate(self._seams[1](*args)):
            # The other micro-batches of a step run the same code.
            with CheckedOperators() if self._checks_operators and number == 0 else nullcontext():
                yield micro_batch
            has_gradients = any(parameter.grad is not None for parameter in self._parameters)
            is_gathered = not isinstance(next(self._trainer.model.parameters()), DTensor)
            self._after.append((has_gradients, self.num_offloaded(), is_gathered))
            known = self._sizes["weights"] + has_gradients * self._sizes["gradients"]
            moments = self._trainer.bytes_present() - known
            assert moments in (0, self._sizes["optimizer"]), (moments, known, self._sizes)

    def _end_step(self) -> None:
        if not self._after:
            return
        *early, last = [has_gradients for has_gradients, _, _ in self._after]
        assert early == [not self._reduces_once] * len(early) and last, self._after
        assert [is_gathered for _, _, is_gathered in self._after] == [self._at_once] * len(early) + [False], self._after
        assert self.num_offloaded() == 0
        if (before := self._num_offloaded) > 0:
            of_layers = [each for each in self._moments if ".layers." in each.info.name and each.data.numel()]
            others = before - len(of_layers)
            assert others < before, (others, before)
            counts = [count for _, count, _ in self._after]
            assert counts == [before] * len(early) + [others], (counts, before, others)
        self._after = []
        if self._trainer.num_updates:
            kinds, parts = self._trainer.weight_kinds, self._trainer.state_slices()
            self._moments = [part for kind, part in parts if kind not in kinds]


def owned_by(rank: int, size: int, batch: Batch, job: dict) -> list[int]:
    """Return every size-th group, as in the rollout stage. If "idle", the last rank owns nothing."""
    owners = size - 1 if job["idle"] else size
    return [s for s in range(batch.num_sequences) if int(batch.group_ids[s]) % owners == rank]


def report(pg: dist.ProcessGroup, folder: Path, job: dict, model: torch.nn.Module, measures: Measures) -> None:
    values = measures.reduce(pg)
    weights = {name: parameter.detach().full_tensor().cpu() for name, parameter in named_parameters(model)}
    if dist.get_rank(pg) == 0:
        save_file(weights, folder / f"{job['name']}.safetensors")
        (folder / f"{job['name']}.json").write_text(json.dumps(values))


def update_critic(pg: dist.ProcessGroup, folder: Path, job: dict) -> None:
    """Write a critic's values before and after one update, and the self-certainty of the policy that it came from."""
    device = torch.device(job["device"])
    actor, algo, critic_config = ActorConfig(**job["actor"]), AlgoConfig(**job["algo"]), CriticConfig(**job["critic"])
    mesh, place = DeviceMesh.from_group(pg, device.type), folder / job["model"]
    compute = Compute(actor.compile, actor.recompute, on_host=actor.offload == "always")
    choose_gathering(job)
    model = load_model(place, mesh, device, job["dtype"], trained_part(job), compute=compute, as_critic=True)
    fill_adapters(model, folder, job, mesh)
    inference = InferenceConfig(max_tokens_per_micro_batch=30)
    config = Config(actor=actor, algo=algo, critic=critic_config, inference=inference)
    critic = CriticTrainer(ShardedModel(model, pg, device), config)
    batch = Batch.from_bytes((folder / "batch.safetensors").read_bytes())
    owned = owned_by(dist.get_rank(pg), dist.get_world_size(pg), batch, job)
    share, measures = batch.select(owned), Measures()
    found = {"before": critic.add_values(share).values}
    offload_and_reload(critic)
    reduces_once = actor.offload != "always" and mesh.size() == 1
    with WatchedUpdate(critic, job["at_once"], reduces_once, checks_operators=False):
        critic.update(share, job["num_prompts"], measures)
    offload_and_reload(critic)
    found["after"] = critic.add_values(share).values
    policy = load_model(place, mesh, device, job["dtype"], trainable=False)
    scorer = LocalScorer(scoring_models("old_logprobs", policy, job), ["old_logprobs", "certainty"], pg)
    scored = scorer.score(share, version=1)
    found |= {"old_logprobs": scored.old_logprobs, "certainty": scored.certainty}
    write_tokens(pg, folder, job, batch, found)
    report(pg, folder, job, model, measures)


def write_tokens(
    pg: dist.ProcessGroup, folder: Path, job: dict, batch: Batch, found: dict[str, torch.Tensor | None]
) -> None:
    """Write values of all tokens. Each rank has those of its own sequences."""
    owned, whole = owned_by(dist.get_rank(pg), dist.get_world_size(pg), batch, job), dict[str, torch.Tensor]()
    for name, values in found.items():
        assert values is not None
        whole[name] = torch.zeros(batch.num_tokens)
        whole[name][torch.isin(batch.segment_ids, torch.tensor(owned))] = values
        dist.all_reduce(whole[name], group=pg)
    if dist.get_rank(pg) == 0:
        save_file(whole, folder / f"{job['name']}.values.safetensors")


def offload_and_reload(trainer: ShardedTrainer) -> None:
    if trainer.offloads:
        trainer.offload()
        assert not any(on_device(trainer.model)), "it is not offloaded"
        trainer.reload()


def work(folder: Path, jobs: list[dict]) -> None:
    if not torch.cuda.is_available():
        # Without Inductor, which needs a C++ compiler. The test is about how layers are traced, cut and called.
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)
    pg = dist.group.WORLD
    assert pg is not None
    for job in jobs:
        torch._dynamo.reset()  # a run has only its own graphs, and torch limits their number for each function
        update_critic(pg, folder, job) if "critic" in job else update(pg, folder, job)
    dist.barrier(group=pg)
    dist.destroy_process_group(pg)


def main() -> None:
    folder = Path(sys.argv[1])
    jobs = json.loads((folder / "jobs.json").read_text())
    run_worlds([(int(size), functools.partial(work, folder, own)) for size, own in jobs.items()])


if __name__ == "__main__":
    main()
