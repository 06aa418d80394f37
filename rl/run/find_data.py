"""Find the datasets of a run that are on the hub. The leader alone downloads them, because it alone reads data.

    rank 0 --DatasetCommits--> leader: downloads

As for models (rl/run/find_models.py), rank 0 records the commits in the run's folder. A restarted or resumed run uses
the recorded commits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl.config.hub_path import HubPath, read_hub_path
from rl.config.schema import Config
from rl.data.read import choose_files
from rl.data.sources import used_paths
from rl.model.hub import HUB_COMMITS, download_dataset, find_dataset_commit, read_commits, write_commits
from rl.placement.roles import Placement
from rl.world.messages import Mailbox, Message

SETTING = "data"


@dataclass(frozen=True)
class DatasetCommits(Message):
    """Tell the leader which commit of each dataset to use."""

    awaited: ClassVar[str] = "the commits of the datasets"
    commits: dict[str, str]


def find_datasets(mail: Mailbox, placement: Placement, config: Config, run_folder: Path) -> dict[str, Path]:
    """Return the folders of the datasets on the hub, by `HubPath.dataset`. Ranks other than the leader get none."""
    if not hub_paths(config):
        return {}
    if mail.rank == 0:
        record = read_commits(run_folder / HUB_COMMITS)
        commits = choose_commits(config, record)
        write_commits(run_folder / HUB_COMMITS, record | commits)
        mail.send(placement.leader, DatasetCommits(commits))
    if mail.rank != placement.leader:
        return {}
    return download_datasets(config, mail.receive(DatasetCommits).message.commits)


def hub_paths(config: Config) -> list[HubPath]:
    """Return the paths of a run that lead to the hub."""
    return [found for path in used_paths(config) if (found := read_hub_path(path)) is not None]


def choose_commits(config: Config, recorded: Mapping[str, str]) -> dict[str, str]:
    """Return the commit of each dataset, by `HubPath.dataset`. Reuse commits that an earlier attempt recorded."""
    commits: dict[str, str] = {}
    for path in hub_paths(config):
        name = path.dataset
        if name not in commits:
            commits[name] = recorded.get(name) or find_dataset_commit(SETTING, path.repo, path.revision)
            source = f", as recorded in {HUB_COMMITS}" if name in recorded else ""
            print(f"oneworld: {SETTING}: {name} at commit {commits[name]}{source}", flush=True)
    return commits


def download_datasets(config: Config, commits: Mapping[str, str]) -> dict[str, Path]:
    """Download the files that the config names, and no others. Return the folders of the datasets in the cache."""
    folders: dict[str, Path] = {}
    for path in hub_paths(config):

        def choose(names: list[str], path: HubPath = path) -> list[str]:
            return choose_files(path, names)

        folders[path.dataset] = download_dataset(SETTING, path.repo, commits[path.dataset], choose)
    return folders
