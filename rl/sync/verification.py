"""Verify a version: each rank's digests and reports, and the checks of the leader, which return what is wrong or "".

digests of what the actors hold       ==  digests of what each receiver received    compared by the leader
digests of what a receiver received   ==  digests of what lies in its memory        compared on the receiver
logprobs of the learner               ~   logprobs of each engine                   compared by the leader

Fixed tensors (plan.py) are compared in every version too, though they are sent only once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl.common.text import count_of
from rl.model.shards import TensorInfo
from rl.placement.roles import Placement
from rl.sync.digest import NUM_SUMS, Digests, flat_part
from rl.sync.layout import MemoryLayout, OpaqueLoader, Region
from rl.sync.plan import Plan, RowRange
from rl.world.messages import Message

MAX_NAMES = 8  # tensors that an error names


@dataclass(frozen=True)
class SyncReport(Message):
    """A rank's report to the leader. Each stage of a sync fills its own fields."""

    round: int
    settings: str = ""  # the plan: all ranks must have the same settings
    opaque_reason: str = ""  # why a receiver of this rank cannot be read back, or empty
    regions: list[list[Region]] | None = None  # what the receiver takes of each tensor; None if not known
    needs_all: bool = False  # joining: whether a receiver of this rank needs the fixed tensors
    errors: list[str] = field(default_factory=list)  # the transfer
    sent: bytes = b""  # digests of this rank's slices; empty on ranks that send nothing
    received: bytes = b""  # digests of the whole tensors as they arrived
    learner: list[float] | None = None  # the probe: logprobs of the learner, only from actors
    receivers: list[list[float]] = field(default_factory=list)  # logprobs of each receiver with a model
    awaited = "the other ranks to report on the weight sync"


class VersionDigests:
    """One rank's digests of one version. `sent` covers its own slices, `received` the whole tensors as they arrived.
    `expected` has, for each layout, what its receiver should hold of tensors that it takes only in part."""

    def __init__(self, plan: Plan, layouts: Sequence[MemoryLayout], device: torch.device, reads_back: bool):
        """`layouts` are those of the receivers that take the version. With `reads_back`, their memory is compared."""
        self._plan, self._device, self._reads_back = plan, device, reads_back
        self.sent, self.received = self._make(), self._make()
        self.expected = {layout: self._make() for layout in layouts}

    def _make(self) -> Digests:
        return Digests(len(self._plan.tensors), self._device)

    def covers(self, layout: MemoryLayout | OpaqueLoader) -> bool:
        """Return whether the version was written to this layout."""
        return layout in self.expected

    def add_others(self, before: "VersionDigests") -> None:
        """Add the layouts that hold this version already. It was sent again for others."""
        self.expected = before.expected | self.expected

    def forget(self, layout: MemoryLayout | OpaqueLoader) -> None:
        self.expected = {other: digests for other, digests in self.expected.items() if other is not layout}

    def keep_fixed(self, before: "VersionDigests") -> None:
        """Take over what arrived of fixed tensors with an earlier version. They are not sent with this one."""
        self.received.copy(before.received, self._plan.fixed)
        for layout, expected in self.expected.items():
            expected.copy(before.expected[layout], self._plan.fixed)

    def add_sent(self, ranges: Sequence[RowRange], sources: Mapping[int, Tensor]) -> None:
        for portion in self._plan.portions(ranges):
            parts = [(part, self._plan.tensors[part.tensor].torch_dtype) for part in portion]
            self.sent.add(
                [
                    flat_part(part.tensor, sources[part.tensor].to(self._device), part.start, dtype)
                    for part, dtype in parts
                ]
            )

    def add_received(self, whole: dict[int, Tensor]) -> None:
        if self._plan.needs_transfer:
            self.received.add(
                [
                    flat_part(index, tensor.view(-1)[start : start + count], start, tensor.dtype)
                    for index, tensor in whole.items()
                    for start, count in self._plan.part_bounds[index]
                ]
            )
        for layout, expected in self.expected.items() if self._reads_back else ():
            expected.add(layout.expected(whole))

    def misplaced(self) -> list[str]:
        """Compare what receivers hold in their own memory with what arrived. Return the errors."""
        errors = []
        for layout, expected in self.expected.items() if self._reads_back else ():
            arrived, held = self.received if self._plan.needs_transfer else self.sent, self._make()
            held.add(layout.held(self._plan.part_bounds))
            is_whole = torch.tensor(layout.is_whole).unsqueeze(1)
            wanted = torch.where(is_whole, arrived.result(), expected.result())
            if names := differing(held.result(), wanted, self._plan.tensors):
                errors.append(f"holds other values than it received of {names}")
        return errors


def differing(ours: Tensor, theirs: Tensor, tensors: Sequence[TensorInfo]) -> str:
    wrong = (ours != theirs).any(1).nonzero().flatten().tolist()
    return _listed([tensors[index].name for index in wrong])


def digest_rows(digests: bytes) -> Tensor:
    return torch.frombuffer(bytearray(digests), dtype=torch.int32).view(-1, NUM_SUMS)


def _listed(names: Sequence[str]) -> str:
    text = ", ".join(names[:MAX_NAMES])
    return f"{text} and {len(names) - MAX_NAMES} more tensors" if len(names) > MAX_NAMES else text


@dataclass(frozen=True)
class Verifier:
    """The leader's checks of the reports of all ranks, which are sorted by rank."""

    tensors: Sequence[TensorInfo]
    placement: Placement

    def describe(self, rank: int) -> str:
        engine = self.placement.engine_of(rank)
        return f"rank {rank}" if engine is None else f"rank {rank} (engine {engine})"

    def describe_opaque(self, reports: Mapping[int, SyncReport]) -> str:
        """Return why the receivers of some ranks cannot be read back, or an empty string if all can."""
        opaque = [rank for rank, report in reports.items() if report.opaque_reason]
        if not opaque:
            return ""
        others = f" and {count_of(len(opaque) - 1, 'other rank')}" if len(opaque) > 1 else ""
        return f"{self.describe(opaque[0])}{others}: {reports[opaque[0]].opaque_reason}"

    def check_plans(self, reports: Mapping[int, SyncReport]) -> str:
        """Check that all ranks have derived the leader's plan, and that the ranks of each engine together take all of
        every tensor."""
        leader = self.placement.leader
        ours = reports[leader].settings
        others = [self.describe(rank) for rank, report in reports.items() if report.settings != ours]
        if others:
            return (
                f"{', '.join(others)} derived another plan for the weight sync than rank {leader}; all ranks need the "
                "same model, placement, model.dtype, sync.* and actor.num_replicas: compare the config files of the "
                "nodes"
            )
        errors = []
        for index, ranks in enumerate(self.placement.engines):
            by_rank = [reports[rank].regions for rank in ranks]
            known = [regions for regions in by_rank if regions is not None]
            if len(known) == len(ranks) and (missing := self.uncovered(known)):
                errors.append(f"engine {index} does not take all of {_listed(missing)}")
        return "; ".join(errors)

    def uncovered(self, by_rank: Sequence[Sequence[Sequence[Region]]]) -> list[str]:
        """Return the parameters whose regions on the ranks of one engine do not add up to the whole tensor. Two ranks
        must take either the same region or regions that do not overlap."""
        names = []
        for index, info in enumerate(self.tensors):
            distinct = {region for regions in by_rank for region in regions[index]}
            is_covered = sum(region.num_elements for region in distinct) == info.num_elements
            if info.sharded and not is_covered:  # one that is not sharded is a buffer, which an engine may not need
                names.append(info.name)
        return names

    def check_transfer(self, reports: Mapping[int, SyncReport]) -> str:
        """Check errors and digests. The digests of the actors' slices (`sent`) must be equal in all replicas. Their sum
        over one replica must equal the digests of the whole tensors that each receiver got (`received`)."""
        found = [f"{self.describe(rank)}: {text}" for rank, report in reports.items() for text in report.errors]
        sent = {rank: digest_rows(report.sent) for rank, report in reports.items() if report.sent}
        received = {rank: digest_rows(report.received) for rank, report in reports.items() if report.received}
        if not sent:
            return "; ".join(found)
        for shard, owner in enumerate(self.placement.owners):
            for rank in (replica[shard] for replica in self.placement.replicas):
                if names := differing(sent[rank], sent[owner], self.tensors):
                    found.append(f"{self.describe(rank)}: holds another replica than rank {owner} of {names}")
        total = torch.stack([sent[owner] for owner in self.placement.owners]).sum(0).to(torch.int32)
        for rank, digests in received.items():
            if names := differing(digests, total, self.tensors):
                found.append(f"{self.describe(rank)}: received other bytes than were sent of {names}")
        return "; ".join(found)

    def probe_gaps(self, reports: Mapping[int, SyncReport]) -> list[tuple[int, float]]:
        """Return how far the logprobs of each engine and inference rank are from the learner's, on average."""
        learner = reports[self.placement.leader].learner
        assert learner is not None
        answers = [(rank, each) for rank, report in reports.items() for each in report.receivers]
        return [
            (rank, sum(abs(a - b) for a, b in zip(learner, logprobs, strict=True)) / len(learner))
            for rank, logprobs in answers
        ]

    def check_probe(self, reports: Mapping[int, SyncReport], limit: float) -> str:
        """Check that the logprobs of engines and inference ranks are near the learner's. NaN is an error."""
        return "; ".join(
            f"{self.describe(rank)}: its logprobs of the probe differ from the learner's by {gap:.3g} on average "
            f"(limit {limit:g}), though the weights arrived: it computes with others, such as a packed copy"
            for rank, gap in self.probe_gaps(reports)
            if not gap <= limit
        )
