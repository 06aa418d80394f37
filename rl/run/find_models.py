"""Find the models of a run. One rank per node downloads them, and all nodes use the same commit.

    rank 0 --HubCommits--> first rank of each node: downloads --ModelFolders--> the other ranks of its node

Somebody may push to the hub between two downloads. So only rank 0 asks the hub for the newest commit. It records the
commit in the run's folder. A restarted or resumed run uses the recorded commit, because the reference model must not
change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rl.common.notices import NOTICES
from rl.config.schema import Config, ConfigError, resolve_path
from rl.model.hub import HUB_COMMITS, download, find_commit, read_commits, warn_of_typo, write_commits
from rl.model.shape import check_folder
from rl.placement.roles import Placement
from rl.world.messages import Mailbox, Message


@dataclass(frozen=True)
class HubCommits(Message):
    """Tell the first rank of a node which commit of each model to use. A local folder has an empty commit."""

    awaited: ClassVar[str] = "the commits of the models"
    commits: dict[str, str]


@dataclass(frozen=True)
class ModelFolders(Message):
    """Tell a rank the folders of the models on its node."""

    awaited: ClassVar[str] = "the model's download by the first rank of its node"
    folders: dict[str, str]


def find_models(mail: Mailbox, placement: Placement, config: Config, run_folder: Path) -> dict[str, Path]:
    """Return the folder of each model. The keys are the settings that name the models: model.path, critic.path."""
    settings = config.model_paths
    if mail.rank == 0:
        commits = HubCommits(_choose_commits(settings, run_folder / HUB_COMMITS))
        for lead in placement.node_leads:
            mail.send(lead, commits)
    if mail.rank in placement.node_leads:
        chosen = mail.receive(HubCommits).message.commits
        found = ModelFolders({path: str(_find(setting, path, chosen[path])) for setting, path in settings.items()})
        for rank in placement.nodes.ranks_of(placement.nodes.node_of(mail.rank)):
            mail.send(rank, found)
    folders = mail.receive(ModelFolders).message.folders
    return {setting: Path(folders[path]) for setting, path in settings.items()}


def _choose_commits(settings: Mapping[str, str], record: Path) -> dict[str, str]:
    """Return the commit of each model, empty for a local folder. Reuse commits that an earlier attempt recorded."""
    recorded = read_commits(record)
    commits: dict[str, str] = {}
    for setting, path in settings.items():
        if resolve_path(path).exists():
            commits[path] = ""
        elif commit := recorded.get(path):
            print(f"oneworld: {setting}: {path} at commit {commit}, as recorded in {record}", flush=True)
            commits[path] = commit
        elif path not in commits:
            if warning := warn_of_typo(setting, path):
                NOTICES.warn(warning)
            commits[path] = find_commit(setting, path)
            print(f"oneworld: {setting}: {path} at commit {commits[path]}", flush=True)
    if on_hub := {path: commit for path, commit in commits.items() if commit}:
        write_commits(record, recorded | on_hub)
    return commits


def _find(setting: str, path: str, commit: str) -> Path:
    """Return the folder of a model on this node."""
    folder = resolve_path(path)
    if bool(commit) == folder.exists():
        here, there = ("no folder", "a folder") if not commit else ("a folder", "no folder, but a name on the hub")
        raise ConfigError(
            f"{setting}: {path} is {here} on this node, and {there} on the node of rank 0, so the nodes would use "
            "different models; give a path that means the same on all nodes"
        )
    folder = download(setting, path, commit) if commit else folder
    check_folder(setting, folder)
    return folder
