"""The settings of a command: those of the config, changed for `--eval-only` or `--dry-run`."""

import argparse
import dataclasses
from pathlib import Path

from rl.config.load import load_config
from rl.config.schema import DEFAULT_CONFIG, Config, ConfigError


def load_settings(args: argparse.Namespace) -> tuple[Config, str]:
    """Return the checked settings of a command of train.py, and the name of the config."""
    config, name = load_config(args.config, args.overrides), Path(args.config or DEFAULT_CONFIG).stem
    config = for_evaluation(config) if args.eval_only else config
    return for_dry_run(config, name) if args.dry_run else config, name


def for_evaluation(config: Config) -> Config:
    """Return the settings of a run that only evaluates. Nothing is sampled or trained on at the same time, so its
    placement need not permit that."""
    if not config.data.eval:
        raise ConfigError("--eval-only has nothing to evaluate on: data.eval is empty; give held-out prompts")
    if config.checkpoint.resume == "never":
        raise ConfigError(
            "--eval-only cannot set checkpoints aside, as checkpoint.resume=never asks; to evaluate model.path itself, "
            "give a run.name without checkpoints"
        )
    return dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, ahead=0),
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
