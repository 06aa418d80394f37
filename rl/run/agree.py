"""Let all ranks agree on what follows from the data and from the GPUs: the leader computes it and tells the others.

every rank --DeviceMemory--> leader: rl/run/derive.py --DerivedSettings--> every rank
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rl.common.notices import NOTICES
from rl.common.text import format_bytes
from rl.config.schema import Config
from rl.config.values import read_value
from rl.data.sources import Data
from rl.placement.roles import Placement
from rl.run.derive import derive, open_settings, read_models
from rl.world.messages import Message
from rl.world.world import World


@dataclass(frozen=True)
class DeviceMemory(Message):
    """Tell the leader the memory and the model of a rank's GPU."""

    num_bytes: int  # 0: the rank has none
    model: str = ""
    awaited = "the memory of the GPUs"


@dataclass(frozen=True)
class DerivedSettings(Message):
    """Tell a rank the settings that the leader has derived."""

    values: dict[str, int | float | str]
    awaited = "the derived settings from the leader"


@dataclass(frozen=True)
class NumSteps(Message):
    """Tell a rank the number of steps, which the leader computes from the size of the data."""

    num_steps: int
    awaited = "the number of steps from the leader"


def agree_on_settings(
    world: World, placement: Placement, config: Config, folders: Mapping[str, Path], trains: bool = True
) -> dict[str, Any]:
    """Return a value for each setting that the user has left open. Called on every rank, once GPUs may be used."""
    world.mail.send(placement.leader, DeviceMemory(device_bytes(world.device), _device_model(world.device)))
    if world.rank == placement.leader:
        letters = [world.mail.receive(DeviceMemory) for _ in range(placement.world_size)]
        smallest, sampling = min(letter.message.num_bytes for letter in letters), placement.ranks("rollout")
        are_alike = len({letter.message.model for letter in letters if letter.source in sampling}) < 2
        models = read_models(config, folders) if smallest else None
        derived = derive(config, placement, models, smallest, trains, are_alike)
        if derived.values and smallest:
            about = f" ({derived.use})" if derived.use else ""
            print(f"oneworld: derived for GPUs of {format_bytes(smallest)}: {derived.line()}{about}", flush=True)
        if derived.problem:
            NOTICES.warn(f"by its estimate, this run does not fit into the memory of its GPUs: {derived.problem}")
        values = {name: read_value(derived.config, name) for name in open_settings(config)}
        for rank in range(placement.world_size):
            world.mail.send(rank, DerivedSettings(values))
    return world.mail.receive(DerivedSettings).message.values


def device_bytes(device: torch.device | None = None) -> int:
    """Return the memory of a GPU, by default that of the first one. Return 0 if there is none."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _device_model(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def agree_on_steps(world: World, placement: Placement, config: Config, data: Data | None) -> Config:
    """Compute train.num_steps from train.num_epochs. Only the leader has the data; it tells the other ranks."""
    if not config.train.num_epochs:
        return config
    if data is not None:
        num_steps = config.train.count_steps(len(data.stream))
        print(f"oneworld: train.num_epochs = {config.train.num_epochs}: {num_steps} steps", flush=True)
        for rank in range(placement.world_size):
            world.mail.send(rank, NumSteps(num_steps))
    num_steps = world.mail.receive(NumSteps).message.num_steps
    return replace(config, train=replace(config.train, num_steps=num_steps))
