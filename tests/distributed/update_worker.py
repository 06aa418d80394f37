"""Run by torchrun from test_learner.py: two updates of the real Learner on a mesh of all ranks, results to a file."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

from rl.config import ActorConfig, AlgoConfig
from rl.data.batch import Batch
from rl.learner import Learner
from rl.metrics import Measures
from rl.model.load import load_model


def main() -> None:
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    pg = dist.group.WORLD
    assert pg is not None
    rank, size = dist.get_rank(pg), dist.get_world_size(pg)
    model = load_model(
        folder / "model", DeviceMesh.from_group(pg, "cpu"), torch.device("cpu"), "float32", trainable=True
    )
    batch = Batch(**load_file(folder / "batch.safetensors"))
    actor = ActorConfig(**job["actor"])
    learner = Learner(model, pg, torch.device("cpu"), actor, AlgoConfig(**job["algo"]), job["temperature"], 4)
    # Rank r owns every size-th group, as the rollout stage deals them out; when "idle" the last owns nothing.
    owners = size - 1 if job["idle"] and size > 1 else size
    owned = [s for s in range(batch.num_sequences) if int(batch.group_ids[s]) % owners == rank]
    measures = Measures()
    for _ in range(2):
        learner.update(batch.select(owned), num_prompts=job["num_prompts"], measures=measures)
    values = measures.reduce(pg)
    weights = {name: parameter.full_tensor().detach().contiguous() for name, parameter in model.named_parameters()}
    if rank == 0:
        save_file(weights, folder / "weights.safetensors")
        (folder / "values.json").write_text(json.dumps(values))
    dist.barrier(group=pg)
    dist.destroy_process_group(pg)


if __name__ == "__main__":
    main()
