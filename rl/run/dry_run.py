"""`--dry-run`: one step of everything that a run does, and nothing saved; then what it took, of each role."""

import dataclasses
import resource
from collections import defaultdict
from typing import Any

import torch

from rl.config.schema import Config
from rl.watch.text import format_bytes, format_ranks
from rl.world.world import World


def for_dry_run(config: Config, config_name: str) -> Config:
    """In a folder of its own, which gets logs and no more: a run of that name may have checkpoints."""
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, name=f"{config.run.name or config_name}.dry-run"),
        train=dataclasses.replace(config.train, num_steps=1, num_epochs=0),
        eval=dataclasses.replace(config.eval, interval=0),
        checkpoint=dataclasses.replace(config.checkpoint, save_interval=0, best_metric="", resume="auto"),
        debug=dataclasses.replace(config.debug, dry_run=True, save_rollouts=False),
    )


def share_footprints(world: World, leader: int) -> None:
    """What each rank took, to the leader, which says it."""
    world.mail.send(leader, "footprint", {"roles": world.roles, **_footprint(world.device)})
    if world.rank != leader:
        return
    footprints = {}
    for _ in range(world.size):
        message = world.mail.receive("footprint")
        assert message is not None
        footprints[message.source] = message.meta
    print("\n".join(describe(footprints, world.stage_seconds)), flush=True)


def _footprint(device: torch.device) -> dict[str, int]:
    """The most bytes so far; of a GPU the allocator's, with what else is in use on it now, such as engines and NCCL."""
    found = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found |= {"gpu_peak": torch.cuda.max_memory_reserved(device), "gpu_now": total - free, "gpu": total}
    return found


def describe(footprints: dict[int, dict[str, Any]], stage_seconds: dict[str, float]) -> list[str]:
    """A line for the step, and one for the ranks of each role: the most that any of them took."""
    stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in stage_seconds.items() if name != "step")
    lines = [f"dry run: one step took {stage_seconds.get('step', 0.0):.1f} s, nothing was saved; in seconds: {stages}"]
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, footprint in sorted(footprints.items()):
        ranks[footprint["roles"]].append(rank)
    for roles, members in ranks.items():
        most = {name: max(footprints[rank].get(name, 0) for rank in members) for name in _NAMES}
        text = f"  {format_ranks(members)} ({roles}): at most {format_bytes(most['host'])} of host memory each"
        if most["gpu"]:
            peak, now, total = (format_bytes(most[name]) for name in ("gpu_peak", "gpu_now", "gpu"))
            text += f"; GPU: {peak} by the allocator, {now} of {total} in use at the end"
        lines.append(text)
    return lines


_NAMES = ("host", "gpu_peak", "gpu_now", "gpu")
