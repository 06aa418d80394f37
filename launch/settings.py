"""Print the settings that a launcher needs before torchrun starts. A mistake in the config ends the launch here.

    python launch/settings.py LAUNCH HEAD [--config F] [key=value ...]

Prints one line each: the directory of the run, its name, placement.num_gpus_per_node, checkpoint.resume, and this
node's address on the route to the head. Unknown values are empty lines. LAUNCH and HEAD may be empty.
"""

import argparse
import ipaddress
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.config.load import add_arguments, load_config
from rl.config.schema import DEFAULT_CONFIG, ConfigError
from rl.world.address import address_towards


def run_settings(launch: str, arguments: list[str]) -> list[str]:
    """Return the run's directory, its name, the ranks per node and checkpoint.resume.

    Every attempt of a launch must find the same run. Without run.name, the name is that of the config and the launch.
    """
    parser = argparse.ArgumentParser(prog="train.py")
    add_arguments(parser)
    args = parser.parse_intermixed_args(arguments)
    config = load_config(args.config, args.overrides)
    stem = Path(args.config or DEFAULT_CONFIG).stem
    name = config.run.name or (f"{stem}-{launch}" if launch else "")
    ranks = str(config.placement.get("num_gpus_per_node") or "")
    return [str(Path(config.run.dir) / name), name, ranks, config.checkpoint.resume]


def own_address(head: str) -> str:
    """Return this node's address on the route to the head. Return an empty string if there is none but the loopback."""
    try:
        address = address_towards(head)
    except OSError:
        return ""
    return "" if ipaddress.ip_address(address).is_loopback else address


if __name__ == "__main__":
    launch, head, *rest = sys.argv[1:]
    try:
        print(*run_settings(launch, rest), own_address(head) if head else "", sep="\n")
    except ConfigError as error:
        sys.exit(f"oneworld: {error}")
