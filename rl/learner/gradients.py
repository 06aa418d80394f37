"""Clip the gradients of a sharded model by their norm, as torch.nn.utils.clip_grad_norm_ does.

The result is the same, bit for bit. But each rank computes with its own rows as plain tensors: on a model with many
small parameters, torch's function spends most of its time on wrapping and unwrapping distributed tensors.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.learner.optimizers import local
from rl.watch.heart import HEART

LEAST_NORM = 1e-6  # is added to the norm, as in torch


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, mesh: DeviceMesh) -> Tensor:
    """Scale the gradients if their norm exceeds `max_norm`, and return the norm. It is 0 without gradients. This is a
    collective of the ranks that share the model; the last axis of the mesh is that of the shards."""
    gradients = [local(each.grad) for each in model.parameters() if each.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norms = torch.stack(torch._foreach_norm(gradients, 2.0))
    if mesh.size(mesh.ndim - 1) > 1:
        squares = norms**2.0
        with HEART.in_collective("actor"):
            dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
        norms = squares**0.5
    norm = torch.linalg.vector_norm(norms, 2.0)
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + LEAST_NORM), max=1.0))
    return norm
