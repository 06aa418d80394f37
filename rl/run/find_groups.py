"""Find the groups of the next step that are in files, before a phase begins (rl/rollout/archive.py).

The phase rollout then samples only the groups that are missing, and the phase update trains on what was found. Both
refuse groups that were sampled from other weights or with other settings.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash

from rl.checkpoint.resume import check_prompts
from rl.checkpoint.write import read_hf_files
from rl.common.text import count_of, format_ranges
from rl.config.schema import Config, ConfigError
from rl.data.prompts import PromptStream
from rl.data.trajectories import Provenance, Trajectory, read_trajectory
from rl.data.trajectory_files import GroupKey, describe_steps, run_folder, trajectory_folder
from rl.model.load import stop_token_ids
from rl.model.shape import tensor_files
from rl.rollout.archive import FindGroups, FoundFile, StoredFile, StoredGroups, choose_files, gather_files
from rl.rollout.schedule import Schedule, ScheduleState, plan_schedule
from rl.run.build import saved_schedule
from rl.run.open import Run
from rl.watch.heart import HEART
from rl.world.restarts import launch_time

CHUNK_BYTES = 16 << 20
MAX_LINES = 10
CLOCK_S = 1.0  # tolerance when the time of a save is compared with the start of a process; no launch saves so soon
# The settings that decide which tokens are sampled and how they are scored.
SETTINGS = (
    *("model.dtype", "run.seed", "rollout.engine", "rollout.num_samples_per_prompt", "rollout.temperature"),
    *("rollout.top_p", "rollout.top_k", "rollout.max_new_tokens", "rollout.max_tokens_per_round"),
    *("rollout.deterministic", "reward.function", "reward.options", "debug.mean_response_tokens"),
)
# The same of conversations. Runs without them leave these out.
ENVIRONMENT_SETTINGS = (
    *("tools", "class", "rollout", "options", "max_turns", "max_tokens_per_turn", "max_observation_tokens"),
    *("max_conversation_tokens", "max_seconds", "timeout_s", "on_rewrite"),
)
TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def find_groups(run: Run) -> Run:
    """Return the run with the groups of its next step. Every rank calls this. In the phase both, there are none."""
    phase = run.phase
    if phase.name == "both" or phase.split == "eval-only" or run.start_step >= run.config.train.num_steps:
        return run
    with run.world.stage("find groups"):
        runs = [run_folder(folder) for folder in phase.folders] or [run.folder]
        order = None
        if run.data is not None:  # on the leader
            order = FindGroups(run.start_step + 1, provenance_of(run, run.data.stream), _has_trained(run))

        def choose(lists: Mapping[int, Sequence[FoundFile]]) -> Mapping[int, list[int]]:
            _refuse_others(lists, phase.name == "update")
            return choose_files(lists)

        found, files = gather_files(run.world.mail, run.placement, runs, order, choose)
        if found.is_done:
            return run
        groups: dict[GroupKey, Trajectory] = {}
        if run.data is not None:
            groups = _read(run, run.data.stream, files)
            _announce(run, run.data.stream, runs, groups)
    return replace(run, stored=StoredGroups(found, groups))


def _has_trained(run: Run) -> bool:
    """Return whether this launch is a restart of a phase update that has saved its step already."""
    saved_at = run.resume.manifest.saved_at if run.resume is not None and run.resume.is_own else 0.0
    is_done = run.phase.name == "update" and saved_at > launch_time() + CLOCK_S
    if is_done:
        print(f"oneworld: step {run.start_step} was saved before this restart, so nothing is left to do", flush=True)
    return is_done


def provenance_of(run: Run, stream: PromptStream) -> Provenance:
    """Return what decides the groups of the run's next step."""
    config, folder = run.config, run.model_folder
    files = read_hf_files(folder, config.model.dtype)
    tokenizer = {name: data for name, data in files.items() if name.startswith(TOKENIZER_FILES)}
    tokenizer |= {name: data for name, data in files.items() if name.endswith(".model")}
    return {
        "the version of the weights": run.resume.version if run.resume is not None else 1,
        "the digest of the weights": _digest_weights(run),
        "the digest of the model's config.json": _digest({"config.json": files["config.json"]}),
        "the digest of the tokenizer": _digest(tokenizer),
        "the digest of data.train, its templates and run.seed": stream.digest,
        "the list of stop tokens": stop_token_ids(folder),
        **_settings(config),
    }


def _settings(config: Config) -> dict[str, Any]:
    conversations = [f"environment.{name}" for name in ENVIRONMENT_SETTINGS] if config.environment.is_set else []
    return {name: json.loads(json.dumps(attrgetter(name)(config))) for name in (*SETTINGS, *conversations)}


def _digest(files: Mapping[str, bytes]) -> str:
    hasher = xxhash.xxh3_64()
    for name, data in sorted(files.items()):
        hasher.update(f"\0{name}\0{len(data)}\0".encode())
        hasher.update(data)
    return hasher.hexdigest()


def _digest_weights(run: Run) -> str:
    """Return a digest of the weights: from the digests in the checkpoint's manifest, or from the files of the model."""
    hasher = xxhash.xxh3_64()
    if run.resume is not None:
        for name, pieces in sorted(run.resume.manifest.slices("model").items()):
            for _, part in sorted(pieces, key=lambda piece: piece[1].offsets):
                hasher.update(f"\0{name}\0{part.dtype}\0{part.offsets}\0{part.size}\0{part.digest}".encode())
        return hasher.hexdigest()
    for file in sorted(set(tensor_files(run.model_folder).values())):
        with (run.model_folder / file).open("rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                HEART.beat(f"the digest of {file}")
                hasher.update(chunk)
    return hasher.hexdigest()


def _refuse_others(lists: Mapping[int, Sequence[FoundFile]], refuses_damage: bool) -> None:
    """Raise ConfigError if there are groups of another origin. The phase update also refuses damaged files, which the
    phase rollout samples again."""
    files = [file for found in lists.values() for file in found]
    foreign = [f"{file.path}: {'; '.join(file.differences)}" for file in files if file.differences]
    if foreign:
        raise ConfigError(
            f"{count_of(len(foreign), 'group')} cannot be used here, because something else has sampled them:\n  "
            f"{_lines(foreign)}\nNothing was changed. Use the settings and the checkpoint that these groups were "
            "sampled with, or move their files away and run the phase rollout again"
        )
    damaged = [f"{file.path}: {file.damage}" for file in files if file.damage]
    if damaged and refuses_damage:
        raise _damaged(damaged)


def _damaged(problems: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{count_of(len(problems), 'file')} of groups cannot be read:\n  {_lines(problems)}\nNothing was changed. Copy "
        "them again, or delete them and run the phase rollout again"
    )


def _lines(texts: Sequence[str]) -> str:
    rest = [f"and {len(texts) - MAX_LINES} more"] if len(texts) > MAX_LINES else []
    return "\n  ".join([*texts[:MAX_LINES], *rest])


def _read(run: Run, stream: PromptStream, files: Mapping[GroupKey, StoredFile]) -> dict[GroupKey, Trajectory]:
    """Return the groups of the files. In the phase rollout, those that are damaged or could not be scored are left out,
    so that they are sampled again."""
    groups, problems = {}, []
    for key, file in files.items():
        HEART.beat(f"reads {file.path}")
        try:
            group = read_trajectory(key, file.data)
            _check_prompt(group, stream, key.number, run.config.rollout.num_samples_per_prompt)
        except ValueError as error:
            problems.append(f"{file.path}: {error}")
            continue
        if group.has_score or run.phase.name == "update":
            groups[key] = group
    if problems and run.phase.name == "update":
        raise _damaged(problems)
    for problem in problems:
        print(f"oneworld: {problem}; the group is sampled again", flush=True)
    return groups


def _check_prompt(group: Trajectory, stream: PromptStream, number: int, num_samples: int) -> None:
    batch, prompt = group.batch, stream.at(number).tokens
    if batch.num_conversations != num_samples:
        raise ValueError(f"it has {count_of(batch.num_conversations, 'sample')}, but a group has {num_samples}")
    if batch.samples is not None:  # an environment may add to the prompt, and a later stretch begins with other tokens
        return
    starts = batch.cu_lengths.tolist()
    if any(batch.tokens[start : start + len(prompt)].tolist() != prompt for start in starts[:-1]):
        raise ValueError(f"its prompt is not that of place {number} in the prompt stream")


def _announce(run: Run, stream: PromptStream, runs: Sequence[Path], groups: Mapping[GroupKey, Trajectory]) -> None:
    """Say how much of the first round is there. The phase update refuses to train on a part of it, unless asked to."""
    wanted = first_round(run, stream)
    if not wanted:
        return
    missing = [number for number in wanted if GroupKey(1, number) not in groups]
    num_found, step = len(wanted) - len(missing), run.start_step + 1
    where = ", ".join(str(trajectory_folder(folder, step)) for folder in runs)
    where += " on the nodes" if run.placement.num_nodes > 1 else ""
    print(f"oneworld: {num_found} of the {len(wanted)} groups of step {step} are in {where}", flush=True)
    if run.phase.name != "update" or not missing:
        return
    if not num_found:
        steps = "; ".join(describe_steps(folder) for folder in runs)
        raise ConfigError(
            f"there is nothing to train on: no group of step {step} was found ({steps}). Run the phase rollout "
            "first: train.py --rl-phase rollout, with the same settings. If another run has sampled the groups, give "
            "its folder: --trajectories DIR"
        )
    if not run.phase.takes_partial:
        raise ConfigError(
            f"{len(missing)} of the {len(wanted)} groups of step {step} are missing: numbers "
            f"{format_ranges(missing)} of the prompt stream. Run the phase rollout again, which samples them; give the "
            "folders of all runs that have sampled a part, with --trajectories DIR; or train without them, with "
            "--partial-batch: then these prompts are skipped"
        )


def first_round(run: Run, stream: PromptStream) -> list[int]:
    """Return the groups of the first round that the next step samples. Empty: its groups are in the checkpoint."""
    state, resume = ScheduleState(), run.resume
    if resume is not None and not check_prompts(resume, stream):
        state = saved_schedule(resume)
    schedule = Schedule(plan_schedule(run.config, run.start_step), state)
    now = None if schedule.take_batch() is not None else schedule.begin_round()
    return now.groups if now is not None else []
