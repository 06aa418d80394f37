"""Make the process groups and device meshes of a run.

All ranks must make all groups in the same order. torch.distributed hangs if only the members of a group make it.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl.placement.roles import Placement


@dataclass(frozen=True)
class Groups:
    """The process groups and meshes of a run. A mesh is None on ranks that are not in it."""

    actor_pg: dist.ProcessGroup
    actor_mesh: DeviceMesh | None  # [shard], or [replica, shard]
    scorer_mesh: DeviceMesh | None
    sync_pgs: tuple[dist.ProcessGroup | None, ...]  # by owner, to send its slices; None if no other rank needs them


def make_groups(placement: Placement, rank: int, device_type: str, timeout_s: float) -> Groups:
    """Make all groups. Every rank calls this, and the order of the calls below must be the same on all ranks."""

    def group(ranks: list[int]) -> dist.ProcessGroup:
        return dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))

    def mesh(pg: dist.ProcessGroup, ranks: list[int]) -> DeviceMesh | None:
        return DeviceMesh.from_group(pg, device_type, mesh_dim_names=("shard",)) if rank in ranks else None

    def replica_mesh() -> DeviceMesh | None:
        shard_pgs = [group(ranks) for ranks in placement.replicas]
        replica_pgs = [group(list(ranks)) for ranks in zip(*placement.replicas, strict=True)]
        if rank not in placement.actors:
            return None
        replica, shard = divmod(placement.actors.index(rank), len(placement.replicas[0]))
        pgs, ranks = [replica_pgs[shard], shard_pgs[replica]], torch.tensor(placement.replicas)
        return DeviceMesh.from_group(pgs, device_type, mesh=ranks, mesh_dim_names=("replica", "shard"))

    actor_pg = group(placement.actors)
    scorer_pg = group(placement.scorers) if placement.scorers else None
    members = [tuple(placement.sync_ranks(owner)) for owner in placement.owners]
    sync_pgs = {ranks: group(list(ranks)) for ranks in dict.fromkeys(members) if len(ranks) > 1}
    actor_mesh = mesh(actor_pg, placement.actors) if placement.num_replicas == 1 else replica_mesh()
    scorer_mesh = mesh(scorer_pg, placement.scorers) if scorer_pg else None
    return Groups(actor_pg, actor_mesh, scorer_mesh, tuple(sync_pgs.get(ranks) for ranks in members))
