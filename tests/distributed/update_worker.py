"""Run by torchrun for tests/update.py: for each job one update of the policy or the critic on a mesh of all ranks."""

import dataclasses
import functools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl.config.schema import ActorConfig, AlgoConfig, Config, CriticConfig, InferenceConfig, RolloutConfig
from rl.data.batch import Batch
from rl.learner.critic import CriticTrainer
from rl.learner.policy import PolicyTrainer
from rl.learner.scoring import LocalScorer, ScoringModels
from rl.learner.sharded_trainer import MOMENTS, ShardedModel, ShardedTrainer
from rl.model.load import Compute, load_model
from rl.model.shards import local_slices
from rl.report.metrics import Measures

if not torch.cuda.is_available():
    # Without Inductor, which needs a C++ compiler. The test is about how layers are traced, cut and called.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


def update(pg: dist.ProcessGroup, folder: Path, job: dict) -> None:
    rank, size, device = dist.get_rank(pg), dist.get_world_size(pg), torch.device(job["device"])
    actor, algo = ActorConfig(**job["actor"]), AlgoConfig(**job["algo"])
    replicas = actor.num_replicas
    mesh = DeviceMesh.from_group(pg, device.type)
    if replicas > 1:
        mesh = init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("replica", "shard"))
    compute = Compute(actor.compile, actor.recompute, on_host=actor.offload == "always")
    model = load_model(folder / job["model"], mesh, device, job["dtype"], trainable=True, compute=compute)
    layers = model.model.layers
    assert all(layer._get_fsdp_state()._states_to_forward_prefetch for layer in layers[:-1]), "no layer is prefetched"
    for name in job["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    if job["poisoned"]:
        model.get_parameter(job["poisoned"]).to_local().detach().fill_(float("nan"))
    batch = Batch(**load_file(folder / "batch.safetensors"))
    for field, (token, value) in job["edits"].items():
        getattr(batch, field)[token] = value
    batch.truncated[:] |= job["all_truncated"]
    rollout = RolloutConfig(temperature=job["temperature"], max_new_tokens=job["max_new_tokens"])
    config = Config(actor=actor, algo=algo, rollout=rollout)
    reference = load_model(folder / "reference", mesh, device, job["dtype"], trainable=False)
    load_reference = (lambda: reference) if algo.kl_estimator == "full" else None
    learner = PolicyTrainer(ShardedModel(model, pg, device), config, 4, [1, 2, 3], load_reference)
    check_reduction(learner)
    measures = Measures()
    share = batch.select(owned_by(rank, size, batch, job))
    if job["old_logprobs"] != "given":
        share = dataclasses.replace(share, old_logprobs=None)
    if job["old_logprobs"] == "by a pass of their own":
        scorer = LocalScorer(scoring_models("old_logprobs", model, job), ["old_logprobs"], pg)
        share = scorer.score(share, version=1)
    if learner.offloads:
        models = scoring_models("ref_logprobs", model, job)
        scorer = LocalScorer(models, ["ref_logprobs"], pg, offloads_reference=True)
        scorer.score(share, version=1)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), (
            "the reference's root is still gathered"
        )
        scorer.offload()
        assert not any(on_device(model)), "the reference is not offloaded"
        scorer.reload()
        learner.offload()
        assert set(on_device(model)) == {actor.offload == "moments"}, "actor.offload=moments offloads only moments"
        learner.reload()
        offload_before_steps(learner)
    try:
        learner.update(share, num_prompts=job["num_prompts"], measures=measures)
    except FloatingPointError as error:
        (folder / f"{job['name']}.{rank}.error").write_text(str(error))
        return
    assert learner.probe_logits is not None, "the probe was not computed"
    if learner.offloads:
        learner.offload()
        assert num_moments_offloaded(learner) > 0
        learner.reload()
    report(pg, folder, job, model, measures)


def on_device(model: torch.nn.Module) -> list[bool]:
    """Return for each tensor of this rank whether its memory on the device exists."""
    return [bool(part.data.untyped_storage().nbytes()) for part in local_slices(model)]


def scoring_models(field: str, model: torch.nn.Module, job: dict) -> ScoringModels:
    return ScoringModels({field: model}, 30, job["temperature"], torch.device(job["device"]))


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


def check_reduction(trainer: ShardedTrainer) -> None:
    """Check that a rank with the whole model, and replicas, reduce gradients only after the last micro-batch."""
    step, accumulate = trainer._optimizer_step, trainer._accumulate
    mesh, has_gradients = trainer._mesh, []
    waits = trainer._actor.offload != "always" and (mesh.ndim == 2 or mesh.size() == 1)

    def optimizer_step(*args: Any) -> None:
        has_gradients.clear()
        step(*args)
        *early, last = has_gradients or [True]  # none where a mini-batch is empty
        assert early == [not waits] * len(early) and last, (has_gradients, mesh)

    def micro_batch(*args: Any) -> None:
        is_checked = not trainer._actor.compile and not has_gradients  # the others of a step run the same code
        with CheckedOperators() if is_checked else nullcontext():
            accumulate(*args)
        has_gradients.append(any(parameter.grad is not None for parameter in trainer.model.parameters()))

    trainer._optimizer_step, trainer._accumulate = optimizer_step, micro_batch  # type: ignore[method-assign]


def offload_before_steps(trainer: ShardedTrainer) -> None:
    """Offload before every optimizer step. Check that moments stay offloaded until the last backward pass has freed the
    activations of their layer, and moments that belong to no layer until the end."""
    step, accumulate = trainer._optimizer_step, trainer._accumulate
    offloaded: list[int] = []  # moments after each micro-batch

    def optimizer_step(*args: Any) -> None:
        trainer.offload()
        trainer.reload()
        before = num_moments_offloaded(trainer)
        offloaded.clear()
        step(*args)
        assert num_moments_offloaded(trainer) == 0
        if before:
            of_layers = [parameter for _, parameters in trainer._layers for parameter in parameters]
            others = before - sum(parameter.to_local().numel() > 0 for parameter in of_layers) * len(MOMENTS)
            assert others < before, (others, before)
            assert offloaded == [before] * (len(offloaded) - 1) + [others], (offloaded, before, others)

    def micro_batch(*args: Any) -> None:
        accumulate(*args)
        offloaded.append(num_moments_offloaded(trainer))

    trainer._optimizer_step, trainer._accumulate = optimizer_step, micro_batch  # type: ignore[method-assign]


def num_moments_offloaded(trainer: ShardedTrainer) -> int:
    moments = [state[of].to_local() for state in trainer._optimizer.state.values() for of in MOMENTS]
    return sum(moment.numel() > 0 and not moment.untyped_storage().nbytes() for moment in moments)


def owned_by(rank: int, size: int, batch: Batch, job: dict) -> list[int]:
    """Return every size-th group, as in the rollout stage. If "idle", the last rank owns nothing."""
    owners = size - 1 if job["idle"] else size
    return [s for s in range(batch.num_sequences) if int(batch.group_ids[s]) % owners == rank]


def report(pg: dist.ProcessGroup, folder: Path, job: dict, model: torch.nn.Module, measures: Measures) -> None:
    values = measures.reduce(pg)
    weights = {name: parameter.detach().full_tensor().cpu() for name, parameter in model.named_parameters()}
    if dist.get_rank(pg) == 0:
        save_file(weights, folder / f"{job['name']}.safetensors")
        (folder / f"{job['name']}.json").write_text(json.dumps(values))


def update_critic(pg: dist.ProcessGroup, folder: Path, job: dict) -> None:
    """Write a critic's values before and after one update, and the self-certainty of the policy that it came from."""
    device = torch.device(job["device"])
    actor, algo, critic_config = ActorConfig(**job["actor"]), AlgoConfig(**job["algo"]), CriticConfig(**job["critic"])
    mesh, place = DeviceMesh.from_group(pg, device.type), folder / job["model"]
    compute = Compute(actor.compile, actor.recompute, on_host=actor.offload == "always")
    model = load_model(place, mesh, device, job["dtype"], trainable=True, compute=compute, as_critic=True)
    inference = InferenceConfig(max_tokens_per_micro_batch=30)
    config = Config(actor=actor, algo=algo, critic=critic_config, inference=inference)
    critic = CriticTrainer(ShardedModel(model, pg, device), config)
    batch = Batch(**load_file(folder / "batch.safetensors"))
    owned = owned_by(dist.get_rank(pg), dist.get_world_size(pg), batch, job)
    share, measures = batch.select(owned), Measures()
    found = {"before": critic.add_values(share).values}
    offload_and_reload(critic)
    if critic.offloads:
        offload_before_steps(critic)
    critic.update(share, job["num_prompts"], measures)
    offload_and_reload(critic)
    found["after"] = critic.add_values(share).values
    policy = load_model(place, mesh, device, job["dtype"], trainable=False)
    scorer = LocalScorer(scoring_models("old_logprobs", policy, job), ["old_logprobs", "certainty"], pg)
    scored = scorer.score(share, version=1)
    found |= {"old_logprobs": scored.old_logprobs, "certainty": scored.certainty}
    for name, values in found.items():
        found[name] = torch.zeros(batch.num_tokens)
        found[name][torch.isin(batch.segment_ids, torch.tensor(owned))] = values
        dist.all_reduce(found[name], group=pg)
    if dist.get_rank(pg) == 0:
        save_file(found, folder / f"{job['name']}.values.safetensors")
    report(pg, folder, job, model, measures)


def offload_and_reload(trainer: ShardedTrainer) -> None:
    if trainer.offloads:
        trainer.offload()
        assert not any(on_device(trainer.model)), "it is not offloaded"
        trainer.reload()


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    pg = dist.group.WORLD
    assert pg is not None
    for job in json.loads(sys.argv[2]):
        update_critic(pg, folder, job) if "critic" in job else update(pg, folder, job)
    dist.barrier(group=pg)
    dist.destroy_process_group(pg)


if __name__ == "__main__":
    main()
