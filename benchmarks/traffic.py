"""Model what a step sends between GPUs, and what bounds it there. Needs no GPU. Prints one JSON line.

    python benchmarks/traffic.py [--model qwen3-0.6b] [--rollout-s 3.61] [--update-s 2.64] [--other-s 0.09]
                                 [--tokens 294400] [--max-tokens 20480] [--nvlink 300] [--network 45]
                                 [--latency-us 30] [--local 240] [--table]

Process groups and bytes follow from the placement (rl/placement), the plan of a weight sync (rl/sync/plan.py) and
FSDP's shards, for several placements of 8 GPUs and of 4 x 8. tests/distributed/test_traffic.py counts the same in real
runs of 2 to 8 ranks. Seconds are modelled:
    --rollout-s, --update-s     measured on one GPU, for --tokens in micro-batches of --max-tokens; each GPU has the
    --other-s                   same work here, and --other-s is the rest of that step
    --nvlink, --network         GB/s into a GPU: from GPUs of its node, and per GPU of a node from other nodes
    --latency-us                of each collective
    --local                     GB/s at which a rank casts, copies and digests the weights of a sync, without transfer
The default seconds and --local are those of an H200 (RESULTS.md). The links are assumed: NVLink at two thirds of its
peak, and one card of 400 Gb/s per GPU. --table prints the figures as rows of a table in Markdown instead.
A collective takes its latency, and the longer one of two times: for all bytes into a GPU over NVLink, and for all
bytes into a node over the network cards of those of its GPUs that take part. Each entry of `placements` has:
    groups                      process groups, and the largest number of them that a rank is in
    update_gb                   bytes into an actor in an update: gathered, reduced, and reduced between replicas
    overlap                     share of the time of these collectives that computation hides: the next layer's weights
                                are gathered while a layer computes, and gradients are reduced meanwhile
    sync_gb, broadcasts         bytes into a receiver in a weight sync, and the number of broadcasts
    seconds                     of the step: sampling, computation of the update, its exposed communication, sync
    step_s, bound, efficiency   the step, its longest part, and its speed per GPU compared with one GPU
    network_needed              GB/s of --network below which exposed communication and sync add 5 % to the step
"""

import argparse
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from benchmarks.random_model import SHAPES, config_of
from rl.model.shards import TensorInfo
from rl.placement.nodes import Nodes
from rl.placement.roles import Placement, plan
from rl.sync.plan import Plan, make_plan, transferred_tensors

NODE_SIZE = 8
ALLOWED = 0.05  # of a step, for communication; see `network_needed`
LAYER = re.compile(r"\.layers\.(\d+)\.")
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast"]
BOUNDS = {  # by the longest part of a step
    "rollout": "sampling",
    "update": "computation",
    "exposed": "communication of the update",
    "sync": "weight sync",
}


@dataclass(frozen=True)
class Links:
    """Speeds in bytes per second, and the latency of a collective in seconds."""

    nvlink: float
    network: float
    latency: float


@dataclass(frozen=True)
class Collective:
    kind: Kind
    ranks: tuple[int, ...]
    num_bytes: int  # of the whole tensor

    def into(self, num_members: int) -> float:
        """Return the bytes into one of this number of equal members: ranks, or nodes."""
        if self.kind == "broadcast":
            return self.num_bytes
        share = self.num_bytes * (num_members - 1) / num_members
        return 2 * share if self.kind == "all_reduce" else share

    @property
    def received(self) -> float:
        """Return the bytes into a rank. The source of a broadcast receives none."""
        return self.into(len(self.ranks)) if len(self.ranks) > 1 else 0.0

    def seconds(self, nodes: Nodes, links: Links) -> float:
        if len(self.ranks) == 1:
            return 0.0
        members = Counter(map(nodes.node_of, self.ranks))
        seconds = self.received / links.nvlink if max(members.values()) > 1 else 0.0
        if len(members) > 1:
            seconds = max(seconds, self.into(len(members)) / (min(members.values()) * links.network))
        return links.latency + seconds


def tensors_of(model: Any, dtype: str = "bfloat16") -> list[TensorInfo]:
    """Return the tensors of a model on the meta device as an actor sends them. FSDP shards all parameters."""
    infos, names = transferred_tensors(model, dtype), dict(model.named_parameters())
    return [replace(info, sharded=info.name in names) for info in infos]


def process_groups(placement: Placement) -> list[tuple[int, ...]]:
    """Return the groups of rl/placement/groups.py that a run makes, beside that of the world."""
    groups = [tuple(placement.actors)]
    groups += [tuple(placement.scorers)] if placement.scorers else []
    members = dict.fromkeys(tuple(placement.sync_ranks(owner)) for owner in placement.owners)
    groups += [ranks for ranks in members if len(ranks) > 1]
    if placement.num_replicas > 1:
        groups += [tuple(ranks) for ranks in placement.replicas]
        groups += list(zip(*placement.replicas, strict=True))
    return groups


@dataclass(frozen=True)
class UpdateTraffic:
    """The collectives of one actor in an update.

    FSDP gathers the root's weights once for each micro-batch, and those of a layer in the forward and in the backward
    pass. Gradients are reduced to shards for each micro-batch, and between replicas once for each optimizer step.
    Small models (rl/model/load.py) send less: they are gathered once for each optimizer step.
    """

    shards: tuple[int, ...]  # the ranks of the replica
    replicas: tuple[int, ...]  # the ranks that hold the same shard
    root: Sequence[TensorInfo]
    layers: Sequence[Sequence[TensorInfo]]
    weight_bytes: int  # of an element when it is gathered
    gradient_bytes: int  # of an element when it is reduced

    @staticmethod
    def of(
        tensors: Sequence[TensorInfo], placement: Placement, weight_bytes: int, gradient_bytes: int
    ) -> "UpdateTraffic":
        parameters = [info for info in tensors if info.sharded]
        numbers = [int(match[1]) if (match := LAYER.search(info.name)) else -1 for info in parameters]
        parts = [[info for info, own in zip(parameters, numbers) if own == number] for number in sorted({*numbers})]
        same = next(zip(*placement.replicas, strict=True))
        return UpdateTraffic(tuple(placement.replicas[0]), same, parts[0], parts[1:], weight_bytes, gradient_bytes)

    def padded(self, tensors: Iterable[TensorInfo]) -> int:
        """Return the number of elements, where every rank of the mesh has as many rows as the first one."""
        count = len(self.shards)
        return sum(info.span(0, count)[1] * count for info in tensors)

    def gather(self, tensors: Iterable[TensorInfo]) -> Collective:
        return Collective("all_gather", self.shards, self.padded(tensors) * self.weight_bytes)

    def reduce(self, tensors: Iterable[TensorInfo]) -> Collective:
        return Collective("reduce_scatter", self.shards, self.padded(tensors) * self.gradient_bytes)

    def reduce_replicas(self, tensors: Iterable[TensorInfo]) -> Collective:
        size = self.padded(tensors) // len(self.shards) * self.gradient_bytes
        return Collective("all_reduce", self.replicas, size)

    def collectives(self, num_micro_batches: int) -> list[Collective]:
        """Return all collectives of an optimizer step, in no order."""
        gathered = [self.root, *self.layers, *self.layers]
        reduced = [self.root, *self.layers]
        each = [*map(self.gather, gathered), *map(self.reduce, reduced)] if len(self.shards) > 1 else []
        between = [*map(self.reduce_replicas, reduced)] if len(self.replicas) > 1 else []
        return num_micro_batches * each + between

    def exposed_seconds(self, num_micro_batches: int, compute_s: float, nodes: Nodes, links: Links) -> float:
        """Return the seconds in which an actor waits for these collectives.

        Computation is one third forward and two thirds backward, in proportion to the parameters. A layer's computation
        hides the gathering of the next one, and in the backward pass also the reduction of the one before. Nothing
        hides the first layer, the root's weights and gradients, and what takes longer than computation.
        """
        sizes = [self.padded(tensors) for tensors in (self.root, *self.layers)]
        shares = [compute_s / num_micro_batches * size / sum(sizes) for size in sizes[1:]]

        def seconds(collective: Collective) -> float:
            return collective.seconds(nodes, links)

        gathers, reduces = (
            [*map(seconds, map(self.gather, self.layers))],
            [*map(seconds, map(self.reduce, self.layers))],
        )
        forward = gathers[0] + sum(max(0.0, own - share / 3) for own, share in zip(gathers[1:], shares))
        backward = sum(max(0.0, own + out - 2 * share / 3) for own, out, share in zip(gathers, reduces, shares))
        root = seconds(self.gather(self.root)) + seconds(self.reduce(self.root))
        between = [seconds(self.reduce_replicas(tensors)) for tensors in self.layers]
        end = sum(max(0.0, own - 2 * share / 3) for own, share in zip(between, shares))
        return num_micro_batches * (root + forward + backward) + end + seconds(self.reduce_replicas(self.root))


def broadcasts(sync: Plan, placement: Placement) -> list[Collective]:
    """Return the broadcasts of a weight sync that sends all tensors, in their order."""
    return [
        Collective("broadcast", tuple(placement.sync_ranks(owner)), bucket.sent_bytes(shard))
        for bucket in (sync.buckets if sync.needs_transfer else ())
        for shard, owner in enumerate(sync.owners)
        if bucket.ranges[shard] and len(placement.sync_ranks(owner)) > 1
    ]


@dataclass(frozen=True)
class Case:
    """A world that is modelled."""

    name: str
    num_nodes: int
    placement: dict[str, str]
    num_replicas: int = 1
    ahead: bool = False

    def plan(self) -> Placement:
        return plan(self.placement, self.num_nodes, NODE_SIZE, num_replicas=self.num_replicas)


SHARED, HALVES = {"actor,rollout": "all"}, {"rollout": "50%", "actor": "rest"}
CASES = (
    Case("8 GPUs, all sample and train", 1, SHARED),
    Case("8 GPUs, half samples, `rollout.ahead=1`", 1, HALVES, ahead=True),
    Case("32 GPUs, all sample and train", 4, SHARED),
    Case("32 GPUs, all sample and train, 4 replicas", 4, SHARED, 4),
    Case("32 GPUs, half samples, `rollout.ahead=1`", 4, HALVES, ahead=True),
    Case("32 GPUs, half samples, `rollout.ahead=1`, 2 replicas", 4, HALVES, 2, ahead=True),
)


class StepModel:
    """The step of a case, for given speeds of links."""

    def __init__(self, case: Case, tensors: Sequence[TensorInfo], args: argparse.Namespace):
        self.placement = placement = case.plan()
        self._case, self._args = case, args
        size, num_actors = placement.world_size, len(placement.actors)
        self._update = UpdateTraffic.of(tensors, placement, weight_bytes=2, gradient_bytes=4)
        self._num_micro_batches = math.ceil(args.tokens * size / num_actors / args.max_tokens)
        self.update = self._update.collectives(self._num_micro_batches)
        plan = make_plan(tensors, placement, 0, torch.device("cuda"))
        self.sync = broadcasts(plan, placement)
        self._local_s = plan.num_bytes / (args.local * 1e9)
        self._compute_s = args.update_s * size / num_actors
        self._rollout_s = args.rollout_s * size / len(placement.ranks("rollout"))

    def wire_s(self, collectives: Sequence[Collective], links: Links) -> float:
        """Return the seconds of these collectives, one after the other."""
        return sum(one.seconds(self.placement.nodes, links) for one in collectives)

    def seconds(self, links: Links) -> dict[str, float]:
        """Return the seconds of each part of a step."""
        nodes = self.placement.nodes
        return {
            "rollout": self._rollout_s,
            "update": self._compute_s,
            "exposed": self._update.exposed_seconds(self._num_micro_batches, self._compute_s, nodes, links),
            "sync": max(self.wire_s(self.sync, links), self._local_s),
        }

    def step_s(self, seconds: dict[str, float]) -> float:
        trains = seconds["update"] + seconds["exposed"]
        both = max(seconds["rollout"], trains) if self._case.ahead else seconds["rollout"] + trains
        return self._args.other_s + seconds["sync"] + both

    def network_needed(self, links: Links) -> float | None:
        """Return the speed of the network in bytes per second below which a step takes 5 % more; None on one node."""
        if self.placement.num_nodes == 1:
            return None
        free = self.step_s(self.seconds(links) | {"exposed": 0.0, "sync": self._local_s})
        low, high = 1e6, links.nvlink
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            slow = self.step_s(self.seconds(replace(links, network=middle)))
            low, high = (middle, high) if slow > (1 + ALLOWED) * free else (low, middle)
        return high


def figures_of(case: Case, tensors: Sequence[TensorInfo], args: argparse.Namespace) -> dict[str, Any]:
    model = StepModel(case, tensors, args)
    links = Links(args.nvlink * 1e9, args.network * 1e9, args.latency_us * 1e-6)
    seconds, groups = model.seconds(links), process_groups(model.placement)
    step_s, wire_s = model.step_s(seconds), model.wire_s(model.update, links)
    needed = model.network_needed(links)
    received: defaultdict[str, float] = defaultdict(float)
    for one in model.update:
        received[one.kind] += one.received / 1e9
    return {
        "name": case.name,
        "gpus": model.placement.world_size,
        "nodes": case.num_nodes,
        "groups": [1 + len(groups), 1 + max(Counter(rank for ranks in groups for rank in ranks).values())],
        "update_gb": {kind: round(value, 2) for kind, value in received.items()},
        "overlap": round(1 - seconds["exposed"] / wire_s, 3),
        "sync_gb": round(sum(one.num_bytes for one in model.sync) / 1e9, 2),
        "broadcasts": len(model.sync),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "step_s": round(step_s, 2),
        "bound": BOUNDS[max(seconds, key=lambda name: seconds[name])],
        "efficiency": round((args.rollout_s + args.update_s + args.other_s) / step_s, 3),
        "network_needed": None if needed is None else round(needed / 1e9, 1),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of a table in Markdown."""
    lines = [
        "| world | groups: all, on a rank | update: into a GPU, hidden | sync: broadcasts, time | step, efficiency |"
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for row in rows:
        update = f"{sum(row['update_gb'].values()):.0f} GB, {100 * row['overlap']:.0f} %"
        sync = f"{row['broadcasts']:,}, {row['seconds']['sync']:.3f} s"
        step = f"{row['step_s']:.2f} s, {100 * row['efficiency']:.1f} %"
        step += f", {row['network_needed']:.1f} GB/s" if row["network_needed"] else ""
        lines.append(f"| {row['name']} | {row['groups'][0]}, {row['groups'][1]} | {update} | {sync} | {step} |")
    return lines


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[name for name in SHAPES if SHAPES[name].layers], default="qwen3-0.6b")
    parser.add_argument("--rollout-s", type=float, default=3.61)
    parser.add_argument("--update-s", type=float, default=2.64)
    parser.add_argument("--other-s", type=float, default=0.09)
    parser.add_argument("--tokens", type=int, default=294400)
    parser.add_argument("--max-tokens", type=int, default=20480)
    parser.add_argument("--nvlink", type=float, default=300)
    parser.add_argument("--network", type=float, default=45)
    parser.add_argument("--latency-us", type=float, default=30)
    parser.add_argument("--local", type=float, default=240)
    parser.add_argument("--table", action="store_true")
    return parser


def model_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all cases."""
    with torch.device("meta"):
        tensors = tensors_of(AutoModelForCausalLM.from_config(config_of(args.model)))
    return [figures_of(case, tensors, args) for case in CASES]


def main() -> None:
    args = arguments().parse_args()
    rows = model_all(args)
    line = json.dumps({"benchmark": "traffic"} | vars(args) | {"placements": rows})
    print("\n".join(table_of(rows)) if args.table else line, flush=True)


if __name__ == "__main__":
    main()
