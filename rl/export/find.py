"""Find the checkpoint that the user asked for, and the places that hold each of its files."""

import hashlib
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rl.checkpoint.manifest import MANIFEST, STEP_FOLDER, CheckpointError, File, Manifest, step_folder
from rl.common.text import format_bytes
from rl.export.errors import MergeError
from rl.export.folders import (
    CHECKPOINTS,
    Inventory,
    LocalFolder,
    Place,
    RemoteFolder,
    SshOptions,
    StepListing,
    list_places,
)

MAX_LINES = 20


class CheckpointNotFound(MergeError):
    """No place holds the checkpoint that was asked for."""


@dataclass(frozen=True)
class CheckpointRequest:
    """The run and the step that the command line selects."""

    run: Path  # results go to a folder in it
    root: Path  # the run's checkpoints
    step: int | None  # None means the newest committed step


def resolve_request(path: Path, step: int | None, is_elsewhere: bool) -> CheckpointRequest:
    """Find the run and step that `path` means: a run, its checkpoints, a step, or a folder of runs (the newest run).

    With `is_elsewhere`, all of the run's checkpoints may be on other nodes.
    """
    path = Path(os.path.abspath(path))  # does not follow links, so results go next to the given path
    if named := STEP_FOLDER.fullmatch(path.name):
        if step not in (None, int(named[1])):
            raise MergeError(f"got {path} and --step {step}, which contradict each other; give one of them")
        is_in_run = path.parent.name == CHECKPOINTS
        return CheckpointRequest(path.parent.parent if is_in_run else path.parent, path.parent, int(named[1]))
    if path.name == CHECKPOINTS:
        return CheckpointRequest(path.parent, path, step)
    if (path / CHECKPOINTS).is_dir() or is_elsewhere:
        return CheckpointRequest(path, path / CHECKPOINTS, step)
    runs = [(_newest_save_time(root), root) for root in path.glob(f"*/{CHECKPOINTS}")] if path.is_dir() else []
    times = [(seconds, root) for seconds, root in runs if seconds]
    if not times:
        problem = "holds no committed checkpoint" if path.is_dir() else "is not a folder"
        raise MergeError(
            f"{path} {problem}; give the folder of a run, such as runs/NAME, or --nodes HOST:FOLDER,... if it lies on "
            "other nodes"
        )
    root = max(times)[1]
    return CheckpointRequest(root.parent, root, step)


def _newest_save_time(root: Path) -> float:
    """Return when the newest committed step was saved, or 0 if there is none."""
    committed = [listing.step for listing in LocalFolder(root).steps() if listing.is_committed and listing.manifest]
    with suppress(FileNotFoundError):  # a running job may delete its oldest step at any moment
        return (root / step_folder(max(committed)) / MANIFEST).stat().st_mtime if committed else 0.0
    return 0.0


def parse_nodes(text: str, ssh: SshOptions) -> list[Place]:
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
            raise MergeError(
                f"--nodes: got {entry!r}; an entry is HOST:FOLDER, such as node1:/data/runs/x, or a folder"
            )
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
    inventory: Inventory
    root: Path  # the run's checkpoints on this machine
    ssh: SshOptions | None  # for the hosts that the manifest records; None if they must not be asked
    corrupt: dict[tuple[str, str], str] = field(default_factory=dict)  # (place, file) -> reason
    _reported: set[tuple[str, str]] = field(default_factory=set)  # (place, file)
    _opened_in: dict[str, str] = field(default_factory=dict)  # file -> place

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the manifest. Places with the same digest hold files of the same save."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def is_committed(self) -> bool:
        return any(listing.is_committed for _, listing in self.inventory.listings if listing.manifest == self.digest)

    @property
    def model_files(self) -> list[File]:
        """The files that the merge needs: model shards, configs and tokenizer."""
        return [file for file in self.manifest.files if is_model_shard(file) or file.name.startswith("hf/")]

    @property
    def trained_in(self) -> str:
        """The dtype of the model during training."""
        return self.manifest.config["model"]["dtype"]

    def holders(self, file: str, num_bytes: int | None = None) -> list[Place]:
        """Return the places with a usable copy of the file, local places first. If given, the size must match."""
        found = [
            place
            for place, listing in self.inventory.listings
            if listing.manifest == self.digest
            and listing.step == self.manifest.step
            and file in listing.sizes
            and num_bytes in (None, listing.sizes[file])
            and (place.name, file) not in self.corrupt
        ]
        return sorted(found, key=lambda place: isinstance(place, RemoteFolder))

    def missing_files(self) -> list[File]:
        return [file for file in self.model_files if not self.holders(file.name, file.num_bytes)]

    def remote_files(self) -> list[File]:
        """Return the files that no place on this machine holds."""
        return [
            file
            for file in self.model_files
            if all(isinstance(place, RemoteFolder) for place in self.holders(file.name, file.num_bytes))
        ]

    def local_path(self, file: File) -> Path:
        place = self.holders(file.name, file.num_bytes)[0]
        assert isinstance(place, LocalFolder), f"{file.name} was not gathered"
        self._opened_in[file.name] = place.name
        return place.path(self.manifest.step, file.name)

    def mark_corrupt(self, file: str, reason: str) -> str:
        """Stop using the local copy of a file. Return a message about it.

        Raise if the same copy was reported before: it was fetched again, so this machine's disk is at fault.
        """
        copy = (self._opened_in[file], file)
        if copy in self._reported:
            raise MergeError(f"{file} was fetched intact and is corrupt again ({reason}): check this machine's disk")
        self._reported.add(copy)
        self.corrupt[copy] = reason
        return f"{copy[0]}: {file} is corrupt ({reason}); looking for another copy"

    def check_complete(self) -> None:
        """Raise unless some reachable place holds each file of the model."""
        self.ask_hosts(host for file in self.missing_files() for host in file.hosts)
        missing = self.missing_files()
        if not missing:
            return
        name = f"step {self.manifest.step} of {self.manifest.run_name}"
        text = f"{name} is not complete in the places that can be reached; nothing was merged. Missing:"
        lines = [f"{file.name} ({file.num_bytes} bytes) {self._why_missing(file)}" for file in missing]
        more = f"\n  and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
        failures = [str(error) for error in self.inventory.failures.values()] + self._places_without_step()
        text += "".join(f"\n  {line}" for line in lines[:MAX_LINES]) + more + "".join(f"\n{line}" for line in failures)
        remedy = "\nBring those nodes back, or give all nodes with --nodes HOST:FOLDER,... and run the command again"
        raise MergeError(text + remedy)

    def ask_hosts(self, hosts: Iterable[str]) -> None:
        """List these nodes, unless --nodes was given or they have been listed before."""
        if self.ssh is None:
            return
        folders = self.manifest.placement.get("folders", {})
        others = sorted({*hosts} - {socket.gethostname()})
        recorded = [RemoteFolder(host, folders.get(host, str(self.root)), self.ssh) for host in others]
        asked = {place.name for place in self.inventory.asked}
        self.inventory.add(list_places([place for place in recorded if place.name not in asked]))

    def _places_without_step(self) -> list[str]:
        step = self.manifest.step
        with_step = {place.name for place, listing in self.inventory.listings if listing.step == step}
        known = {*with_step, *self.inventory.failures}
        return [f"{place.name} holds no step {step}" for place in self.inventory.asked if place.name not in known]

    def _why_missing(self, file: File) -> str:
        found = []
        for place, listing in self.inventory.listings:
            if listing.step != self.manifest.step:
                continue
            if (place.name, file.name) in self.corrupt:
                found.append(f"the copy in {place.name} is corrupt: {self.corrupt[place.name, file.name]}")
            elif file.name not in listing.sizes:
                continue
            elif not listing.manifest:
                found.append(f"the manifest in {place.name} cannot be read")
            elif listing.manifest != self.digest:
                found.append(f"{place.name} holds another save of this step, which cannot be mixed with this one")
            elif listing.sizes[file.name] != file.num_bytes:
                found.append(f"the copy in {place.name} has {listing.sizes[file.name]} bytes")
        here = socket.gethostname()
        hosts = [f"{host} (this machine)" if host == here else host for host in file.hosts]
        return "; ".join([f"should be on {' or '.join(hosts)}", *found])


def is_model_shard(file: File) -> bool:
    return any(part.kind == "model" for part in file.slices)


def find_checkpoint(
    request: CheckpointRequest, gathered: Sequence[Place], nodes: Sequence[Place], ssh: SshOptions
) -> Checkpoint:
    """Return the requested checkpoint, with the places that hold its files.

    `nodes` are the places in --nodes. Without them, missing files are looked for on the hosts in the manifest.
    `gathered` are the places where earlier calls stored files. A step that the run has deleted is found there, if the
    user names it.
    """
    found, earlier = list_places([LocalFolder(request.root), *nodes]), list_places(gathered)
    _exclude_other_runs(found, request.root)
    chosen = _choose(request.step, found)
    if chosen is None and request.step is not None:
        chosen = _choose(request.step, earlier)
        if chosen is not None and LocalFolder(request.root).read_run_id() not in ("", chosen[0].run_id):
            chosen = None
    if chosen is None:
        raise CheckpointNotFound(_not_found_message(request, found))
    found.add(earlier)
    return Checkpoint(*chosen, inventory=found, root=request.root, ssh=None if nodes else ssh)


def _exclude_other_runs(found: Inventory, root: Path) -> None:
    """Exclude places of other runs than the one in `root`. If `root` holds no run, all places must be of one run."""
    run_ids = {place.name: listing.run_id for place, listing in found.listings if listing.run_id}
    if not run_ids:
        return
    wanted = run_ids.get(str(root), next(iter(run_ids.values())))
    foreign = [name for name, run_id in run_ids.items() if run_id != wanted]
    if foreign and str(root) not in run_ids:
        raise MergeError(f"--nodes names folders of different runs: {', '.join(run_ids)}; give those of one run")
    for name in foreign:
        found.exclude(name, f"it belongs to another run than {root}")


def _choose(step: int | None, found: Inventory) -> tuple[Manifest, bytes] | None:
    """Return the manifest of a step and its bytes. By default, the step is the newest that is committed in some place.

    If places hold different saves of the step, a committed save wins, then the newest.
    """
    if step is None:
        step = max(_committed_steps(found), default=None)
    saves: dict[str, tuple[Place, StepListing]] = {}  # by the digest of the manifest
    for place, listing in found.listings:
        if listing.step == step and listing.manifest:
            saves.setdefault(listing.manifest, (place, listing))
    committed = {listing.manifest for _, listing in found.listings if listing.is_committed}
    choices: list[tuple[bool, Manifest, bytes]] = []
    errors: list[CheckpointError] = []
    for save, (place, listing) in saves.items():
        name = f"{step_folder(listing.step)}/{MANIFEST}"
        text = place.read(name) or b""
        try:
            manifest = Manifest.from_json(text, f"{place.name}/{name}")
            if manifest.step != listing.step:
                raise CheckpointError(f"{place.name}/{name} is of step {manifest.step}: its folder was renamed")
            choices.append((save in committed, manifest, text))
        except CheckpointError as error:
            errors.append(error)
    if errors and not choices:
        raise errors[0]
    best = max(choices, key=lambda choice: (choice[0], choice[1].saved_at), default=None)
    return best[1:] if best is not None else None


def _committed_steps(found: Inventory) -> list[int]:
    return sorted({listing.step for _, listing in found.listings if listing.is_committed and listing.manifest})


def _not_found_message(request: CheckpointRequest, found: Inventory) -> str:
    committed = _committed_steps(found)
    failures = "".join(f"\n{error}" for error in found.failures.values())
    if request.step is not None and committed:
        where = f"in {request.root} or on the nodes"
        return f"no step {request.step} {where}; there are {committed}: give --step one of them{failures}"
    return (
        f"no committed checkpoint in {request.root} or on the nodes; a run saves every checkpoint.save_interval steps "
        f"and at its last one. If the run lies on other nodes, give --nodes HOST:FOLDER,...{failures}"
    )


def describe(checkpoint: Checkpoint) -> str:
    """Return a line about the checkpoint for the user."""
    manifest = checkpoint.manifest
    shards = [file for file in manifest.files if is_model_shard(file)]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    num_bytes = sum(file.num_bytes for file in shards)
    return (
        f"step {manifest.step} of {manifest.run_name}, saved {saved}: {len(shards)} shards of the model, "
        f"{format_bytes(num_bytes)}"
    )
