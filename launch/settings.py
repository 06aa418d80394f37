"""Print the settings that a launcher needs before torchrun starts. A mistake in the config ends the launch here.

    python launch/settings.py LAUNCH HEAD [--config F] [key=value ...]

Prints one line each: the directory of the run, its name, placement.num_gpus_per_node, checkpoint.resume, and this
node's address on the route to the head. Unknown values are empty lines. LAUNCH and HEAD may be empty.
"""

import argparse
import ipaddress
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.config.load import add_arguments, load_config
from rl.config.schema import DEFAULT_CONFIG, ConfigError
from rl.world.address import address_towards


def main(launch: str, head: str, *arguments: str) -> None:
    parser = argparse.ArgumentParser(prog="train.py")
    add_arguments(parser)
    args = parser.parse_intermixed_args(arguments)
    config = load_config(args.config, args.overrides)
    # Every attempt of a launch must find the same run. Without run.name, the config and the launch name it.
    stem = Path(args.config or DEFAULT_CONFIG).stem
    name = config.run.name or (f"{stem}-{launch}" if launch else "")
    address = ""
    with suppress(OSError):
        if head and not ipaddress.ip_address(route := address_towards(head)).is_loopback:
            address = route
    per_node = config.placement.get("num_gpus_per_node")
    num_ranks = per_node if isinstance(per_node, int) else ""  # of a list, this node cannot know its number yet
    print(Path(config.run.dir) / name, name, num_ranks, config.checkpoint.resume, address, sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"oneworld: {error}")
