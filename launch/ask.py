"""What a launcher asks before torchrun starts. A mistake in the settings ends the launch here, on every node alike.

    python launch/ask.py LAUNCH HEAD [--config F] [key=value ...]

prints, a line each: the run's folder, its name, placement.num_gpus_per_node, checkpoint.resume, and this node's address
on the way to the head. What is not known is empty, and so may LAUNCH and HEAD be.
"""

import argparse
import ipaddress
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.config.load import add_arguments, load_config
from rl.config.schema import DEFAULT_CONFIG, ConfigError
from rl.world.address import address_towards


def ask_run(launch: str, arguments: list[str]) -> list[str]:
    """Every attempt of a launch is the same run: without a name of its own it has the config's and the launch's."""
    parser = argparse.ArgumentParser(prog="train.py")
    add_arguments(parser)
    args = parser.parse_intermixed_args(arguments)
    config = load_config(args.config, args.overrides)
    stem = Path(args.config or DEFAULT_CONFIG).stem
    name = config.run.name or (f"{stem}-{launch}" if launch else "")
    ranks = str(config.placement.get("num_gpus_per_node") or "")
    return [str(Path(config.run.dir) / name), name, ranks, config.checkpoint.resume]


def ask_address(head: str) -> str:
    """Other nodes may not know this one's name; the loopback is of no use to them."""
    try:
        address = address_towards(head)
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address


if __name__ == "__main__":
    launch, head, *rest = sys.argv[1:]
    try:
        print(*ask_run(launch, rest), ask_address(head) if head else "", sep="\n")
    except ConfigError as error:
        sys.exit(f"oneworld: {error}")
