"""Weight sync: bring every version of the actors' shards to every engine and every inference rank, and verify it.

    leader announces -> ranks join between two pieces of work -> leader says go -> buckets -> reports -> verdict

Buckets are broadcast as planned (plan.py, transfer.py), on process groups that nothing else uses. Everything else is
sent as messages. If a receiver fails in the middle, it still receives all buckets and then reports the error. So the
process groups stay in step, and every rank raises.

`sync.verify` compares digests of what the actors hold with digests of what each receiver received (`transport`) and of
what its memory holds afterwards (`full`). For the first two versions, and then every `sync.probe_interval` versions,
the receivers' logprobs of a fixed probe are also compared with the learner's. A rebuilt receiver that cannot be read
back is probed too. A receiver confirms a version only after the leader's verdict. Until then it serves nothing.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.common.text import count_of
from rl.config.schema import SyncConfig
from rl.model.shards import LocalSlice, TensorInfo
from rl.placement.roles import Placement
from rl.sync.digest import NUM_SUMS, Digests, flat_part
from rl.sync.layout import MemoryLayout, OpaqueLoader, Region, Weights
from rl.sync.plan import Plan, RowRange, transferred_tensors
from rl.sync.probe import Probe, learner_logprobs
from rl.sync.transfer import BucketTransfer
from rl.sync.verification import check_plans, check_probe, check_regions, check_transfer, describe_rank, differing
from rl.watch.heart import HEART
from rl.world.messages import Letter, Mailbox, Message
from rl.world.service import Service


class SyncError(RuntimeError):
    """Raised on every rank if a version did not arrive everywhere, or did not arrive as it was sent."""


class Receiver(Protocol):
    """A model that takes weights: an engine, or a sharded copy that computes logprobs."""

    version: int  # the last confirmed version, or 0

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout | OpaqueLoader:
        """Return where these tensors lie in the receiver's memory, or its loader if that is not known."""
        ...

    def begin_version(self) -> None:
        """Stop serving until `confirm` is called. New weights are about to arrive."""
        ...

    def confirm(self, version: int) -> None:
        """Start to serve this version, which has been verified."""
        ...

    def probe(self, tokens: list[int]) -> list[float] | None:
        """Return the logprobs of all tokens but the first under the current weights, or None without a model."""
        ...


@dataclass(frozen=True)
class SyncSettings:
    """Settings of the transfer and of its verification."""

    placement: Placement
    plan: Plan
    pgs: Sequence[dist.ProcessGroup | None]  # by shard; None if its owner is the only member
    config: SyncConfig
    device: torch.device
    probe: Probe


@dataclass(frozen=True)
class WeightSource:
    """The policy of an actor. `slices` returns its weights, which are in host memory while they are offloaded."""

    model: nn.Module
    slices: Callable[[], Iterable[LocalSlice]]


@dataclass(frozen=True)
class StartSync(Message):
    """Announces a sync to the ranks that are not actors. The leader sends it."""

    version: int
    step: int  # the step that samples from this version


@dataclass(frozen=True)
class SyncReport(Message):
    """A rank's report to the leader. Without further fields it says only that the rank has joined."""

    round: int


@dataclass(frozen=True)
class PlanReport(SyncReport):
    settings: str
    opaque_reason: str  # why a receiver of this rank cannot be read back, or empty
    regions: list[list[Region]] | None  # what the receiver takes of each tensor; None if not known


@dataclass(frozen=True)
class TransferReport(SyncReport):
    errors: list[str]
    digests: list[str]  # in the payload, in this order: some of "sent" and "received"


@dataclass(frozen=True)
class ProbeReport(SyncReport):
    learner: list[float] | None
    receivers: list[list[float]]


@dataclass(frozen=True)
class SyncVerdict(Message):
    """The leader's answer to the reports of all ranks."""

    round: int
    error: str
    has_opaque: bool  # whether any rank's receiver cannot be read back


@dataclass(frozen=True)
class TransferredTensors(Message):
    tensors: list[TensorInfo]


R = TypeVar("R", bound=SyncReport)


class WeightSync:
    """One rank's part in every sync: an actor sends its shard, and receivers of this rank are filled."""

    def __init__(
        self,
        mail: Mailbox,
        settings: SyncSettings,
        source: WeightSource | None,
        receivers: Sequence[Receiver],
        version: int = 0,
    ):
        """`version` is the last published version. It is not 0 when a run resumes."""
        self.version = version
        self._step = 0  # the step that samples from the current version; only actors know it
        self._round = self._num_published = 0
        self._has_opaque = False  # whether a receiver of any rank cannot be read back
        self._learner_logprobs: list[float] | None = None  # of the probe under the current version; only on actors
        self._mail, self._source = mail, source
        self._placement, self._plan, self._config = settings.placement, settings.plan, settings.config
        self._device, self._probe = settings.device, settings.probe
        self._shard = self._placement.shard_of(mail.rank) if source is not None else None
        self._receivers = [(receiver, receiver.memory_layout(self._plan.tensors)) for receiver in receivers]
        self._taking = self._receivers  # the receivers that the current sync fills
        has_loader = bool(self._loaders)  # a loader may keep the tensors that it is given
        self._transfer = BucketTransfer(self._plan, settings.pgs, mail.rank, self._device, reuse=not has_loader)
        self._compare_plans()

    def remove_receiver(self, receiver: Receiver) -> None:
        """Drop a receiver and all views of its memory."""
        self._receivers = [(other, layout) for other, layout in self._receivers if other is not receiver]
        self._taking = []

    def add_receiver(self, receiver: Receiver) -> None:
        """Fill this receiver in all later syncs. It holds no version yet."""
        layout = receiver.memory_layout(self._plan.tensors)
        if isinstance(layout, OpaqueLoader) and not self._has_opaque:  # no logprobs were kept to probe it with
            raise SyncError(f"a rebuilt engine cannot be read back, though the first one could: {layout.reason}")
        self._receivers.append((receiver, layout))

    @property
    def _layouts(self) -> list[MemoryLayout]:
        return [layout for _, layout in self._taking if isinstance(layout, MemoryLayout)]

    @property
    def _loaders(self) -> list[OpaqueLoader]:
        return [layout for _, layout in self._taking if isinstance(layout, OpaqueLoader)]

    def publish(self, step: int, free_device: Callable[[], None] = lambda: None) -> int:
        """Bring the next version to all receivers and return its number. Every actor must call this.

        `step` is the step that samples from this version. `free_device` is called before receivers of this rank
        compute, so that the learner frees the device for them.
        """
        self._step = step
        self._announce(self.version + 1)
        self._run(self.version + 1, free_device)
        return self.version

    def publish_again(self) -> int:
        """Bring the current version to the receivers that lack it. The others take part and keep their weights."""
        self._announce(self.version)
        self._run(self.version)
        return self.version

    def join(self, version: int) -> None:
        """Take part in an announced sync. Ranks that are not actors call this."""
        assert version in (self.version, self.version + 1), f"{version} was announced, this rank holds {self.version}"
        self._run(version)

    def _announce(self, version: int) -> None:
        if self._mail.rank == self._placement.leader:
            # The first rank of an engine passes the announcement on to its followers.
            followers = {rank for ranks in self._placement.engines for rank in ranks[1:]}
            for rank in range(self._placement.world_size):
                if rank not in self._placement.actors and rank not in followers:
                    self._mail.send(rank, StartSync(version, self._step))

    def _run(self, version: int, free_device: Callable[[], None] = lambda: None) -> None:
        what, timeout_s = f"version {version} of the weights", self._config.join_timeout_s
        is_again = version == self.version
        self._taking = [(receiver, layout) for receiver, layout in self._receivers if receiver.version != version]
        self._num_published += not is_again
        self._agree(f"{what}, not joined everywhere", SyncReport(self._next_round()), lambda reports: "", timeout_s)
        report, payload = self._move_buckets()
        self._agree(f"{what}, not transferred everywhere", report, self._check_transfer, timeout_s, payload)
        if not is_again:
            self._ask_learner(version)
        if self._is_probed(version, is_again):
            free_device()
            self._agree(f"{what}, not probed everywhere", self._ask_receivers(), self._check_probe, timeout_s)
        for receiver, _ in self._taking:
            receiver.confirm(version)
        self.version = version
        HEART.describe(version=version)

    def _next_round(self) -> int:
        self._round += 1
        return self._round

    def _agree(
        self,
        failure: str,
        report: R,
        check: Callable[[dict[int, Letter[R]]], str],
        timeout_s: float | None,
        payload: bytes = b"",
    ) -> None:
        """Report to the leader, which checks the reports of all ranks. If it finds an error, every rank raises
        SyncError."""
        self._mail.send(self._placement.leader, report, payload=payload)
        if self._mail.rank == self._placement.leader:
            reports, missing = self._collect(type(report), timeout_s)
            names = ", ".join(describe_rank(rank, self._placement) for rank in missing)
            error = f"no word from {names} within sync.join_timeout_s = {timeout_s:g} s" if missing else check(reports)
            verdict = SyncVerdict(self._round, f"{failure}: {error}" if error else "", self._has_opaque)
            for rank in range(self._placement.world_size):
                self._mail.send(rank, verdict)
        verdict = self._mail.receive(SyncVerdict).message
        assert verdict.round == self._round, f"{verdict} in round {self._round}"
        if verdict.error:
            raise SyncError(verdict.error)
        self._has_opaque = verdict.has_opaque

    def _collect(self, kind: type[R], timeout_s: float | None) -> tuple[dict[int, Letter[R]], list[int]]:
        """Return the reports of this round, and the ranks that sent none in time."""
        reports: dict[int, Letter[R]] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(reports) < self._placement.world_size:
            if deadline is None:
                letter: Letter[R] | None = self._mail.receive(kind)
            else:
                letter = self._mail.receive_within(deadline - time.monotonic(), kind)
            if letter is None:
                break
            if letter.message.round == self._round:  # an older report is from a rank that had missed its deadline
                reports[letter.source] = letter
        return reports, [rank for rank in range(self._placement.world_size) if rank not in reports]

    def _compare_plans(self) -> None:
        """Check at the start that all ranks have the same plan, and that engines take every tensor completely."""
        settings = repr((self._plan.digest, self._config.verify, self._config.probe_interval, self._probe))
        reason = self._loaders[-1].reason if self._loaders else ""
        regions = self._layouts[0].regions if self._layouts and not self._loaders else None
        report = PlanReport(self._next_round(), settings, reason, regions)
        self._agree("the weight sync, not planned everywhere", report, self._check_plans, timeout_s=None)

    def _check_plans(self, letters: dict[int, Letter[PlanReport]]) -> str:
        reports = {rank: letter.message for rank, letter in sorted(letters.items())}
        reasons = {rank: report.opaque_reason for rank, report in reports.items() if report.opaque_reason}
        self._has_opaque = bool(reasons)
        if reasons and self._config.verify == "full":
            rank, reason = next(iter(reasons.items()))
            others = f" and {count_of(len(reasons) - 1, 'other rank')}" if len(reasons) > 1 else ""
            print(
                f"oneworld: {describe_rank(rank, self._placement)}{others}: {reason}, so what it holds cannot be "
                "read back exactly. It is verified by what it received (sync.verify=transport) and by the probe.",
                flush=True,
            )
        settings = {rank: report.settings for rank, report in reports.items()}
        regions = {rank: report.regions for rank, report in reports.items() if report.regions}
        return check_plans(settings, self._placement) or check_regions(regions, self._plan.tensors, self._placement)

    @torch.no_grad()
    def _move_buckets(self) -> tuple[TransferReport, bytes]:
        """Transfer a version. Return this rank's report, and the digests of what it sent and received."""
        is_full = self._config.verify == "full"
        digests = _VersionDigests(self._plan, self._layouts if is_full else [], self._device)
        errors: list[str] = []
        failure: Exception | None = None
        stream = self._fill_receivers(digests, errors)
        try:
            for receiver, _ in self._taking:
                receiver.begin_version()
            for layout in self._layouts:
                layout.fill_zeros()
            for loader in self._loaders:
                loader.load(stream)
        except Exception as error:  # any error of a receiver: the other ranks need this one until the last bucket
            failure = error
            errors.append(f"{type(error).__name__}: {error}")
        for _ in stream:  # take the remaining buckets, even if a receiver has failed
            pass
        if failure is not None and not self._transfer.is_in_step:
            raise failure  # the transfer itself failed and is out of step, so no collective may follow
        if not errors:
            errors += digests.misplaced()
        parts = {}
        if self._config.verify != "off" and self._shard is not None:
            parts["sent"] = digests.sent
        is_receiver = self._mail.rank in self._plan.receivers and self._plan.needs_transfer
        if self._config.verify != "off" and is_receiver and not errors:
            parts["received"] = digests.received
        payload = b"".join(part.result().numpy().tobytes() for part in parts.values())
        return TransferReport(self._next_round(), errors, list(parts)), payload

    def _fill_receivers(self, digests: "_VersionDigests", errors: list[str]) -> Weights:
        """Fill the receivers whose layout is known. Yield every whole tensor, in its transfer dtype, for loaders."""
        slices = self._source.slices() if self._source is not None else ()
        sources = {index: part.data.reshape(-1) for index, part in enumerate(slices)}
        for bucket, whole in self._transfer.buckets(sources):
            HEART.beat(f"the bucket from {self._plan.tensors[bucket.tensors[0]].name} on")
            if self._shard is not None and self._config.verify != "off":
                digests.add_sent(bucket.ranges[self._shard], sources)
            try:
                if not errors:
                    self._fill(whole, digests)
            except Exception as error:  # reported at the end, as in `_move_buckets`
                errors.append(f"{type(error).__name__}: {error}")
            while whole and self._loaders:
                index = next(iter(whole))
                info = self._plan.tensors[index]
                yield info.name, whole.pop(index).to(info.torch_dtype)
            whole.clear()  # otherwise the views would keep the bucket's memory alive

    def _fill(self, whole: dict[int, Tensor], digests: "_VersionDigests") -> None:
        # A CPU takes one tensor at a time, while it is in the cache. A GPU takes all of them in a few launches.
        for portion in [whole] if self._device.type == "cuda" else [{i: tensor} for i, tensor in whole.items()]:
            if self._config.verify != "off":
                digests.add_received(portion)
            for layout in self._layouts:
                layout.fill(portion)

    def _check_transfer(self, letters: dict[int, Letter[TransferReport]]) -> str:
        found: dict[str, dict[int, Tensor]] = {"sent": {}, "received": {}}
        for rank, letter in letters.items():
            names = letter.message.digests
            if names:
                rows = torch.frombuffer(bytearray(letter.payload), dtype=torch.int32).view(len(names), -1, NUM_SUMS)
                for name, row in zip(names, rows, strict=True):
                    found[name][rank] = row
        errors = {rank: letter.message.errors for rank, letter in letters.items()}
        return check_transfer(errors, found["sent"], found["received"], self._plan.tensors, self._placement)

    def _is_probed(self, version: int, is_again: bool) -> bool:
        """Return whether a version is probed. The first two versions since the start always are: engines hold dummy
        weights before the first, and have sampled for the first time before the second. A repeated version is for
        rebuilt receivers, and digests verify those that can be read back."""
        if self._config.verify == "off":
            return False
        if is_again:
            return self._has_opaque
        interval = self._config.probe_interval
        return self._num_published <= 2 or (interval > 0 and version % interval == 0)

    def _ask_learner(self, version: int) -> None:
        """Compute the learner's logprobs of the probe, if this sync compares them or a rebuilt receiver may need them
        later, when the learner may be offloaded. An error here ends the world at once, because the other actors may be
        in the same forward pass."""
        is_needed = self._has_opaque and self._config.verify != "off"
        if self._source is not None and (is_needed or self._is_probed(version, is_again=False)):
            self._learner_logprobs = learner_logprobs(self._source.model, self._probe.tokens, self._device)

    def _ask_receivers(self) -> ProbeReport:
        """Return the logprobs to compare. An error here ends the world at once, because the ranks of an engine compute
        together."""
        answers = [receiver.probe(self._probe.tokens) for receiver, _ in self._taking]
        known = [answer for answer in answers if answer is not None]
        return ProbeReport(self._next_round(), self._learner_logprobs, known)

    def _check_probe(self, letters: dict[int, Letter[ProbeReport]]) -> str:
        receivers = {rank: letter.message.receivers for rank, letter in letters.items()}
        learner = letters[self._placement.leader].message.learner
        assert learner is not None
        return check_probe(learner, receivers, self._probe.limit, self._placement)


class _VersionDigests:
    """One rank's digests of one version. `sent` covers its own slices, `received` the whole tensors as they arrived.
    Each layout also has the digests of what its receiver should hold of tensors that it takes only in part."""

    def __init__(self, plan: Plan, layouts: Sequence[MemoryLayout], device: torch.device):
        self.sent, self.received = (Digests(len(plan.tensors), device) for _ in range(2))
        self._plan, self._device = plan, device
        self._layouts = [(layout, Digests(len(plan.tensors), device)) for layout in layouts]

    def add_sent(self, ranges: Sequence[RowRange], sources: dict[int, Tensor]) -> None:
        parts = [(part, self._plan.tensors[part.tensor].torch_dtype) for part in ranges]
        self.sent.add(
            [flat_part(part.tensor, sources[part.tensor].to(self._device), part.start, dtype) for part, dtype in parts]
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
        for layout, expected in self._layouts:
            expected.add(layout.expected(whole))

    def misplaced(self) -> list[str]:
        """Compare what receivers hold in their own memory with what arrived. Return the errors."""
        errors = []
        arrived = (self.received if self._plan.needs_transfer else self.sent).result() if self._layouts else None
        for layout, expected in self._layouts:
            assert arrived is not None
            held = Digests(len(self._plan.tensors), self._device)
            held.add(layout.held(self._plan.part_bounds))
            is_whole = torch.tensor(layout.is_whole).unsqueeze(1)
            names = differing(held.result(), torch.where(is_whole, arrived, expected.result()), self._plan.tensors)
            if names:
                errors.append(f"holds other values than it received of {names}")
        return errors


class SyncService(Service):
    """Joins announced syncs on ranks that are not actors. The first rank of an engine passes each announcement on to
    its followers, in order with its other messages."""

    name = "sync"
    kinds = (StartSync,)

    def __init__(self, sync: WeightSync, mail: Mailbox, followers: Sequence[int], begin_step: Callable[[int], None]):
        self._sync, self._mail, self._followers, self._begin_step = sync, mail, followers, begin_step

    def handle(self, letter: Letter[StartSync]) -> None:
        for rank in self._followers:
            self._mail.send(rank, letter.message)
        self._sync.join(letter.message.version)
        self._begin_step(letter.message.step)


def share_tensors(mail: Mailbox, placement: Placement, model: nn.Module | None, dtype: str) -> list[TensorInfo]:
    """Return the tensors that a sync transfers. Actors derive them from their model, and the leader tells the rest."""
    if model is None:
        return mail.receive(TransferredTensors).message.tensors
    tensors = transferred_tensors(model, dtype)
    if mail.rank == placement.leader:
        for rank in range(placement.world_size):
            if rank not in placement.actors:
                mail.send(rank, TransferredTensors(tensors))
    return tensors
