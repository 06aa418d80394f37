"""Compare how long training waits for our save and for torch's dcp.async_save of the same state. Prints one JSON line.

    python benchmarks/checkpoint.py [--ranks 1] [--megabytes 200 | --model 1.7b] [--rollout-seconds 2] [--folder PATH]

It starts its own torchrun. Learner, optimizer state (after one step) and checkpoints are those of train.py, without
engines. Rounds of all ways take turns on one disk, which is synced between them. Figures are medians of five rounds
after a warm-up round, each the slowest rank's:
    blocked_s                   time in end_step and wait_copied if the next update comes at once
    blocked_in_loop_s           the same if the next update comes after the next rollouts
    commit_s                    from end_step until committed; also how long a synchronous save would block
    dcp_async_blocked_s         time in async_save and until its copy is taken, by the fastest of the settings in `dcp`;
                                the state dict is made before (dcp_state_dict_s)
    blocked_ratio_to_dcp_async  blocked_s / dcp_async_blocked_s
    end_step_s, wait_copied_s   the parts of blocked_s; probe_s: the forward for the probe alone, as at the run's end
    first_blocked_s             blocked_s of the warm-up round, in which memory is allocated, and pinned for a GPU
    write_gbps                  file_gb over the time from copied to committed
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.program import gpu_name, run_torchrun
from benchmarks.random_batch import random_batch
from benchmarks.random_model import SHAPES, save_random_model
from rl.checkpoint.checkpoints import Checkpoints
from rl.checkpoint.manifest import step_folder
from rl.checkpoint.store import CheckpointStore
from rl.config.load import load_config
from rl.config.schema import Config
from rl.data.rollout_state import RolloutState
from rl.learner.policy import PolicyTrainer
from rl.learner.sharded_trainer import ShardedModel
from rl.model.load import load_model
from rl.placement.groups import make_groups
from rl.placement.roles import plan
from rl.report.metrics import Measures
from rl.run.build import build_checkpoints
from rl.run.derive import derive_for_cpu
from rl.run.open import Run
from rl.sync.probe import probe_of_run
from rl.sync.weights import share_tensors
from rl.world.world import World, join

DCP_SETTINGS = ("default", "kept", "kept, in the background")


class Bench:
    """One rank of the benchmark."""

    def __init__(self, world: World, args: argparse.Namespace):
        self.world, self.args = world, args
        self.placement = plan({"actor,rollout": "all"}, 1, world.size)
        self.is_leader = world.rank == self.placement.leader
        self.on_gpu = torch.cuda.is_available()
        world.connect(share_gpu=self.on_gpu and world.size > torch.cuda.device_count(), timeout_s=300)
        self.groups = make_groups(self.placement, world.rank, world.device.type, timeout_s=300)
        self.world_pg, self.dcp_pg = (dist.new_group(list(range(world.size)), backend="gloo") for _ in range(2))
        self.folder = Path(args.folder)
        dtype = "bfloat16" if self.on_gpu else "float32"
        self._make_model(dtype)
        overrides = [f"model.path={self.folder / 'model'}", f"model.dtype={dtype}", "train.num_steps=1000000"]
        self.config: Config = derive_for_cpu(load_config(None, [*overrides, "checkpoint.save_interval=1"]))
        self.store = CheckpointStore(world.mail, self.folder / "checkpoints", None, self.placement.node_leads)
        self.learner = self._build_learner()
        self.names = [part.info.name for kind, part in self.learner.state_slices() if kind == "model"]
        self.checkpoints = self._build_checkpoints()
        self.step = 0
        self.num_bytes: dict[str, int] = {}  # of the files that each way wrote

    def _make_model(self, dtype: str) -> None:
        if self.world.rank == 0:
            num_parameters = self.args.megabytes * 1e6 / torch.float32.itemsize
            save_random_model(self.folder / "model", self.args.model, num_parameters, dtype, self.world.device)
        self.wait()

    def _build_learner(self) -> PolicyTrainer:
        config, mesh = self.config, self.groups.actor_mesh
        assert mesh is not None
        model = load_model(self.folder / "model", mesh, self.world.device, config.model.dtype, trainable=True)
        probe = probe_of_run(config, self.folder / "model").tokens if self.is_leader else ()
        learner = PolicyTrainer(ShardedModel(model, self.groups.actor_pg, self.world.device), config, 1, probe)
        learner.update(random_batch(torch.tensor([16, 16]), torch.tensor([4, 4]), vocab=1000), 1, Measures())
        return learner

    def _build_checkpoints(self) -> Checkpoints:
        if self.is_leader:
            self.store.create_roots("benchmark")
        self.wait()
        run = Run(
            self.world,
            self.config,
            self.placement,
            self.groups,
            folder=self.folder,
            models={"model.path": self.folder / "model"},
            store=self.store,
            resume=None,
        )
        tensors = share_tensors(self.world.mail, self.placement, self.learner.model, self.config.model.dtype)
        return build_checkpoints(run, self.learner, tensors)

    def ours(self, pause_s: float) -> dict[str, float]:
        """Save once. The next update comes after `pause_s` seconds."""
        step = self.next_step()
        self.checkpoints.end_update(step, version=step, rollouts=RolloutState({}, None))
        started = self.start_together()
        self.checkpoints.end_step(step, {})
        ended = time.perf_counter()
        time.sleep(pause_s)
        resumed = time.perf_counter()
        self.checkpoints.wait_copied()
        copied = time.perf_counter()
        self.checkpoints._saver.wait_committed()
        committed = time.perf_counter()
        self.checkpoints.close()  # this computes the probe's logits, which in a run come with the next update
        self.remove("ours", self.store.root / step_folder(step))
        seconds = {"end_step_s": ended - started, "wait_copied_s": copied - resumed, "commit_s": committed - started}
        return seconds | {"blocked_s": seconds["end_step_s"] + seconds["wait_copied_s"]}

    def probe(self) -> dict[str, float]:
        started = self.start_together()
        self.learner.run_probe()
        return {"seconds": time.perf_counter() - started}

    def dcp(self, stager: AsyncStager | None) -> dict[str, float]:
        folder = self.folder / f"dcp_{self.next_step()}"
        started = self.start_together()
        state = self.state_dict()
        seconds = {"state_dict_s": time.perf_counter() - started}
        started = self.start_together()
        saved = dcp.async_save(state, checkpoint_id=folder, process_group=self.dcp_pg, async_stager=stager)
        seconds["call_s"] = time.perf_counter() - started
        if isinstance(saved, AsyncSaveResponse):
            saved.staging_completion.result()
        seconds["blocked_s"] = time.perf_counter() - started
        (saved.upload_completion if isinstance(saved, AsyncSaveResponse) else saved).result()
        seconds["commit_s"] = time.perf_counter() - started
        self.remove("dcp", folder)
        return seconds

    def state_dict(self) -> dict[str, Any]:
        """Return what dcp saves. A tied parameter is saved once, as in our checkpoints."""
        model, moments = get_model_state_dict(self.learner.model), dict[str, DTensor]()
        for name, parameter in self.learner.model.named_parameters():
            assert isinstance(parameter, DTensor)
            whole: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            for kind, part in self.learner.optimizer.state_of(parameter).items():
                moment = DTensor.from_local(part.data, parameter.device_mesh, parameter.placements, **whole)
                moments[f"{name}.{kind}"] = moment
        return {"model": {name: model[name] for name in self.names}, "optimizer": moments}

    def next_step(self) -> int:
        self.step += 1
        return self.step

    def start_together(self) -> float:
        """Start on all ranks at once, on a disk that has nothing left to write."""
        if self.world.local_rank == 0:
            os.sync()
        self.wait()
        return time.perf_counter()

    def remove(self, kind: str, folder: Path) -> None:
        self.wait()
        if self.is_leader:
            self.num_bytes[kind] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(group=self.world_pg)

    def slowest(self, seconds: dict[str, float]) -> dict[str, float]:
        values = torch.tensor(list(seconds.values()), dtype=torch.float64)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.world_pg)
        return dict(zip(seconds, values.tolist()))

    def run(self) -> dict[str, Any]:
        pause_s = self.args.rollout_seconds
        if pause_s is None:
            pause_s = 10.0 if self.on_gpu else 2.0
        works: dict[str, Callable[[], dict[str, float]]] = {
            "at once": partial(self.ours, 0.0),
            "in loop": partial(self.ours, pause_s),
            "probe": self.probe,
        }
        stagers = {name: stager for name, stager in dcp_stagers(self.on_gpu).items() if name in self.args.dcp}
        for setting, stager in stagers.items():
            works[setting] = partial(self.dcp, stager)
        rounds = [{name: self.slowest(work()) for name, work in works.items()} for _ in range(self.args.rounds + 1)]
        self.checkpoints.close()
        return self._row(rounds, list(stagers), pause_s)

    def _row(self, rounds: list[dict[str, dict[str, float]]], settings: list[str], pause_s: float) -> dict[str, Any]:
        first, rest = rounds[0], rounds[1:]
        medians = {
            name: {figure: statistics.median(row[name][figure] for row in rest) for figure in first[name]}
            for name in first
        }
        at_once, in_loop = medians["at once"], medians["in loop"]
        fastest = min(settings, key=lambda setting: medians[setting]["blocked_s"])
        theirs = medians[fastest]
        held = torch.tensor(sum(part.data.nbytes for _, part in self.learner.state_slices()))
        dist.all_reduce(held, group=self.world_pg)
        file_gb = self.num_bytes.get("ours", 0) / 1e9
        seconds = {
            "blocked_s": at_once["blocked_s"],
            "blocked_in_loop_s": in_loop["blocked_s"],
            "commit_s": at_once["commit_s"],
            "sync_blocked_s": at_once["commit_s"],
            "end_step_s": at_once["end_step_s"],
            "wait_copied_s": at_once["wait_copied_s"],
            "probe_s": medians["probe"]["seconds"],
            "first_blocked_s": first["at once"]["blocked_s"],
            "dcp_async_blocked_s": theirs["blocked_s"],
            "dcp_async_commit_s": theirs["commit_s"],
            "dcp_async_first_blocked_s": first[fastest]["blocked_s"],
            "dcp_state_dict_s": theirs["state_dict_s"],
        }
        row: dict[str, Any] = {"benchmark": "checkpoint", "model": self.args.model, "ranks": self.world.size}
        row |= {"device": gpu_name(), "torch": torch.__version__, "rounds": len(rest)}
        row |= {"state_gb": round(int(held) / 1e9, 3), "file_gb": round(file_gb, 3)}
        row |= {"dcp_file_gb": round(self.num_bytes.get("dcp", 0) / 1e9, 3), "rollout_s": pause_s}
        row |= {name: round(value, 4) for name, value in seconds.items()}
        row["blocked_ratio_to_dcp_async"] = round(at_once["blocked_s"] / theirs["blocked_s"], 3)
        row["write_gbps"] = round(file_gb / (at_once["commit_s"] - at_once["blocked_s"]), 3)
        row["dcp_setting"] = fastest
        row["dcp"] = {name: {key: round(value, 4) for key, value in medians[name].items()} for name in settings}
        return row | {"blocked_range_s": _range(rest, "at once"), "dcp_async_blocked_range_s": _range(rest, fastest)}


def dcp_stagers(on_gpu: bool) -> dict[str, AsyncStager | None]:
    """Return the ways in which dcp can take its copy. By default it allocates memory each time. A stager that is kept
    keeps its memory, pinned for a GPU. A process that writes, instead of a thread, would not make the copy shorter."""

    def keep(use_async_staging: bool) -> DefaultStager:
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_shared_memory=False,  # only for another process
            use_async_staging=use_async_staging,
            use_non_blocking_copy=on_gpu,
        )
        stager = DefaultStager(options)
        stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]  # torch 2.11 does it after each copy
        return stager

    return dict(zip(DCP_SETTINGS, (None, keep(False), keep(True)), strict=True))


def _range(rounds: list[dict[str, dict[str, float]]], name: str) -> list[float]:
    values = [row[name]["blocked_s"] for row in rounds]
    return [round(min(values), 4), round(max(values), 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--megabytes", type=float, default=200, help="of float32 parameters, to the nearest layer")
    parser.add_argument("--model", choices=SHAPES, default="any size", help="or one of these shapes")
    parser.add_argument("--rollout-seconds", type=float, help="default: 2 on CPUs, 10 on a GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dcp", nargs="+", choices=DCP_SETTINGS, default=DCP_SETTINGS, help="how dcp takes its copy")
    parser.add_argument(
        "--folder", help="folder on the disk to measure, cleaned up afterwards; default: a temporary one"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder = str(Path(name).resolve())
            run_torchrun(args.ranks, str(Path(__file__).resolve()), *sys.argv[1:], "--folder", folder)
        return
    with join() as world:
        bench = Bench(world, args)
        row = bench.run()
        if bench.is_leader:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
