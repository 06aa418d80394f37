"""Weight sync: every version of the actors' shards to every engine and every inference rank.

One plan, which every rank derives from the list of tensors: buckets of whole tensors in model order; each actor
broadcasts its slices of a bucket, packed, before the next bucket begins; receivers assemble the tensors and pass them
on. Collocated ranks are senders and receivers of the same plan.

    leader announces -> ranks join between two pieces of work -> leader says go -> buckets -> all agree

A receiver that fails in the middle receives to the end and then reports, so the group stays in step and every rank
raises.
"""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.config import SyncConfig
from rl.mail import Mail, Message
from rl.placement import Placement
from rl.serve import Service
from rl.shards import LocalSlice, TensorInfo, local_slices

Weights = Iterator[tuple[str, Tensor]]
REPORT_BYTES = 512


class SyncError(RuntimeError):
    """A version did not arrive somewhere; raised on every rank."""


class WeightSync:
    """On every rank. `model` is an actor's policy; `copy` and `load` are what receives: a sharded copy, an engine's
    loader."""

    def __init__(
        self,
        mail: Mail,
        placement: Placement,
        pg: dist.ProcessGroup,
        config: SyncConfig,
        device: torch.device,
        tensors: list[TensorInfo],
        model: nn.Module | None = None,
        copy: nn.Module | None = None,
        load: Callable[[Weights, int], None] | None = None,
    ):
        self.version = 0
        self._mail, self._pg, self._device = mail, pg, device
        self._actors, self._leader, self._world_size = placement.actors, placement.leader, placement.world_size
        self._serving = [rank for rank in range(placement.world_size) if rank not in placement.actors]
        self._scorers = placement.scorers
        self._join_timeout_s = config.join_timeout_s
        self._buckets = cut_buckets(tensors, config.bucket_mb << 20)
        self._model, self._copy, self._load = model, copy, load
        self._num_buckets_left = 0

    def publish(self) -> int:
        """On every actor: brings the next version to all; returns its number."""
        version = self.version + 1
        if self._mail.rank == self._leader:
            for rank in self._serving:
                self._mail.send(rank, "sync", {"version": version})
            self._wait_for_all(version)
        self._run(version)
        return version

    def join(self, version: int) -> None:
        """On a rank that only serves, when a sync has been announced."""
        assert version == self.version + 1, f"version {version} was announced, this rank holds {self.version}"
        self._run(version)

    def _wait_for_all(self, version: int) -> None:
        missing = set(range(self._world_size)) - {self._leader}
        deadline = time.monotonic() + self._join_timeout_s
        while missing:
            message = self._mail.receive("joined", timeout_s=deadline - time.monotonic())
            if message is None:
                names = ", ".join(map(str, sorted(missing)))
                raise SyncError(
                    f"version {version}: no answer from rank {names} within sync.join_timeout_s = "
                    f"{self._join_timeout_s:g} s"
                )
            missing.discard(message.source)
        for rank in range(self._world_size):
            self._mail.send(rank, "go", {"version": version})

    def _run(self, version: int) -> None:
        if self._mail.rank != self._leader:
            self._mail.send(self._leader, "joined", {"version": version})
        self._mail.receive("go")
        stream = self._stream()
        error: Exception | None = None
        weights = self._copied(stream) if self._copy is not None else stream
        try:
            if self._load is not None:
                self._load(weights, version)
        except Exception as failure:  # whatever the engine raised: the others need this rank until the last bucket
            error = failure
        if error is None:
            for _ in weights:
                pass
        for _ in stream:  # where the consumer gave up, the collectives go on
            pass
        if error is not None and self._num_buckets_left:
            raise error  # the exchange itself failed here: out of step, so nothing collective may follow
        self._agree(version, error)
        self.version = version

    @torch.no_grad()
    def _stream(self) -> Weights:
        """Every tensor of the model, whole, in the engine's dtype; each bucket in fresh memory, since receivers may
        keep it."""
        own = list(local_slices(self._model)) if self._model is not None else []
        parts = {part.info.name: part for part in own}
        self._num_buckets_left = len(self._buckets)
        for bucket in self._buckets:
            whole = [torch.empty(info.shape, dtype=info.torch_dtype, device=self._device) for info in bucket]
            for index, actor in enumerate(self._actors):
                self._exchange(bucket, whole, index, parts if actor == self._mail.rank else None)
            self._num_buckets_left -= 1
            yield from zip((info.name for info in bucket), whole, strict=True)

    def _exchange(
        self, bucket: list[TensorInfo], whole: list[Tensor], index: int, parts: dict[str, LocalSlice] | None
    ) -> None:
        """One actor's slices of a bucket, from it to everyone; `parts` are this rank's own when it is that actor."""
        views = []
        for info, tensor in zip(bucket, whole, strict=True):
            start, stop = info.rows(index, len(self._actors))
            views.append(tensor.view(-1)[start * info.row_elements : stop * info.row_elements])
        if not sum(view.numel() for view in views):
            return
        if parts is not None:
            for info, view in zip(bucket, views, strict=True):
                if view.numel():
                    view.copy_(parts[info.name].data.reshape(-1))
        packed = torch.cat(views)
        dist.broadcast(packed, group=self._pg, group_src=self._actors[index])
        if parts is None:
            for view, piece in zip(views, packed.split([view.numel() for view in views]), strict=True):
                view.copy_(piece)

    @torch.no_grad()
    def _copied(self, weights: Weights) -> Weights:
        """Fills this rank's sharded copy in passing."""
        assert self._copy is not None
        slices = {part.info.name: part for part in local_slices(self._copy)}
        index = self._scorers.index(self._mail.rank)
        for name, tensor in weights:
            part = slices[name]
            start, stop = part.info.rows(index if part.info.sharded else 0, len(self._scorers))
            part.data.view(-1).copy_(tensor.view(-1)[start * part.info.row_elements : stop * part.info.row_elements])
            yield name, tensor

    def _agree(self, version: int, error: Exception | None) -> None:
        report = f"{type(error).__name__}: {error}".encode()[:REPORT_BYTES] if error is not None else b""
        own = torch.tensor(list(report.ljust(REPORT_BYTES, b"\0")), dtype=torch.uint8)
        reports = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather(reports, own, group=self._pg)
        texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in reports]
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if failed:
            raise SyncError(f"version {version} did not arrive everywhere: {'; '.join(failed)}") from error


class SyncService(Service):
    """Joins announced syncs on ranks that only serve."""

    name = "sync"
    kinds = ("sync",)

    def __init__(self, sync: WeightSync, on_version: Callable[[int], None]):
        self._sync, self._on_version = sync, on_version

    def handle(self, message: Message) -> None:
        self._sync.join(message.meta["version"])
        self._on_version(message.meta["version"])


def cut_buckets(tensors: list[TensorInfo], max_bytes: int) -> list[list[TensorInfo]]:
    """Runs of whole tensors of one dtype in model order, each at most `max_bytes` unless one tensor alone is larger."""
    buckets: list[list[TensorInfo]] = []
    used = 0
    for info in tensors:
        num_bytes = info.num_elements * info.torch_dtype.itemsize
        if not buckets or used + num_bytes > max_bytes or buckets[-1][-1].dtype != info.dtype:
            buckets.append([])
            used = 0
        buckets[-1].append(info)
        used += num_bytes
    return buckets


def wire_tensors(model: nn.Module, dtype: str) -> list[TensorInfo]:
    """The tensors of an actor's model as they travel: floating point in the engine's dtype."""
    infos = []
    for part in local_slices(model):
        info = part.info
        floating = info.torch_dtype.is_floating_point
        infos.append(TensorInfo(info.name, info.shape, dtype if floating else info.dtype, info.sharded))
    return infos
