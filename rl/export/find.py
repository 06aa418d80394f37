"""Which checkpoint is meant, and where each of its files lies."""

import hashlib
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rl.checkpoint.manifest import MANIFEST, STEP_FOLDER, CheckpointError, File, Manifest, step_folder
from rl.export.errors import MergeError
from rl.export.places import CHECKPOINTS, Folder, Listing, Place, Remote, Ssh, Survey, survey
from rl.watch.text import format_bytes

MAX_LINES = 20


class NotFound(MergeError):
    """No such checkpoint in any place."""


@dataclass(frozen=True)
class Request:
    """What the command line names: a run's folder, or one of its steps."""

    run: Path  # results go to a folder in it
    root: Path  # its checkpoints
    step: int | None  # None: the newest committed one


def resolve_request(path: Path, step: int | None, is_elsewhere: bool) -> Request:
    """`path` is a run, its folder of checkpoints, one step, or a folder of runs, of which the newest is meant. With
    `is_elsewhere` its checkpoints may lie on other nodes alone."""
    path = Path(os.path.abspath(path))  # a run's name is that of its folder here, not of what a link points to
    if named := STEP_FOLDER.fullmatch(path.name):
        if step not in (None, int(named[1])):
            raise MergeError(f"got {path} and --step {step}, which contradict each other; give one of them")
        is_in_run = path.parent.name == CHECKPOINTS
        return Request(path.parent.parent if is_in_run else path.parent, path.parent, int(named[1]))
    if path.name == CHECKPOINTS:
        return Request(path.parent, path, step)
    if (path / CHECKPOINTS).is_dir() or is_elsewhere:
        return Request(path, path / CHECKPOINTS, step)
    runs = [(_newest(root), root) for root in path.glob(f"*/{CHECKPOINTS}")] if path.is_dir() else []
    times = [(seconds, root) for seconds, root in runs if seconds]
    if not times:
        found = "holds no committed checkpoint" if path.is_dir() else "is no folder"
        raise MergeError(
            f"{path} {found}; give the folder of a run, such as runs/NAME, or --nodes HOST:FOLDER,... where it lies on "
            "other nodes"
        )
    root = max(times)[1]
    return Request(root.parent, root, step)


def _newest(root: Path) -> float:
    """When the newest committed step was saved; 0 where there is none."""
    committed = [listing.step for listing in Folder(root).steps() if listing.is_committed and listing.manifest]
    with suppress(FileNotFoundError):  # a live run removes its oldest step
        return (root / step_folder(max(committed)) / MANIFEST).stat().st_mtime if committed else 0.0
    return 0.0


def parse_nodes(text: str, ssh: Ssh) -> list[Place]:
    """`HOST:FOLDER,...`; an entry without a host is a folder of this machine."""
    places: list[Place] = []
    for entry in filter(None, (part.strip() for part in text.replace("\n", ",").split(","))):
        host, colon, folder = entry.partition("]:") if entry.startswith("[") else entry.partition(":")
        if not colon or "/" in host:
            path = Path(os.path.abspath(entry))
            if not path.is_dir():
                raise MergeError(f"--nodes: got {entry!r}, no folder here; on another node it is HOST:FOLDER")
            places.append(Folder(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path))
        elif not host or not folder or host.startswith("-"):
            raise MergeError(
                f"--nodes: got {entry!r}; an entry is HOST:FOLDER, such as node1:/data/runs/x, or a folder"
            )
        else:
            places.append(Remote(host.removeprefix("["), folder, ssh))
    if not places:
        raise MergeError("--nodes: got no node; give HOST:FOLDER,... such as node1:/data/runs/x,node2:/data/runs/x")
    return places


@dataclass
class Checkpoint:
    """A step of a run, and the places that hold its files. Copies that turn out to be spoilt are set aside."""

    manifest: Manifest
    text: bytes  # of the manifest
    survey: Survey
    root: Path  # where the run's steps lie on this machine
    ssh: Ssh | None  # by which the hosts that it records are asked for what is not here; None: they are not
    spoilt: dict[tuple[str, str], str] = field(default_factory=dict)  # (place, file) -> why
    _complaints: set[tuple[str, str]] = field(default_factory=set)
    _used: dict[str, str] = field(default_factory=dict)  # file -> the place that it was opened in

    @cached_property
    def digest(self) -> str:
        """By which places with the same save are known."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def is_committed(self) -> bool:
        return any(listing.is_committed for _, listing in self.survey.listings if listing.manifest == self.digest)

    @property
    def wanted(self) -> list[File]:
        """The files that a model is merged from: shards of the model, its configs and tokenizer."""
        return [file for file in self.manifest.files if is_model_shard(file) or file.name.startswith("hf/")]

    @property
    def trained_in(self) -> str:
        return self.manifest.config["model"]["dtype"]

    def holders(self, file: str, num_bytes: int | None = None) -> list[Place]:
        """Those that hold it in this save, in full, as far as is known; folders of this machine first."""
        found = [
            place
            for place, listing in self.survey.listings
            if listing.manifest == self.digest
            and listing.step == self.manifest.step
            and file in listing.sizes
            and num_bytes in (None, listing.sizes[file])
            and (place.name, file) not in self.spoilt
        ]
        return sorted(found, key=lambda place: isinstance(place, Remote))

    def missing(self) -> list[File]:
        return [file for file in self.wanted if not self.holders(file.name, file.num_bytes)]

    def elsewhere(self) -> list[File]:
        """What only other nodes hold."""
        return [
            file
            for file in self.wanted
            if all(isinstance(place, Remote) for place in self.holders(file.name, file.num_bytes))
        ]

    def local_path(self, file: File) -> Path:
        place = self.holders(file.name, file.num_bytes)[0]
        assert isinstance(place, Folder), f"{file.name} was not gathered"
        self._used[file.name] = place.name
        return place.path(self.manifest.step, file.name)

    def set_aside(self, file: str, reason: str) -> str:
        """A local copy that is spoilt is not used again; returns what to say about it. One that was fetched anew and is
        spoilt again is this machine's fault."""
        copy = (self._used[file], file)
        if copy in self._complaints:
            raise MergeError(f"{file} arrived whole and is spoilt again ({reason}): look at this machine's disk")
        self._complaints.add(copy)
        self.spoilt[copy] = reason
        return f"{copy[0]}: {file} is spoilt ({reason}); looking for another copy"

    def look_again(self, place: Folder) -> None:
        """After files came to it."""
        if place not in self.survey.asked:
            self.survey.asked.append(place)
        others = [(other, listing) for other, listing in self.survey.listings if other.name != place.name]
        self.survey.listings = [*others, *((place, listing) for listing in place.steps())]

    def check_complete(self) -> None:
        """Every file that is wanted lies in some place that can be reached."""
        self.ask_hosts(host for file in self.missing() for host in file.hosts)
        missing = self.missing()
        if not missing:
            return
        name = f"step {self.manifest.step} of {self.manifest.run_name}"
        text = f"not all of {name} is in reach; nothing was merged. Missing:"
        lines = [f"{file.name} ({file.num_bytes} bytes) {self._why_missing(file)}" for file in missing]
        more = f"\n  and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
        failures = [str(error) for error in self.survey.failures.values()] + self._empty_places()
        text += "".join(f"\n  {line}" for line in lines[:MAX_LINES]) + more + "".join(f"\n{line}" for line in failures)
        remedy = "\nBring those nodes back, or give all nodes with --nodes HOST:FOLDER,...; the same command goes on"
        raise MergeError(text + remedy)

    def ask_hosts(self, hosts: Iterable[str]) -> None:
        """Nodes that the checkpoint records, unless --nodes says where to look, or they were asked before."""
        if self.ssh is None:
            return
        folders = self.manifest.placement.get("folders", {})
        others = sorted({*hosts} - {socket.gethostname()})
        recorded = [Remote(host, folders.get(host, str(self.root)), self.ssh) for host in others]
        asked = {place.name for place in self.survey.asked}
        more = survey([place for place in recorded if place.name not in asked])
        self.survey.asked += more.asked
        self.survey.listings += more.listings
        self.survey.failures |= more.failures

    def _empty_places(self) -> list[str]:
        step = self.manifest.step
        full = {place.name for place, listing in self.survey.listings if listing.step == step}
        silent = {*full, *self.survey.failures}
        return [f"{place.name} holds no step {step}" for place in self.survey.asked if place.name not in silent]

    def _why_missing(self, file: File) -> str:
        found = []
        for place, listing in self.survey.listings:
            if listing.step != self.manifest.step:
                continue
            if (place.name, file.name) in self.spoilt:
                found.append(f"in {place.name} it is spoilt: {self.spoilt[place.name, file.name]}")
            elif file.name not in listing.sizes:
                continue
            elif not listing.manifest:
                found.append(f"{place.name} has a manifest that cannot be read")
            elif listing.manifest != self.digest:
                found.append(f"{place.name} holds another save of this step, which never mixes with this one")
            elif listing.sizes[file.name] != file.num_bytes:
                found.append(f"in {place.name} it has {listing.sizes[file.name]} bytes")
        here = socket.gethostname()
        hosts = [f"{host} (this machine)" if host == here else host for host in file.hosts]
        return "; ".join([f"should be on {' or '.join(hosts)}", *found])


def is_model_shard(file: File) -> bool:
    return any(part.kind == "model" for part in file.slices)


def find_checkpoint(request: Request, left: Sequence[Place], places: Sequence[Place], ssh: Ssh) -> Checkpoint:
    """`places` are those that --nodes names; without them, files that are not here are looked for on the hosts that the
    checkpoint itself records. `left` is what earlier calls gathered: it holds files, but says which step is meant only
    where a step was asked for that the run has removed."""
    found = _one_run(survey([Folder(request.root), *places]), request.root)
    gathered = survey(left)
    ssh_to_hosts = None if places else ssh
    try:
        checkpoint = _choose(request, found, ssh_to_hosts)
    except NotFound as not_found:
        run_id = (Folder(request.root).read("run_id") or b"").decode()
        try:
            checkpoint = _choose(request, gathered, ssh_to_hosts)
        except NotFound:
            raise not_found from None
        if request.step is None or run_id not in ("", checkpoint.manifest.run_id):
            raise
        checkpoint.survey = found
    checkpoint.survey.asked += gathered.asked
    checkpoint.survey.listings += gathered.listings
    return checkpoint


def _one_run(found: Survey, root: Path) -> Survey:
    """Places of other runs do not count: those whose run is not that of `root`, if it has one."""
    run_ids = {place.name: listing.run_id for place, listing in found.listings if listing.run_id}
    if not run_ids:
        return found
    wanted = run_ids.get(str(root), next(iter(run_ids.values())))
    foreign = [name for name, run_id in run_ids.items() if run_id != wanted]
    if foreign and str(root) not in run_ids:
        raise MergeError(f"--nodes names folders of different runs: {', '.join(run_ids)}; give those of one run")
    for name in foreign:
        found.failures[name] = MergeError(f"{name}: it is of another run than {root}")
    found.listings = [(place, listing) for place, listing in found.listings if place.name not in foreign]
    return found


def _choose(request: Request, found: Survey, ssh: Ssh | None) -> Checkpoint:
    """The step that was asked for, else the newest that some place has the marker of. Where places hold different saves
    of it, the committed one that was saved last."""
    readable = [(place, listing) for place, listing in found.listings if listing.manifest]
    marked = {(listing.step, listing.manifest) for _, listing in readable if listing.is_committed}
    step = request.step if request.step is not None else max((step for step, _ in marked), default=None)
    saves: dict[str, tuple[Place, Listing]] = {}
    for place, listing in readable:
        if listing.step == step:
            saves.setdefault(listing.manifest, (place, listing))
    manifests, torn = _read_all(saves)
    if not manifests:
        raise torn[0] if torn else NotFound(_nothing_found(request, found, sorted({step for step, _ in marked})))
    checkpoints = [Checkpoint(manifest, text, found, request.root, ssh) for manifest, text in manifests]
    return max(checkpoints, key=lambda checkpoint: (checkpoint.is_committed, checkpoint.manifest.saved_at))


def _read_all(saves: Mapping[str, tuple[Place, Listing]]) -> tuple[list[tuple[Manifest, bytes]], list[CheckpointError]]:
    """Their manifests; one that is torn in one place may be whole in another."""
    manifests: list[tuple[Manifest, bytes]] = []
    torn: list[CheckpointError] = []
    for place, listing in saves.values():
        name = f"{step_folder(listing.step)}/{MANIFEST}"
        text = place.read(name) or b""
        try:
            manifest = Manifest.from_json(text, f"{place.name}/{name}")
            if manifest.step != listing.step:
                raise CheckpointError(f"{place.name}/{name} is of step {manifest.step}: its folder was renamed")
            manifests.append((manifest, text))
        except CheckpointError as error:
            torn.append(error)
    return manifests, torn


def _nothing_found(request: Request, found: Survey, committed: list[int]) -> str:
    failures = "".join(f"\n{error}" for error in found.failures.values())
    if request.step is not None and committed:
        where = f"in {request.root} or on the nodes"
        return f"no step {request.step} {where}; there are {committed}: give --step one of them{failures}"
    return (
        f"no committed checkpoint in {request.root} or on the nodes; a run saves every checkpoint.save_interval steps "
        f"and at its last one. Where it lies on other nodes give --nodes HOST:FOLDER,...{failures}"
    )


def describe(checkpoint: Checkpoint) -> str:
    manifest = checkpoint.manifest
    shards = [file for file in manifest.files if is_model_shard(file)]
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_at))
    num_bytes = sum(file.num_bytes for file in shards)
    return (
        f"step {manifest.step} of {manifest.run_name}, saved {saved}: {len(shards)} shards of the model, "
        f"{format_bytes(num_bytes)}"
    )
