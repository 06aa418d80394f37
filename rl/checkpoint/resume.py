"""Find the checkpoint to resume from, and load it into a learner, at any number of ranks.

The leader asks one rank of every node for its steps, chooses the newest step, and checks that some node holds each of
its files. Then each actor reads the slices that overlap its rows, from its own node's disk or through a rank of another
node. The digest of every slice is checked. If a copy is corrupt, another copy is read.
"""

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from rl.checkpoint.directory import CheckpointDirectory, StepsListed, StoredStep
from rl.checkpoint.manifest import GROUPS, MANIFEST, PROBE, TORCH_DTYPES, CheckpointError, File, Manifest, Slice
from rl.checkpoint.settings import changed_settings, check_settings_of_checkpoint
from rl.checkpoint.shard_file import digest, read_bytes
from rl.checkpoint.snapshot import set_rng_states
from rl.checkpoint.store import MESSAGE_BYTES, CheckpointStore
from rl.common.files import UnsafeName
from rl.config.schema import Config, ConfigError
from rl.data.prompts import PromptStream
from rl.learner.critic import CriticTrainer
from rl.learner.policy import PolicyTrainer
from rl.learner.sharded_trainer import ShardedTrainer
from rl.model.shards import LocalSlice
from rl.placement.roles import Placement
from rl.watch.heart import HEART
from rl.world.messages import Mailbox, Message

MAX_LINES = 20
Listings = Sequence[StepsListed]  # by node
R = TypeVar("R")


@dataclass(frozen=True)
class ResumeFrom(Message):
    """Tell a rank which checkpoint the run resumes from. The payload is a `Resume`, and empty for a new run."""

    awaited: ClassVar[str] = "the choice of a checkpoint"

    run_id: str


@dataclass(frozen=True)
class Resume:
    """The checkpoint that this run resumes from. Only actors receive the list of its files."""

    manifest: Manifest
    holders: dict[str, list[tuple[int, str]]]  # for each file with slices, ranks that can read it, and its folder there
    is_own: bool  # False if this run forks the run that saved it
    committed: tuple[int, ...]  # committed steps of this run up to this one
    origin: str  # the path that a fork was made from; empty if this run is not a fork
    has_probe: bool  # logits were added after the commit

    @property
    def version(self) -> int:
        return self.manifest.state["version"]

    @property
    def has_critic(self) -> bool:
        return bool(self.manifest.slices("critic"))

    def without_files(self) -> "Resume":
        """Return the part that ranks other than actors need."""
        state = {"version": self.version}
        manifest = dataclasses.replace(self.manifest, files=(), state=state, config={}, placement={})
        return dataclasses.replace(self, manifest=manifest, holders={})

    def to_payload(self) -> bytes:
        return json.dumps(msgspec.to_builtins(self)).encode()


class Steps(Protocol):
    """What a search for a checkpoint needs of a CheckpointStore."""

    @property
    def root(self) -> Path: ...
    def call(self, rank: int, method: Callable[..., R], *args: Any) -> Future[R]: ...
    def call_all(self, method: Callable[..., R], *args: Any) -> list[R]: ...
    def wait(self, future: Future[R]) -> R: ...


class LocalSteps:
    """The steps on this node only, without a world."""

    def __init__(self, root: Path, source: Path | None):
        self.root, self._directory = root, CheckpointDirectory(root, source, rank=0)

    def call(self, rank: int, method: Callable[..., R], *args: Any) -> Future[R]:
        future = Future[R]()
        future.set_result(method(self._directory, *args))
        return future

    def call_all(self, method: Callable[..., R], *args: Any) -> list[R]:
        return [method(self._directory, *args)]

    def wait(self, future: Future[R]) -> R:
        return future.result()


def agree_on_resume(
    mail: Mailbox, placement: Placement, store: CheckpointStore, config: Config, derived: Collection[str] = ()
) -> Resume | None:
    """Return the checkpoint that the leader chose, or None if the run starts from the model. Called on every rank. The
    names in `derived` are those of settings that the user has not given."""
    if mail.rank == placement.leader:
        found = find_checkpoint(store, config.checkpoint.resume)
        if found is not None:
            check_settings_of_checkpoint(found.manifest, config)
        store.create_roots(found.manifest.run_id if found is not None and found.is_own else secrets.token_hex(8))
        whole = found.to_payload() if found is not None else b""
        small = found.without_files().to_payload() if found is not None else b""
        for rank in range(placement.world_size):
            mail.send(rank, ResumeFrom(store.run_id), payload=whole if rank in placement.actors else small)
        if found is not None:
            print(announcement(found, store.root, config, derived), flush=True)
    letter = mail.receive(ResumeFrom)
    store.run_id = letter.message.run_id
    return msgspec.convert(json.loads(letter.payload), Resume) if letter.payload else None


def announcement(resume: Resume, root: Path, config: Config, derived: Collection[str] = ()) -> str:
    """Return from where a run resumes, and which settings the user has changed since then."""
    step, num_steps = resume.manifest.step, config.train.num_steps
    text = f"{root if resume.is_own else resume.origin}: resumes after step {step}"
    changed = changed_settings(resume.manifest.config, dataclasses.asdict(config), derived)
    if changed:
        text += f"; settings changed since then: {', '.join(changed)}"
    if step >= num_steps:
        setting = "train.num_epochs" if config.train.num_epochs else "train.num_steps"
        text += f"; all {num_steps} steps are done; raise {setting} to continue training"
    return text


def find_checkpoint(store: CheckpointStore, resume: str) -> Resume | None:
    """Return the checkpoint that `checkpoint.resume` selects, or None. Called on the leader."""
    own: Listings = store.call_all(CheckpointDirectory.list_steps, "root")
    if resume == "never":
        own = _rename_old_roots(store, own)
    found = choose_checkpoint(store, own, resume)
    if found is not None and found.is_own:
        for step in _steps(own):  # a kill may have left some nodes without COMMITTED
            if step.save_id == found.manifest.save_id and not step.is_committed:
                store.wait(store.call(step.rank, CheckpointDirectory.confirm, step.folder, step.save_id))
    return found


def choose_checkpoint(store: Steps, own: Listings, resume: str) -> Resume | None:
    """Return the checkpoint that `checkpoint.resume` selects among the run's own steps, or at another path."""
    found = _load(store, own, is_own=True)
    return found if resume in ("auto", "never") else _fork(store, found, resume)


def preview_resume(root: Path, config: Config) -> Resume | None:
    """Return the checkpoint that a run would resume from, if all of its files are on this node. Nothing is changed."""
    resume = config.checkpoint.resume
    store = LocalSteps(root, None if resume in ("auto", "never") else Path(resume))
    own = [] if resume == "never" else store.call_all(CheckpointDirectory.list_steps, "root")
    found = choose_checkpoint(store, own, resume)
    if found is not None:
        check_settings_of_checkpoint(found.manifest, config)
    return found


def _rename_old_roots(store: CheckpointStore, own: Listings) -> Listings:
    """Rename the checkpoint directories of earlier launches. A restart within a launch keeps its own."""
    times = [step.saved_at for step in _steps(own)]
    if not times or max(times) >= min(listing.launched_at for listing in own):
        return own
    suffix = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(max(times)))}-{secrets.token_hex(2)}"
    store.call_all(CheckpointDirectory.rename_root, suffix)
    print(f"oneworld: checkpoint.resume=never: {store.root} is now {store.root.name}.{suffix}", flush=True)
    return store.call_all(CheckpointDirectory.list_steps, "root")


def _fork(store: Steps, own: Resume | None, path: str) -> Resume:
    """Return the checkpoint for checkpoint.resume=PATH: the newest of this fork, or else the one at PATH."""
    source = [listing for listing in store.call_all(CheckpointDirectory.list_steps, "source") if listing.exists]
    if not source:
        raise ConfigError(
            f"checkpoint.resume: got {path!r}, which is not a folder on any node; give auto, never or a folder"
        )
    place, origin = Path(source[0].folder), str(Path(path).resolve())
    if own is not None:
        is_own_path = store.root.resolve() in (place, place.parent)
        if is_own_path and own.manifest.save_id not in {step.save_id for step in _steps(source)}:
            raise ConfigError(
                f"checkpoint.resume: got {path!r}, but this run has reached step {own.manifest.step}; to resume from "
                "an older step give the new run another run.name, to resume from the newest set checkpoint.resume=auto"
            )
        if not is_own_path and own.origin != origin:
            raise ConfigError(
                f"checkpoint.resume: got {path!r}, but {store.root} holds step {own.manifest.step} of a run that "
                f"{f'forked {own.origin!r}' if own.origin else 'is no fork'}; give this fork another run.name"
            )
        return own
    found = _load(store, source, is_own=False)
    if found is None:
        raise ConfigError(
            f"checkpoint.resume: {place} holds no committed checkpoint; give a run's folder, or a step_N in it with a "
            "file COMMITTED"
        )
    return dataclasses.replace(found, committed=(), origin=origin)


def _steps(listings: Listings) -> list[StoredStep]:
    return [step for listing in listings for step in listing.steps]


def _load(store: Steps, listings: Listings, is_own: bool) -> Resume | None:
    """Return the step that was saved last. It is valid without COMMITTED if all of its files can be reached, because no
    node renames a step's folder to its final name before all nodes have written everything."""
    steps = _steps(listings)
    committed = {step.save_id for step in steps if step.is_committed and not step.error}
    readable = {step.save_id: step for step in steps if not step.error}
    runs = {listing.run_id: listing.folder for listing in listings if listing.run_id}
    runs |= {step.run_id: step.folder for step in readable.values() if step.save_id in committed}
    if is_own and len(runs) > 1:
        listed = ", ".join(f"{folder} (run {run_id})" for run_id, folder in sorted(runs.items()))
        raise ConfigError(f"checkpoints of different runs lie in one folder: {listed}; move those of other runs away")
    unreadable = {step.step: step.error for step in steps if step.is_committed and step.error}
    for step in sorted(readable.values(), key=lambda step: -step.saved_at):
        text = store.wait(store.call(step.rank, CheckpointDirectory.read, step.folder, MANIFEST))
        manifest = Manifest.from_json(text, f"{step.folder}/{MANIFEST}")
        holders, problems = _locate(manifest, steps)
        others = sorted({other.step for other in steps if other.save_id in committed - {manifest.save_id}})
        if not problems and max(unreadable, default=0) > manifest.step:
            break  # a newer committed step cannot be read, which is reported below
        if not problems:
            older = [other for other in others if other < manifest.step]
            has_probe = any(PROBE in other.files for other in steps if other.save_id == manifest.save_id)
            origin = manifest.state.get("origin", "")
            return Resume(manifest, holders, is_own, (*older, manifest.step), origin, has_probe)
        if manifest.save_id in committed:
            raise ConfigError(_incomplete_message(manifest, step.folder, problems, others))
    if unreadable:
        raise ConfigError(unreadable[max(unreadable)])
    return None


def _locate(manifest: Manifest, steps: Sequence[StoredStep]) -> tuple[dict[str, list[tuple[int, str]]], list[str]]:
    """Return the holders of each file with slices, and a line about each file that no node holds."""
    holders: dict[str, list[tuple[int, str]]] = {}
    problems = []
    # Files next to an unreadable manifest may still be good. Their digests are checked when they are read.
    same = [step for step in steps if step.step == manifest.step and (step.save_id == manifest.save_id or step.error)]
    for file in manifest.files:
        if not file.slices:
            continue
        found = [(step, step.files[file.name]) for step in same if file.name in step.files]
        holders[file.name] = [(step.rank, step.folder) for step, size in found if size == file.num_bytes]
        if not holders[file.name]:
            place = f"was saved on {' and '.join(file.hosts)}"
            if found:
                step, size = found[-1]
                place = f"{step.folder}/{file.name} has {size} bytes"
            problems.append(f"{file.name} ({file.num_bytes} bytes): {place}")
    return holders, problems


def _incomplete_message(manifest: Manifest, folder: str, problems: list[str], others: list[int]) -> str:
    shown = problems[:MAX_LINES] + ([f"and {len(problems) - MAX_LINES} more"] if len(problems) > MAX_LINES else [])
    steps = ", ".join(map(str, others))
    older = f" or resume from an older step ({steps}) in a new run, with checkpoint.resume=PATH," if others else ""
    lines = "\n  ".join(shown)
    return (
        f"step {manifest.step} was committed, but no reachable disk holds {len(problems)} of its {len(manifest.files)} "
        f"files ({folder}):\n  {lines}\nNothing was changed. Start again with the nodes that hold them,{older} or "
        "start over with checkpoint.resume=never; checkpoint.copies=2 keeps each file on two nodes"
    )


class SliceReader:
    """Read slices of a checkpoint, from this node's disk if possible. `own_lead` is this node's entry of node_leads."""

    def __init__(self, resume: Resume, store: CheckpointStore, own_lead: int):
        self.resume, self._store, self._own_lead = resume, store, own_lead

    def read(self, file: File, part: Slice) -> Tensor:
        """Return the elements of a slice as a flat tensor, after a check of their digest."""
        problems, are_all_corrupt = [], True
        holders = self.resume.holders[file.name]
        for rank, folder in sorted(holders, key=lambda holder: holder[0] != self._own_lead):
            try:
                data = self._fetch(rank, folder, file, part)
            except ConnectionError:
                raise  # a lost node ends this world, so another copy does not help
            except (CheckpointError, OSError, UnsafeName) as error:
                problems.append(str(error))
                are_all_corrupt = False
                continue
            if digest(data) == part.digest:
                return torch.frombuffer(data, dtype=getattr(torch, TORCH_DTYPES[part.dtype]))
            place = f"{folder}/{file.name} on the node of rank {rank}"
            problems.append(f"the bytes of {part.key} in {place} differ from those that were saved")
        text = (
            f"step {self.resume.manifest.step} cannot be read: {'; '.join(problems)}. Nothing was changed; restore the "
            "file, or resume from an older step in a new run with checkpoint.resume=PATH"
        )
        raise ConfigError(text) if are_all_corrupt else CheckpointError(text)

    def _fetch(self, rank: int, folder: str, file: File, part: Slice) -> bytearray:
        if rank == self._own_lead:
            return read_bytes(self._store.local_path(folder, file.name), part.begin, part.num_bytes)
        data = bytearray()
        while len(data) < part.num_bytes:
            count = min(MESSAGE_BYTES, part.num_bytes - len(data))
            begin = part.begin + len(data)
            call = self._store.call(rank, CheckpointDirectory.read, folder, file.name, begin, count)
            data += self._store.wait(call)
        return data


def read_groups(resume: Resume, store: CheckpointStore, placement: Placement) -> list[bytes]:
    """Return the files of the groups that this actor takes over: those of the saved actors i, i + number of actors, and
    so on, if this is actor i."""
    rank, num_actors = store.mail.rank, len(placement.actors)
    reader = SliceReader(resume, store, placement.nodes.lead_of(rank))
    data = []
    for name, pieces in sorted(resume.manifest.slices(GROUPS).items()):
        match = re.fullmatch(rf"{GROUPS}-(\d{{5,9}})-of-\d{{5,9}}\.safetensors", name, re.ASCII)
        if match is None or len(pieces) > 1:
            raise ConfigError(f"the manifest of step {resume.manifest.step} lists {name!a} as a file of groups")
        if int(match[1]) % num_actors == placement.actors.index(rank):
            data.append(reader.read(*pieces[0]).numpy().tobytes())
    return data


def check_prompts(resume: Resume, stream: PromptStream) -> str:
    """Return a warning if a fork has other prompts than the checkpoint, or else an empty text. Raise ConfigError if a
    run that continues has other prompts."""
    if resume.manifest.state["data"] == stream.digest:
        return ""
    if resume.is_own:
        raise ConfigError(
            f"data.train, its templates or run.seed differ from those of step {resume.manifest.step}; a resumed run "
            "must use the same prompts. To train on other prompts from here, start a run with another run.name and "
            "with the path of this one as checkpoint.resume"
        )
    return "the checkpoint has other prompts, so the run starts with the first prompt, and drops sampled groups"


def restore(
    learner: PolicyTrainer,
    critic: CriticTrainer | None,
    resume: Resume,
    store: CheckpointStore,
    placement: Placement,
    trains: bool = True,
) -> None:
    """Restore learner, critic and this process's random generators. Called on every actor. A run that does not train
    needs no optimizer state, and may have no memory for it."""
    rank = store.mail.rank
    reader = SliceReader(resume, store, placement.nodes.lead_of(rank))
    state = resume.manifest.state
    shard, num_shards = placement.shard_of(rank), len(placement.owners)
    trainers: list[tuple[ShardedTrainer, int]] = [(learner, state["num_updates"])]
    if critic is not None and resume.has_critic:  # otherwise the critic is new, and starts from its model
        trainers.append((critic, state["num_critic_updates"]))
    for trainer, num_updates in trainers:
        fill(trainer.state_slices(with_moments=trains, with_frozen=False), reader, shard, num_shards)
        if trains:
            trainer.restore_schedule(num_updates)
    learner.restore_kl_coef(state.get("kl_coef", learner.kl_coef))
    generators = state["actors"].get(str(placement.actors.index(rank)))
    if generators is not None:  # otherwise the world has grown, and this rank keeps its own state
        set_rng_states(generators)


def fill(parts: Sequence[tuple[str, LocalSlice]], reader: SliceReader, shard: int, num_shards: int) -> None:
    """Load this rank's part of every tensor. `parts` are (kind, slice), as `state_slices` returns them."""
    manifest = reader.resume.manifest
    kinds = {kind for kind, _ in parts}
    saved = {kind: manifest.slices(kind) for kind in kinds | {"master"}}
    for kind in kinds & {"model", "critic"}:
        _check_same_model([part for of, part in parts if of == kind], saved[kind], kind)
    for kind, part in parts:
        name = part.info.name
        HEART.beat(f"{kind} of {name}")
        exact = saved["master"] if kind == "model" and name in saved["master"] else saved[kind]
        first, end = part.info.rows(shard, num_shards) if part.info.sharded else part.info.rows(0, 1)
        if name not in exact:
            raise ConfigError(f"step {manifest.step} has no {kind} of {name}: it was saved with another optimizer")
        filled = 0
        rows = part.data.view(1) if not part.info.shape else part.data
        for file, piece in exact[name]:
            assert piece.size[1:] == piece.shape[1:], f"{piece.key} is cut along another dimension than the first"
            start, num_rows = (piece.offsets[0], piece.size[0]) if piece.shape else (0, 1)
            low, high = max(first, start), min(end, start + num_rows)
            if low < high:
                values = reader.read(file, piece).view(-1, *piece.size[1:])[low - start : high - start]
                rows[low - first : high - first].copy_(values)
                filled += high - low
        if filled != end - first:
            raise ConfigError(
                f"step {manifest.step} has {filled} of the {end - first} rows of {kind} {name} that this rank needs"
            )


def _check_same_model(parts: Sequence[LocalSlice], saved: Mapping[str, list[tuple[File, Slice]]], kind: str) -> None:
    ours = {part.info.name: part.info.shape for part in parts}
    theirs = {name: pieces[0][1].shape for name, pieces in saved.items()}
    if ours != theirs:
        name = sorted(set(ours.items()) ^ set(theirs.items()))[0][0]
        raise ConfigError(
            f"the checkpoint's {kind} differs from {kind}.path: {name} is {theirs.get(name, 'absent')} there "
            f"and {ours.get(name, 'absent')} in the model; give the model that the run was started with"
        )
