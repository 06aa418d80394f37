"""Writes docs/configuration.md from the settings in rl/config/schema.py, where each key is documented.

python tools/config_reference.py            writes the page
python tools/config_reference.py --check    says whether it is current; exit code 1 if not
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl.config.schema import Config  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
HEAD = """# Configuration

Every setting, with its default: a config file says only what differs, and `key=value` on the command line comes last,
as in `torchrun ... train.py --config configs/dapo.yaml actor.lr=2e-6`. Unknown keys and values that contradict each
other are errors that say what to change; `python train.py --plan` finds them without a GPU. This page is written by
`python tools/config_reference.py` from [rl/config/schema.py](../rl/config/schema.py).
"""


def render() -> str:
    lines = [HEAD]
    for section in dataclasses.fields(Config):
        if not dataclasses.is_dataclass(section.type):
            lines += [
                f"## {section.name}",
                "",
                f"{section.metadata['doc']}; default `{_shown(_default(section))}`.",
                "",
            ]
            continue
        lines += [f"## {section.name}", "", "| key | default | |", "| --- | --- | --- |"]
        for entry in dataclasses.fields(section.type):
            doc = entry.metadata["doc"].replace("|", "\\|")
            lines.append(f"| `{section.name}.{entry.name}` | `{_shown(_default(entry))}` | {doc} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _default(entry: dataclasses.Field[Any]) -> Any:
    return entry.default if entry.default_factory is dataclasses.MISSING else entry.default_factory()


def _shown(value: Any) -> str:
    """As YAML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "''" if value == "" else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args(arguments)
    if not args.check:
        PAGE.write_text(render())
        return 0
    if PAGE.is_file() and PAGE.read_text() == render():
        return 0
    print(f"{PAGE.relative_to(ROOT)} does not match rl/config/schema.py; run python tools/config_reference.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
