"""Recompute a step of a run from the rollouts that debug.save_rollouts stored, in one process without a GPU.

    RUN/rollouts/step_N.rank_*   -->  groups, lag, advantages  \\
    checkpoint of step N - 1     -->  loss, gradient norm       -->  compare with step N of RUN/metrics.jsonl

The code is that of the run: the same functions compute advantages, losses and metrics, in a world of one rank.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec
import torch
from torch import Tensor

from rl.algo.choose import own_advantage
from rl.checkpoint.manifest import COMMITTED, MANIFEST, Manifest, step_folder
from rl.checkpoint.resume import Resume, restore
from rl.checkpoint.store import CheckpointStore
from rl.common.files import join_inside
from rl.common.text import count_of, format_ranges
from rl.config.schema import Config, resolve_path
from rl.data.batch import Batch
from rl.data.conversations import count_observed
from rl.data.group_file import StoredGroup, groups_from_bytes, step_from_bytes
from rl.learner.credit import assign_credit
from rl.model.hub import HUB_COMMITS, download
from rl.placement.groups import Groups, make_groups
from rl.placement.nodes import Nodes
from rl.placement.roles import Placement
from rl.report.describe import describe
from rl.report.metrics import Measures
from rl.report.rows import METRICS, ROLLOUTS, read_metrics
from rl.run.derive import derive_for_cpu
from rl.run.models import build_critic, build_learner, digest_bases, load_policy, reference_of
from rl.run.open import Run
from rl.run.reporter import rollout_file
from rl.world.world import World

ALONE = Placement(Nodes((1,)), roles=(("actor",),), engines=())
TIMEOUT_S = 600.0
EXACT = 1e-5  # limit of relative differences if only sums are computed in another order
MODEL_LIMITS = {"float32": (1e-3, 1e-6), "bfloat16": (0.05, 2e-3)}  # relative and absolute, if the model is used
SEVERAL_UPDATES = 2e-5  # absolute limit from the second optimizer step on, since AdamW amplifies rounding
MAX_GAPS = 1000  # shown places without a group; a damaged file may name any place
NOT_REPLAYED = ("time/", "perf/", "eval/")  # metrics that do not follow from what was trained on

Parsed = TypeVar("Parsed")


class ReplayError(Exception):
    """A step cannot be replayed. The message says what is missing, and what to do."""


@dataclass(frozen=True)
class Facts:
    """What a file of rollouts says about its step."""

    world: str  # id of the start of the run
    actors: list[int]  # ranks
    config: Config

    @staticmethod
    def from_bytes(data: bytes) -> "Facts":
        """Return the facts in a file. Raise ValueError if they are damaged."""
        try:
            return msgspec.convert(step_from_bytes(data), Facts)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f'the entry "step" of its metadata is damaged: {error}') from error


@dataclass(frozen=True)
class SavedStep:
    """What a run has left of a step."""

    folder: Path  # of the run
    step: int
    config: Config
    groups: list[StoredGroup]  # of all actors, by their places in the batch
    metrics: dict[str, float | None]  # None: not finite
    version: int | None  # newest version of the weights when the step began; None: unknown
    kl_coef: float | None  # None: unknown
    checkpoint: Resume | None  # of the step before

    @cached_property
    def batch(self) -> Batch:
        return Batch.concat([group.batch for group in self.groups])

    @cached_property
    def lags(self) -> Tensor | None:
        """[T], computed from the versions of the tokens; None: the version of the step is unknown."""
        if self.version is None:
            return None
        return torch.where(self.batch.loss_mask, self.version - self.batch.versions, 0)


@dataclass(frozen=True)
class Comparison:
    """A recorded value and the same value recomputed."""

    name: str
    recorded: float | None  # None: not finite
    recomputed: float
    limit: float  # largest difference that rounding explains
    reason: str = ""  # what a difference means

    @property
    def is_equal(self) -> bool:
        if self.recorded is None or not math.isfinite(self.recomputed):
            return self.recorded is None and not math.isfinite(self.recomputed)
        return abs(self.recorded - self.recomputed) <= self.limit


@dataclass
class Replay:
    """The result. `notes` say what was not recomputed, and why."""

    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return all(comparison.is_equal for comparison in self.comparisons)


def read_step(folder: Path, step: int) -> SavedStep:
    """Read what the run in `folder` has left of a step. Raise ReplayError if something is missing or damaged."""
    files, facts = _find_files(folder, step)
    groups = sorted((group for file in files for group in _read(file, _trained_groups)), key=_place)
    if len({frozenset(group.batch.tensors()) for group in groups}) > 1:
        names = ", ".join(file.name for file in files)
        raise ReplayError(f"the files {names} in {files[0].parent} hold different tensors; copy them again")
    config = facts.config
    rows = {int(row["step"]): row for row in read_metrics(folder / METRICS)}
    if step not in rows:
        raise ReplayError(
            f"{folder / METRICS} has no row of step {step}, so there is nothing to compare with: the run has not "
            "finished this step, or this is not the node of its first actor. Copy the file from there"
        )
    metrics = {name: value for name, value in rows[step].items() if "/" in name}
    checkpoint = _find_checkpoint(folder, step - 1)
    state = checkpoint.manifest.state if checkpoint is not None else {}
    version = rows.get(step - 1, {}).get("version", state.get("version"))
    return SavedStep(folder, step, config, groups, metrics, version, _kl_coef(config, rows, step, state), checkpoint)


def _find_files(folder: Path, step: int) -> tuple[list[Path], Facts]:
    """Return the files of a step, one per actor, and the facts about the step. The newest file names the actors."""
    if not folder.is_dir():
        raise ReplayError(f"there is no folder {folder}; give the folder of a run, such as runs/demo")
    saved = sorted((folder / ROLLOUTS).glob("step_*.rank_*.safetensors"), key=lambda path: path.stat().st_mtime)
    if not saved:
        raise ReplayError(f"{folder / ROLLOUTS} holds no rollouts; start the run with debug.save_rollouts=true")
    found = [path for path in saved if path.name.startswith(f"step_{step}.rank_")]
    if not found:
        steps = sorted({int(path.name.removeprefix("step_").partition(".")[0]) for path in saved})
        raise ReplayError(f"{folder / ROLLOUTS} has no step {step}, but steps {format_ranges(steps)}; give one of them")
    facts = _read(found[-1], Facts.from_bytes)
    files = [folder / ROLLOUTS / rollout_file(step, rank) for rank in facts.actors]
    for file in files:
        if not file.exists():
            raise ReplayError(
                f"{file} is missing: the actors of step {step} were the ranks {format_ranges(facts.actors)}. Each "
                "node stores the files of its own ranks; copy this one from its node"
            )
        if _read(file, Facts.from_bytes).world != facts.world:
            raise ReplayError(
                f"{file} and {found[-1].name} are of different starts of the run, so they do not belong together; "
                "copy the newer one from its node"
            )
    return files, facts


def _read(file: Path, parse: Callable[[bytes], Parsed]) -> Parsed:
    try:
        return parse(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ReplayError(f"{file} cannot be read: {error}. Copy it again, or replay another step") from error


def _trained_groups(data: bytes) -> list[StoredGroup]:
    """Return the groups of a file. Raise ValueError if an update cannot have trained on them."""
    groups = groups_from_bytes(data)
    if any(group.state != "trained" or group.batch.ended is not None for group in groups):
        raise ValueError("it holds groups that no update has trained on")
    return groups


def _place(group: StoredGroup) -> int:
    return int(group.batch.group_ids[0])


def _find_checkpoint(folder: Path, step: int) -> Resume | None:
    """Return the checkpoint of a step, or None if not all of its files are on this machine."""
    path = folder / "checkpoints" / step_folder(step)
    if not (path / COMMITTED).is_file():
        return None
    manifest = Manifest.from_json((path / MANIFEST).read_bytes(), str(path / MANIFEST))
    if manifest.step != step:
        raise ReplayError(f"{path} holds step {manifest.step}: its folder was renamed. Restore its name")
    holders = {file.name: [(0, str(path))] for file in manifest.files if file.slices}
    if not all((path / name).is_file() for name in holders):
        return None
    return Resume(manifest, holders, is_own=True, committed=(step,), origin="", has_probe=False)


def _kl_coef(
    config: Config, rows: Mapping[int, Mapping[str, Any]], step: int, state: Mapping[str, Any]
) -> float | None:
    """Return the coefficient of the KL in a step. It changes from step to step if algo.kl_target is set."""
    if not config.algo.kl_target:
        return config.algo.kl_coef
    earlier = [row["policy/kl_coef"] for at, row in sorted(rows.items()) if at < step and "policy/kl_coef" in row]
    first = config.algo.kl_coef if 0 in rows else None  # a fork starts with the coefficient of another run
    return earlier[-1] if earlier else state.get("kl_coef", first)


def replay(saved: SavedStep, with_loss: bool = True, model_limit: float | None = None) -> Replay:
    """Recompute a step, and compare. torch.distributed must be initialized with a world of one rank."""
    result, processes = Replay(), make_groups(ALONE, 0, "cpu", TIMEOUT_S)
    result.comparisons += _compare_groups(saved)
    if saved.lags is None:
        result.notes.append(f"lags: {METRICS} has no row of step {saved.step - 1}, which names the version")
    else:
        result.comparisons += _compare_lags(saved, saved.lags)
    pg = processes.actor_pg
    assert pg is not None
    values, measures = describe(saved.batch, saved.config.environment.is_set).reduce(pg), Measures()
    if saved.kl_coef is None:
        result.notes.append("advantages and loss: neither the metrics nor a checkpoint has the KL coefficient")
    else:
        result.comparisons += _compare_credit(saved, saved.kl_coef, processes, measures)
        result.comparisons += compare_values(saved.metrics, values | _reduce(measures, processes), EXACT, EXACT * 0.01)
        reason = _why_no_loss(saved) if with_loss else "--no-loss was given"
        if reason:
            result.notes.append(f"loss, and what else needs the model: {reason}")
        else:
            relative, absolute = MODEL_LIMITS[saved.config.model.dtype]
            relative = model_limit if model_limit is not None else relative
            if saved.config.algo.num_mini_batches * saved.config.algo.num_epochs > 1:
                absolute = max(absolute, SEVERAL_UPDATES)
            result.comparisons += compare_values(saved.metrics, _update(saved, processes), relative, absolute)
    known = {comparison.name for comparison in result.comparisons}
    left = [name for name in saved.metrics if name not in known and not name.startswith(NOT_REPLAYED)]
    if left:
        result.notes.append(f"other metrics: {', '.join(left)}")
    return result


def compare_values(
    recorded: Mapping[str, float | None], recomputed: Mapping[str, float], relative: float, absolute: float
) -> Iterator[Comparison]:
    """Compare metrics that have both values."""
    for name, value in recomputed.items():
        if name in recorded:
            yield Comparison(name, recorded[name], value, absolute + relative * abs(recorded[name] or 0.0))


def _compare_groups(saved: SavedStep) -> Iterator[Comparison]:
    """Check that each place of the batch has one group, and that all samples of the group are at this place.

    A group may have any number of samples: one that a resumed run carries over keeps its number.
    """
    whole = {_place(group) for group in saved.groups if (group.batch.group_ids == _place(group)).all()}
    num_places = max(map(_place, saved.groups), default=-1) + 1
    gaps = islice((place for place in range(num_places) if place not in whole), MAX_GAPS)
    rule = "each place of the batch must have one group, and all samples of a group must be at its place"
    reason = f"{rule}; places without a whole one: {format_ranges(gaps) or 'none, so one has several'}"
    yield Comparison("groups", max(len(saved.groups), num_places), len(whole), 0.0, reason)


def _compare_lags(saved: SavedStep, lags: Tensor) -> Iterator[Comparison]:
    mask, stored = saved.batch.loss_mask, saved.batch.lags
    stored = torch.zeros_like(lags) if stored is None else stored
    yield _compare_tokens("lags", stored, lags, saved.batch, 0.0)
    values = {"rollout/lag_max": lags[mask].max().item()} if mask.any() else {}
    yield from compare_values(saved.metrics, values, EXACT, EXACT)


def _compare_tokens(name: str, stored: Tensor, recomputed: Tensor, batch: Batch, limit: float) -> Comparison:
    """Compare values of tokens, [T]. Show those of the token that differs most."""
    if not stored.numel():
        return Comparison(name, 0.0, 0.0, limit)
    differences = (stored.double() - recomputed.double()).abs()
    token = int((differences if differences.any() else stored.abs()).argmax())
    place = int(batch.group_ids[batch.segment_ids[token]])
    reason = f"shown is the token that differs most, of the group at place {place} of the batch"
    return Comparison(name, stored[token].item(), recomputed[token].item(), limit, reason)


def _compare_credit(saved: SavedStep, kl_coef: float, processes: Groups, measures: Measures) -> Iterator[Comparison]:
    """Recompute the advantages, and the returns if there is a critic."""
    algo, batch, pg = saved.config.algo, saved.batch, processes.actor_pg
    assert pg is not None
    bare = dataclasses.replace(batch, advantages=None, returns=None)
    longest, own = saved.config.rollout.max_new_tokens, own_advantage(algo)
    credited = assign_credit(bare, algo, longest, kl_coef, pg, measures, own)
    for name in ("advantages", "returns"):
        stored, recomputed = getattr(batch, name), getattr(credited, name)
        if recomputed is not None and stored is not None:
            scale = max(1.0, float(stored.abs().max())) if stored.numel() else 1.0
            yield _compare_tokens(name, stored, recomputed, batch, 10 * EXACT * scale)


def _reduce(measures: Measures, processes: Groups) -> dict[str, float]:
    assert processes.actor_pg is not None
    return measures.reduce(processes.actor_pg) if measures.names else {}


def _why_no_loss(saved: SavedStep) -> str:
    """Return why the loss cannot be recomputed, or an empty text."""
    before = saved.step - 1
    if saved.checkpoint is None and before:
        path = saved.folder / "checkpoints" / step_folder(before)
        keep = "checkpoint.save_interval=1 and a larger checkpoint.keep_last keep the checkpoint of every step"
        return f"there is no whole checkpoint in {path}; {keep}"
    model = saved.config.model
    if _needs_model_files(saved) and not resolve_path(model.path).is_dir() and not _commits(saved):
        what = "the checkpoint holds only adapters to" if saved.checkpoint is not None else "step 1 starts from"
        return f"{what} the model of model.path, and there is no folder {model.path} here; copy the model to it"
    return ""


def _needs_model_files(saved: SavedStep) -> bool:
    """Return whether the weights of model.path are needed. A checkpoint has them, unless it holds only adapters."""
    return saved.checkpoint is None or saved.config.model.lora.is_set


def _commits(saved: SavedStep) -> dict[str, str]:
    """Return the commits of models on the hub, which the run has recorded."""
    record = saved.folder / HUB_COMMITS
    return msgspec.json.decode(record.read_bytes(), type=dict[str, str]) if record.is_file() else {}


def _model_folder(saved: SavedStep, setting: str, path: str) -> Path:
    """Return the folder of a model: a local one, else the configs in the checkpoint, else from the hub."""
    if resolve_path(path).is_dir():
        return resolve_path(path)
    if setting == "model.path" and not _needs_model_files(saved):
        return saved.folder / "checkpoints" / step_folder(saved.step - 1) / "hf"
    return download(setting, path, _commits(saved)[path])


def _update(saved: SavedStep, processes: Groups) -> dict[str, float]:
    """Run the update of the step with the weights of the step before. Return its metrics."""
    run = _open(saved, processes)
    policy = load_policy(run)
    learner, critic = build_learner(run, policy, reference_of(run, policy)), build_critic(run)
    if run.resume is not None:
        digest_bases(run, policy, critic)  # raises if the base model is another one
        restore(learner, critic, run.resume, run.store, run.placement)
    assert saved.kl_coef is not None
    learner.kl_coef = saved.kl_coef
    measures, num_prompts = Measures(), len(saved.groups)
    if critic is not None:
        critic.update(saved.batch, num_prompts, measures)
    if critic is None or saved.step > saved.config.critic.warmup_steps:
        learner.update(saved.batch, num_prompts, measures)
    return _reduce(measures, processes)


def _open(saved: SavedStep, processes: Groups) -> Run:
    """Return the parts of a run that its models need, on one rank. Settings that only change speed are left out."""
    config = derive_for_cpu(saved.config)
    actor = dataclasses.replace(config.actor, offload="none", compile=False, recompute="head", num_replicas=1)
    rollout = dataclasses.replace(config.rollout, max_mismatch_kl=0.0)  # compared, but no reason to stop
    critic = dataclasses.replace(config.critic, offload="none", recompute="none")
    reference = dataclasses.replace(config.reference, offload="none")
    config = dataclasses.replace(config, actor=actor, critic=critic, reference=reference, rollout=rollout)
    models = {setting: _model_folder(saved, setting, path) for setting, path in config.model_paths.items()}
    world = cast(World, SimpleNamespace(rank=0, device=torch.device("cpu")))
    store = cast(CheckpointStore, _LocalFiles())
    return Run(world, config, ALONE, processes, saved.folder, models, store, saved.checkpoint)


class _LocalFiles:
    """The part of a CheckpointStore that `restore` uses, if all files are on this machine."""

    mail = SimpleNamespace(rank=0)

    def local_path(self, folder: str, file: str) -> Path:
        return join_inside(Path(folder), file)


def describe_groups(saved: SavedStep) -> list[dict[str, Any]]:
    """Return one row per group: its place in the stream and in the batch, lengths, versions, lag and rewards. Those of
    conversations are by sample, and name the number of sequences too."""
    rows = []
    for group in saved.groups:
        batch, mask = group.batch, group.batch.loss_mask
        lengths, versions = batch.conversation_lengths, batch.versions[mask]
        row = {
            "group": group.number,
            "place": _place(group),
            "samples": batch.num_conversations,
            "prompt_tokens": int(batch.prompt_lengths[0]),
            "response_tokens": lengths.tolist(),
            "versions": sorted(set(versions.tolist())),
            "reward_mean": batch.rewards[batch.starts_conversation].mean().item(),
        }
        if batch.turns is not None:
            row |= {"sequences": batch.num_sequences, "observed_tokens": count_observed(batch).tolist()}
        if saved.version is not None and versions.numel():
            lags = (saved.version - versions).double()
            row |= {"lag_mean": lags.mean().item(), "lag_max": int(lags.max())}
        rows.append(row)
    return rows


def summarize_samples(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say in words if groups have different numbers of samples, else return an empty text."""
    counts = sorted(Counter(row["samples"] for row in rows).items())
    if len(counts) < 2:
        return ""
    parts = ", ".join(f"{count_of(number, 'group')} of {samples}" for samples, number in counts)
    return (
        f"the groups have different numbers of samples: {parts}. After a resume with another "
        "rollout.num_samples_per_prompt, groups that were sampled before keep theirs"
    )


def summarize_lags(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the lag of the groups in words."""
    lags = [row["lag_max"] for row in rows if "lag_max" in row]
    if not lags:
        return "lag unknown"
    stale = sum(lag > 0 for lag in lags)
    return f"lag at most {max(lags)}; {stale} of {len(rows)} groups have tokens of older versions"
