"""Finds the checkpoint to go on from, and fills a learner from it, at any number of ranks.

The leader asks one rank of every node what lies on its disk, takes the newest step, and proves that each of its files
lies somewhere in reach. Then each actor reads the slices that overlap its rows: from its own node's disk, else from a
rank of a node that holds them. Every slice is checked by its digest; a spoilt one is read from another copy where there
is one.
"""

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl.checkpoint.dtypes import TORCH_DTYPES
from rl.checkpoint.manifest import MANIFEST, PROBE, CheckpointError, File, Manifest, Slice
from rl.checkpoint.shard_file import digest, read_bytes
from rl.checkpoint.snapshot import restore_generators
from rl.checkpoint.store import MESSAGE_BYTES, CheckpointStore
from rl.config.schema import Config, ConfigError
from rl.learner.critic import CriticTrainer
from rl.learner.policy import PolicyTrainer
from rl.model.shards import LocalSlice
from rl.placement.roles import Placement
from rl.watch.heart import HEART
from rl.world.mail import Mail, Message

MAX_LINES = 20
Holder = tuple[int, str]  # a rank that can read a file, and the step's folder on its node


@dataclass(frozen=True)
class Resume:
    """The checkpoint that this run goes on from. Ranks that are no actors know it without its files."""

    manifest: Manifest
    holders: Mapping[str, Sequence[Holder]]  # of each file that holds slices
    is_own: bool  # of this run, not of one that it forks
    committed: tuple[int, ...]  # steps of this run up to this one
    origin: str  # of a fork: the path that it was made from
    has_probe: bool  # logits were added after it was committed

    @property
    def version(self) -> int:
        return self.manifest.state["version"]

    @property
    def has_critic(self) -> bool:
        return bool(self.manifest.slices("critic"))

    def without_files(self) -> "Resume":
        state = {"version": self.version}
        manifest = dataclasses.replace(self.manifest, files=(), state=state, config={}, placement={})
        return dataclasses.replace(self, manifest=manifest, holders={})

    def to_payload(self) -> bytes:
        places = sorted({holder for holders in self.holders.values() for holder in holders})
        held = {name: [places.index(holder) for holder in holders] for name, holders in self.holders.items()}
        body = {"places": places, "held": held, "is_own": self.is_own, "committed": self.committed}
        head = json.dumps(body | {"origin": self.origin, "has_probe": self.has_probe}).encode()
        return len(head).to_bytes(8, "little") + head + self.manifest.to_json()

    @staticmethod
    def from_payload(payload: bytes | bytearray) -> "Resume":
        end = 8 + int.from_bytes(payload[:8], "little")
        body = json.loads(payload[8:end])
        places = [(rank, folder) for rank, folder in body["places"]]
        holders = {name: [places[index] for index in held] for name, held in body["held"].items()}
        manifest = Manifest.from_json(payload[end:], "the leader's manifest")
        committed = tuple(body["committed"])
        return Resume(manifest, holders, body["is_own"], committed, body["origin"], body["has_probe"])


def agree_on_resume(mail: Mail, placement: Placement, store: CheckpointStore, config: Config) -> Resume | None:
    """On every rank: the checkpoint that the leader found; None where the run starts from the model."""
    if mail.rank == placement.leader:
        found = find_checkpoint(store, config.checkpoint.resume)
        store.make_folders(found.manifest.run_id if found is not None and found.is_own else secrets.token_hex(8))
        whole = found.to_payload() if found is not None else b""
        small = found.without_files().to_payload() if found is not None else b""
        for rank in range(placement.world_size):
            mail.send(rank, "resume", {"run_id": store.run_id}, whole if rank in placement.actors else small)
        if found is not None:
            print(_announcement(found, store, config), flush=True)
    message = mail.receive("resume")
    assert message is not None
    store.run_id = message.meta["run_id"]
    return Resume.from_payload(message.payload) if message.payload else None


def _announcement(resume: Resume, store: CheckpointStore, config: Config) -> str:
    step, num_steps = resume.manifest.step, config.train.num_steps
    text = f"{store.root if resume.is_own else resume.origin}: goes on after step {step}"
    changed = changed_settings(resume.manifest.config, dataclasses.asdict(config))
    if changed:
        text += f"; set otherwise since then: {', '.join(changed)}"
    if step >= num_steps:
        setting = "train.num_epochs" if config.train.num_epochs else "train.num_steps"
        text += f"; all {num_steps} steps are done, raise {setting} to train on"
    return text


def find_checkpoint(store: CheckpointStore, resume: str) -> Resume | None:
    """On the leader: what `checkpoint.resume` asks for; None where the run starts from the model."""
    own = store.ask_all("list", where="root")
    if resume == "never":
        own = _set_aside(store, own)
    found = _load(store, own, is_own=True)
    if resume not in ("auto", "never"):
        found = _follow(store, found, resume)
    if found is not None and found.is_own:
        for answer, entry in _entries(own):  # on all nodes, also where a kill came before the marker
            if entry["save_id"] == found.manifest.save_id and not entry["committed"]:
                asked = store.call(answer.source, "confirm", folder=entry["folder"], save_id=entry["save_id"])
                store.wait(asked)
    return found


def _set_aside(store: CheckpointStore, own: list[Message]) -> list[Message]:
    """checkpoint.resume=never: steps of earlier launches make room. Those of this launch stay: it was restarted."""
    times = [entry["saved_at"] for _, entry in _entries(own)]
    if not times or max(times) >= min(answer.meta["launched_at"] for answer in own):
        return own
    suffix = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(max(times)))}-{secrets.token_hex(2)}"
    store.ask_all("set aside", suffix=suffix)
    print(
        f"oneworld: checkpoint.resume=never: {store.root} is now {store.root.name}.{suffix}",
        flush=True,
    )
    return store.ask_all("list", where="root")


def _follow(store: CheckpointStore, own: Resume | None, path: str) -> Resume:
    """checkpoint.resume=PATH: the fork of another run, which is made once: from then on the run has its own steps."""
    there = [answer for answer in store.ask_all("list", where="source") if answer.meta["exists"]]
    if not there:
        raise ConfigError(f"checkpoint.resume: got {path!r}, no folder on any node; give auto, never or a folder")
    place, origin = Path(there[0].meta["place"]), str(Path(path).resolve())
    if own is not None and store.root.resolve() in (place, place.parent):
        if own.manifest.save_id not in {entry["save_id"] for _, entry in _entries(there)}:
            raise ConfigError(
                f"checkpoint.resume: got {path!r}, but this run has gone on to step {own.manifest.step}; to go on from "
                "an older step give the new run another run.name, to go on from the newest set checkpoint.resume=auto"
            )
        return own
    if own is not None:
        if own.origin != origin:
            raise ConfigError(
                f"checkpoint.resume: got {path!r}, but {store.root} holds step {own.manifest.step} of a run that "
                f"{f'forked {own.origin!r}' if own.origin else 'forked none'}; give this fork another run.name"
            )
        return own
    found = _load(store, there, is_own=False)
    if found is None:
        raise ConfigError(
            f"checkpoint.resume: {place} holds no committed checkpoint; give a run's folder, or a step_N in it with a "
            "file COMMITTED"
        )
    return dataclasses.replace(found, committed=(), origin=origin)


def _entries(answers: Sequence[Message]) -> list[tuple[Message, dict[str, Any]]]:
    return [(answer, entry) for answer in answers for entry in answer.meta["steps"]]


def _load(store: CheckpointStore, answers: Sequence[Message], is_own: bool) -> Resume | None:
    """The step that was saved last. It counts when some node has its marker, or when all of it is in reach: no node
    gives a step its final name before all nodes have written all of it."""
    entries = _entries(answers)
    marked = {entry["save_id"] for _, entry in entries if entry["committed"] and not entry["error"]}
    readable = {entry["save_id"]: (answer, entry) for answer, entry in entries if not entry["error"]}
    if is_own:
        _check_one_run(answers, [entry for _, entry in readable.values() if entry["save_id"] in marked])
    torn = {entry["step"]: entry["error"] for _, entry in entries if entry["committed"] and entry["error"]}
    for answer, entry in sorted(readable.values(), key=lambda pair: -pair[1]["saved_at"]):
        asked = store.call(answer.source, "get", folder=entry["folder"], file=MANIFEST, begin=0, num_bytes=None)
        manifest = Manifest.from_json(store.wait(asked).payload, f"{entry['folder']}/{MANIFEST}")
        holders, problems = _locate(manifest, answers)
        others = sorted({other["step"] for _, other in entries if other["save_id"] in marked - {manifest.save_id}})
        if not problems and max(torn, default=0) > manifest.step:
            break  # what is newer was committed too
        if not problems:
            steps = {step for step in others if step < manifest.step} | {manifest.step}
            same = [other for _, other in entries if other["save_id"] == manifest.save_id]
            return Resume(
                manifest,
                holders,
                is_own,
                committed=tuple(sorted(steps)),
                origin=manifest.state.get("origin", ""),
                has_probe=any(PROBE in other["files"] for other in same),
            )
        if manifest.save_id in marked:
            raise ConfigError(_incomplete(manifest, entry["folder"], problems, others))
    if torn:
        raise ConfigError(torn[max(torn)])
    return None


def _check_one_run(answers: Sequence[Message], committed: Sequence[dict[str, Any]]) -> None:
    runs = {answer.meta["run_id"]: answer.meta["place"] for answer in answers if answer.meta["run_id"]}
    runs |= {entry["run_id"]: entry["folder"] for entry in committed}
    if len(runs) > 1:
        listed = ", ".join(f"{folder} (run {run_id})" for run_id, folder in sorted(runs.items()))
        raise ConfigError(f"checkpoints of different runs lie in one folder: {listed}; move the foreign ones away")


def _locate(manifest: Manifest, answers: Sequence[Message]) -> tuple[dict[str, list[Holder]], list[str]]:
    """Which ranks hold each file with slices, by what their nodes list; and what no one holds."""
    files = [file for file in manifest.files if file.slices]
    holders: dict[str, list[Holder]] = {file.name: [] for file in files}
    cut: dict[str, str] = {}
    for answer, entry in _entries(answers):
        # A folder whose manifest is unreadable may still hold good files: digests tell.
        if entry["step"] != manifest.step or (entry["save_id"] != manifest.save_id and not entry["error"]):
            continue
        for file in files:
            size = entry["files"].get(file.name)
            if size == file.num_bytes:
                holders[file.name].append((answer.source, entry["folder"]))
            elif size is not None:
                cut[file.name] = f"{entry['folder']}/{file.name} has {size} bytes"
    problems = []
    for file in files:
        if not holders[file.name]:
            place = cut.get(file.name) or f"was saved on {' and '.join(file.hosts)}"
            problems.append(f"{file.name} ({file.num_bytes} bytes): {place}")
    return holders, problems


def _incomplete(manifest: Manifest, folder: str, problems: list[str], others: list[int]) -> str:
    shown = problems[:MAX_LINES] + ([f"and {len(problems) - MAX_LINES} more"] if len(problems) > MAX_LINES else [])
    steps = ", ".join(map(str, others))
    older = f" or go on from an older step ({steps}) in a new run, with checkpoint.resume=PATH," if others else ""
    lines = "\n  ".join(shown)
    return (
        f"step {manifest.step} was committed, but {len(problems)} of its {len(manifest.files)} files are on no disk in "
        f"reach ({folder}):\n  {lines}\nNothing was changed. Start again with the nodes that hold them,{older} or "
        "start over with checkpoint.resume=never; checkpoint.copies=2 keeps each file on two nodes"
    )


class SliceReader:
    """Reads slices of a checkpoint on this rank, from its own node's disk where they lie there."""

    def __init__(self, resume: Resume, store: CheckpointStore, own_lead: int):
        self.manifest = resume.manifest
        self._resume, self._store, self._own_lead = resume, store, own_lead

    def read(self, file: File, part: Slice) -> Tensor:
        """Its elements, flat, proven by their digest."""
        problems, is_proven_wrong = [], True
        holders = self._resume.holders[file.name]
        for rank, folder in sorted(holders, key=lambda holder: holder[0] != self._own_lead):
            try:
                data = self._fetch(rank, folder, file, part)
            except ConnectionError:
                raise  # a node was lost, and with it this world
            except (CheckpointError, OSError) as error:
                problems.append(str(error))
                is_proven_wrong = False
                continue
            if digest(data) == part.digest:
                return torch.frombuffer(data, dtype=TORCH_DTYPES[part.dtype])
            place = f"{folder}/{file.name} on the node of rank {rank}"
            problems.append(f"{place} has other bytes of {part.key} than were saved")
        text = (
            f"step {self.manifest.step} cannot be read: {'; '.join(problems)}. Nothing was changed; restore the file, "
            "or go on from an older step in a new run with checkpoint.resume=PATH"
        )
        raise ConfigError(text) if is_proven_wrong else CheckpointError(text)

    def _fetch(self, rank: int, folder: str, file: File, part: Slice) -> bytearray:
        if rank == self._own_lead:
            return read_bytes(Path(folder) / file.name, part.begin, part.num_bytes)
        data = bytearray()
        while len(data) < part.num_bytes:
            count = min(MESSAGE_BYTES, part.num_bytes - len(data))
            begin = part.begin + len(data)
            asked = self._store.call(rank, "get", folder=folder, file=file.name, begin=begin, num_bytes=count)
            data += self._store.wait(asked).payload
        return data


def restore(
    learner: PolicyTrainer,
    resume: Resume,
    store: CheckpointStore,
    placement: Placement,
    rank: int,
    critic: CriticTrainer | None = None,
) -> None:
    """On every actor: learner and critic as they were, and this process's random generators."""
    reader, state = (
        SliceReader(resume, store, rank - rank % placement.num_ranks_per_node),
        resume.manifest.state,
    )
    shard, num_shards = placement.shard_of(rank), len(placement.owners)
    fill(learner.state_slices(), reader, shard, num_shards)
    learner.restore_schedule(state["num_updates"])
    learner.restore_kl_coef(state.get("kl_coef", learner.kl_coef))
    if critic is not None and resume.has_critic:  # else it starts from its model, in a run that had none before
        fill(critic.state_slices(), reader, shard, num_shards)
        critic.restore_schedule(state["num_critic_updates"])
    generators = state["actors"].get(str(placement.actors.index(rank)))
    if generators is not None:  # else the world has grown, and this rank keeps its own
        restore_generators(generators)


def fill(parts: Sequence[tuple[str, LocalSlice]], reader: SliceReader, shard: int, num_shards: int) -> None:
    """Fills this rank's part of every tensor; `parts` are kinds and slices as the learner names them."""
    manifest = reader.manifest
    kinds = {kind for kind, _ in parts}
    saved = {kind: manifest.slices(kind) for kind in kinds | {"master"}}
    for kind in kinds & {"model", "critic"}:
        _check_same_model([part for of, part in parts if of == kind], saved[kind], kind)
    for kind, part in parts:
        name = part.info.name
        HEART.beat(f"{kind} of {name}")
        exact = saved["master"] if kind == "model" and name in saved["master"] else saved[kind]
        first, end = part.info.rows(shard, num_shards) if part.info.sharded else (0, part.info.rows(0, 1)[1])
        if name not in exact:
            raise ConfigError(f"step {manifest.step} holds no {kind} of {name}: it was saved with another optimizer")
        filled = 0
        rows = part.data.view(1) if not part.info.shape else part.data
        for file, piece in exact[name]:
            low, high = max(first, piece.offsets[0] if piece.offsets else 0), min(end, _end_row(piece))
            if low < high:
                start = piece.offsets[0] if piece.offsets else 0
                values = reader.read(file, piece).view(-1, *piece.size[1:])[low - start : high - start]
                rows[low - first : high - first].copy_(values)
                filled += high - low
        if filled != end - first:
            raise ConfigError(
                f"step {manifest.step} holds {filled} of the {end - first} rows of {kind} {name} needed here"
            )


def _end_row(piece: Slice) -> int:
    assert piece.size[1:] == piece.shape[1:], f"{piece.key} is cut along another dimension than the first"
    return piece.offsets[0] + piece.size[0] if piece.offsets else 1


def _check_same_model(parts: Sequence[LocalSlice], saved: Mapping[str, list[tuple[File, Slice]]], kind: str) -> None:
    ours = {part.info.name: part.info.shape for part in parts}
    theirs = {name: pieces[0][1].shape for name, pieces in saved.items()}
    if ours != theirs:
        name = sorted(set(ours.items()) ^ set(theirs.items()))[0][0]
        raise ConfigError(
            f"the checkpoint is of another {kind} than {kind}.path: {name} is {theirs.get(name, 'absent')} there and "
            f"{ours.get(name, 'absent')} here; give the model that the run was started with"
        )


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What was set otherwise when the checkpoint was saved, apart from names, places and checkpoints themselves."""

    def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in section.items():
            found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
        return found

    old, new = flat(before), flat(now)
    names = [name for name in new if name.partition(".")[0] not in ("run", "checkpoint", "placement")]
    return [f"{name} {old.get(name)} -> {new[name]}" for name in names if old.get(name) != new[name]]
