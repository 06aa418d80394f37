"""Builds what this rank's roles need, in the order that all ranks share, and nothing more: a rank that only samples
loads no trainable model, a rank that only trains does not import vLLM."""

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from rl.checkpoint.checkpoints import Checkpoints
from rl.checkpoint.resume import Resume, agree_on_resume, restore
from rl.checkpoint.save import Saver
from rl.checkpoint.store import CheckpointStore
from rl.checkpoint.write import Record, read_hf_files
from rl.config.schema import Config, ConfigError, with_patience
from rl.data.prompts import PromptStream, Tokenizer, sample_seed
from rl.data.sources import Data, read_data
from rl.evaluation.evaluation import Evaluation, check_best_metric
from rl.learner.critic import Critic
from rl.learner.policy import Learner
from rl.learner.scoring import LocalScorer, LogprobService, RemoteScorer, Scorer
from rl.model.load import Compute, fill_with_noise, find_model, has_weights, load_model, stop_token_ids
from rl.model.positions import freeze as freeze_positions
from rl.model.shape import check_model
from rl.model.shards import TensorInfo
from rl.placement.groups import Groups, make_groups
from rl.placement.roles import Placement, plan
from rl.report.metrics import MetricsWriter
from rl.rewards.pool import RewardPool
from rl.rollout.balance import Balancer
from rl.rollout.build import build_engine
from rl.rollout.collect import Rollouts
from rl.rollout.engine import Engine, EngineSeat
from rl.rollout.service import RolloutService
from rl.run.actor import Actor
from rl.sync.plan import make_plan
from rl.sync.probe import LIMITS, Probe, make_probe
from rl.sync.weights import Receiver, SyncService, WeightSync, share_tensors
from rl.watch.text import count_of
from rl.world.bootstrap import collect_garbage_from_now_on, reward_server
from rl.world.restarts import launcher_process
from rl.world.service import EndService, Service, serve
from rl.world.world import World

MAX_REWARD_WORKERS = 8


@dataclass
class Run:
    """What every rank knows about the run before it builds anything."""

    world: World
    config: Config  # whose train.num_steps is the true one, also where it follows from train.num_epochs
    placement: Placement
    folder: Path  # of the run
    model_folder: Path
    groups: Groups
    checkpoint_store: CheckpointStore
    resume: Resume | None
    data: Data | None = None  # the leader's
    rewards: RewardPool | None = None  # on ranks that lead an engine

    @property
    def roles(self) -> tuple[str, ...]:
        return self.placement.roles[self.world.rank]


def open_run(world: World, config: Config, config_name: str) -> Run:
    """Checks everything that can be checked without loading a model, then connects the process groups."""
    config = with_patience(config)
    folder = Path(config.run.dir) / _run_name(world, config, config_name)
    world.begin_run(folder, config)
    num_nodes, uneven = divmod(world.size, world.num_ranks_per_node)
    if uneven:
        raise ConfigError(
            f"got {count_of(world.size, 'rank')}, {world.num_ranks_per_node} of them on the node of rank {world.rank}; "
            "all nodes need equally many: give the same --nproc-per-node on each"
        )
    placement = plan(
        config.placement,
        num_nodes,
        world.num_ranks_per_node,
        config.rollout.tensor_parallel_size,
        config.actor.num_replicas,
    )
    world.introduce(",".join(placement.roles[world.rank]))
    check_best_metric(config)
    rewards = _start_rewards(world, config, placement)
    if placement.scorers and config.algo.kl_coef and config.algo.kl_estimator == "full":
        raise ConfigError(
            "algo.kl_estimator=full computes the reference beside the policy, on the actors; give the inference ranks "
            "another role, or choose k1, k2 or k3"
        )
    if world.rank == placement.leader:
        print(f"{folder}: {placement.summary()}; loading", flush=True)
        if placement.scorers and not _score_fields(config):
            print(
                "oneworld: the inference ranks have nothing to do: without algo.kl_coef there is no reference, and one "
                "update on exactly on-policy data needs no old logprobs from a pass of their own "
                "(algo.old_logprobs=auto); give these ranks another role",
                flush=True,
            )
    model_folder = find_model(config.model.path)
    check_model(config, model_folder)
    if rewards is not None:
        rewards.wait_ready()
    world.meet("model found")  # a download may take long, and what follows has a time limit
    world.connect(config.debug.share_gpu, config.world.transfer_timeout_s)
    groups = make_groups(placement, world.rank, world.device.type, config.world.transfer_timeout_s)
    with world.stage("read data"):
        data = None
        if world.rank == placement.leader:
            data = read_data(config, AutoTokenizer.from_pretrained(model_folder))
        config = agree_on_steps(world, placement, config, data)
    path = config.checkpoint.resume
    source = None if path in ("auto", "never") else Path(path)
    checkpoint_store = CheckpointStore(world.mail, folder / "checkpoints", source, placement.node_leads)
    with world.stage("resume"):
        resume = agree_on_resume(world.mail, placement, checkpoint_store, config)
    return Run(world, config, placement, folder, model_folder, groups, checkpoint_store, resume, data, rewards)


def agree_on_steps(world: World, placement: Placement, config: Config, data: Data | None) -> Config:
    """train.num_epochs as steps, which only the leader can count."""
    if not config.train.num_epochs:
        return config
    if data is not None:
        num_prompts = len(data.stream) * config.train.num_epochs
        num_steps = -(-num_prompts // config.train.num_prompts_per_step)
        print(f"oneworld: train.num_epochs = {config.train.num_epochs}: {count_of(num_steps, 'step')}", flush=True)
        for rank in range(placement.world_size):
            world.mail.send(rank, "steps", {"num_steps": num_steps})
    message = world.mail.receive("steps")
    assert message is not None
    train = dataclasses.replace(config.train, num_steps=message.meta["num_steps"])
    return dataclasses.replace(config, train=train)


def _start_rewards(world: World, config: Config, placement: Placement) -> RewardPool | None:
    """Functions are imported in the server of each rank that leads an engine; the others' are not needed."""
    if not any(ranks[0] == world.rank for ranks in placement.engines):
        reward_server().dismiss()
        return None

    def deliver(key: tuple[int, ...], result: dict[str, Any]) -> None:
        world.mail.send(world.rank, "scored", {"key": key, "result": result})

    share = len(os.sched_getaffinity(0)) // world.num_ranks_per_node
    num_workers = config.reward.num_workers or max(1, min(MAX_REWARD_WORKERS, share))
    pool = RewardPool(reward_server(), config.reward, num_workers, deliver, world.mail.fail)
    world.closers.append(pool.close)
    return pool


def _run_name(world: World, config: Config, config_name: str) -> str:
    """The config's name and the time the launcher started, so that a restarted world finds its folder again."""
    if config.run.name:
        return config.run.name
    if world.rank == 0:
        launcher = launcher_process()
        started = time.strftime("%Y%m%d-%H%M%S", time.localtime(launcher.create_time()))
        world.store.set("run/name", f"{config_name}-{started}-{launcher.pid}")
    return world.store.get("run/name").decode()


def build_actor(run: Run, trains: bool = True) -> Actor:
    """With `trains` False it only evaluates, whatever the run trained on, and leaves the run's metrics alone."""
    config, mail = run.config, run.world.mail
    tokenizer = AutoTokenizer.from_pretrained(run.model_folder)
    model = _load(run, trainable=True, filled=run.resume is None)
    updates = config.train.num_steps * config.algo.num_epochs * config.algo.num_mini_batches
    learner = Learner(model, run.groups.actor_pg, run.world.device, config.actor, config.algo, config.rollout, updates)
    critic = _build_critic(run) if config.algo.has_critic else None
    tensors = share_tensors(mail, run.placement, model, config.model.dtype)
    service, sync = _build_collocated(run, tokenizer, learner, critic, tensors)
    if run.resume is not None:  # after the engine was built, which seeds the process
        with run.world.stage("resume"):
            restore(learner, run.resume, run.checkpoint_store, run.placement, run.world.rank, critic)
    checkpoints = build_checkpoints(run, learner, tensors, critic)
    hidden_size = AutoConfig.from_pretrained(run.model_folder).get_text_config().hidden_size
    balancer = Balancer(mail, run.groups.actor_pg, run.placement.actors, hidden_size)

    def obey(order: str) -> None:
        if order != "publish again":
            return checkpoints.obey(order)
        with run.world.stage("sync"):
            sync.publish(again=True)

    rollouts = Rollouts(mail, run.placement, config.algo.num_mini_batches, service, obey, balancer)
    step = run.resume.manifest.step if run.resume is not None else 0
    is_evaluated = run.resume is not None and run.resume.manifest.state["is_evaluated"]
    actor = Actor(
        config,
        learner,
        critic,
        _build_scorer(run, learner),
        rollouts,
        sync,
        checkpoints,
        step,
        is_evaluated,
        run.groups.actor_pg,
        run.folder,
        tokenizer,
        _build_evaluation(run, rollouts, tokenizer),
    )
    sync.make_room = actor.give_device_to_engine
    if run.data is not None:
        actor.stream = run.data.stream
        if run.resume is not None and trains:
            _restore_position(run.resume, actor.stream)
        if trains and not config.debug.dry_run:
            actor.writer = writer = MetricsWriter(run.folder, config.train.num_steps, step)
            run.world.closers.append(lambda: writer.close(rollouts.engine_name))
    collect_garbage_from_now_on()
    return actor


def _build_collocated(
    run: Run, tokenizer: Tokenizer, learner: Learner, critic: Critic | None, tensors: list[TensorInfo]
) -> tuple[RolloutService | None, WeightSync]:
    """An actor's engine, if it hosts one, and its weight sync. The engine finds the device as it will have it later,
    and then sleeps, as it does whenever weights come."""
    index = run.placement.engine_of(run.world.rank)
    if index is None:
        return None, _build_sync(run, tensors, [], learner)
    trainers = [learner] if critic is None else [learner, critic]
    for trainer in trainers:
        trainer.release_device()
    service = _build_rollout_service(run, tokenizer, index)
    sync = _build_sync(run, tensors, [service.engine], learner)
    service.on_failed, service.on_rebuilt = sync.forget, sync.add
    service.engine.sleep()
    for trainer in trainers:
        trainer.take_device()
    return service, sync


def _build_critic(run: Run) -> Critic:
    config, device = run.config, run.world.device
    folder = find_model(config.critic.path) if config.critic.path else run.model_folder
    is_saved = run.resume is not None and run.resume.has_critic
    model = _load(run, trainable=True, filled=not is_saved, folder=folder, as_critic=True)
    max_tokens = config.inference.max_tokens_per_micro_batch
    return Critic(model, run.groups.actor_pg, device, config.actor, config.algo, config.critic, max_tokens)


def _build_evaluation(run: Run, rollouts: Rollouts, tokenizer: Tokenizer) -> Evaluation | None:
    config = run.config
    if not config.eval.interval:
        return None
    sets = run.data.eval_sets if run.data is not None else {}
    first = {name: prompts[: config.eval.num_prompts or None] for name, prompts in sets.items()}
    return Evaluation(run.world.mail, run.placement, config, rollouts, tokenizer, run.folder, first)


def _restore_position(resume: Resume, stream: PromptStream) -> None:
    state = resume.manifest.state
    if state["data"] == stream.digest:
        stream.position = state["position"]
    elif resume.is_own:
        raise ConfigError(
            f"data.train, its templates or run.seed are not those of step {resume.manifest.step}; a run goes on with "
            "the same prompts. To train on others from here give the new run another run.name, and this one's path as "
            "checkpoint.resume"
        )
    else:
        print("oneworld: other prompts than those of the checkpoint: they start from the first", flush=True)


def build_checkpoints(
    run: Run, learner: Learner, tensors: list[TensorInfo], critic: Critic | None = None
) -> Checkpoints:
    config, resume = run.config, run.resume
    hf_files = read_hf_files(run.model_folder, config.model.dtype)
    record = Record(run.folder.name, dataclasses.asdict(config), tuple(tensors), hf_files)
    saver = Saver(run.world, run.placement, run.checkpoint_store, record, config.checkpoint.copies)
    learner.probe_tokens = _probe(run).tokens if saver.is_leader else ()
    last_step = 0 if config.debug.dry_run else config.train.num_steps  # which is saved
    return Checkpoints(saver, learner, config.checkpoint, last_step, resume, critic)


def serve_run(run: Run) -> None:
    """A rank that only samples or scores: serves until the run ends."""
    services: list[Service] = []
    rollout = None
    if (index := run.placement.engine_of(run.world.rank)) is not None:
        rollout = _build_rollout_service(run, AutoTokenizer.from_pretrained(run.model_folder), index)
    logprobs = _build_logprob_service(run) if "inference" in run.roles else None
    tensors = share_tensors(run.world.mail, run.placement, None, run.config.model.dtype)
    receivers: list[Receiver] = [rollout.engine] if rollout is not None else []
    receivers += [logprobs] if logprobs is not None else []
    sync = _build_sync(run, tensors, receivers)
    if rollout is not None:
        rollout.on_failed, rollout.on_rebuilt = sync.forget, sync.add

    def on_version(version: int) -> None:
        run.world.step = version  # the step that samples from it

    end = EndService()
    followers = rollout.followers if rollout is not None else ()
    services += [SyncService(sync, run.world.mail, followers, on_version), end]
    services += [service for service in (rollout, logprobs) if service is not None]
    if rollout is not None:
        rollout.begin()
    collect_garbage_from_now_on()
    with run.world.stage("serve"):
        serve(run.world, services, until=lambda: end.ended)


def end_run(run: Run) -> None:
    """On the leader: releases the ranks that only serve."""
    if run.world.rank == run.placement.leader:
        for rank in range(run.placement.world_size):
            if rank not in run.placement.actors:
                run.world.mail.send(rank, "end")


def _probe(run: Run) -> Probe:
    config = run.config
    vocab_size = AutoConfig.from_pretrained(run.model_folder).get_text_config().vocab_size
    return make_probe(vocab_size, config.data.max_prompt_tokens, config.sync.probe_limit or LIMITS[config.model.dtype])


def _load(
    run: Run, trainable: bool, filled: bool = True, folder: Path | None = None, as_critic: bool = False
) -> nn.Module:
    mesh = run.groups.actor_mesh or run.groups.scorer_mesh
    assert mesh is not None
    config = run.config
    compiled = config.actor.compile and run.world.device.type == "cuda"
    on_host = config.actor.offload == "always" and "actor" in run.roles
    compute = Compute(compiled, config.actor.recompute, on_host)
    dtype, folder = config.model.dtype, folder or run.model_folder
    is_made_up = filled and config.debug.dry_run and not has_weights(folder)
    filled = filled and not is_made_up
    model = load_model(folder, mesh, run.world.device, dtype, trainable, filled, compute, as_critic)
    freeze_positions(model, config.max_sequence_tokens)
    if is_made_up:
        fill_with_noise(model, mesh)
    return model


def _build_scorer(run: Run, learner: Learner) -> Scorer:
    config, fields = run.config, _score_fields(run.config)
    if run.placement.scorers:
        return RemoteScorer(run.world.mail, run.placement.scorers, fields)
    models = {"old_logprobs": learner.model} if config.algo.has_old_pass else {}
    if config.algo.kl_coef:
        models["ref_logprobs"] = reference = _load(run, trainable=False)
        if config.algo.kl_estimator == "full":
            learner.reference = reference
    max_tokens, temperature = config.inference.max_tokens_per_micro_batch, config.rollout.temperature
    rests = config.actor.offload == "rollout"
    return LocalScorer(models, fields, run.groups.actor_pg, max_tokens, temperature, run.world.device, rests)


def _build_logprob_service(run: Run) -> LogprobService:
    config = run.config
    names = [name for name in _score_fields(config) if name != "certainty"]  # which old_logprobs' model gives
    models = {name: _load(run, trainable=False) for name in dict.fromkeys(["old_logprobs", *names])}
    max_tokens = config.inference.max_tokens_per_micro_batch
    return LogprobService(
        run.world.mail, run.placement.scorers, models, max_tokens, config.rollout.temperature, run.world.device
    )


def _score_fields(config: Config) -> list[str]:
    """What a separate pass computes."""
    algo = config.algo
    wanted = {
        "old_logprobs": algo.has_old_pass,
        "certainty": bool(algo.certainty_coef),
        "ref_logprobs": bool(algo.kl_coef) and algo.kl_estimator != "full",
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _build_rollout_service(run: Run, tokenizer: Tokenizer, index: int) -> RolloutService:
    """Of this engine, which the rank has a part of."""
    config, rank = run.config, run.world.rank
    ranks = run.placement.engines[index]
    seat = EngineSeat(
        name=f"oneworld-{run.world.id}-engine{index}",
        tp_rank=ranks.index(rank),
        tp_size=len(ranks),
        store=run.world.store,
        device=run.world.device,
        shares_device="actor" in run.roles,
        stop_token_ids=[] if config.debug.ignore_stop_tokens else stop_token_ids(run.model_folder),
        # Ranks of one engine sample the same tokens only if nothing else draws from their generators.
        deterministic=config.rollout.deterministic or len(ranks) > 1,
    )
    with run.world.stage("build engine"):
        engine = build_engine(config, run.model_folder, seat)
    if engine.notice and index == seat.tp_rank == 0:
        print(f"oneworld: {engine.notice}", flush=True)
    torch.manual_seed(sample_seed(config.run.seed, 0, index, 0))  # engines differ

    def rebuild(old: Engine) -> Engine:
        with run.world.stage("build engine"):
            return build_engine(config, run.model_folder, seat, old)

    max_num_groups = max(1, config.rollout.max_num_seqs // config.rollout.num_samples_per_prompt)
    seed = config.run.seed if seat.deterministic else None
    service = RolloutService(
        run.world, engine, ranks, run.placement.leader, max_num_groups, seed, run.rewards, tokenizer, rebuild
    )
    run.world.closers.append(lambda: service.engine.close())
    return service


def _build_sync(
    run: Run, tensors: list[TensorInfo], receivers: Sequence[Receiver], learner: Learner | None = None
) -> WeightSync:
    config, placement = run.config, run.placement
    sync = WeightSync(
        run.world.mail,
        placement,
        make_plan(tensors, placement, config.sync.bucket_mb, run.world.device),
        run.groups.sync_pgs,
        config.sync,
        run.world.device,
        _probe(run),
        model=learner.model if learner is not None else None,
        receivers=receivers,
        slices=learner.weight_slices if learner is not None else None,
    )
    if run.resume is not None:
        sync.version = run.resume.version - 1  # which the first publication brings
    run.world.take_orders_to(placement.leader)
    return sync
