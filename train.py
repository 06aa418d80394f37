"""RL post-training in one torchrun world. Start the same command on every node; the config gives each rank its roles.

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint head:29500 train.py [--config F] [key=value ...]
    torchrun ... train.py --rl-phase rollout [--config F] [key=value ...]     only sample, into files (docs/phases.md)
    torchrun ... train.py --rl-phase update [--config F] [key=value ...]      only train, on such files
    torchrun ... train.py --eval-only [--config F] [key=value ...]
    torchrun ... train.py --dry-run [--config F] [key=value ...]
    python train.py --plan [--config F] [--nnodes N --nproc-per-node M] [--gpu-memory-gb G] [key=value ...]

Actor ranks drive the loop in `train`. The other ranks, with only rollout or inference, serve them until the run ends.
rl/config/schema.py documents every key, and configs/ has recipes.
"""

from argparse import Namespace

import rl.world.bootstrap  # noqa: F401  before torch
from rl.run.plan import parse_or_plan

if __name__ == "__main__":
    arguments = parse_or_plan(__doc__)  # --plan ends here, because the imports below take seconds

from rl.config.modes import load_settings, read_phase
from rl.evaluation.evaluation import show_evaluation
from rl.report.metrics import Measures
from rl.run.actor import Actor
from rl.run.build import build_actor
from rl.run.dry_run import share_footprints
from rl.run.find_groups import find_groups
from rl.run.open import Run, open_run
from rl.run.rollout_phase import RolloutLead, build_rollout_lead
from rl.run.serve import end_run, serve_run
from rl.world.world import World, join


def train(world: World, actor: Actor) -> None:
    """Train: prompts -> rollout and reward -> old logprobs -> advantages -> update -> weight sync -> checkpoint.

    In the phase update, there is one step, and its rollouts come from files.
    """
    start, reporter = actor.start_step, actor.reporter
    with world.stage("sync"):
        version = actor.publish(start + 1)  # engines start with dummy weights
    if not actor.is_evaluated:  # evaluate before training, or if a signal interrupted the evaluation
        reporter.report(start, version, evaluate(world, actor, start, version))
    for step in range(start + 1, actor.last_step + 1):
        world.progress.begin_step(step)
        with reporter.profile(), world.stage("step"):
            with world.stage("handover"):
                actor.give_device_to_engine()
            measures = Measures()
            with world.stage("rollout"):
                batch, groups = actor.sampler.sample(version, measures)
            with world.stage("handover"):
                actor.give_device_to_learner()
            with world.stage("logprobs"):
                batch = actor.score(batch, version)
                values = actor.describe(batch)
            with world.stage("advantages"):
                batch = actor.assign_credit(batch, measures)
                reporter.save_rollouts(batch, groups)
            with world.stage("update"):
                actor.update(batch, step, len(groups), measures)
                values |= measures.reduce(actor.sampler.pg)
                values |= actor.adapt(values, len(groups))
            with world.stage("rollout"):
                actor.sampler.end_round()  # with rollout.ahead, engines have sampled a round during the update
            with world.stage("sync"):
                version = actor.publish(step + 1)
                values |= actor.sync.metrics
        try:
            with world.stage("checkpoint"):
                is_evaluated = not actor.is_evaluation_due(step)
                values |= actor.checkpoints.end_update(step, version, actor.sampler.save(), is_evaluated)
            values |= evaluate(world, actor, step, version)
        finally:  # a signal may stop the run here, after this step was saved
            reporter.report(step, version, values, batch, measures.histograms)
        with world.stage("checkpoint"):
            actor.checkpoints.end_step(step, values)
    with world.stage("checkpoint"):
        actor.give_device_to_learner()
        actor.checkpoints.close()


def evaluate(world: World, actor: Actor, step: int, version: int) -> dict[str, float]:
    """Evaluate on held-out prompts, if that is due."""
    if actor.evaluation is None or not actor.is_evaluation_due(step):
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


def roll_out(world: World, lead: RolloutLead) -> None:
    """The phase rollout: evaluate the newest weights, and sample the groups of the next step into files."""
    with world.stage("sync"):
        version = lead.publish()
    with world.stage("evaluate"):
        lead.evaluate(version)
    with world.stage("rollout"):
        lead.sample(version)


def main(args: Namespace) -> None:
    with join() as world:
        run = find_groups(open_run(world, load_settings(args), read_phase(args), not args.eval_only))
        if run.drives and run.phase.name == "rollout":
            roll_out(world, build_rollout_lead(run))
        elif run.drives and args.eval_only:
            evaluate_alone(run, build_actor(run, trains=False))
        elif run.drives:
            train(world, build_actor(run))
        else:
            serve_run(run)
        end_run(run)
        if args.dry_run:
            share_footprints(world, run.placement.leader)


if __name__ == "__main__":
    main(arguments)
