"""Run by torchrun for tests/update.py: for each job one update by the real Learner on a mesh of all ranks."""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from rl.config import ActorConfig, AlgoConfig, RolloutConfig
from rl.data.batch import Batch
from rl.learner import Learner
from rl.metrics import Measures
from rl.model.load import Compute, load_model
from rl.scoring import LocalScorer
from rl.shards import local_slices

if not torch.cuda.is_available():
    # Without Inductor, which needs a C++ compiler: what is tested is how layers are traced, cut and called.
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


def update(pg: dist.ProcessGroup, folder: Path, job: dict) -> None:
    rank, size, device = dist.get_rank(pg), dist.get_world_size(pg), torch.device(job["device"])
    actor, algo = ActorConfig(**job["actor"]), AlgoConfig(**job["algo"])
    mesh = DeviceMesh.from_group(pg, device.type)
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
    # Rank r owns every size-th group, as the rollout stage deals them out; when "idle" the last owns nothing.
    owners = size - 1 if job["idle"] else size
    owned = [s for s in range(batch.num_sequences) if int(batch.group_ids[s]) % owners == rank]
    measures = Measures()
    share = batch.select(owned)
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
        assert not any(part.data.untyped_storage().nbytes() for part in local_slices(model)), "the learner rests"
        learner.take_device()
    learner.update(share, num_prompts=job["num_prompts"], measures=measures)
    if learner.offloads:
        learner.release_device()
        learner.take_device()
    values = measures.reduce(pg)
    weights = {name: parameter.detach().full_tensor().cpu() for name, parameter in model.named_parameters()}
    if rank == 0:
        save_file(weights, folder / f"{job['name']}.safetensors")
        (folder / f"{job['name']}.json").write_text(json.dumps(values))


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    pg = dist.group.WORLD
    assert pg is not None
    for job in json.loads(sys.argv[2]):
        update(pg, folder, job)
    dist.barrier(group=pg)
    dist.destroy_process_group(pg)


if __name__ == "__main__":
    main()
