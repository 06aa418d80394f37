"""Find the checkpoint that the user asked for, and the places that hold each of its files."""

import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rl.checkpoint.manifest import MANIFEST, STEP_FOLDER, CheckpointError, File, Manifest, step_folder
from rl.export.errors import MergeError
from rl.export.folders import CHECKPOINTS, Inventory, LocalFolder, Place, RemoteFolder, StepListing

MAX_LINES = 20
SAME_TIME_S = 1.0  # saves less than this apart count as equally new; some file systems store whole seconds
HOST = re.compile(r"[\w.:%][\w.:%-]*", re.ASCII)  # becomes an argument of ssh, and perhaps of the user's ProxyCommand


class CheckpointNotFound(MergeError):
    """No place holds the checkpoint that was asked for."""


def resolve_request(path: Path, step: int | None, is_elsewhere: bool) -> tuple[Path, Path, int | None]:
    """Return the run's folder, its checkpoints, and the step if one is named. In a folder of runs, take the newest run.

    `path` is a run, its checkpoints, a step, or a folder of runs. With `is_elsewhere`, it may be on other nodes only.
    """
    path = Path(os.path.abspath(path))  # does not follow links, so results go next to the given path
    if named := STEP_FOLDER.fullmatch(path.name):
        if step not in (None, int(named[1])):
            raise MergeError(f"got {path} and --step {step}, which contradict each other; give one of them")
        is_in_run = path.parent.name == CHECKPOINTS
        return path.parent.parent if is_in_run else path.parent, path.parent, int(named[1])
    if path.name == CHECKPOINTS:
        return path.parent, path, step
    if (path / CHECKPOINTS).is_dir() or is_elsewhere:
        return path, path / CHECKPOINTS, step
    runs = [(_newest_save_time(root), root) for root in path.glob(f"*/{CHECKPOINTS}")] if path.is_dir() else []
    saved_at, root = max(runs, default=(0.0, path))
    if not saved_at:
        problem = "holds no run with a committed checkpoint" if path.is_dir() else "is not a folder"
        remedy = "give the folder of a run, such as runs/NAME, or --nodes HOST:FOLDER,... if it lies on other nodes"
        raise MergeError(f"{path} {problem}; {remedy}")
    newest = sorted(str(root.parent) for time, root in runs if saved_at - time < SAME_TIME_S)
    if len(newest) > 1:
        remedy = f"name one of them, as in tools/merge_checkpoint.py {newest[0]}"
        raise MergeError(f"several runs are equally new: {', '.join(newest)}; {remedy}")
    return root.parent, root, step


def _newest_save_time(root: Path) -> float:
    """Return when the newest committed step was saved, or 0 if there is none."""
    committed = [listing.step for listing in LocalFolder(root).steps() if listing.is_committed and listing.manifest]
    with suppress(FileNotFoundError):  # a running job may delete its oldest step at any moment
        return (root / step_folder(max(committed)) / MANIFEST).stat().st_mtime if committed else 0.0
    return 0.0


def parse_nodes(text: str, ssh: Sequence[str]) -> list[Place]:
    """Return the places in `HOST:FOLDER,...`. An entry without a host is a folder on this machine."""
    places: list[Place] = []
    for entry in filter(None, (part.strip() for part in text.replace("\n", ",").split(","))):
        host, colon, folder = entry.partition("]:") if entry.startswith("[") else entry.partition(":")
        if not colon or "/" in host:
            path = Path(os.path.abspath(entry))
            if not path.is_dir():
                raise MergeError(f"--nodes: got {entry!r}, which is no folder here; on another node it is HOST:FOLDER")
            places.append(LocalFolder(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path))
        elif not host or not folder or host.startswith("-"):
            raise MergeError(f"--nodes: got {entry!r}; an entry is HOST:FOLDER, as in node1:/data/runs/x, or a folder")
        else:
            places.append(RemoteFolder(host.removeprefix("["), folder, ssh))
    if not places:
        raise MergeError("--nodes: got no node; give HOST:FOLDER,... such as node1:/data/runs/x,node2:/data/runs/x")
    return places


@dataclass
class Checkpoint:
    """A step of a run, and the places that hold its files. Corrupt copies are not used again."""

    manifest: Manifest
    text: bytes  # the manifest's bytes
    digest: str  # SHA-256 of the manifest; places with the same digest hold files of the same save
    inventory: Inventory
    root: Path  # the run's checkpoints on this machine
    ssh: Sequence[str] | None  # for the hosts that the manifest records; None if they must not be asked
    corrupt: dict[tuple[str, str], str] = field(default_factory=dict)  # (place, file) -> reason
    _reported: set[tuple[str, str]] = field(default_factory=set)  # (place, file)
    _opened_in: dict[str, str] = field(default_factory=dict)  # file -> place

    @property
    def is_committed(self) -> bool:
        return any(listing.is_committed for listing in self.inventory.listings if listing.manifest == self.digest)

    @property
    def model_files(self) -> list[File]:
        """The files that the merge needs: model shards, configs and tokenizer."""
        return [file for file in self.manifest.files if is_model_shard(file) or file.name.startswith("hf/")]

    def holders(self, file: str, num_bytes: int | None = None) -> list[Place]:
        """Return the places with a usable copy of the file, local places first. If given, the size must match."""
        copies = self._copies(file)
        found = [listing.place for listing in copies if not self._why_unusable(listing, file, num_bytes)]
        return sorted(found, key=lambda place: isinstance(place, RemoteFolder))

    def remote_files(self) -> list[File]:
        """Return the files that no place on this machine holds."""
        return [file for file in self.model_files if not isinstance(self._best_holder(file), LocalFolder)]

    def local_path(self, file: File) -> Path:
        place = self._best_holder(file)
        assert isinstance(place, LocalFolder), f"{file.name} was not gathered"
        self._opened_in[file.name] = place.name
        return place.path(self.manifest.step, file.name)

    def mark_corrupt(self, file: str, reason: str) -> str:
        """Stop using the local copy of a file. Return a message about it."""
        copy = (self._opened_in[file], file)
        if copy in self._reported:  # it was fetched again
            raise MergeError(f"{file} was fetched intact and is corrupt again ({reason}): check this machine's disk")
        self._reported.add(copy)
        self.corrupt[copy] = reason
        return f"{copy[0]}: {file} is corrupt ({reason}); looking for another copy"

    def check_complete(self) -> None:
        """Raise unless some reachable place holds each file of the model."""
        self.ask_hosts(host for file in self._missing_files() for host in file.hosts)
        missing, step = self._missing_files(), self.manifest.step
        if not missing:
            return
        lines = [f"  {file.name} ({file.num_bytes} bytes) {self._why_missing(file)}" for file in missing[:MAX_LINES]]
        if len(missing) > MAX_LINES:
            lines.append(f"  and {len(missing) - MAX_LINES} more")
        failures = self.inventory.failures
        known = {*failures, *(listing.place.name for listing in self.inventory.listings if listing.step == step)}
        without = [f"{place.name} holds no step {step}" for place in self.inventory.places if place.name not in known]
        raise MergeError(
            f"step {step} of {self.manifest.run_name} is not complete in the places that can be reached; nothing was "
            "merged. Missing:\n" + "\n".join([*lines, *map(str, failures.values()), *without]) + "\nBring those nodes "
            "back, or give all nodes with --nodes HOST:FOLDER,... and run the command again"
        )

    def ask_hosts(self, hosts: Iterable[str]) -> None:
        """List these nodes, unless --nodes was given or they have been listed before."""
        if self.ssh is None:
            return
        folders = self.manifest.placement.get("folders", {})
        named = {*hosts} - {socket.gethostname()}
        for host in sorted(host for host in named if not HOST.fullmatch(host)):
            self.inventory.failures[host] = MergeError(
                f"{host!r} is not the name of a host; give --nodes HOST:FOLDER,..."
            )
        others = sorted(filter(HOST.fullmatch, named))
        recorded = [RemoteFolder(host, folders.get(host, str(self.root)), self.ssh) for host in others]
        asked = {place.name for place in self.inventory.places}
        self.inventory.add([place for place in recorded if place.name not in asked])

    def _best_holder(self, file: File) -> Place | None:
        return next(iter(self.holders(file.name, file.num_bytes)), None)

    def _missing_files(self) -> list[File]:
        return [file for file in self.model_files if self._best_holder(file) is None]

    def _copies(self, file: str) -> list[StepListing]:
        step = self.manifest.step
        return [listing for listing in self.inventory.listings if listing.step == step and file in listing.sizes]

    def _why_unusable(self, listing: StepListing, file: str, num_bytes: int | None) -> str:
        """Return why a place's copy of a file must not be used, or "" if it may be."""
        place = listing.place.name
        if reason := self.corrupt.get((place, file)):
            return f"the copy in {place} is corrupt: {reason}"
        if not listing.manifest:
            return f"the manifest in {place} cannot be read"
        if listing.manifest != self.digest:
            return f"{place} holds another save of this step, which cannot be mixed with this one"
        if num_bytes not in (None, listing.sizes[file]):
            return f"the copy in {place} has {listing.sizes[file]} bytes"
        return ""

    def _why_missing(self, file: File) -> str:
        here = socket.gethostname()
        hosts = [f"{host} (this machine)" if host == here else host for host in file.hosts]
        reasons = [self._why_unusable(listing, file.name, file.num_bytes) for listing in self._copies(file.name)]
        return "; ".join([f"should be on {' or '.join(hosts)}", *reasons])


def is_model_shard(file: File) -> bool:
    return any(part.kind == "model" for part in file.slices)


def find_checkpoint(
    root: Path, wanted: int | None, gathered: Sequence[Place], nodes: Sequence[Place], ssh: Sequence[str]
) -> Checkpoint:
    """Return the wanted step, by default the newest committed one, with the places that hold its files.

    Without `nodes`, missing files are looked for on the hosts in the manifest. Earlier calls stored files in the places
    `gathered`. A step that the run has deleted is found there, if the user names it.
    """
    here, found = LocalFolder(root), Inventory()
    found.add([here, *nodes])
    _exclude_other_runs(found, root)
    committed = sorted({listing.step for listing in found.listings if listing.is_committed and listing.manifest})
    step = max(committed, default=None) if wanted is None else wanted
    chosen = _choose(step, found)
    found.add(gathered)
    if chosen is None and wanted is not None:
        chosen = _choose(step, found)
        if chosen is not None and here.read_run_id() not in ("", chosen[0].run_id):
            chosen = None
    if chosen is not None:
        return Checkpoint(*chosen, inventory=found, root=root, ssh=None if nodes else ssh)
    failures = "".join(f"\n{error}" for error in found.failures.values())
    where = f"in {root} or on the nodes"
    if wanted is not None and committed:
        raise CheckpointNotFound(f"no step {step} {where}; there are {committed}: give --step one of them{failures}")
    raise CheckpointNotFound(
        f"no committed checkpoint {where}; a run saves every checkpoint.save_interval steps and at its last one. If "
        f"the run lies on other nodes, give --nodes HOST:FOLDER,...{failures}"
    )


def _exclude_other_runs(found: Inventory, root: Path) -> None:
    """Exclude places of other runs than the one in `root`. If `root` holds no run, all places must be of one run."""
    run_ids = {listing.place.name: listing.run_id for listing in found.listings if listing.run_id}
    wanted = run_ids.get(str(root), next(iter(run_ids.values()), ""))
    foreign = [name for name, run_id in run_ids.items() if run_id != wanted]
    if foreign and str(root) not in run_ids:
        raise MergeError(f"--nodes names folders of different runs: {', '.join(run_ids)}; give those of one run")
    found.failures |= {name: MergeError(f"{name}: it belongs to another run than {root}") for name in foreign}
    found.listings = [listing for listing in found.listings if listing.place.name not in foreign]


def _choose(step: int | None, found: Inventory) -> tuple[Manifest, bytes, str] | None:
    """Return a step's manifest, its bytes and their digest. Of several saves, a committed one wins, then the newest."""
    saves: dict[str, StepListing] = {}  # by the digest of the manifest
    for listing in found.listings:
        if listing.step == step and listing.manifest:
            saves.setdefault(listing.manifest, listing)
    committed = {listing.manifest for listing in found.listings if listing.is_committed}
    choices: list[tuple[bool, Manifest, bytes, str]] = []
    errors: list[CheckpointError] = []
    for save, listing in saves.items():
        name = f"{step_folder(listing.step)}/{MANIFEST}"
        where = f"{listing.place.name}/{name}"
        text = listing.place.read(name) or b""
        try:
            manifest = Manifest.from_json(text, where)
            if manifest.step != step:
                raise CheckpointError(f"{where} is of step {manifest.step}: its folder was renamed")
            choices.append((save in committed, manifest, text, save))
        except CheckpointError as error:
            errors.append(error)
    if errors and not choices:
        raise errors[0]
    best = max(choices, key=lambda choice: (choice[0], choice[1].saved_at), default=None)
    return best[1:] if best is not None else None
