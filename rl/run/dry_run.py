"""The end of `--dry-run`: print the time of each stage and the memory of each role."""

import resource
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl.common.text import format_bytes, format_ranks
from rl.world.messages import Message
from rl.world.world import World


@dataclass(frozen=True)
class Footprint(Message):
    """Report the memory of a rank to the leader."""

    roles: str
    host: int  # peak of the process; all sizes are in bytes
    gpu_peak: int = 0  # peak of PyTorch's allocator
    gpu_now: int = 0  # in use on the whole GPU, including engines and NCCL
    gpu: int = 0  # size of the GPU's memory
    awaited = "the other ranks to report their memory"


def share_footprints(world: World, leader: int) -> None:
    """Send the memory of every rank to the leader, which prints a summary."""
    host, gpu = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, (0, 0, 0)
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(world.device)
        gpu = (torch.cuda.max_memory_reserved(world.device), total - free, total)
    world.mail.send(leader, Footprint(world.roles, host, *gpu))
    if world.rank != leader:
        return
    letters = [world.mail.receive(Footprint) for _ in range(world.size)]
    footprints = {letter.source: letter.message for letter in letters}
    print("\n".join(describe(footprints, world.progress.seconds)), flush=True)


def describe(footprints: Mapping[int, Footprint], stage_seconds: Mapping[str, float]) -> list[str]:
    """Return a line for the step, and a line per set of roles with the maximum over its ranks."""
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in stage_seconds.items() if name != "step")
    lines = [f"dry run: one step took {stage_seconds.get('step', 0.0):.1f} s, nothing was saved; in seconds: {stages}"]
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, footprint in sorted(footprints.items()):
        ranks[footprint.roles].append(rank)
    for roles, members in ranks.items():
        most = {
            name: format_bytes(max(getattr(footprints[rank], name) for rank in members))
            for name in ("host", "gpu_peak", "gpu_now", "gpu")
        }
        each = " each" if len(members) > 1 else ""
        text = f"  {format_ranks(members)} ({roles}): at most {most['host']} of host memory{each}"
        if footprints[members[0]].gpu:
            text += f"; GPU: {most['gpu_peak']} by the allocator, {most['gpu_now']} of {most['gpu']} in use at the end"
        lines.append(text)
    return lines
