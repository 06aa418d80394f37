"""RL post-training in one torchrun world: the same command on every node, ranks take their roles from the placement
config.

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint head:29500 train.py [--config F] [key=value ...]
    torchrun ... train.py --eval-only [--config F] [key=value ...]
    torchrun ... train.py --dry-run [--config F] [key=value ...]
    python train.py --plan [--config F] [--nnodes N --nproc-per-node M] [key=value ...]

Actor ranks drive the loop in `train`; ranks that are only rollout or inference serve it and return when the run ends.
rl/config/schema.py documents every key; configs/ has recipes.
"""

import argparse
import sys
from pathlib import Path

import rl.world.bootstrap  # noqa: F401  before torch
from rl.algo.mismatch import check_mismatch
from rl.config.load import add_arguments, load_config
from rl.config.schema import DEFAULT_CONFIG, Config, ConfigError, resolve_path
from rl.data.batch import Batch
from rl.evaluation.evaluation import check_best_metric, for_evaluation, show_evaluation
from rl.placement.roles import plan
from rl.report.describe import describe, show
from rl.report.metrics import Measures
from rl.report.profile import profiled
from rl.rewards.find import check_rewards
from rl.rewards.totals import metrics_of
from rl.run.actor import Actor
from rl.run.build import build_actor, check_model, end_run, open_run, serve_run
from rl.run.dry_run import for_dry_run, share_footprints
from rl.world.world import World, join


def train(world: World, config: Config, actor: Actor) -> None:
    """The loop: prompts -> rollout and reward -> old logprobs -> advantages -> update -> weight sync -> checkpoint."""
    with world.stage("sync"):
        version = actor.publish()  # engines start from dummy weights
    if not actor.is_evaluated:  # before training, or where a signal cut it off
        report(world, config, actor, actor.step, version, evaluate(world, config, actor, actor.step, version))
    for step in range(actor.step + 1, config.train.num_steps + 1):
        world.step = step
        with profiled(profile_target(world, config, actor.folder)), world.stage("step"):
            with world.stage("handover"):
                actor.give_device_to_engine()
            measures = Measures()
            with world.stage("rollout"):
                batch, num_prompts, totals = actor.sample(version, measures)
            with world.stage("handover"):
                actor.give_device_to_learner()
            with world.stage("logprobs"):
                batch = actor.score(batch, version)
                values = describe(batch).reduce(actor.pg) | metrics_of(totals)
                check_mismatch(values.get("policy/mismatch_kl", 0.0), config.rollout.max_mismatch_kl)
            with world.stage("advantages"):
                batch = actor.assign_credit(batch, measures)
                save_rollouts(world, config, actor.folder, batch)
            with world.stage("update"):
                actor.checkpoints.wait_copied()
                actor.update(batch, step, num_prompts, measures)
                values |= measures.reduce(actor.pg)
                values |= actor.adapt(values, num_prompts)
            with world.stage("sync"):
                version = actor.publish()
        actor.checkpoints.end_update(step, version, actor.stream)
        try:
            values |= evaluate(world, config, actor, step, version)
        finally:  # a signal may stop the run here, after this step was saved
            report(world, config, actor, step, version, values, batch)
        with world.stage("checkpoint"):
            actor.checkpoints.end_step(step, values)
    with world.stage("checkpoint"):
        actor.give_device_to_learner()
        actor.checkpoints.close()


def evaluate(world: World, config: Config, actor: Actor, step: int, version: int) -> dict[str, float]:
    """On held-out prompts: before training, every eval.interval steps, and after the last."""
    interval = config.eval.interval
    if actor.evaluation is None or (step % interval and step != config.train.num_steps):
        return {}
    with world.stage("evaluate"):
        actor.give_device_to_engine()
        return actor.evaluation.run(step, version)


def evaluate_alone(world: World, actor: Actor) -> None:
    """Of what the run has come to: leaves its metrics and checkpoints as they are."""
    assert actor.evaluation is not None
    with world.stage("sync"):
        version = actor.publish()
    with world.stage("evaluate"):
        actor.give_device_to_engine()
        values = actor.evaluation.run(actor.step, version)
    if actor.stream is not None:
        show_evaluation(actor.folder, actor.step, values)


def profile_target(world: World, config: Config, folder: Path) -> Path | None:
    first = config.debug.profile_step
    is_wanted = first and first <= world.step < first + config.debug.profile_num_steps
    return folder / "profile" / f"step_{world.step}.rank_{world.rank}" if is_wanted else None


def save_rollouts(world: World, config: Config, folder: Path, batch: Batch) -> None:
    if config.debug.save_rollouts:
        file = folder / "rollouts" / f"step_{world.step}.rank_{world.rank}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(batch.to_bytes())


def report(
    world: World,
    config: Config,
    actor: Actor,
    step: int,
    version: int,
    values: dict[str, float],
    batch: Batch | None = None,
) -> None:
    """On the leader: one step's metrics, and now and then what was sampled."""
    if config.debug.dry_run:
        return
    seconds = {f"time/{stage}": seconds for stage, seconds in world.take_stage_seconds().items()}
    if actor.writer is None:
        return
    if batch is not None:
        values = values | {"perf/tokens_per_s": values["rollout/tokens"] / seconds["time/step"]}
        if config.metrics.samples_interval and (step - 1) % config.metrics.samples_interval == 0:
            actor.writer.write_text("rollout/samples", show(batch, actor.tokenizer, config.metrics.num_samples), step)
    actor.writer.write(step, version, values | seconds)


def print_plan(args: argparse.Namespace) -> int:
    """The table of ranks and roles, or the mistake; needs no torchrun, no GPU and no model that is not local."""
    try:
        config = load_config(args.config, args.overrides)
        config = for_evaluation(config) if args.eval_only else config
        num_nodes = args.nnodes or config.placement.get("num_nodes") or 1
        num_ranks = args.nproc_per_node or config.placement.get("num_gpus_per_node") or 2
        sizes = (num_nodes, num_ranks, config.rollout.tensor_parallel_size, config.actor.num_replicas)
        placement = plan(config.placement, *sizes)
        check_rewards(config.reward)
        check_best_metric(config)
        model_folder = resolve_path(config.model.path)
        if (model_folder / "config.json").is_file():
            check_model(config, model_folder)
    except ConfigError as error:
        print(f"oneworld: {error}", file=sys.stderr)
        return 2
    print(placement.table())
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--plan", action="store_true", help="print the roles of every rank and exit")
    parser.add_argument("--nnodes", type=int, metavar="N", help="with --plan: number of nodes")
    parser.add_argument("--nproc-per-node", type=int, metavar="M", help="with --plan: ranks per node")
    args = parser.parse_intermixed_args()
    if (args.nnodes or args.nproc_per_node) and not args.plan:
        parser.error("--nnodes and --nproc-per-node are torchrun's, before train.py; here they go with --plan")
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
                evaluate_alone(world, actor)
            else:
                train(world, run.config, actor)
            end_run(run)
        else:
            serve_run(run)
        if args.dry_run:
            share_footprints(world, run.placement.leader)


if __name__ == "__main__":
    main()
