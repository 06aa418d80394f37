"""RL post-training in one torchrun world. Start the same command on every node; the config gives each rank its roles.

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint head:29500 train.py [--config F] [key=value ...]
    torchrun ... train.py --eval-only [--config F] [key=value ...]
    torchrun ... train.py --dry-run [--config F] [key=value ...]
    python train.py --plan [--config F] [--nnodes N --nproc-per-node M] [key=value ...]

Actor ranks drive the loop in `train`. The other ranks, with only rollout or inference, serve them until the run ends.
rl/config/schema.py documents every key, and configs/ has recipes.
"""

import argparse
import json
import sys
from contextlib import suppress
from itertools import islice
from pathlib import Path

import rl.world.bootstrap  # noqa: F401  before torch
from rl.algo.choose import check_functions
from rl.config.load import add_arguments, load_config
from rl.config.schema import DEFAULT_CONFIG, Config, ConfigError, DataConfig, resolve_path
from rl.data.read import read_rows
from rl.evaluation.evaluation import check_best_metric, for_evaluation, show_evaluation
from rl.model.shape import check_model
from rl.placement.roles import plan
from rl.report.console import print_or_exit
from rl.report.metrics import Measures
from rl.rewards.find import check_rewards
from rl.rewards.trial import TrialRow, score_one_row
from rl.run.actor import Actor
from rl.run.build import build_actor
from rl.run.dry_run import for_dry_run, share_footprints
from rl.run.open import Run, open_run
from rl.run.serve import end_run, serve_run
from rl.world.world import World, join


def train(world: World, config: Config, actor: Actor) -> None:
    """Train: prompts -> rollout and reward -> old logprobs -> advantages -> update -> weight sync -> checkpoint."""
    start, reporter = actor.start_step, actor.reporter
    with world.stage("sync"):
        version = actor.publish(start + 1)  # engines start with dummy weights
    if not actor.is_evaluated:  # evaluate before training, or if a signal interrupted the evaluation
        reporter.report(start, version, evaluate(world, config, actor, start, version))
    for step in range(start + 1, config.train.num_steps + 1):
        world.progress.begin_step(step)
        with reporter.profile(), world.stage("step"):
            with world.stage("handover"):
                actor.give_device_to_engine()
            measures = Measures()
            with world.stage("rollout"):
                batch, num_prompts, totals = actor.sampler.sample(version, measures)
            with world.stage("handover"):
                actor.give_device_to_learner()
            with world.stage("logprobs"):
                batch = actor.score(batch, version)
                values = actor.describe(batch, totals)
            with world.stage("advantages"):
                batch = actor.assign_credit(batch, measures)
                reporter.save_rollouts(batch)
            with world.stage("update"):
                actor.update(batch, step, num_prompts, measures)
                values |= measures.reduce(actor.sampler.pg)
                values |= actor.adapt(values, num_prompts)
            with world.stage("sync"):
                version = actor.publish(step + 1)
        actor.checkpoints.end_update(step, version, actor.sampler.stream)
        try:
            values |= evaluate(world, config, actor, step, version)
        finally:  # a signal may stop the run in the evaluation, after this step was saved
            reporter.report(step, version, values, batch)
        with world.stage("checkpoint"):
            actor.checkpoints.end_step(step, values)
    with world.stage("checkpoint"):
        actor.give_device_to_learner()
        actor.checkpoints.close()


def evaluate(world: World, config: Config, actor: Actor, step: int, version: int) -> dict[str, float]:
    """Evaluate on held-out prompts: before training, every eval.interval steps, and after the last step."""
    interval = config.eval.interval
    if actor.evaluation is None or (step % interval and step != config.train.num_steps):
        return {}
    with world.stage("evaluate"):
        actor.give_device_to_engine()
        return actor.evaluation.run(step, version)


def evaluate_alone(run: Run, actor: Actor) -> None:
    """Evaluate the newest checkpoint, without any change to the run's metrics and checkpoints."""
    assert actor.evaluation is not None
    with run.world.stage("sync"):
        version = actor.publish(actor.start_step + 1)
    with run.world.stage("evaluate"):
        actor.give_device_to_engine()
        values = actor.evaluation.run(actor.start_step, version)
    if run.data is not None:
        show_evaluation(run.folder, actor.start_step, values)


def print_plan(args: argparse.Namespace) -> int:
    """Print the table of ranks and roles, or the mistake in the config. Return the exit code.

    This needs no torchrun, no GPU and no download.
    """
    try:
        config = load_config(args.config, args.overrides)
        config = for_evaluation(config) if args.eval_only else config
        num_nodes = args.nnodes or config.placement.get("num_nodes") or 1
        num_ranks = args.nproc_per_node or config.placement.get("num_gpus_per_node") or 2
        sizes = (num_nodes, num_ranks, config.rollout.tensor_parallel_size, config.actor.num_replicas)
        placement = plan(config.placement, *sizes)
        scored = try_rewards(config)
        check_functions(config.algo)
        check_best_metric(config)
        model_folder = resolve_path(config.model.path)
        if (model_folder / "config.json").is_file():
            check_model(config, model_folder)
    except ConfigError as error:
        print(f"oneworld: {error}", file=sys.stderr)
        return 2
    print_or_exit(placement.table())
    print(f"oneworld: {scored}", file=sys.stderr)
    return 0


def try_rewards(config: Config) -> str:
    """Score a row of data.train. If the data is not on this machine, only check that the functions can be called."""
    row = None
    with suppress(ConfigError):
        row = first_row(config.data)
    if row is None:
        check_rewards(config.reward)
        return "the reward functions were not called, because data.train has no complete row on this machine"
    return score_one_row(config.reward, row)


def first_row(data: DataConfig) -> TrialRow | None:
    """Return the first row of data.train that has a prompt and an answer."""
    for place, values, _ in islice(read_rows(next(iter(data.train_weights))), 100):
        prompt, answer = values.get(data.prompt_key), values.get(data.answer_key) if data.answer_key else ""
        if prompt is not None and answer is not None:
            answer = json.dumps(answer) if isinstance(answer, list | dict) else str(answer)
            return TrialRow(place, str(prompt), values | {"answer": answer})
    return None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--plan", action="store_true", help="print the roles of every rank and exit")
    parser.add_argument("--nnodes", type=int, metavar="N", help="with --plan: number of nodes")
    parser.add_argument("--nproc-per-node", type=int, metavar="M", help="with --plan: ranks per node")
    args = parser.parse_intermixed_args()
    if (args.nnodes or args.nproc_per_node) and not args.plan:
        parser.error("--nnodes and --nproc-per-node after train.py need --plan; without it, write them before train.py")
    return args


def main() -> None:
    args = parse_args()
    if args.plan:
        sys.exit(print_plan(args))
    with join() as world:
        config = load_config(args.config, args.overrides)
        config = for_evaluation(config) if args.eval_only else config
        name = Path(args.config or DEFAULT_CONFIG).stem
        config = for_dry_run(config, name) if args.dry_run else config
        run = open_run(world, config, name)
        if "actor" in run.roles:
            actor = build_actor(run, trains=not args.eval_only)
            if args.eval_only:
                evaluate_alone(run, actor)
            else:
                train(world, run.config, actor)
            end_run(run)
        else:
            serve_run(run)
        if args.dry_run:
            share_footprints(world, run.placement.leader)


if __name__ == "__main__":
    main()
