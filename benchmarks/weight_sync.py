"""Compare the weight sync with a bare broadcast of the same bytes in the same groups. Prints one JSON line.

    python benchmarks/weight_sync.py [--actors 1] [--rollouts 2 | --collocated] [--megabytes 500 | --model 1.7b]
                                     [--lora RANK] [--bucket-mb 0] [--rounds 5]

It starts its own torchrun. Weights are random. With --lora, the model has adapters, so weights are merged on their way,
and those without adapters are not sent. Rounds of all ways take turns, and figures are medians of --rounds:
    megabytes               what a sync sends, of model_megabytes
    gbps                    the sync as train.py runs it, with real vLLM engines and sync.verify=full
    wire_gbps               a bare broadcast of the plan's bytes, bucket by bucket, between buffers that exist already
    ratio                   gbps / wire_gbps
    ratio_bare_receivers    the same with receivers that only receive, and sync.verify=transport
    verify_percent          extra time of sync.verify=transport over off, with the same engines
    verify_full_percent     extra time of sync.verify=full over off
    naive_gbps              each tensor gathered on the actors, broadcast and loaded on its own, without verification;
                            without --lora only
    peak_extra_mb           the most memory that a rank used during a sync, besides its model and its engine
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import gpu_name, run_torchrun
from benchmarks.random_model import SHAPES, save_random_model
from rl.config.load import load_config
from rl.config.schema import Config, LoraConfig, Verify
from rl.model.load import load_model
from rl.model.lora import Adapters
from rl.model.shards import local_slices
from rl.placement.groups import make_groups
from rl.placement.roles import plan
from rl.rollout.engine import Engine, EngineSeat, build_engine
from rl.sync.layout import MemoryLayout
from rl.sync.plan import make_plan
from rl.sync.probe import LIMITS, make_probe
from rl.sync.sources import WeightSource
from rl.sync.weights import StartSync, SyncSettings, WeightSync, share_tensors
from rl.world.world import World, join


class Bench:
    """One rank of the benchmark."""

    def __init__(self, world: World, args: argparse.Namespace):
        self.world, self.args = world, args
        self.version = 0  # the newest version, which all syncs share
        spec = {"actor,rollout": "all"}
        if not args.collocated:
            spec = {"rollout": f"0-{args.rollouts - 1}", "actor": "rest"}
        self.placement = plan(spec, 1, world.size)
        cuda = torch.cuda.is_available()
        world.connect(share_gpu=cuda and world.size > torch.cuda.device_count(), timeout_s=300)
        self.groups = make_groups(self.placement, world.rank, world.device.type, timeout_s=300)
        self.world_pg = dist.new_group(list(range(world.size)), backend="gloo")
        dtype = "bfloat16" if cuda else "float32"
        folder = self._make_model(dtype)
        overrides = [f"model.path={folder}", f"model.dtype={dtype}", "rollout.gpu_memory_fraction=0.25"]
        overrides += ["rollout.enforce_eager=true", "data.max_prompt_tokens=64", "rollout.kv_cache_mb=64"]
        overrides += ["sync.probe_interval=0", "rollout.max_num_seqs=8"]
        self.config: Config = load_config(None, overrides)
        self.model = self._load(folder)
        self.engine = self._build_engine(folder)
        self.tensors = share_tensors(world.mail, self.placement, self.model, dtype)
        self.plan = make_plan(self.tensors, self.placement, args.bucket_mb, world.device)

    def _make_model(self, dtype: str) -> Path:
        folder = Path(self.args.folder)
        if self.world.rank == 0:
            num_parameters = self.args.megabytes * 1e6 / getattr(torch, dtype).itemsize
            save_random_model(folder, self.args.model, num_parameters, dtype, self.world.device)
        self.wait()
        return folder

    def _load(self, folder: Path) -> nn.Module | None:
        if self.groups.actor_mesh is None:
            return None
        trainable = Adapters(LoraConfig(rank=self.args.lora), seed=0) if self.args.lora else True
        return load_model(folder, self.groups.actor_mesh, self.world.device, self.config.model.dtype, trainable)

    def _build_engine(self, folder: Path) -> Engine | None:
        index = self.placement.engine_of(self.world.rank)
        if index is None:
            return None
        seat = EngineSeat(
            name=f"bench-{self.world.id}-{index}",
            tp_rank=0,
            tp_size=1,
            store=self.world.store.unsealed,
            device=self.world.device,
            sleeps=False,
            stop_token_ids=[0],
        )
        engine = build_engine(self.config, folder, seat)
        self.world.at_end(engine.close)
        return engine

    def sync(self, verify: Verify, bare: bool = False) -> WeightSync:
        settings = SyncSettings(
            self.placement,
            self.plan,
            self.groups.sync_pgs,
            dataclasses.replace(self.config.sync, verify=verify),
            self.world.device,
            make_probe(SHAPES[self.args.model].vocab, 64, LIMITS[self.config.model.dtype]),
        )
        source = WeightSource(self.model, partial(local_slices, self.model)) if self.model is not None else None
        receivers = [self.engine] if self.engine is not None and not bare else []
        return WeightSync(self.world.mail, settings, source, receivers)

    def publish(self, sync: WeightSync) -> None:
        # The syncs share their engines, and an engine refuses a version that it already has.
        self.version, sync.version = self.version + 1, self.version
        if self.model is not None:
            sync.publish(step=1)
        else:
            sync.join(self.world.mail.receive(StartSync).message.version)
        assert sync.version == self.version, (sync.version, self.version)

    def wire(self) -> None:
        """Broadcast the plan's bytes, bucket by bucket, from each owner."""
        for bucket in self.plan.changing_buckets:
            for owner, pg in enumerate(self.groups.sync_pgs):
                num_bytes = bucket.sent_bytes(owner) if bucket.ranges[owner] else 0
                if (
                    num_bytes
                    and pg is not None
                    and self.world.rank in self.placement.sync_ranks(self.plan.owners[owner])
                ):
                    source = dist.get_group_rank(pg, self.plan.owners[owner])
                    dist.broadcast(self.scratch[:num_bytes], group=pg, group_src=source)

    @torch.no_grad()
    def naive(self) -> None:
        parts = dict(self.model.named_parameters()) if self.model is not None else {}
        layout = self.layout
        leader, pg = self.placement.leader, self.groups.sync_pgs[self.plan.owners.index(self.placement.leader)]
        for index, info in enumerate(self.tensors):
            whole = parts[info.name].full_tensor().to(info.torch_dtype) if parts else None  # type: ignore[attr-defined]
            if pg is not None and self.world.rank in self.placement.sync_ranks(leader):
                if whole is None:
                    whole = torch.empty(info.shape, dtype=info.torch_dtype, device=self.world.device)
                dist.broadcast(whole, group=pg, group_src=dist.get_group_rank(pg, leader))
            if layout is not None:
                assert whole is not None
                layout.fill({index: whole})

    def timed(self, work: Callable[[], None]) -> float:
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group=self.world_pg)

    def extra_mb(self, work: Callable[[], None]) -> float:
        """Return by how many megabytes a rank's memory grew at most during the work."""
        cuda = self.world.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            before = _peak_rss()
        work()
        grown = torch.tensor([(torch.cuda.max_memory_allocated() if cuda else _peak_rss()) - before])
        dist.all_reduce(grown, op=dist.ReduceOp.MAX, group=self.world_pg)
        return round(int(grown) / 1e6, 1)

    def run(self) -> dict:
        engines, engines_transport, engines_off = self.sync("full"), self.sync("transport"), self.sync("off")
        bare = self.sync("transport", bare=True)
        for sync in (engines_transport, engines_off, bare):
            for _ in range(2):
                self.publish(sync)  # the first versions come with a probe, and fill caches
        engines._num_published = 2  # as if it had sent its probes, so that the peak is that of the transfer
        peak = self.extra_mb(lambda: self.publish(engines))
        layout = self.engine.memory_layout(self.tensors) if self.engine is not None else None
        assert layout is None or isinstance(layout, MemoryLayout), layout
        self.layout = layout
        works: dict[str, Callable[[], None]] = {
            "full": lambda: self.publish(engines),
            "transport": lambda: self.publish(engines_transport),
            "off": lambda: self.publish(engines_off),
            "bare": lambda: self.publish(bare),
        }
        if not self.args.lora:
            works["naive"] = self.naive
        if self.plan.needs_transfer:
            longest = max(bucket.num_bytes for bucket in self.plan.changing_buckets)
            self.scratch = torch.zeros(longest, dtype=torch.uint8, device=self.world.device)
            works["wire"] = self.wire
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for round_number in range(self.args.rounds + 1):
            for name, work in works.items():
                taken = self.timed(work)
                if round_number:
                    seconds[name].append(taken)
        return self._row({name: statistics.median(values) for name, values in seconds.items()}, peak)

    def _row(self, seconds: dict[str, float], peak: float) -> dict:
        sent = self.plan.bytes_of(self.plan.changing_buckets)
        gbps = {name: sent / value / 1e9 for name, value in seconds.items()}
        actors, rollouts = len(self.placement.actors), len(self.placement.engines)
        row: dict = {"benchmark": "weight_sync", "model": self.args.model, "actors": actors, "engines": rollouts}
        row |= {"collocated": self.args.collocated, "device": gpu_name()}
        row |= {"lora": self.args.lora, "megabytes": round(sent / 1e6), "bucket_mb": self.plan.bucket_bytes >> 20}
        row |= {"model_megabytes": round(self.plan.num_bytes / 1e6), "buckets": len(self.plan.changing_buckets)}
        row |= {"seconds": round(seconds["full"], 4), "gbps": round(gbps["full"], 3)}
        if "wire" in gbps:
            row |= {"wire_gbps": round(gbps["wire"], 3), "ratio": round(gbps["full"] / gbps["wire"], 3)}
            row |= {"ratio_bare_receivers": round(gbps["bare"] / gbps["wire"], 3)}
        for name, key in (("transport", "verify_percent"), ("full", "verify_full_percent")):
            row[key] = round(100 * (seconds[name] / seconds["off"] - 1), 1)
        row["peak_extra_mb"] = peak
        return row | ({"naive_gbps": round(gbps["naive"], 3)} if "naive" in gbps else {})


def _peak_rss() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--collocated", action="store_true", help="every actor also hosts an engine; no other ranks")
    parser.add_argument("--megabytes", type=float, default=500, help="size of the model, to the nearest layer")
    parser.add_argument("--model", choices=SHAPES, default="any size", help="or one of these shapes")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="rank of adapters; 0: none")
    parser.add_argument("--bucket-mb", type=int, default=0, help="0: the default of train.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # the launching process passes the model's folder
    args = parser.parse_args()
    if "RANK" not in os.environ:
        ranks = args.actors + (0 if args.collocated else args.rollouts)
        with tempfile.TemporaryDirectory() as folder:
            run_torchrun(ranks, str(Path(__file__).resolve()), *sys.argv[1:], "--folder", folder)
        return
    with join() as world:
        bench = Bench(world, args)
        row = bench.run()
        if world.rank == bench.placement.leader:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
