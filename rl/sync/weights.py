"""Weight sync: bring every version of the actors' shards to every engine and every inference rank, and verify it.

    leader announces -> ranks join between two pieces of work -> leader says go -> buckets -> reports -> verdict

Buckets travel by the plan (plan.py, transfer.py) on process groups of their own; all else is messages. A receiver that
fails in the middle receives to the end and then reports. So the process groups stay in step, and every rank raises.

`sync.verify` compares digests of what the actors hold with digests of what each receiver received (`transport`) and of
what lies in its memory afterwards (`full`). At the first two versions and every `sync.probe_interval` versions the
receivers' logprobs of a fixed probe are compared with the learner's as well. So are those of a rebuilt receiver that
cannot be read back. A receiver confirms a version only after the leader's verdict, and serves nothing in between.
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
from rl.sync.plan import Plan, Range, transferred_tensors
from rl.sync.probe import Probe, learner_logprobs
from rl.sync.transfer import BucketTransfer
from rl.sync.verification import check_plans, check_probe, check_regions, check_transfer, describe_rank, differing
from rl.watch.heart import HEART
from rl.world.messages import Letter, Mailbox, Message
from rl.world.service import Service


class SyncError(RuntimeError):
    """A version did not arrive somewhere, or is not what was sent. Every rank raises it."""


class Receiver(Protocol):
    """An engine or a sharded copy for logprobs, which takes weights."""

    version: int  # that it has confirmed; 0: none

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout | OpaqueLoader:
        """Return where these tensors lie in its memory, or the loader that alone knows."""
        ...

    def begin_version(self) -> None:
        """Serve nothing until `confirm`: new weights are about to arrive."""
        ...

    def confirm(self, version: int) -> None:
        """Serve this version: it has been verified."""
        ...

    def probe(self, tokens: list[int]) -> list[float] | None:
        """Return the logprobs of all tokens but the first by the current weights; None without a model."""
        ...


@dataclass(frozen=True)
class SyncSettings:
    """How weights travel and how their arrival is verified."""

    placement: Placement
    plan: Plan
    pgs: Sequence[dist.ProcessGroup | None]  # by owner of a shard
    config: SyncConfig
    device: torch.device
    probe: Probe


@dataclass(frozen=True)
class WeightSource:
    """The policy of an actor. `slices` returns its weights, in host memory while they are offloaded."""

    model: nn.Module
    slices: Callable[[], Iterable[LocalSlice]]


@dataclass(frozen=True)
class StartSync(Message):
    """The leader's announcement to ranks that only serve."""

    version: int
    step: int  # that samples from this version


@dataclass(frozen=True)
class SyncReport(Message):
    """A rank's report to the leader. It says only that the rank has come this far."""

    round: int


@dataclass(frozen=True)
class PlanReport(SyncReport):
    settings: str
    opaque_reason: str  # why a receiver of this rank cannot be read back; empty if all can
    regions: list[list[Region]] | None  # by tensor: what the receiver takes of it


@dataclass(frozen=True)
class TransferReport(SyncReport):
    errors: list[str]
    digests: list[str]  # which of sent and received are in the payload


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
        """`version` is the last one that was published: not 0 when a run resumes."""
        self.version = version
        self._step = 0  # that samples from the current version; on actors
        self._round = self._num_published = 0
        self._has_opaque = False  # on any rank
        self._learner_logprobs: list[float] | None = None  # of the probe, by the current version; on actors
        self._mail, self._source = mail, source
        self._placement, self._plan, self._config = settings.placement, settings.plan, settings.config
        self._device, self._probe = settings.device, settings.probe
        self._shard = self._placement.shard_of(mail.rank) if source is not None else None
        self._receivers = [(receiver, receiver.memory_layout(self._plan.tensors)) for receiver in receivers]
        self._taking = self._receivers  # those that take the current version
        has_loader = bool(self._loaders)  # which may keep what it is given
        self._transfer = BucketTransfer(self._plan, settings.pgs, mail.rank, self._device, reuse=not has_loader)
        self._compare_plans()

    def remove_receiver(self, receiver: Receiver) -> None:
        """Forget a receiver and the views of its memory."""
        self._receivers = [(other, layout) for other, layout in self._receivers if other is not receiver]
        self._taking = []

    def add_receiver(self, receiver: Receiver) -> None:
        """Fill this receiver too from the next sync on. It holds no version yet."""
        layout = receiver.memory_layout(self._plan.tensors)
        if isinstance(layout, OpaqueLoader) and not self._has_opaque:  # so no logprobs were kept to probe it with
            raise SyncError(f"a rebuilt engine cannot be read back, though the first one could: {layout.reason}")
        self._receivers.append((receiver, layout))

    @property
    def _layouts(self) -> list[MemoryLayout]:
        return [layout for _, layout in self._taking if isinstance(layout, MemoryLayout)]

    @property
    def _loaders(self) -> list[OpaqueLoader]:
        return [layout for _, layout in self._taking if isinstance(layout, OpaqueLoader)]

    def publish(self, step: int, free_device: Callable[[], None] = lambda: None) -> int:
        """Bring the next version to all receivers and return its number; called by every actor.

        `step` samples from this version. `free_device` is called before receivers of this rank compute, so that the
        learner leaves them the device.
        """
        self._step = step
        self._announce(self.version + 1)
        self._run(self.version + 1, free_device)
        return self.version

    def publish_again(self) -> int:
        """Bring the current version to receivers that do not hold it. The others take part and keep what they have."""
        self._announce(self.version)
        self._run(self.version)
        return self.version

    def join(self, version: int) -> None:
        """Take part in an announced sync, on a rank that only serves."""
        assert version in (self.version, self.version + 1), f"{version} was announced, this rank holds {self.version}"
        self._run(version)

    def _announce(self, version: int) -> None:
        if self._mail.rank == self._placement.leader:
            # The first rank of an engine passes it on to the others.
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
        """Report to the leader, which checks the reports of all ranks; raise SyncError everywhere if it finds an
        error."""
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
            if letter.message.round == self._round:  # an older one comes from a rank that was given up
                reports[letter.source] = letter
        return reports, [rank for rank in range(self._placement.world_size) if rank not in reports]

    def _compare_plans(self) -> None:
        """Check at the start that all ranks have the same plan, and that engines take all of it."""
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
        """Move a version; return this rank's report with the digests of what it sent and received."""
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
        except Exception as error:  # whatever a receiver raised: the others need this rank until the last bucket
            failure = error
            errors.append(f"{type(error).__name__}: {error}")
        for _ in stream:  # to the end, also where a receiver gave up
            pass
        if failure is not None and not self._transfer.is_in_step:
            raise failure  # the transfer itself failed here: out of step, so nothing collective may follow
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
        """Fill the receivers whose layout is known; yield every tensor, whole and in its transfer dtype."""
        slices = self._source.slices() if self._source is not None else ()
        sources = {index: part.data.reshape(-1) for index, part in enumerate(slices)}
        for bucket, whole in self._transfer.buckets(sources):
            HEART.beat(f"the bucket from {self._plan.tensors[bucket.tensors[0]].name} on")
            if self._shard is not None and self._config.verify != "off":
                digests.add_sent(bucket.ranges[self._shard], sources)
            try:
                if not errors:
                    self._fill(whole, digests)
            except Exception as error:  # as in `_move_buckets`: reported at the end
                errors.append(f"{type(error).__name__}: {error}")
            while whole and self._loaders:
                index = next(iter(whole))
                info = self._plan.tensors[index]
                yield info.name, whole.pop(index).to(info.torch_dtype)
            whole.clear()  # so that its memory is free when the next bucket needs some

    def _fill(self, whole: dict[int, Tensor], digests: "_VersionDigests") -> None:
        # On a CPU tensor by tensor, each while it is in the cache; on a GPU all in a few launches.
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
        """Probe the first two versions of this start: engines held dummies before the one and have sampled before the
        other. A version that comes again is for rebuilt receivers, and digests verify those that can be read back."""
        if self._config.verify == "off":
            return False
        if is_again:
            return self._has_opaque
        interval = self._config.probe_interval
        return self._num_published <= 2 or (interval > 0 and version % interval == 0)

    def _ask_learner(self, version: int) -> None:
        """Compute the learner's logprobs of the probe if they are compared, now or when a receiver is rebuilt: by then
        the learner may be offloaded. A failure in here ends the world at once: the others may be inside a forward pass
        with this rank."""
        is_needed = self._has_opaque and self._config.verify != "off"
        if self._source is not None and (is_needed or self._is_probed(version, is_again=False)):
            self._learner_logprobs = learner_logprobs(self._source.model, self._probe.tokens, self._device)

    def _ask_receivers(self) -> ProbeReport:
        """Return the logprobs to compare. A failure in here ends the world at once: the ranks of an engine compute
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
    """One rank's digests of one version: of its own slices, of whole tensors as they arrived, and of what a receiver
    should hold of tensors of which it takes only parts."""

    def __init__(self, plan: Plan, layouts: Sequence[MemoryLayout], device: torch.device):
        self.sent, self.received = (Digests(len(plan.tensors), device) for _ in range(2))
        self._plan, self._device = plan, device
        self._layouts = [(layout, Digests(len(plan.tensors), device)) for layout in layouts]

    def add_sent(self, ranges: Sequence[Range], sources: dict[int, Tensor]) -> None:
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
                    for start, count in self._plan.cuts[index]
                ]
            )
        for layout, expected in self._layouts:
            expected.add(layout.expected(whole))

    def misplaced(self) -> list[str]:
        """Compare what receivers hold, read from their own memory, with what arrived; return the errors."""
        errors = []
        arrived = (self.received if self._plan.needs_transfer else self.sent).result() if self._layouts else None
        for layout, expected in self._layouts:
            assert arrived is not None
            held = Digests(len(self._plan.tensors), self._device)
            held.add(layout.held(self._plan.cuts))
            is_whole = torch.tensor(layout.is_whole).unsqueeze(1)
            names = differing(held.result(), torch.where(is_whole, arrived, expected.result()), self._plan.tensors)
            if names:
                errors.append(f"holds other values than it received of {names}")
        return errors


class SyncService(Service):
    """Joins announced syncs on ranks that only serve. The first rank of an engine passes them on to the others, in the
    order of its other calls."""

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
    """Return the tensors that a sync transfers. An actor derives them from its model; the leader tells the others."""
    if model is None:
        return mail.receive(TransferredTensors).message.tensors
    tensors = transferred_tensors(model, dtype)
    if mail.rank == placement.leader:
        for rank in range(placement.world_size):
            if rank not in placement.actors:
                mail.send(rank, TransferredTensors(tensors))
    return tensors
