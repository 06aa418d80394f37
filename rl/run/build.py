"""Build the objects of an actor rank. All ranks build in the same order, since some builds are collectives.

A rank builds only what its roles need. A rank that only samples loads no trainable model (serve.py), and a rank that
only trains does not import vLLM.
"""

import dataclasses
import functools
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from transformers import AutoConfig

from rl.algo.choose import OwnAdvantage, own_advantage
from rl.checkpoint.checkpoints import Checkpoints
from rl.checkpoint.resume import Resume, check_prompts, read_groups, restore
from rl.checkpoint.save import Saver
from rl.checkpoint.write import RunDescription, read_hf_files
from rl.common.notices import NOTICES
from rl.common.text import count_of
from rl.config.schema import Config, ConfigError
from rl.data.prompts import PromptStream
from rl.evaluation.evaluation import Evaluation
from rl.learner.critic import CriticTrainer
from rl.learner.offload import avoid_fragments, free_cached_memory
from rl.learner.overlap import OverlappedUpdate, why_overlap_waits
from rl.learner.policy import PolicyTrainer
from rl.learner.scoring import Scorer
from rl.learner.sharded_trainer import ShardedTrainer
from rl.model.base_digest import BaseDigests
from rl.model.shards import TensorInfo
from rl.report.health import Finding
from rl.rewards.find import read_rules
from rl.rollout.balance import Balancer
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import Sampling
from rl.rollout.held import HeldGroups
from rl.rollout.overlap import OverlapService
from rl.rollout.sample_exchange import SampleExchange
from rl.rollout.sampler import Sampler
from rl.rollout.schedule import Schedule, ScheduleState, describe_lag, plan_schedule
from rl.run.actor import Actor
from rl.run.models import (
    announce_adapters,
    build_critic,
    build_learner,
    build_scorer,
    digest_bases,
    load_policy,
    reference_of,
)
from rl.run.open import Run
from rl.run.record import begin_story
from rl.run.reporter import Reporter
from rl.run.reporting import build_health, build_writer
from rl.run.serve import build_rollout_service, build_sync, import_engine_of
from rl.sync.sources import WeightSource
from rl.sync.weights import share_tensors
from rl.watch.heart import HEART
from rl.watch.reports import ServiceUnavailable
from rl.world.bootstrap import enable_garbage_collection
from rl.world.orders import Action, Order


def build_actor(run: Run, trains: bool = True) -> Actor:
    """Build an actor. With `trains` False, it only evaluates, and writes no metrics of the run."""
    config, mail, resume = run.config, run.world.mail, run.resume
    HEART.describe(num_steps=config.train.num_steps if trains else 0)
    if run.data is not None and trains and not config.debug.dry_run:
        begin_story(run)
    import_engine_of(run)
    with run.world.stage("load model"):
        policy = load_policy(run)
        if trains:
            announce_adapters(run, policy)
        # Call this only after the engine is built, since the engine measures the free device memory then.
        reference = reference_of(run, policy)
        learner, critic = build_learner(run, policy, reference), build_critic(run)
        bases = digest_bases(run, policy, critic)
    tensors = share_tensors(mail, run.placement, learner.model, config.model.dtype)
    # The engine must find as much free memory as it will have later, so the trainers are offloaded while it is built.
    offloaded = [part for part in (learner, critic) if part is not None and "rollout" in run.roles]
    offload_for_engine(offloaded)
    free_cached_memory(learner.device)
    service = build_rollout_service(run)
    sync = build_sync(run, tensors, service, source=WeightSource(learner.model, learner.weight_slices))
    if service is not None:
        service.engine.sleep()
    for trainer in offloaded:
        trainer.reload()
    if resume is not None:  # after the engine, because vLLM seeds the random generators
        with run.world.stage("resume"):
            restore(learner, critic, resume, run.store, run.placement, trains)
    start_step, num_steps = run.start_step, config.train.num_steps
    last_step = start_step + (run.stored is not None) if run.phase.name == "update" else num_steps
    checkpoints = build_checkpoints(run, learner, tensors, critic, last_step, bases)
    hidden_size = AutoConfig.from_pretrained(run.model_folder).get_text_config().hidden_size
    balancer = Balancer(mail, run.groups.actor_pg, run.placement.actors, hidden_size)
    own, scorer = own_advantage(config.algo), build_scorer(run, learner, reference)
    overlap = _build_overlap(run, learner, scorer, balancer, own) if trains and config.actor.overlap else None

    def execute(action: Action) -> None:
        if action != "publish again":
            return checkpoints.execute(action)
        if overlap is not None:  # inference ranks join a sync only when they have scored all groups
            overlap.update.wait_scored()
        with run.world.stage("sync"):
            sync.publish_again()

    has_engines = bool(run.placement.engines)
    all_failed = error_if_all_fail(config, is_resumed=trains and resume is not None) if has_engines else None
    num_mini_batches = config.algo.num_mini_batches
    rollouts = Rollouts(run.world, run.placement, num_mini_batches, service, execute, balancer, all_failed, overlap)
    if run.stored is not None and run.data is not None:
        rollouts.use_archive(run.stored.groups, samples=functools.partial(_skip_missing, run))
    sampler = build_sampler(run, rollouts, trains)

    def end_run(finding: Finding) -> None:
        """Have all actors end the run before they save this step, or else while they wait for the next rollouts."""
        mail.send(run.world.rank, Order(checkpoints.plan_end(finding.text, finding.is_worth_saving)))

    writer = build_writer(run) if trains else None
    health = build_health(run, writer, sampler, end_run) if writer is not None else None
    actors = run.placement.actors
    reporter = Reporter(run.world, config, run.folder, run.tokenizer, rollouts, writer, actors, health)
    reporter.exchange = sampler.exchange = SampleExchange(run.world, run.placement, config.metrics)
    actor = Actor(
        config,
        learner,
        critic,
        scorer,
        sampler,
        sync,
        checkpoints,
        build_evaluation(run, rollouts) if has_engines else None,
        reporter,
        start_step,
        last_step,
        is_evaluated=not has_engines or (resume is not None and resume.manifest.state["is_evaluated"]),
        own_advantage=own,
        overlap=overlap.update if overlap is not None else None,
    )
    enable_garbage_collection()
    return actor


def offload_for_engine(trainers: Sequence[ShardedTrainer]) -> None:
    """Offload the trainers of a rank with an engine, before the engine is built."""
    if any(trainer.is_short_of_memory for trainer in trainers):
        avoid_fragments()  # before host memory is pinned
    for trainer in trainers:
        trainer.offload()


def _skip_missing(run: Run, number: int) -> bool:
    """Let the phase update go without a group that is in no file, if that was asked for. Otherwise raise ConfigError.
    At the start, the groups of the first round were checked already."""
    if run.phase.takes_partial:
        return False
    raise ConfigError(
        f"group {number} of step {run.start_step + 1} is missing in a later round of sampling; run the phase rollout "
        "again, which samples it"
    )


def error_if_all_fail(config: Config, is_resumed: bool) -> type[Exception] | None:
    """Return the error that ends the run if the reward functions fail for all samples of its first step.

    A new run is not restarted. In a resumed run the functions have worked before, so a restart may help: for example,
    a judge is not reachable for a while.
    """
    if not config.reward.stop_if_all_fail:
        return None
    return ServiceUnavailable if is_resumed else ConfigError


def build_checkpoints(
    run: Run,
    learner: PolicyTrainer,
    tensors: list[TensorInfo],
    critic: CriticTrainer | None = None,
    last_step: int | None = None,
    bases: dict[str, BaseDigests] | None = None,
) -> Checkpoints:
    """Build the checkpoints of a command. Its last step is always saved. By default, that is the last of the run."""
    config = run.config
    hf_files = read_hf_files(run.model_folder, config.model.dtype)
    description = RunDescription(run.folder.name, dataclasses.asdict(config), tuple(tensors), hf_files, bases or {})
    saver = Saver(run.world, run.placement, run.store, description, config.checkpoint.copies)
    last_step = config.train.num_steps if last_step is None else last_step
    last_step = 0 if config.debug.dry_run else last_step  # a dry run does not save it
    return Checkpoints(saver, learner, config.checkpoint, last_step, run.resume, critic)


def _build_overlap(
    run: Run, learner: PolicyTrainer, scorer: Scorer, balancer: Balancer, own: OwnAdvantage | None
) -> OverlapService | None:
    """Return the service that trains on groups while others are sampled, or None if every update must wait."""
    if reason := why_overlap_waits(run.config.algo, own):
        if run.data is not None:
            print(f"oneworld: {reason}", flush=True)
        return None
    update = OverlappedUpdate(learner, scorer, run.config, run.groups.actor_pg, own)
    num_at_once = run.config.rollout.max_num_groups * len(run.placement.engines)
    return OverlapService(run.world.mail, run.placement.leader, balancer, update, num_at_once)


def build_sampler(run: Run, rollouts: Rollouts, trains: bool) -> Sampler:
    """Build the sampler, with the schedule and the groups of the checkpoint if the command trains."""
    config, pg = run.config, run.groups.actor_pg
    rollout = config.rollout
    stream = run.data.stream if run.data is not None else None
    sampling = Sampling(
        rollout.num_samples_per_prompt,
        rollout.temperature,
        rollout.max_new_tokens,
        rollout.top_p,
        rollout.top_k,
        rollout.max_tokens_per_round,
        mean_tokens=config.debug.mean_response_tokens,
        length_seed=config.run.seed,
        keeps_kv=rollout.keep_kv,
    )
    state, held = _restore_rollouts(run, stream) if trains else (ScheduleState(), HeldGroups())
    schedule = Schedule(plan_schedule(config, run.start_step), state)
    rewards = [rule.name for rule in read_rules(config.reward)]
    if schedule.state.max_lag and trains and stream is not None:
        print(f"oneworld: {describe_lag(schedule.plan, schedule.state.max_lag)}", flush=True)
    return Sampler(rollouts, stream, pg, schedule, sampling, config.algo, rewards, held)


def _restore_rollouts(run: Run, stream: PromptStream | None) -> tuple[ScheduleState, HeldGroups]:
    """Return the schedule and the groups of the checkpoint. A fork with other prompts starts from the first prompt.
    All actors call this; only the leader has the stream."""
    resume, num_actors = run.resume, len(run.placement.actors)
    if resume is None:
        return ScheduleState(), HeldGroups()
    warning = check_prompts(resume, stream) if stream is not None else ""
    if warning:
        NOTICES.warn(warning)
    is_other = torch.tensor(bool(warning), dtype=torch.int32)
    dist.all_reduce(is_other, group=run.groups.actor_pg)
    if is_other:
        return ScheduleState(), HeldGroups()
    saved, files = resume.manifest.state, read_groups(resume, run.store, run.placement)
    try:
        state = saved_schedule(resume)
        owners = msgspec.convert(saved.get("owners", {}), dict[int, int], strict=False)
        counts = msgspec.convert(saved.get("counts", {}), dict[str, int])
        held = HeldGroups.from_files(owners, files, num_actors, counts)
        held.check(state, run.placement.actors.index(run.world.rank))
    except ValueError as error:
        raise ConfigError(
            f"the sampled groups of step {resume.manifest.step} cannot be read: {error}. Nothing was changed; restore "
            "its files, or resume from an older step in a new run with checkpoint.resume=PATH"
        ) from error
    held.check_lengths(run.config.rollout.max_new_tokens)
    if run.config.actor.overlap and held.owners:
        raise ConfigError(
            f"actor.overlap: got true, but the checkpoint of step {resume.manifest.step} holds "
            f"{count_of(len(held.owners), 'group')} of earlier rounds, and an overlapped update trains only on groups "
            "of its own round. Set actor.overlap=false, or resume from a run without rollout.max_tokens_per_round and "
            "rollout.ahead"
        )
    return state, held


def saved_schedule(resume: Resume) -> ScheduleState:
    """Return the schedule of a checkpoint. Raise ValueError if it is damaged."""
    saved = resume.manifest.state
    return msgspec.convert(saved.get("schedule", {"num_started": saved["position"]}), ScheduleState)


def build_evaluation(run: Run, rollouts: Rollouts) -> Evaluation | None:
    config = run.config
    if not config.eval.interval:
        return None
    sets = run.data.eval_sets if run.data is not None else {}
    first = {name: prompts[: config.eval.num_prompts or None] for name, prompts in sets.items()}
    return Evaluation(run.world.mail, run.placement, config, rollouts, run.tokenizer, run.folder, first)
