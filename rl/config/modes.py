"""The settings of a command: those of the config, changed for `--eval-only` or `--dry-run`, and checked for a phase."""

import argparse
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rl.config.load import load_config
from rl.config.schema import DEFAULT_CONFIG, Config, ConfigError, Phase, Split


@dataclass(frozen=True)
class PhaseOptions:
    """What a command does of a step: `--rl-phase` and the options that go with it."""

    name: Phase = "both"
    split: Split = "all"
    part: tuple[int, int] = (1, 1)  # the phase rollout samples the first of so many parts of the batch
    folders: tuple[str, ...] = ()  # of the runs whose groups the phase update trains on; empty: this run
    takes_partial: bool = False  # the phase update trains even if groups of the batch are missing

    @property
    def samples_part(self) -> bool:
        return self.part[1] > 1

    def is_in_part(self, number: int) -> bool:
        """Return whether this command samples the group at this place of the prompt stream."""
        return number % self.part[1] == self.part[0] - 1


BOTH = PhaseOptions()


class Settings(NamedTuple):
    """The settings of a command."""

    config: Config
    name: str  # of the config
    of_run: Config  # those of the run that a dry run tries out. Otherwise the same


def load_settings(args: argparse.Namespace) -> Settings:
    """Return the checked settings of a command of train.py."""
    config, name = load_config(args.config, args.overrides), Path(args.config or DEFAULT_CONFIG).stem
    phase = read_phase(args)
    for problem in _phase_problems(config, phase):
        raise ConfigError(f"--rl-phase {phase.name}: {problem}")
    if args.eval_only or phase.split == "eval-only":
        config = for_evaluation(config, "--eval-only" if args.eval_only else "--rollout-split eval-only")
    return Settings(for_dry_run(config, name) if args.dry_run else config, name, config)


def read_phase(args: argparse.Namespace) -> PhaseOptions:
    """Return the phase of a command. Raise ConfigError if its options do not fit together."""
    part = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", args.rollout_part, re.ASCII)
    if part is None or int(part[1]) > int(part[2]):
        raise ConfigError(f"--rollout-part: got {args.rollout_part!r}; it must be K/N with K from 1 to N, such as 1/2")
    phase = PhaseOptions(
        args.rl_phase,
        args.rollout_split,
        (int(part[1]), int(part[2])),
        tuple(args.trajectories),
        args.partial_batch,
    )
    given = {
        "--rollout-split": ("rollout", phase.split != "all"),
        "--rollout-part": ("rollout", phase.samples_part),
        "--trajectories": ("update", bool(phase.folders)),
        "--partial-batch": ("update", phase.takes_partial),
    }
    for option, (needed, is_given) in given.items():
        if is_given and phase.name != needed:
            raise ConfigError(f"{option} needs --rl-phase {needed}, but the phase is {phase.name}")
    if phase.samples_part and phase.split == "eval-only":
        raise ConfigError("--rollout-part divides a batch of training prompts; leave it out with eval-only")
    for option, is_given in {"--eval-only": args.eval_only, "--dry-run": args.dry_run}.items():
        if is_given and phase.name != "both":
            instead = (
                "write --rl-phase rollout --rollout-split eval-only" if args.eval_only else "leave one of them out"
            )
            raise ConfigError(f"{option} and --rl-phase {phase.name} exclude each other; {instead}")
    return phase


def _phase_problems(config: Config, phase: PhaseOptions) -> Iterator[str]:
    """Yield what is wrong with the settings if rollout and update are separate commands."""
    if phase.name == "both":
        return
    rollout, algo = config.rollout, config.algo
    if not config.run.name:
        yield "run.name is empty, so each command would be a new run; give a name, the same for rollout and update"
    if config.checkpoint.resume == "never":
        yield (
            "checkpoint.resume: got never, so each command would begin again with step 1; set auto, and give a new "
            "run.name to start over"
        )
    if phase.split == "eval-only":
        return
    if config.checkpoint.save_interval < 0:
        yield "checkpoint.save_interval: got -1, but a phase needs the step that the last one saved; set 0 or more"
    if rollout.ahead:
        yield (
            "rollout.ahead: got 1, but separate commands cannot sample and train at the same time; set rollout.ahead=0"
        )
    if config.actor.overlap:
        yield (
            "actor.overlap: got true, but separate commands cannot train while engines sample; set actor.overlap=false"
        )
    if rollout.keep_kv:
        yield "rollout.keep_kv: got true, but an engine's KV cache ends with its command; set rollout.keep_kv=false"
    metric = config.checkpoint.best_metric
    if metric.startswith("eval/"):
        yield (
            f"checkpoint.best_metric: got {metric!r}, but the command that saves a step does not evaluate it; choose "
            "a metric of the update, such as reward/mean, or keep steps with checkpoint.keep_every"
        )
    several = {"algo.dynamic_sampling=false": algo.dynamic_sampling}
    several["rollout.max_tokens_per_round=0"] = rollout.max_rounds > 1
    for remedy in (remedy for remedy, is_set in several.items() if is_set):
        if phase.samples_part:
            yield (
                "--rollout-part: a step may take several rounds of sampling, and the second one depends on all groups "
                f"of the first; leave the option out, or set {remedy}"
            )
        if phase.takes_partial:
            yield (
                "--partial-batch: a step may take several rounds of sampling, and the groups of a round depend on all "
                f"groups of the one before; leave the option out, or set {remedy}"
            )
    num_prompts = config.train.num_prompts_per_step
    if phase.part[1] > num_prompts:
        yield (
            f"--rollout-part: got {phase.part[1]} parts, but a batch has train.num_prompts_per_step = {num_prompts} "
            "groups; make at most as many parts"
        )


def for_evaluation(config: Config, option: str = "--eval-only") -> Config:
    """Return the settings of a command that only evaluates. Nothing is sampled or trained on at the same time, so its
    placement need not permit that."""
    if not config.data.eval:
        raise ConfigError(f"{option} has nothing to evaluate on: data.eval is empty; give held-out prompts")
    if config.checkpoint.resume == "never":
        raise ConfigError(
            f"{option} cannot set checkpoints aside, as checkpoint.resume=never asks; to evaluate model.path itself, "
            "give a run.name without checkpoints"
        )
    return dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, ahead=0, keep_kv=False),
        actor=dataclasses.replace(config.actor, overlap=False),
        eval=dataclasses.replace(config.eval, interval=config.eval.interval or 1),
    )


def for_dry_run(config: Config, config_name: str) -> Config:
    """Return the config of a dry run. The folder is separate, since the real run's folder may have checkpoints. Rounds
    have no token limit, because the only update must also train on the longest responses."""
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, name=f"{config.run.name or config_name}.dry-run"),
        train=dataclasses.replace(config.train, num_steps=1, num_epochs=0),
        rollout=dataclasses.replace(config.rollout, max_tokens_per_round=0, keep_kv=False),
        eval=dataclasses.replace(config.eval, interval=0),
        checkpoint=dataclasses.replace(config.checkpoint, save_interval=0, best_metric="", resume="auto"),
        reward=dataclasses.replace(config.reward, stop_if_all_fail=True),
        debug=dataclasses.replace(config.debug, dry_run=True, save_rollouts=False),
    )
