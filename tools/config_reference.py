"""Write docs/configuration.md from rl/config/schema.py, where each key is documented.

python tools/config_reference.py            write the page
python tools/config_reference.py --check    exit with 1 if the page is out of date
"""

import argparse
import dataclasses
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.config.schema import ROOT, Config, keys_of
from rl.report.printing import print_and_go_on

PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

This page lists every setting with its default. A config file contains only what differs from the defaults.
`key=value` on the command line overrides the file. `key=` is the empty text; a number or a choice needs a value.
Unknown keys and contradictory values are errors that say what to change.
This command finds them without a GPU. It also checks the files that the config names:

```bash
python train.py --plan --config configs/dapo.yaml actor.lr=2e-6
```

`python tools/config_reference.py` writes this page from [rl/config/schema.py](../rl/config/schema.py).
"""


def render() -> str:
    """Return the page: a table for each section of the config."""
    lines = [HEAD]
    for section in dataclasses.fields(Config):
        lines.append(f"## {section.name}\n")
        if dataclasses.is_dataclass(section.type):
            lines += ["| key | default | allowed | meaning |", "| --- | --- | --- | --- |"]
            for name, entry in keys_of(section.type, f"{section.name}."):
                lines.append(f"| `{name}` | `{_default(name)}` | {_allowed(entry)} | {entry.metadata['doc']} |")
        else:
            lines.append(f"{section.metadata['doc']} Default: `{_default(section.name)}`.")
        lines.append("")
    return "\n".join(lines)


def _allowed(entry: dataclasses.Field[Any]) -> str:
    choices = get_args(entry.type) if get_origin(entry.type) is Literal else ()
    return entry.metadata["allowed"].text if entry.metadata["allowed"] else ", ".join(f"`{each}`" for each in choices)


def _default(name: str) -> str:
    value = attrgetter(name)(Config())
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(render())
    elif not PAGE.is_file() or PAGE.read_text() != render():
        remedy = "run python tools/config_reference.py"
        print_and_go_on(f"{PAGE.relative_to(ROOT)} does not match rl/config/schema.py; {remedy}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
