"""The checks with which the leader verifies a version. Each returns what is wrong, or an empty string.

digests of what the actors sent       ==  digests of what each receiver received    compared here
digests of what a receiver received   ==  digests of what lies in its memory        compared on the receiver
logprobs of the learner               ~   logprobs of each engine                   compared here
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl.model.shards import TensorInfo
from rl.placement.roles import Placement
from rl.sync.layout import Region, uncovered
from rl.sync.probe import difference

MAX_NAMES = 8  # tensors that an error names


def describe_rank(rank: int, placement: Placement) -> str:
    engine = placement.engine_of(rank)
    return f"rank {rank}" if engine is None else f"rank {rank} (engine {engine})"


def differing(ours: Tensor, theirs: Tensor, tensors: Sequence[TensorInfo]) -> str:
    """Return the names of the tensors whose digests differ."""
    wrong = (ours != theirs).any(1).nonzero().flatten().tolist()
    return _listed([tensors[index].name for index in wrong])


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(names[:MAX_NAMES])
    return f"{text} and {len(names) - MAX_NAMES} more tensors" if len(names) > MAX_NAMES else text


def check_plans(plans: Mapping[int, str], placement: Placement) -> str:
    """Check that all ranks have derived the same plan as the leader."""
    ours = plans[placement.leader]
    others = [describe_rank(rank, placement) for rank, plan in sorted(plans.items()) if plan != ours]
    if not others:
        return ""
    return (
        f"{', '.join(others)} derived another plan for the weight sync than rank {placement.leader}; all ranks need "
        "the same model, placement, model.dtype, sync.* and actor.num_replicas: compare the config files of the nodes"
    )


def check_regions(
    regions: Mapping[int, Sequence[Sequence[Region]]], tensors: Sequence[TensorInfo], placement: Placement
) -> str:
    """Check that the ranks of each engine together take all of every tensor. Engines are skipped if the regions of one
    of their ranks are not known."""
    errors = []
    for index, ranks in enumerate(placement.engines):
        if all(rank in regions for rank in ranks):
            missing = uncovered(tensors, [regions[rank] for rank in ranks])
            if missing:
                errors.append(f"engine {index} does not take all of {_listed(missing)}")
    return "; ".join(errors)


def check_transfer(
    errors: Mapping[int, Sequence[str]],
    sent: Mapping[int, Tensor],
    received: Mapping[int, Tensor],
    tensors: Sequence[TensorInfo],
    placement: Placement,
) -> str:
    """Check the digests of a transfer. The digests of the actors' slices (`sent`) must be equal in all replicas. Their
    sum over one replica must equal the digests of the whole tensors that each receiver got (`received`)."""
    found = [f"{describe_rank(rank, placement)}: {text}" for rank, texts in sorted(errors.items()) for text in texts]
    for shard, owner in enumerate(placement.owners):
        for rank in (replica[shard] for replica in placement.replicas if sent):
            names = differing(sent[rank], sent[owner], tensors)
            if names:
                found.append(f"{describe_rank(rank, placement)}: holds another replica than rank {owner} of {names}")
    if sent:
        total = torch.stack([sent[owner] for owner in placement.owners]).sum(0).to(torch.int32)
        for rank, digests in sorted(received.items()):
            names = differing(digests, total, tensors)
            if names:
                found.append(f"{describe_rank(rank, placement)}: received other bytes than were sent of {names}")
    return "; ".join(found)


def check_probe(
    learner: Sequence[float], receivers: Mapping[int, Sequence[Sequence[float]]], limit: float, placement: Placement
) -> str:
    """Check that the logprobs of engines and inference ranks are near the learner's. NaN is an error."""
    found = []
    for rank, answers in sorted(receivers.items()):
        for logprobs in answers:
            gap = difference(learner, logprobs)
            if not gap <= limit:
                found.append(
                    f"{describe_rank(rank, placement)}: its logprobs of the probe differ from the learner's by "
                    f"{gap:.3g} on average (limit {limit:g}), though the weights arrived: it computes with others, "
                    "such as a packed copy"
                )
    return "; ".join(found)
