"""Identify the base model of adapters in a checkpoint, and refuse to resume with another one."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from rl.checkpoint.manifest import Manifest
from rl.config.schema import ConfigError
from rl.model.base_digest import BaseDigests, FrozenTensor, digest_tensors
from rl.model.lora import trained_slices
from rl.model.shards import local_slices
from rl.watch.heart import HEART

BITS = 64  # of a digest


class Share(NamedTuple):
    """The part of a rank in the work of its node."""

    number: int  # from 0
    num_ranks: int  # of this node


def digest_base(model: nn.Module, path: str, folder: Path, pg: dist.ProcessGroup, share: Share) -> BaseDigests | None:
    """Return the digests of a model's frozen tensors, or None if it has no adapters. All ranks of `pg` call this. Those
    of a node share the work, and nodes are compared, since each may have a disk of its own. `folder` holds the model
    that the setting `path` names."""
    trained = {part.info.name for part in trained_slices(model)}
    dtypes = {part.info.name: part.info.dtype for part in local_slices(model) if part.info.name not in trained}
    if not dtypes:
        return None
    own = digest_tensors(folder, dtypes, *share)
    limits = torch.iinfo(torch.int64)  # what a rank has of tensors that others of its node read
    lowest = torch.tensor([_to_signed(own[name]) if name in own else limits.max for name in dtypes])
    highest = torch.tensor([_to_signed(own[name]) if name in own else limits.min for name in dtypes])
    with HEART.in_collective("actor"):
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=pg)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=pg)
    different = [name for name, is_equal in zip(dtypes, (lowest == highest).tolist()) if not is_equal]
    if different:
        raise ConfigError(
            f"{path}: the nodes have different models in {folder}, the first difference is in {different[0]}; copy the "
            "same folder to all nodes"
        )
    texts = [f"{value % (1 << BITS):016x}" for value in lowest.tolist()]
    return BaseDigests(path, {name: FrozenTensor(dtypes[name], text) for name, text in zip(dtypes, texts)})


def _to_signed(digest: str) -> int:
    """Return a digest as a signed integer, since torch has no sums of unsigned ones."""
    value = int(digest, 16)
    return value - (1 << BITS) if value >> (BITS - 1) else value


def check_same_base(manifest: Manifest, bases: Mapping[str, BaseDigests]) -> None:
    """Raise ConfigError if the checkpoint's adapters belong to other models than `bases`."""
    saved = manifest.bases
    if "model" in bases and "model" not in saved:
        raise ConfigError(
            f"the manifest of step {manifest.step} does not name the base model of its adapters, so it is damaged. "
            "Restore it from another node or a backup, or resume from an older step with checkpoint.resume=PATH"
        )
    for kind in (kind for kind in bases if kind in saved):  # the model first, which may also be that of the critic
        before, now = saved[kind], bases[kind]
        difference = before.find_difference({name: tensor.digest for name, tensor in now.tensors.items()})
        if difference:
            remedy = f"give the model that the run was started with, {before.path}"
            if before.path == now.path:
                remedy = "its files have changed since then: bring back those that the run was started with"
            raise ConfigError(
                f"{kind}.path: got {now.path}, but step {manifest.step} holds adapters of another base model "
                f"({difference}); {remedy}"
            )
