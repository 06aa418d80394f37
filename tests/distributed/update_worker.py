"""Run by torchrun for tests/update.py: for each job one update by the real Learner or Critic on a mesh of all ranks."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.config import ActorConfig, AlgoConfig, CriticConfig, RolloutConfig
from rl.critic import Critic
from rl.data.batch import Batch
from rl.learner import Learner
from rl.metrics import Measures
from rl.model.load import Compute, load_model
from rl.scoring import LocalScorer
from rl.shards import local_slices
from rl.trainee import Trainee

if not torch.cuda.is_available():
    # Without Inductor, which needs a C++ compiler: what is tested is how layers are traced, cut and called.
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
    assert all(layer._get_fsdp_state()._states_to_forward_prefetch for layer in layers[:-1]), (
        "no layer is fetched early"
    )
    batch = Batch(**load_file(folder / "batch.safetensors"))
    rollout = RolloutConfig(temperature=job["temperature"], max_new_tokens=job["max_new_tokens"])
    learner = Learner(model, pg, device, actor, algo, rollout, num_optimizer_steps=4)
    if algo.kl_estimator == "full":
        learner.reference = load_model(folder / "reference", mesh, device, job["dtype"], trainable=False)
    measures = Measures()
    share = batch.select(owned_by(rank, size, batch, job))
    if job["old_logprobs"] != "given":
        share = dataclasses.replace(share, old_logprobs=None)
    if job["old_logprobs"] == "by a pass of their own":
        scorer = LocalScorer({"old_logprobs": model}, ["old_logprobs"], pg, 30, job["temperature"], device)
        share = scorer.score(share, version=1)
    if learner.offloads:
        scorer = LocalScorer(
            {"ref_logprobs": model}, ["ref_logprobs"], pg, 30, job["temperature"], device, reference_rests=True
        )
        scorer.release_device()
        assert not any(part.data.untyped_storage().nbytes() for part in local_slices(model)), "the reference rests"
        scorer.take_device()
        learner.release_device()
        on_device = [bool(part.data.untyped_storage().nbytes()) for part in local_slices(model)]
        assert on_device == [actor.offload == "moments"] * len(on_device), (
            "the learner rests, or its moments alone will"
        )
        learner.take_device()
    learner.update(share, num_prompts=job["num_prompts"], measures=measures)
    if learner.offloads:
        learner.release_device()
        states = learner._optimizer.state.values()
        moments = [state[of].to_local().untyped_storage() for state in states for of in ("exp_avg", "exp_avg_sq")]
        assert not any(storage.nbytes() for storage in moments)
        learner.take_device()
    report(pg, folder, job, model, measures)


def owned_by(rank: int, size: int, batch: Batch, job: dict) -> list[int]:
    """Every size-th group, as the rollout stage deals them out; when "idle" the last rank owns nothing."""
    owners = size - 1 if job["idle"] else size
    return [s for s in range(batch.num_sequences) if int(batch.group_ids[s]) % owners == rank]


def report(pg: dist.ProcessGroup, folder: Path, job: dict, model: torch.nn.Module, measures: Measures) -> None:
    values = measures.reduce(pg)
    weights = {name: parameter.detach().full_tensor().cpu() for name, parameter in model.named_parameters()}
    if dist.get_rank(pg) == 0:
        save_file(weights, folder / f"{job['name']}.safetensors")
        (folder / f"{job['name']}.json").write_text(json.dumps(values))


def judge(pg: dist.ProcessGroup, folder: Path, job: dict) -> None:
    """Values of a critic before and after one update, and the self-certainty of the policy that it came from."""
    device = torch.device(job["device"])
    actor, algo, critic_config = ActorConfig(**job["actor"]), AlgoConfig(**job["algo"]), CriticConfig(**job["critic"])
    mesh, place = DeviceMesh.from_group(pg, device.type), folder / job["model"]
    compute = Compute(actor.compile, actor.recompute, on_host=actor.offload == "always")
    model = load_model(place, mesh, device, job["dtype"], trainable=True, compute=compute, as_critic=True)
    critic = Critic(model, pg, device, actor, algo, critic_config, max_tokens=30)
    batch = Batch(**load_file(folder / "batch.safetensors"))
    owned = owned_by(dist.get_rank(pg), dist.get_world_size(pg), batch, job)
    share, measures = batch.select(owned), Measures()
    found = {"before": critic.judge(share).values}
    rest(critic)
    critic.update(share, job["num_prompts"], measures)
    rest(critic)
    found["after"] = critic.judge(share).values
    policy = load_model(place, mesh, device, job["dtype"], trainable=False)
    fields = ["old_logprobs", "certainty"]
    scorer = LocalScorer({"old_logprobs": policy}, fields, pg, 30, job["temperature"], device)
    scored = scorer.score(share, version=1)
    found |= {"old_logprobs": scored.old_logprobs, "certainty": scored.certainty}
    for name, values in found.items():
        found[name] = torch.zeros(batch.num_tokens)
        found[name][torch.isin(batch.segment_ids, torch.tensor(owned))] = values
        dist.all_reduce(found[name], group=pg)
    if dist.get_rank(pg) == 0:
        save_file(found, folder / f"{job['name']}.values.safetensors")
    report(pg, folder, job, model, measures)


def rest(trainee: Trainee) -> None:
    if trainee.offloads:
        trainee.release_device()
        assert not any(part.data.untyped_storage().nbytes() for part in local_slices(trainee.model)), "it rests"
        trainee.take_device()


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    pg = dist.group.WORLD
    assert pg is not None
    for job in json.loads(sys.argv[2]):
        judge(pg, folder, job) if "critic" in job else update(pg, folder, job)
    dist.barrier(group=pg)
    dist.destroy_process_group(pg)


if __name__ == "__main__":
    main()
