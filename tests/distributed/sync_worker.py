"""Run from test_weight_sync.py and test_weight_sync_lora.py: weight syncs in several placements, with fake engines and
planted faults.

`sync_worker.py NUM_RANKS FOLDER JOBS`: each job is a placement of all ranks and a model in FOLDER. Every rank writes
what it saw to FOLDER/JOB.RANK.json. Weights are multiplied by 1.5 between versions, so a stale tensor is a wrong one. A
job with `lora` has a model with adapters, which are drawn again between versions.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from rl.config.schema import LoraConfig, SyncConfig
from rl.learner.scoring import LogprobService, ScoringModels
from rl.model.load import load_model
from rl.model.shards import LocalSlice, TensorInfo, local_slices
from rl.placement.groups import Groups, make_groups
from rl.placement.roles import Placement, plan
from rl.rollout.fake_engine import FakeEngine
from rl.sync.layout import MemoryLayout
from rl.sync.plan import Bucket, Plan, RowRange
from rl.sync.probe import LIMITS, make_probe
from rl.sync.sources import MergedSources, WeightSource
from rl.sync.transfer import BucketTransfer
from rl.sync.weights import Receiver, StartSync, SyncError, SyncSettings, WeightSync, share_tensors
from rl.world.world import World, join
from tests.adapted_model import draw, fill_adapters, load_adapted, merged
from tests.forked_ranks import run_worlds

BUCKET_BYTES = 6000  # several tensors in most buckets, and some tensors larger than one
JOIN_TIMEOUT_S = 2.0
SCALE = 1.5  # exact in bfloat16 for weights of few bits


@contextmanager
def replaced(owner: Any, name: str, function: Callable) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: function(original, *args, **options))
    try:
        yield
    finally:
        setattr(owner, name, original)


Buckets = Iterator[tuple[Bucket, dict[int, Tensor]]]


def flip_a_byte(buckets: Callable[..., Buckets], *args: Any) -> Buckets:
    for bucket, whole in buckets(*args):
        whole[bucket.tensors[0]].view(-1).view(torch.uint8)[5] ^= 1
        yield bucket, whole


def swap_slices(buckets: Callable[..., Buckets], *args: Any) -> Buckets:
    """Exchange the rows of the first two of four owners in every tensor."""
    for bucket, whole in buckets(*args):
        for tensor in whole.values():
            count = -(-len(tensor) // 4)
            if 2 * count <= len(tensor):
                tensor[: 2 * count] = torch.cat([tensor[count : 2 * count], tensor[:count]])
        yield bucket, whole


def drop_second_bucket(fill: Callable, layout: MemoryLayout, whole: dict[int, Tensor]) -> None:
    layout.num_fills = getattr(layout, "num_fills", 0) + 1
    if layout.num_fills != 2:
        fill(layout, whole)
    else:
        layout.num_fills = 10**6  # in this version only


def load_nothing(fill: Callable, layout: MemoryLayout, whole: dict[int, Tensor]) -> None:
    pass


def fail_in_the_middle(fill: Callable, layout: MemoryLayout, whole: dict[int, Tensor]) -> None:
    if 2 in whole:
        raise ZeroDivisionError("planted")
    fill(layout, whole)


def spoil_what_is_sent(broadcast: Callable, buffer: Tensor, **options: Any) -> Any:
    buffer[-1] ^= 1
    return broadcast(buffer, **options)


def be_late(join: Callable, sync: WeightSync, version: int) -> None:
    time.sleep(JOIN_TIMEOUT_S + 1)
    join(sync, version)


def skip_the_merge(get: Callable, sources: MergedSources, index: int) -> Tensor:
    rows = sources._rows[index].reshape(-1)
    return rows.to(sources._tensors[index].torch_dtype)


def pack_without_a_merge(pack: Callable, transfer: BucketTransfer, ranges: tuple[RowRange, ...], to: Tensor) -> None:
    """Send weights without their adapters. What is digested has them."""
    with replaced(MergedSources, "__getitem__", skip_the_merge):
        pack(transfer, ranges, to)


def use_the_last_a(slices: Callable, job: "AdaptedJob") -> list[LocalSlice]:
    return job.slices_with(".lora_A.", lambda info: draw(info.name, info.shape, job.round - 1)[job.rows(info)])


def use_the_last_b(slices: Callable, job: "AdaptedJob") -> list[LocalSlice]:
    return job.slices_with(".lora_B.", lambda info: draw(info.name, info.shape, job.round - 1)[job.rows(info)])


def swap_rows_of_a(slices: Callable, job: "AdaptedJob") -> list[LocalSlice]:
    return job.slices_with(".lora_A.", lambda info: draw(info.name, info.shape, job.round)[job.rows(info, other=1)])


def swap_rows_of_b(slices: Callable, job: "AdaptedJob") -> list[LocalSlice]:
    return job.slices_with(".lora_B.", lambda info: draw(info.name, info.shape, job.round)[job.rows(info, other=1)])


def overwrite_a_fixed_tensor(begin_version: Callable, engine: FakeEngine) -> None:
    engine.memory["model.embed_tokens.weight"][3, 1] += 1
    begin_version(engine)


def change_a_frozen_weight(slices: Callable, job: "AdaptedJob") -> list[LocalSlice]:
    return job.slices_with("model.norm.", lambda info: 2 * job.files[info.name][job.rows(info)])


FAULTS: dict[str, tuple[Any, str, Callable]] = {
    "flipped byte": (BucketTransfer, "buckets", flip_a_byte),
    "swapped slices": (BucketTransfer, "buckets", swap_slices),
    "dropped bucket": (MemoryLayout, "fill", drop_second_bucket),
    "loads nothing": (MemoryLayout, "fill", load_nothing),
    "fails in the middle": (MemoryLayout, "fill", fail_in_the_middle),
    "spoilt sender": (dist, "broadcast", spoil_what_is_sent),
    "late": (WeightSync, "join", be_late),
}


class Job:
    def __init__(self, world: World, folder: Path, job: dict):
        self.world, self.job, self.folder = world, job, folder / job["model"]
        self.files = load_file(self.folder / "model.safetensors")
        self.placement: Placement = plan(job["placement"], 1, world.size, num_replicas=job.get("num_replicas", 1))
        self.groups: Groups = make_groups(self.placement, world.rank, "cpu", timeout_s=60)
        self.model, self.engine, self.copy = self._build_model(), self._build_engine(), self._build_copy()
        self.tensors = tuple(share_tensors(world.mail, self.placement, self.model, job["dtype"]))
        self.scale = 1.0
        self.seen: dict[str, Any] = {"errors": {}, "versions": [], "metrics": [], "broadcast": []}

    def _build_model(self) -> nn.Module | None:
        if self.groups.actor_mesh is None:
            return None
        return load_model(self.folder, self.groups.actor_mesh, self.world.device, self.job["dtype"], trainable=True)

    def _build_engine(self) -> FakeEngine | None:
        return FakeEngine(4, 0) if self.placement.engine_of(self.world.rank) is not None else None

    def _build_copy(self) -> LogprobService | None:
        if self.groups.scorer_mesh is None:
            return None
        model = load_model(self.folder, self.groups.scorer_mesh, self.world.device, self.job["dtype"], trainable=False)
        for part in local_slices(model):
            part.data.zero_()
        scorers = self.placement.scorers
        self.copied_model = model
        models = ScoringModels(
            {"old_logprobs": model}, max_tokens={"old_logprobs": 100}, temperature=1.0, device=self.world.device
        )
        return LogprobService(self.world.mail, scorers, models)

    def make_sync(self, bucket_bytes: int = BUCKET_BYTES) -> WeightSync:
        receivers: list[Receiver] = [receiver for receiver in (self.engine, self.copy) if receiver is not None]
        settings = SyncSettings(
            self.placement,
            Plan(self.tensors, tuple(self.placement.owners), tuple(self.placement.receivers), bucket_bytes),
            self.groups.sync_pgs,
            SyncConfig(join_timeout_s=JOIN_TIMEOUT_S, probe_interval=1, verify=self.job.get("verify", "full")),
            self.world.device,
            make_probe(32, 16, LIMITS[self.job["dtype"]]),
        )
        return WeightSync(self.world.mail, settings, self._make_source(), receivers)

    def _make_source(self) -> WeightSource | None:
        return WeightSource(self.model, partial(local_slices, self.model)) if self.model is not None else None

    def publish(self, sync: WeightSync, again: bool = False) -> None:
        """Publish a version. Record how many bytes this rank sent and received."""
        sizes: list[int] = []

        def measure(broadcast: Callable, buffer: Tensor, **options: Any) -> Any:
            sizes.append(buffer.nbytes)
            return broadcast(buffer, **options)

        with replaced(dist, "broadcast", measure):
            if self.model is None:
                sync.join(self.world.mail.receive(StartSync).message.version)
            elif again:
                sync.publish_again()
            else:
                sync.publish(step=1)
        self.seen["broadcast"].append(sum(sizes))

    @torch.no_grad()
    def train(self) -> None:
        self.scale *= SCALE
        for part in local_slices(self.model) if self.model is not None else ():
            if part.info.torch_dtype.is_floating_point:
                part.data.mul_(SCALE)

    def check(self, sync: WeightSync) -> None:
        """Check that this rank's receivers hold the right weights."""
        self.seen["versions"].append(sync.version)
        self.seen["metrics"].append(sync.metrics)
        for index, info in enumerate(self.tensors):
            expected = self.expected(info)
            if self.engine is not None:
                assert torch.equal(self.engine.memory[info.name], expected), f"engine: {info.name}"
            if self.copy is not None:
                part = list(local_slices(self.copied_model))[index]
                rank = self.placement.scorers.index(self.world.rank)
                first, end = info.rows(rank, len(self.placement.scorers))
                assert torch.equal(part.data, expected[first:end].float()), f"copy: {info.name}"
        for receiver in (self.engine, self.copy):
            assert receiver is None or receiver.version == sync.version

    def expected(self, info: TensorInfo) -> Tensor:
        """Return the weights of the files, times the scale."""
        return (self.files[info.name].float() * self.scale).to(info.torch_dtype)

    def run(self) -> WeightSync:
        sync = self.make_sync()
        self.seen |= {"num_bytes": sum(info.num_bytes for info in self.tensors), "seconds": []}
        for _ in range(3):
            started = time.perf_counter()
            self.publish(sync)
            self.seen["seconds"].append(time.perf_counter() - started)
            self.check(sync)
            self.train()
        for name, culprits in self.job.get("faults", {}).items():
            owner, method, function = FAULTS[name]
            before = sync.version
            try:
                if self.world.rank in (culprits if isinstance(culprits, list) else [culprits]):
                    with replaced(owner, method, function):
                        self.publish(sync)
                else:
                    self.publish(sync)
            except SyncError as error:
                self.seen["errors"][name] = str(error)
            assert sync.version == before
            unproven = before if name == "late" else 0  # nothing had arrived when the sync was given up
            assert self.engine is None or self.engine.version == unproven, "serves a version that was not proven"
            self.world.meet(name)
            self.publish(sync)  # the process groups are still in step
            self.check(sync)
            self.train()
        if "other_plan" in self.job:
            try:
                self.make_sync(BUCKET_BYTES + (self.world.rank == self.job["other_plan"]))
            except SyncError as error:
                self.seen["errors"]["other plan"] = str(error)
        return sync


class AdaptedJob(Job):
    """A job whose model has adapters."""

    def __init__(self, world: World, folder: Path, job: dict):
        self.lora, self.round = LoraConfig(**job["lora"]), 0
        super().__init__(world, folder, job)

    def _build_model(self) -> nn.Module | None:
        mesh = self.groups.actor_mesh
        return load_adapted(self.folder, mesh, self.lora, self.job["dtype"]) if mesh is not None else None

    def _make_source(self) -> WeightSource | None:
        return WeightSource(self.model, lambda: self.slices()) if self.model is not None else None

    def slices(self) -> list[LocalSlice]:
        return list(local_slices(self.model)) if self.model is not None else []

    def slices_with(self, name: str, data: Callable[[TensorInfo], Tensor]) -> list[LocalSlice]:
        """Return the slices with other data in those whose names contain this one."""
        assert self.model is not None
        parts = local_slices(self.model)
        return [LocalSlice(part.info, data(part.info)) if name in part.info.name else part for part in parts]

    def rows(self, info: TensorInfo, other: int = 0) -> slice:
        """Return the rows of this rank's shard, or of another one after it."""
        mesh = self.groups.actor_mesh
        assert mesh is not None
        axis = mesh.ndim - 1
        return slice(*info.rows((mesh.get_local_rank(axis) + other) % mesh.size(axis), mesh.size(axis)))

    def train(self) -> None:
        self.round += 1
        if self.model is not None and self.groups.actor_mesh is not None:
            fill_adapters(self.model, self.groups.actor_mesh, self.round)

    def expected(self, info: TensorInfo) -> Tensor:
        return merged(info, self.files, self.lora, self.round)

    def run(self) -> WeightSync:
        self.seen["num_merged_bytes"] = sum(info.num_bytes for info in self.tensors if info.is_merged)
        self.seen["num_ranges"] = len(self.tensors) * len(self.placement.owners)
        sync = super().run()
        self.seen["broadcast"].clear()
        if "rebuilt" in self.job:
            self._rebuild(sync)
        return sync

    def _rebuild(self, sync: WeightSync) -> None:
        """Replace the engine of one rank, publish again, and then publish as usual."""
        self.train()
        self.publish(sync)
        self.check(sync)
        if self.world.rank == self.job["rebuilt"]:
            assert self.engine is not None
            sync.remove_receiver(self.engine)
            self.engine = FakeEngine(4, 0)
            sync.add_receiver(self.engine)
        self.world.meet("rebuilt")
        self.publish(sync, again=True)
        self.check(sync)
        for _ in range(2):
            self.train()
            self.publish(sync)
            self.check(sync)


# Faults of jobs with adapters. Ranks that merge in a wrong way also digest what they merged, so that only the probe can
# find it.
FAULTS |= {
    "sent without a merge": (BucketTransfer, "_pack", pack_without_a_merge),
    "no merge": (MergedSources, "__getitem__", skip_the_merge),
    "stale A": (AdaptedJob, "slices", use_the_last_a),
    "stale B": (AdaptedJob, "slices", use_the_last_b),
    "swapped rows of A": (AdaptedJob, "slices", swap_rows_of_a),
    "swapped rows of B": (AdaptedJob, "slices", swap_rows_of_b),
    "another replica": (AdaptedJob, "slices", use_the_last_b),
    "overwritten fixed tensor": (FakeEngine, "begin_version", overwrite_a_fixed_tensor),
    "changed frozen weight": (AdaptedJob, "slices", change_a_frozen_weight),
}


def work(folder: Path, jobs: list[dict]) -> None:
    with join() as world:
        world.connect(share_gpu=False, timeout_s=60)
        for number, description in enumerate(jobs):
            job = (AdaptedJob if "lora" in description else Job)(world, folder, description)
            job.run()
            (folder / f"{number}.{world.rank}.json").write_text(json.dumps(job.seen))


if __name__ == "__main__":
    run_worlds([(int(sys.argv[1]), lambda: work(Path(sys.argv[2]), json.loads(sys.argv[3])))])
