"""What the leader concludes from the reports of all ranks about a version; an empty text is the proof.

sent by the actors, slice by slice  ==  got by each receiver        compared here, by digests
got by a receiver                   ==  what lies in its memory     compared on its rank, by digests
logprobs of the learner             ~   logprobs of each engine     compared here
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rl.model.shards import TensorInfo
from rl.placement.roles import Placement
from rl.sync.landing import Region, uncovered
from rl.sync.probe import difference

MAX_NAMES = 8  # of tensors in an error


def who(rank: int, placement: Placement) -> str:
    engine = placement.engine_of(rank)
    return f"rank {rank}" if engine is None else f"rank {rank} (engine {engine})"


def differing(ours: Tensor, theirs: Tensor, tensors: Sequence[TensorInfo]) -> str:
    """The names of the tensors whose digests differ; empty when none does."""
    wrong = (ours != theirs).any(1).nonzero().flatten().tolist()
    return _listed([tensors[index].name for index in wrong])


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(names[:MAX_NAMES])
    return f"{text} and {len(names) - MAX_NAMES} more tensors" if len(names) > MAX_NAMES else text


def judge_plans(digests: Mapping[int, str], placement: Placement) -> str:
    """All ranks must have derived the leader's plan."""
    ours = digests[placement.leader]
    others = [who(rank, placement) for rank, digest in sorted(digests.items()) if digest != ours]
    if not others:
        return ""
    return (
        f"{', '.join(others)} derived another plan for the weight sync than rank {placement.leader}; all ranks need "
        "the same model, placement, model.dtype, sync.* and actor.num_replicas: compare the config files of the nodes"
    )


def judge_regions(
    regions: Mapping[int, Sequence[Sequence[Sequence[int]]]], tensors: Sequence[TensorInfo], placement: Placement
) -> str:
    """The ranks of an engine together take all of every tensor; ranks that cannot tell are left out."""
    errors = []
    for index, ranks in enumerate(placement.engines):
        if all(rank in regions for rank in ranks):
            taken = [[[Region(*region) for region in tensor] for tensor in regions[rank]] for rank in ranks]
            missing = uncovered(tensors, taken)
            if missing:
                errors.append(f"engine {index} does not take all of {_listed(missing)}")
    return "; ".join(errors)


def judge_transfer(
    errors: Mapping[int, Sequence[str]],
    sent: Mapping[int, Tensor],
    got: Mapping[int, Tensor],
    tensors: Sequence[TensorInfo],
    placement: Placement,
) -> str:
    """`sent` are the digests of the actors' slices: equal in all replicas, and those of one replica add up; `got` are
    those of whole tensors."""
    found = [f"{who(rank, placement)}: {text}" for rank, texts in sorted(errors.items()) for text in texts]
    for shard, owner in enumerate(placement.owners):
        for rank in (replica[shard] for replica in placement.replicas if sent):
            names = differing(sent[rank], sent[owner], tensors)
            if names:
                found.append(f"{who(rank, placement)}: holds another replica than rank {owner} of {names}")
    if sent:
        total = torch.stack([sent[owner] for owner in placement.owners]).sum(0).to(torch.int32)
        for rank, digests in sorted(got.items()):
            names = differing(digests, total, tensors)
            if names:
                found.append(f"{who(rank, placement)}: received other bytes than were sent of {names}")
    return "; ".join(found)


def judge_probe(
    learner: Sequence[float], receivers: Mapping[int, Sequence[Sequence[float]]], limit: float, placement: Placement
) -> str:
    """The logprobs of engines and inference ranks against the learner's; a NaN does not pass."""
    found = []
    for rank, answers in sorted(receivers.items()):
        for logprobs in answers:
            gap = difference(learner, logprobs)
            if not gap <= limit:
                found.append(
                    f"{who(rank, placement)}: its logprobs of the probe differ from the learner's by {gap:.3g} on "
                    f"average (limit {limit:g}), though the weights arrived: it computes with others, such as a packed "
                    "copy"
                )
    return "; ".join(found)
