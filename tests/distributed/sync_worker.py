"""Run from test_weight_sync.py: weight syncs in several placements, with fake engines and planted faults.

`sync_worker.py NUM_RANKS FOLDER JOBS`: each job is a placement of all ranks and a model in FOLDER. Every rank writes
what it saw to FOLDER/JOB.RANK.json. Weights are multiplied by 1.5 between versions, so a stale tensor is a wrong one.
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

from rl.config.schema import SyncConfig
from rl.learner.scoring import LogprobService, ScoringModels
from rl.model.load import load_model
from rl.model.shards import local_slices
from rl.placement.groups import Groups, make_groups
from rl.placement.roles import Placement, plan
from rl.rollout.fake_engine import FakeEngine
from rl.sync.layout import MemoryLayout
from rl.sync.plan import Bucket, Plan
from rl.sync.probe import LIMITS, make_probe
from rl.sync.transfer import BucketTransfer
from rl.sync.weights import Receiver, StartSync, SyncError, SyncSettings, WeightSource, WeightSync, share_tensors
from rl.world.world import World, join
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
        self.placement: Placement = plan(job["placement"], 1, world.size, num_replicas=job.get("num_replicas", 1))
        self.groups: Groups = make_groups(self.placement, world.rank, "cpu", timeout_s=60)
        self.model, self.engine, self.copy = self._build_model(), self._build_engine(), self._build_copy()
        self.tensors = tuple(share_tensors(world.mail, self.placement, self.model, job["dtype"]))
        self.scale = 1.0
        self.seen: dict[str, Any] = {"errors": {}, "versions": [], "metrics": []}

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
        source = WeightSource(self.model, partial(local_slices, self.model)) if self.model is not None else None
        return WeightSync(self.world.mail, settings, source, receivers)

    def publish(self, sync: WeightSync) -> None:
        if self.model is not None:
            sync.publish(step=1)
        else:
            sync.join(self.world.mail.receive(StartSync).message.version)

    @torch.no_grad()
    def train(self) -> None:
        self.scale *= SCALE
        for part in local_slices(self.model) if self.model is not None else ():
            if part.info.torch_dtype.is_floating_point:
                part.data.mul_(SCALE)

    def check(self, sync: WeightSync) -> None:
        """Check that this rank's receivers hold the weights of the files, times the scale."""
        self.seen["versions"].append(sync.version)
        self.seen["metrics"].append(sync.metrics)
        files = load_file(self.folder / "model.safetensors")
        for index, info in enumerate(self.tensors):
            expected = (files[info.name].float() * self.scale).to(info.torch_dtype)
            if self.engine is not None:
                assert torch.equal(self.engine.memory[info.name], expected), f"engine: {info.name}"
            if self.copy is not None:
                part = list(local_slices(self.copied_model))[index]
                rank = self.placement.scorers.index(self.world.rank)
                first, end = info.rows(rank, len(self.placement.scorers))
                assert torch.equal(part.data, expected[first:end].float()), f"copy: {info.name}"
        for receiver in (self.engine, self.copy):
            assert receiver is None or receiver.version == sync.version

    def run(self) -> None:
        sync = self.make_sync()
        self.seen |= {"num_bytes": sum(info.num_bytes for info in self.tensors), "seconds": []}
        for _ in range(3):
            started = time.perf_counter()
            self.publish(sync)
            self.seen["seconds"].append(time.perf_counter() - started)
            self.check(sync)
            self.train()
        for name, culprit in self.job.get("faults", {}).items():
            owner, method, function = FAULTS[name]
            before = sync.version
            try:
                if self.world.rank == culprit:
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


def work(folder: Path, jobs: list[dict]) -> None:
    with join() as world:
        world.connect(share_gpu=False, timeout_s=60)
        for number, description in enumerate(jobs):
            job = Job(world, folder, description)
            job.run()
            (folder / f"{number}.{world.rank}.json").write_text(json.dumps(job.seen))


if __name__ == "__main__":
    run_worlds([(int(sys.argv[1]), lambda: work(Path(sys.argv[2]), json.loads(sys.argv[3])))])
