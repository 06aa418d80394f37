"""Weight sync: every version of the actors' shards to every engine and every inference rank, with proof.

    leader announces -> ranks join between two pieces of work -> leader says go -> buckets -> reports -> verdict

Buckets travel by the plan (plan.py, wire.py) on process groups of their own; all else is messages. A receiver that
fails in the middle receives to the end and then reports, so the groups stay in step and every rank raises.

The proof (`sync.verify`): digests of what the actors hold, of what each receiver got (`transport`), and of what lies
in its memory afterwards (`full`). At the first two versions and every `sync.probe_interval` versions the receivers'
logprobs of a fixed probe are compared with the learner's as well, and so are those of a rebuilt receiver that cannot be
read back. A receiver confirms a version only after the leader's verdict, and serves nothing in between.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.config.schema import SyncConfig
from rl.model.shards import LocalSlice, TensorInfo, from_json, to_json
from rl.placement.roles import Placement
from rl.sync.digest import NUM_SUMS, Digests, flat_part
from rl.sync.landing import Landings, Opaque, Weights
from rl.sync.plan import Plan, Range, wire_tensors
from rl.sync.probe import Probe, learner_logprobs
from rl.sync.proof import differing, judge_plans, judge_probe, judge_regions, judge_transfer, who
from rl.sync.wire import Wire
from rl.watch.heart import HEART
from rl.world.mail import Mail, Message
from rl.world.service import Service


class SyncError(RuntimeError):
    """A version did not arrive somewhere, or is not what was sent; raised on every rank."""


class Receiver(Protocol):
    """What takes weights on a rank: an engine, or a sharded copy for logprobs."""

    version: int  # that it has confirmed; 0: none

    def landings(self, tensors: Sequence[TensorInfo]) -> Landings | Opaque:
        """Where these tensors land in its memory, as far as that can be told."""
        ...

    def begin_version(self) -> None:
        """New weights are about to arrive: nothing is served from here until `confirm`."""
        ...

    def confirm(self, version: int) -> None:
        """This version has been proven: it may be served."""
        ...

    def probe(self, tokens: list[int]) -> list[float] | None:
        """Logprobs of all but the first token by the weights that it holds; None where there is no model."""
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


class WeightSync:
    """One rank's part in every sync: an actor sends its shard, and receivers of this rank are filled."""

    def __init__(
        self,
        mail: Mail,
        settings: SyncSettings,
        source: WeightSource | None,
        receivers: Sequence[Receiver],
        version: int = 0,
    ):
        """`version` is the last one that was published: not 0 when a run resumes."""
        self.version = version
        self._round = self._num_published = 0
        self._has_opaque = False  # whether any rank's receiver cannot be read back; the leader tells all ranks
        self._learner_logprobs: list[float] | None = None  # of the probe, by the current version; on actors
        self._mail, self._source = mail, source
        self._placement, self._plan, self._config = settings.placement, settings.plan, settings.config
        self._device, self._probe = settings.device, settings.probe
        self._shard = self._placement.shard_of(mail.rank) if source is not None else None
        self._ways = [(receiver, receiver.landings(self._plan.tensors)) for receiver in receivers]
        self._taking = self._ways  # of the current version
        has_loader = any(isinstance(way, Opaque) for _, way in self._ways)  # which may keep what it is given
        self._wire = Wire(self._plan, settings.pgs, mail.rank, self._device, reuse=not has_loader)
        self._compare_plans()

    def forget(self, receiver: Receiver) -> None:
        """It is gone, and so is the memory that its landings are views of."""
        self._ways = [(other, way) for other, way in self._ways if other is not receiver]
        self._taking = []

    def add(self, receiver: Receiver) -> None:
        """Feed it too from now on; it holds no version yet."""
        way = receiver.landings(self._plan.tensors)
        if isinstance(way, Opaque) and not self._has_opaque:  # so no logprobs were kept that it could be probed with
            raise SyncError(f"a rebuilt engine cannot be read back, though the first one could: {way.reason}")
        self._ways.append((receiver, way))

    @property
    def _landings(self) -> list[Landings]:
        return [way for _, way in self._taking if isinstance(way, Landings)]

    @property
    def _opaque(self) -> list[Opaque]:
        return [way for _, way in self._taking if isinstance(way, Opaque)]

    def publish(self, free_device: Callable[[], None] = lambda: None) -> int:
        """Bring the next version to all receivers and return its number; called by every actor. `free_device` is called
        before receivers of this rank compute, so that the learner leaves them the device."""
        self._announce(self.version + 1)
        self._run(self.version + 1, free_device)
        return self.version

    def publish_again(self) -> int:
        """Bring the current version to receivers that do not hold it. The others take part and keep what they have."""
        self._announce(self.version)
        self._run(self.version)
        return self.version

    def _announce(self, version: int) -> None:
        if self._mail.rank == self._placement.leader:
            led = {rank for ranks in self._placement.engines for rank in ranks[1:]}  # by the first rank of their engine
            for rank in range(self._placement.world_size):
                if rank not in self._placement.actors and rank not in led:
                    self._mail.send(rank, "sync", {"version": version})

    def join(self, version: int) -> None:
        """On a rank that only serves, when a sync has been announced."""
        assert version in (self.version, self.version + 1), f"{version} was announced, this rank holds {self.version}"
        self._run(version)

    def _run(self, version: int, free_device: Callable[[], None] = lambda: None) -> None:
        what, timeout_s = f"version {version} of the weights", self._config.join_timeout_s
        is_again = version == self.version
        self._taking = [(receiver, way) for receiver, way in self._ways if receiver.version != version]
        self._num_published += not is_again
        self._agree(f"{what}, not joined everywhere", {}, lambda reports: "", timeout_s)
        report, payload = self._transfer()
        self._agree(f"{what}, not transferred everywhere", report, self._judge_transfer, timeout_s, payload)
        if not is_again:
            self._ask_learner(version)
        if self._is_probed(version, is_again):
            free_device()
            self._agree(f"{what}, not probed everywhere", self._ask_receivers(), self._judge_probe, timeout_s)
        for receiver, _ in self._taking:
            receiver.confirm(version)
        self.version = version
        HEART.describe(version=version)

    def _agree(
        self,
        failure: str,
        report: dict[str, Any],
        judge: Callable[[dict[int, Message]], str],
        timeout_s: float | None,
        payload: bytes = b"",
    ) -> None:
        """Every rank reports to the leader, which judges when all have; a verdict that is not empty raises on all."""
        self._round += 1
        self._mail.send(self._placement.leader, "sync report", {"round": self._round} | report, payload)
        if self._mail.rank == self._placement.leader:
            reports, missing = self._collect(timeout_s)
            names = ", ".join(who(rank, self._placement) for rank in missing)
            error = f"no word from {names} within sync.join_timeout_s = {timeout_s:g} s" if missing else judge(reports)
            verdict = {"round": self._round, "error": f"{failure}: {error}" if error else ""}
            verdict["has_opaque"] = self._has_opaque
            for rank in range(self._placement.world_size):
                self._mail.send(rank, "sync verdict", verdict)
        message = self._mail.receive("sync verdict")
        assert message is not None and message.meta["round"] == self._round, f"{message} in round {self._round}"
        if message.meta["error"]:
            raise SyncError(message.meta["error"])
        self._has_opaque = message.meta["has_opaque"]

    def _collect(self, timeout_s: float | None) -> tuple[dict[int, Message], list[int]]:
        """The reports of this round, and the ranks that sent none in time."""
        reports: dict[int, Message] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(reports) < self._placement.world_size:
            left_s = None if deadline is None else deadline - time.monotonic()
            message = self._mail.receive("sync report", timeout_s=left_s)
            if message is None:
                break
            if message.meta["round"] == self._round:  # an older one comes from a rank that was given up
                reports[message.source] = message
        return reports, [rank for rank in range(self._placement.world_size) if rank not in reports]

    def _compare_plans(self) -> None:
        """At the start: the same plan everywhere, and engines that take all of it."""
        settings = (self._plan.digest, self._config.verify, self._config.probe_interval, self._probe)
        report: dict[str, Any] = {"plan": repr(settings), "notice": "", "regions": None}
        for opaque in self._opaque:
            report["notice"] = opaque.reason
        if self._landings and not self._opaque:
            report["regions"] = [[astuple(region) for region in regions] for regions in self._landings[0].regions]
        self._agree("the weight sync, not planned everywhere", report, self._judge_plans, timeout_s=None)

    def _judge_plans(self, reports: dict[int, Message]) -> str:
        notices = {rank: message.meta["notice"] for rank, message in sorted(reports.items()) if message.meta["notice"]}
        self._has_opaque = bool(notices)
        if notices and self._config.verify == "full":
            rank, reason = next(iter(notices.items()))
            others = f" and {len(notices) - 1} other ranks" if len(notices) > 1 else ""
            print(
                f"oneworld: {who(rank, self._placement)}{others}: {reason}, so what it holds cannot be read back "
                "exactly; it is proven by what it received (sync.verify=transport) and by the probe",
                flush=True,
            )
        regions = {rank: message.meta["regions"] for rank, message in reports.items() if message.meta["regions"]}
        plans = {rank: message.meta["plan"] for rank, message in reports.items()}
        return judge_plans(plans, self._placement) or judge_regions(regions, self._plan.tensors, self._placement)

    @torch.no_grad()
    def _transfer(self) -> tuple[dict[str, Any], bytes]:
        """Moves a version; returns this rank's report: what went wrong, and digests of what it holds as an actor and
        of what it got."""
        is_full = self._config.verify == "full"
        digests = _VersionDigests(self._plan, self._landings if is_full else [], self._device)
        errors: list[str] = []
        failure: Exception | None = None
        stream = self._feed(digests, errors)
        try:
            for receiver, _ in self._taking:
                receiver.begin_version()
            for landings in self._landings:
                landings.fill_zeros()
            for opaque in self._opaque:
                opaque.load(stream)
        except Exception as error:  # whatever a receiver raised: the others need this rank until the last bucket
            failure = error
            errors.append(f"{type(error).__name__}: {error}")
        for _ in stream:  # to the end, also where a receiver gave up
            pass
        if failure is not None and not self._wire.is_in_step:
            raise failure  # the transfer itself failed here: out of step, so nothing collective may follow
        if not errors:
            errors += digests.misplaced()
        if self._config.verify == "off":
            return {"errors": errors, "digests": []}, b""
        parts = {"sent": digests.sent} if self._shard is not None else {}
        if self._mail.rank in self._plan.receivers and self._plan.needs_wire and not errors:
            parts["got"] = digests.got
        payload = b"".join(part.result().numpy().tobytes() for part in parts.values())
        return {"errors": errors, "digests": list(parts)}, payload

    def _feed(self, digests: "_VersionDigests", errors: list[str]) -> Weights:
        """Feeds the receivers with landings; yields every tensor, whole and in the wire's dtype, for the others."""
        slices = self._source.slices() if self._source is not None else ()
        sources = {index: part.data.reshape(-1) for index, part in enumerate(slices)}
        for bucket, whole in self._wire.buckets(sources):
            HEART.beat(f"the bucket from {self._plan.tensors[bucket.tensors[0]].name} on")
            if self._shard is not None and self._config.verify != "off":
                digests.add_sent(bucket.ranges[self._shard], sources)
            try:
                if not errors:
                    self._use(whole, digests)
            except Exception as error:  # as in `_transfer`: reported at the end
                errors.append(f"{type(error).__name__}: {error}")
            while whole and self._opaque:
                index = next(iter(whole))
                info = self._plan.tensors[index]
                yield info.name, whole.pop(index).to(info.torch_dtype)
            whole.clear()  # so that its memory is free when the next bucket needs some

    def _use(self, whole: dict[int, Tensor], digests: "_VersionDigests") -> None:
        # On a CPU tensor by tensor, each while it is in the cache; on a GPU all in a few launches.
        for portion in [whole] if self._device.type == "cuda" else [{i: tensor} for i, tensor in whole.items()]:
            if self._config.verify != "off":
                digests.add_got(portion)
            for landings in self._landings:
                landings.fill(portion)

    def _judge_transfer(self, reports: dict[int, Message]) -> str:
        found: dict[str, dict[int, Tensor]] = {"sent": {}, "got": {}}
        for rank, message in reports.items():
            names = message.meta["digests"]
            if names:
                rows = torch.frombuffer(bytearray(message.payload), dtype=torch.int32).view(len(names), -1, NUM_SUMS)
                for name, row in zip(names, rows, strict=True):
                    found[name][rank] = row
        errors = {rank: message.meta["errors"] for rank, message in reports.items()}
        return judge_transfer(errors, found["sent"], found["got"], self._plan.tensors, self._placement)

    def _is_probed(self, version: int, is_again: bool) -> bool:
        """The first two of this start: engines held dummies before the one and have sampled before the other. A version
        that comes again is for rebuilt receivers. Digests prove those, except the ones that cannot be read back."""
        if self._config.verify == "off":
            return False
        if is_again:
            return self._has_opaque
        interval = self._config.probe_interval
        return self._num_published <= 2 or (interval > 0 and version % interval == 0)

    def _ask_learner(self, version: int) -> None:
        """Compute the learner's logprobs of the probe where they are compared, now or when a receiver is rebuilt: by
        then the learner may lie in host memory. A failure in here ends the world at once: the others may be inside a
        forward with this rank."""
        is_needed = self._has_opaque and self._config.verify != "off"
        if self._source is not None and (is_needed or self._is_probed(version, is_again=False)):
            self._learner_logprobs = learner_logprobs(self._source.model, self._probe.tokens, self._device)

    def _ask_receivers(self) -> dict[str, Any]:
        """Return the logprobs to compare. A failure in here ends the world at once: the ranks of an engine compute
        together."""
        answers = [receiver.probe(self._probe.tokens) for receiver, _ in self._taking]
        return {
            "learner": self._learner_logprobs,
            "receivers": [answer for answer in answers if answer is not None],
        }

    def _judge_probe(self, reports: dict[int, Message]) -> str:
        receivers = {rank: message.meta["receivers"] for rank, message in reports.items()}
        learner = reports[self._placement.leader].meta["learner"]
        return judge_probe(learner, receivers, self._probe.limit, self._placement)


class _VersionDigests:
    """One rank's digests of one version: of its own slices, of whole tensors as they arrived, and of what a receiver
    should hold of tensors of which it takes only parts."""

    def __init__(self, plan: Plan, landings: Sequence[Landings], device: torch.device):
        self.sent, self.got = (Digests(len(plan.tensors), device) for _ in range(2))
        self._plan, self._device = plan, device
        self._landed = [(entry, Digests(len(plan.tensors), device)) for entry in landings]

    def add_sent(self, ranges: Sequence[Range], sources: dict[int, Tensor]) -> None:
        parts = [(part, self._plan.tensors[part.tensor].torch_dtype) for part in ranges]
        self.sent.add(
            [flat_part(part.tensor, sources[part.tensor].to(self._device), part.start, dtype) for part, dtype in parts]
        )

    def add_got(self, whole: dict[int, Tensor]) -> None:
        if self._plan.needs_wire:
            self.got.add(
                [
                    flat_part(index, tensor.view(-1)[start : start + count], start, tensor.dtype)
                    for index, tensor in whole.items()
                    for start, count in self._plan.cuts[index]
                ]
            )
        for landings, expected in self._landed:
            expected.add(landings.expected(whole))

    def misplaced(self) -> list[str]:
        """What receivers hold, read from their own memory, against what arrived."""
        errors = []
        arrived = (self.got if self._plan.needs_wire else self.sent).result() if self._landed else None
        for landings, expected in self._landed:
            assert arrived is not None
            held = Digests(len(self._plan.tensors), self._device)
            held.add(landings.held(self._plan.cuts))
            is_whole = torch.tensor(landings.is_whole).unsqueeze(1)
            names = differing(held.result(), torch.where(is_whole, arrived, expected.result()), self._plan.tensors)
            if names:
                errors.append(f"holds other values than it received of {names}")
        return errors


class SyncService(Service):
    """Joins announced syncs on ranks that only serve. The first rank of an engine passes them on to the others, in the
    order of its other calls."""

    name = "sync"
    kinds = ("sync",)

    def __init__(self, sync: WeightSync, mail: Mail, followers: Sequence[int], on_version: Callable[[int], None]):
        self._sync, self._mail, self._followers, self._on_version = sync, mail, followers, on_version

    def handle(self, message: Message) -> None:
        for rank in self._followers:
            self._mail.send(rank, "sync", message.meta)
        self._sync.join(message.meta["version"])
        self._on_version(message.meta["version"])


def share_tensors(mail: Mail, placement: Placement, model: nn.Module | None, dtype: str) -> list[TensorInfo]:
    """The tensors that travel: an actor derives them from its model, the leader tells the others."""
    if model is None:
        message = mail.receive("tensors")
        assert message is not None
        return from_json(message.meta["tensors"])
    tensors = wire_tensors(model, dtype)
    if mail.rank == placement.leader:
        for rank in range(placement.world_size):
            if rank not in placement.actors:
                mail.send(rank, "tensors", {"tensors": to_json(tensors)})
    return tensors
