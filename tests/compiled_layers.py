"""Run one pass forward and backward through the compiled layers of a tiny model. Print how often caches were used.

test_compile_caches.py runs this program several times.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

from rl.model.load import Compute, load_model
from rl.model.logprobs import score_responses
from tests.update import TEMPERATURE, make_batch, make_model

CPU = torch.device("cpu")


def main() -> None:
    folder = Path(sys.argv[1])
    make_model(folder, "llama, tied")  # its layers share one graph
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
    assert dist.group.WORLD is not None
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    model = load_model(folder, mesh, CPU, "float32", trainable=True, compute=Compute(compiled=True))
    scores = score_responses(model, make_batch(), TEMPERATURE, CPU)
    scores[0].sum().backward()
    graphs, gradients = counters["inductor"], counters["aot_autograd"]
    hits = graphs["fxgraph_cache_hit"] + gradients["autograd_cache_hit"]
    misses = graphs["fxgraph_cache_miss"] + gradients["autograd_cache_miss"]
    bypassed = graphs["fxgraph_cache_bypass"] + gradients["autograd_cache_bypass"]
    print(json.dumps({"hits": hits, "misses": misses, "bypassed": bypassed}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
