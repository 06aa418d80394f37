"""Weight sync: bring every version of the actors' shards to every engine and every inference rank, and verify it.

    leader announces -> ranks join between two pieces of work -> leader says go -> buckets -> reports -> verdict

sources.py has what the actors send. Buckets are broadcast as planned (plan.py, transfer.py), on process groups that
nothing else uses. Everything else is sent as messages. A receiver that fails still receives all buckets, and then
reports the error. So the process groups stay in step, and every rank raises. verification.py says what is compared. A
receiver confirms a version only after the leader's verdict. Until then it serves nothing.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.config.schema import SyncConfig
from rl.model.shards import TensorInfo
from rl.placement.roles import Placement
from rl.sync.layout import MemoryLayout, OpaqueLoader, Weights
from rl.sync.plan import Bucket, Plan, transferred_tensors
from rl.sync.probe import Probe, learner_logprobs
from rl.sync.sources import WeightSource, open_sources
from rl.sync.transfer import BucketTransfer
from rl.sync.verification import SyncReport, Verifier, VersionDigests
from rl.watch.heart import HEART
from rl.world.messages import Letter, Mailbox, Message
from rl.world.service import Service

Check = Callable[[dict[int, SyncReport]], str]  # from the reports of all ranks to what is wrong
UNLIMITED_S = 1e9  # a timeout that never passes


class SyncError(RuntimeError):
    """Raised on every rank if a version did not arrive everywhere, or did not arrive as it was sent."""


class Receiver(Protocol):
    """A model that takes weights: an engine, or a sharded copy that computes logprobs. It stops serving at
    `begin_version`, and serves again when a version is confirmed. `memory_layout` returns where the tensors lie in its
    memory, or its loader if that is not known. `probe` returns the logprobs of all tokens but the first, or None
    without a model."""

    version: int  # the last confirmed version; 0: none, or its weights were dropped

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout | OpaqueLoader: ...

    def begin_version(self) -> None: ...

    def confirm(self, version: int) -> None: ...

    def probe(self, tokens: list[int]) -> list[float] | None: ...


@dataclass(frozen=True)
class SyncSettings:
    placement: Placement
    plan: Plan
    pgs: Sequence[dist.ProcessGroup | None]  # by shard; None if its owner is the only member
    config: SyncConfig
    device: torch.device
    probe: Probe


@dataclass(frozen=True)
class StartSync(Message):
    version: int
    step: int  # the step that samples from this version


@dataclass(frozen=True)
class SyncVerdict(Message):
    round: int
    error: str
    has_opaque: bool  # whether any rank's receiver cannot be read back
    sends_all: bool  # whether any rank's receiver needs the fixed tensors
    metrics: dict[str, float]  # see WeightSync
    awaited = "the verdict on the weight sync"


@dataclass(frozen=True)
class TransferredTensors(Message):
    tensors: list[TensorInfo]
    awaited = "the actors to load the model"


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
        self.metrics: dict[str, float] = {}  # of the last version; equal on all ranks
        self.before_version: Callable[[int], None] = lambda version: None  # called when the sync of a version begins
        self._step = 0  # the step that samples from the current version; only actors know it
        self._round = self._num_published = 0
        self._has_opaque = False  # whether a receiver of any rank cannot be read back
        self._sends_all = True  # whether the current sync also sends fixed tensors; equal on all ranks
        self._arrived: VersionDigests | None = None  # of the last version, with those of all receivers that hold it
        self._learner_logprobs: list[float] | None = None  # of the probe under the current version; only on actors
        self._mail, self._source = mail, source
        self._placement, self._plan, self._config = settings.placement, settings.plan, settings.config
        self._device, self._probe = settings.device, settings.probe
        self._is_verified = self._config.verify != "off"
        self._verifier = Verifier(self._plan.tensors, self._placement)
        self._shard = self._placement.shard_of(mail.rank) if source is not None else None
        self._receivers = [(receiver, receiver.memory_layout(self._plan.tensors)) for receiver in receivers]
        self._taking = self._receivers  # the receivers that the current sync fills
        has_loader = bool(self._loaders)  # a loader may keep the tensors that it is given
        self._transfer = BucketTransfer(self._plan, settings.pgs, mail.rank, self._device, reuse=not has_loader)
        self._compare_plans()

    def remove_receiver(self, receiver: Receiver) -> None:
        """Drop a receiver and all views of its memory."""
        for other, layout in self._receivers:
            if other is receiver and self._arrived is not None:
                self._arrived.forget(layout)
        self._receivers = [(other, layout) for other, layout in self._receivers if other is not receiver]
        self._taking = []

    def add_receiver(self, receiver: Receiver) -> None:
        """Fill this receiver in all later syncs. It holds no version yet."""
        layout = receiver.memory_layout(self._plan.tensors)
        if isinstance(layout, OpaqueLoader) and not self._has_opaque:  # no logprobs were kept to probe it with
            raise SyncError(f"a rebuilt engine cannot be read back, though the first one could: {layout.reason}")
        self._receivers.append((receiver, layout))

    def layout_of(self, receiver: Receiver) -> MemoryLayout | OpaqueLoader:
        return next(layout for other, layout in self._receivers if other is receiver)

    @property
    def _layouts(self) -> list[MemoryLayout]:
        return [layout for _, layout in self._taking if isinstance(layout, MemoryLayout)]

    @property
    def _loaders(self) -> list[OpaqueLoader]:
        return [layout for _, layout in self._taking if isinstance(layout, OpaqueLoader)]

    @property
    def _needs_all(self) -> bool:
        """Whether this rank needs all tensors. It does if a receiver is new, has dropped its weights, or cannot be read
        back, because its loader takes only whole models."""
        if self._mail.rank not in self._plan.receivers:
            return False
        arrived = self._arrived
        return arrived is None or any(
            receiver.version != self.version or not arrived.covers(layout) for receiver, layout in self._receivers
        )

    @property
    def _buckets(self) -> tuple[Bucket, ...]:
        return self._plan.buckets if self._sends_all else self._plan.changing_buckets

    def publish(self, step: int, free_device: Callable[[], None] = lambda: None) -> int:
        """Bring the next version to all receivers and return its number. Every actor must call this. `step` is the step
        that samples from this version. `free_device` is called before receivers of this rank compute."""
        self._step = step
        return self._publish(self.version + 1, free_device)

    def publish_again(self) -> int:
        """Bring the current version to the receivers that lack it. The others take part and keep their weights."""
        return self._publish(self.version)

    def join(self, version: int) -> None:
        """Take part in an announced sync, on a rank that is not an actor."""
        assert version in (self.version, self.version + 1), f"{version} was announced, this rank holds {self.version}"
        self._run(version)

    def _publish(self, version: int, free_device: Callable[[], None] = lambda: None) -> int:
        if self._mail.rank == self._placement.leader:
            # The first rank of an engine passes the announcement on to its followers, unless it is an actor.
            actors = self._placement.actors
            followers = {rank for ranks in self._placement.engines for rank in ranks[1:] if ranks[0] not in actors}
            for rank in range(self._placement.world_size):
                if rank not in actors and rank not in followers:
                    self._mail.send(rank, StartSync(version, self._step))
        self._run(version, free_device)
        return version

    def _run(self, version: int, free_device: Callable[[], None] = lambda: None) -> None:
        what, is_again = f"version {version} of the weights", version == self.version
        self._taking = [(receiver, layout) for receiver, layout in self._receivers if receiver.version != version]
        self._num_published += not is_again
        if not is_again:
            self.before_version(version)
        interval = self._config.probe_interval
        # The first two versions are always probed: engines hold dummy weights before the first, and have sampled for
        # the first time before the second.
        is_due = self._num_published <= 2 or (interval > 0 and version % interval == 0)
        joined = SyncReport(self._round + 1, needs_all=self._needs_all)
        self._agree(f"{what}, not joined everywhere", joined, self._check_joined)
        began = time.perf_counter()
        check_transfer = functools.partial(self._check_transfer, began, is_again)
        digests = VersionDigests(self._plan, self._layouts, self._device, reads_back=self._config.verify == "full")
        if not self._sends_all and self._arrived is not None:
            digests.keep_fixed(self._arrived)
        self._agree(f"{what}, not transferred everywhere", self._move_buckets(digests), check_transfer)
        if self._arrived is not None:
            digests.add_others(self._arrived)
        self._arrived = digests
        # An error in these forward passes ends the world at once, because other ranks compute in the same passes.
        if self._is_verified and (is_due or self._has_opaque) and not is_again and self._source is not None:
            # A rebuilt receiver may need the logprobs later, when the learner may be offloaded.
            self._learner_logprobs = learner_logprobs(self._source.model, self._probe.tokens, self._device)
        # A repeated version is for rebuilt receivers, and digests verify those that can be read back.
        if self._is_verified and (self._has_opaque if is_again else is_due):
            free_device()
            answers = [receiver.probe(self._probe.tokens) for receiver, _ in self._taking]
            known = [answer for answer in answers if answer is not None]
            report = SyncReport(self._round + 1, learner=self._learner_logprobs, receivers=known)
            self._agree(f"{what}, not probed everywhere", report, self._check_probe)
        for receiver, _ in self._taking:
            receiver.confirm(version)
        self.version = version
        HEART.describe(version=version)

    def _check_joined(self, reports: dict[int, SyncReport]) -> str:
        self._sends_all = not self._plan.fixed or any(report.needs_all for report in reports.values())
        return ""

    def _check_transfer(self, began: float, is_again: bool, reports: dict[int, SyncReport]) -> str:
        """Compare the digests, and measure the transfer. Without digests, nobody waits until it is over."""
        if self._is_verified and self._plan.receivers and not is_again:
            num_bytes = self._plan.bytes_of(self._buckets)
            self.metrics = {"perf/sync_gb_per_s": num_bytes / 1e9 / (time.perf_counter() - began)}
        return self._verifier.check_transfer(reports)

    def _check_probe(self, reports: dict[int, SyncReport]) -> str:
        gaps = [gap for _, gap in self._verifier.probe_gaps(reports)]  # none if no receiver has a model
        if gaps and self._config.probe_interval == 1:  # otherwise only some steps would have the metric
            self.metrics = self.metrics | {"policy/probe_gap": max(gaps)}
        return self._verifier.check_probe(reports, self._probe.limit)

    def _agree(self, failure: str, report: SyncReport, check: Check, is_timed: bool = True) -> None:
        """Report to the leader, which checks the reports of all ranks. If it finds an error, or if sync.join_timeout_s
        passes in a timed stage, every rank raises SyncError."""
        self._round = report.round
        self._mail.send(self._placement.leader, report)
        if self._mail.rank == self._placement.leader:
            error = self._collect(check, self._config.join_timeout_s if is_timed else UNLIMITED_S)
            error = f"{failure}: {error}" if error else ""
            verdict = SyncVerdict(self._round, error, self._has_opaque, self._sends_all, self.metrics)
            for rank in range(self._placement.world_size):
                self._mail.send(rank, verdict)
        verdict = self._mail.receive(SyncVerdict).message
        assert verdict.round == self._round, f"{verdict} in round {self._round}"
        if verdict.error:
            raise SyncError(verdict.error)
        self._has_opaque, self._sends_all, self.metrics = verdict.has_opaque, verdict.sends_all, verdict.metrics

    def _collect(self, check: Check, timeout_s: float) -> str:
        """Check the reports of this round. Return what is wrong, or which ranks sent none in time."""
        reports: dict[int, SyncReport] = {}
        ranks, deadline = range(self._placement.world_size), time.monotonic() + timeout_s
        while len(reports) < len(ranks):
            letter = self._mail.receive_within(deadline - time.monotonic(), SyncReport)
            if letter is None:
                missing = ", ".join(self._verifier.describe(rank) for rank in ranks if rank not in reports)
                return f"no word from {missing} within sync.join_timeout_s = {timeout_s:g} s"
            if letter.message.round == self._round:  # an older report is from a rank that had missed its deadline
                reports[letter.source] = letter.message
        return check(dict(sorted(reports.items())))

    def _compare_plans(self) -> None:
        """Check at the start that all ranks have the same plan, and that engines take every tensor completely."""
        settings = repr((self._plan.digest, self._config.verify, self._config.probe_interval, self._probe))
        reason = _encodable(self._loaders[-1].reason) if self._loaders else ""
        regions = self._layouts[0].regions if self._layouts and not self._loaders else None
        report = SyncReport(self._round + 1, settings, reason, regions)
        self._agree("the weight sync, not planned everywhere", report, self._check_plans, is_timed=False)

    def _check_plans(self, reports: dict[int, SyncReport]) -> str:
        opaque = self._verifier.describe_opaque(reports)
        self._has_opaque = bool(opaque)
        if opaque and self._config.verify == "full":
            print(
                f"oneworld: {opaque}, so what it holds cannot be read back exactly. It is verified by what it received "
                "(sync.verify=transport) and by the probe.",
                flush=True,
            )
        return self._verifier.check_plans(reports)

    @torch.no_grad()
    def _move_buckets(self, digests: VersionDigests) -> SyncReport:
        errors: list[str] = []
        failure = None
        # Before the first bucket: this may be a collective of the actors, and two at once could block each other.
        sources = open_sources(self._source, self._plan.tensors, self._device) if self._source is not None else {}
        stream = self._fill_receivers(sources, digests, errors)
        try:
            for receiver, _ in self._taking:
                receiver.begin_version()
            for layout in self._layouts:
                layout.fill_zeros()
            for loader in self._loaders:
                loader.load(stream)
        except Exception as error:  # any error of a receiver: the other ranks need this one until the last bucket
            failure = error
            errors.append(_encodable(f"{type(error).__name__}: {error}"))
        for _ in stream:  # take the remaining buckets, even if a receiver has failed
            pass
        if failure is not None and not self._transfer.is_in_step:
            raise failure  # the transfer itself failed and is out of step, so no collective may follow
        if self._shard is not None and self._is_verified and not self._sends_all:
            for bucket in self._plan.fixed_buckets:
                HEART.beat(f"the digests from {self._plan.tensors[bucket.tensors[0]].name} on")
                digests.add_sent(bucket.ranges[self._shard], sources)
        if not errors:
            errors += digests.misplaced()
        is_receiver = self._plan.needs_transfer and self._mail.rank in self._plan.receivers and not errors
        sent = digests.sent.to_bytes() if self._is_verified and self._shard is not None else b""
        received = digests.received.to_bytes() if self._is_verified and is_receiver else b""
        return SyncReport(self._round + 1, errors=errors, sent=sent, received=received)

    def _fill_receivers(self, sources: Mapping[int, Tensor], digests: VersionDigests, errors: list[str]) -> Weights:
        """Fill the receivers whose layout is known. Yield every whole tensor, in its transfer dtype, for loaders."""
        for bucket, whole in self._transfer.buckets(sources, self._buckets):
            HEART.beat(f"the bucket from {self._plan.tensors[bucket.tensors[0]].name} on")
            if self._shard is not None and self._is_verified:
                digests.add_sent(bucket.ranges[self._shard], sources)
            try:
                if not errors:
                    self._fill(whole, digests)
            except Exception as error:  # reported at the end, as in `_move_buckets`
                errors.append(_encodable(f"{type(error).__name__}: {error}"))
            while whole and self._loaders:
                index = next(iter(whole))
                info = self._plan.tensors[index]
                yield info.name, whole.pop(index).to(info.torch_dtype)
            whole.clear()  # otherwise the views would keep the bucket's memory alive

    def _fill(self, whole: dict[int, Tensor], digests: VersionDigests) -> None:
        # A CPU takes one tensor at a time, while it is in the cache. A GPU takes all of them in a few launches.
        for portion in [whole] if self._device.type == "cuda" else [{i: tensor} for i, tensor in whole.items()]:
            if self._is_verified:
                digests.add_received(portion)
            for layout in self._layouts:
                layout.fill(portion)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which a message with a field of bytes cannot hold."""
    return text.encode(errors="replace").decode()


class SyncService(Service):
    """Joins syncs on ranks that are not actors. The first rank of an engine passes each announcement on to its
    followers, in order with its other messages."""

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
