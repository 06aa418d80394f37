"""run.json: the settings, versions, hardware and commit that a run was last started with. Reports show them.

The file has no names of hosts and no credentials, because a report is shared.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rl.common.credentials import hide_credentials
from rl.common.files import write_atomically
from rl.config.differences import LOCAL_SETTINGS, flatten

RECORD = "run.json"
MAX_CHANGES = 5  # named in an event


@dataclass(frozen=True)
class NodeRecord:
    """The hardware of a node."""

    cpu: str  # model
    num_cpus: int  # that the ranks may use
    memory_gb: float
    gpus: list[str] = field(default_factory=list)  # model of each


@dataclass(frozen=True)
class RunRecord:
    config: dict[str, Any]  # by section
    versions: dict[str, str]  # of packages, the driver and the system
    commit: str  # of the code; empty if it is unknown
    placement: str  # in words
    nodes: list[NodeRecord]
    derived: list[str] = field(default_factory=list)  # names of the settings that the user left open


def write_record(run_dir: Path, record: RunRecord) -> None:
    write_atomically(run_dir / RECORD, hide_credentials(json.dumps(asdict(record), indent=1)))


def read_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a run. Return None if the file is missing or damaged."""
    try:
        return msgspec.json.decode((run_dir / RECORD).read_bytes(), type=RunRecord)
    except (OSError, ValueError):
        return None


def describe_changes(before: RunRecord | None, now: RunRecord) -> str:
    """Say in one line what is not as it was at the last start. Return "" if nothing has changed. Derived settings are
    left out, because they follow from the others and from the GPUs."""
    if before is None:
        return ""
    old, new = _facts(before), _facts(now)
    names = [name for name in (*new, *(old.keys() - new.keys())) if old.get(name) != new.get(name)]
    names = [name for name in names if name not in now.derived]
    shown = [f"{name} {old.get(name, 'nothing')} -> {new.get(name, 'nothing')}" for name in names[:MAX_CHANGES]]
    if len(names) > MAX_CHANGES:
        shown.append(f"{len(names) - MAX_CHANGES} more")
    return f"changed: {', '.join(shown)}" if shown else ""


def _facts(record: RunRecord) -> Mapping[str, Any]:
    settings = {name: value for name, value in flatten(record.config).items() if name not in LOCAL_SETTINGS}
    # In a record that was read, lists stand for tuples.
    return json.loads(json.dumps(settings | record.versions | {"commit": record.commit, "ranks": record.placement}))
