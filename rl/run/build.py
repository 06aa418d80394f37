"""Build the objects of an actor rank. All ranks build in the same order, since some builds are collectives.

A rank builds only what its roles need. A rank that only samples loads no trainable model (serve.py), and a rank that
only trains does not import vLLM.
"""

import dataclasses
import functools

from transformers import AutoConfig, AutoTokenizer

from rl.checkpoint.checkpoints import Checkpoints
from rl.checkpoint.resume import Resume, restore
from rl.checkpoint.save import Saver
from rl.checkpoint.write import RunDescription, read_hf_files
from rl.config.schema import AlgoConfig, Config, ConfigError
from rl.data.prompts import PromptStream, Tokenizer
from rl.evaluation.evaluation import Evaluation
from rl.learner.critic import CriticTrainer
from rl.learner.policy import PolicyTrainer
from rl.model.shards import TensorInfo
from rl.report.metrics import MetricsWriter
from rl.rollout.balance import Balancer
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import Sampling
from rl.rollout.dynamic_sampling import DynamicSampling, Sampler
from rl.rollout.service import RolloutService
from rl.run.actor import Actor, Start, Trainers
from rl.run.engines import build_rollout_service, build_sync
from rl.run.models import build_critic, build_learner, build_scorer, load
from rl.run.open import Run
from rl.run.reporter import Reporter
from rl.sync.weights import WeightSync, share_tensors
from rl.world.bootstrap import enable_garbage_collection
from rl.world.orders import Action


def build_actor(run: Run, trains: bool = True) -> Actor:
    """Build an actor. With `trains` False, it only evaluates, and writes no metrics of the run."""
    config, mail, resume = run.config, run.world.mail, run.saved.resume
    tokenizer = AutoTokenizer.from_pretrained(run.model_folder)
    # Load the reference after the engine, which measures the free device memory while it is built.
    load_reference = functools.cache(lambda: load(run, trainable=False))
    learner = build_learner(run, load_reference)
    critic = build_critic(run)
    tensors = share_tensors(mail, run.placement, learner.model, config.model.dtype)
    service, sync = _build_collocated(run, tokenizer, learner, critic, tensors)
    if resume is not None:  # after the engine, because vLLM seeds the random generators
        with run.world.stage("resume"):
            restore(learner, resume, run.saved.store, run.placement, run.world.rank, critic)
    checkpoints = build_checkpoints(run, learner, tensors, critic)
    hidden_size = AutoConfig.from_pretrained(run.model_folder).get_text_config().hidden_size
    balancer = Balancer(mail, run.groups.actor_pg, run.placement.actors, hidden_size)

    def execute(action: Action) -> None:
        if action != "publish again":
            return checkpoints.execute(action)
        with run.world.stage("sync"):
            sync.publish_again()

    rollouts = Rollouts(mail, run.placement, config.algo.num_mini_batches, service, execute, balancer)
    start = Start(resume.manifest.step, resume.manifest.state["is_evaluated"]) if resume is not None else Start()
    actor = Actor(
        config,
        Trainers(learner, critic, build_scorer(run, learner, load_reference)),
        _build_sampler(run, rollouts, trains),
        sync,
        checkpoints,
        _build_evaluation(run, rollouts, tokenizer),
        _build_reporter(run, rollouts, tokenizer, start.step, trains),
        start,
    )
    enable_garbage_collection()
    return actor


def _build_collocated(
    run: Run, tokenizer: Tokenizer, learner: PolicyTrainer, critic: CriticTrainer | None, tensors: list[TensorInfo]
) -> tuple[RolloutService | None, WeightSync]:
    """Build an actor's engine, if it hosts one, and its weight sync.

    The learner is offloaded meanwhile, so that the engine finds as much free memory as it will have later. Then the
    engine sleeps, and the learner returns to the device.
    """
    index = run.placement.engine_of(run.world.rank)
    if index is None:
        return None, build_sync(run, tensors, [], learner)
    trainers = [learner] if critic is None else [learner, critic]
    for trainer in trainers:
        trainer.offload()
    service = build_rollout_service(run, tokenizer, index)
    sync = build_sync(run, tensors, [service.engine], learner)
    service.host.add_user(sync)
    service.engine.sleep()
    for trainer in trainers:
        trainer.reload()
    return service, sync


def build_checkpoints(
    run: Run, learner: PolicyTrainer, tensors: list[TensorInfo], critic: CriticTrainer | None = None
) -> Checkpoints:
    config = run.config
    hf_files = read_hf_files(run.model_folder, config.model.dtype)
    description = RunDescription(run.folder.name, dataclasses.asdict(config), tuple(tensors), hf_files)
    saver = Saver(run.world, run.placement, run.saved.store, description, config.checkpoint.copies)
    last_step = 0 if config.debug.dry_run else config.train.num_steps  # the last step is always saved
    return Checkpoints(saver, learner, config.checkpoint, last_step, run.saved.resume, critic)


def _build_sampler(run: Run, rollouts: Rollouts, trains: bool) -> Sampler:
    config, stream, resume = run.config, None, run.saved.resume
    if run.inputs.data is not None:
        stream = run.inputs.data.stream
        if resume is not None and trains:
            _restore_position(resume, stream)
    pg, num_prompts = run.groups.actor_pg, config.train.num_prompts_per_step
    return Sampler(rollouts, stream, pg, num_prompts, sampling_of(config), dynamic_sampling_of(config.algo))


def sampling_of(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        rollout.num_samples_per_prompt, rollout.temperature, rollout.max_new_tokens, rollout.top_p, rollout.top_k
    )


def dynamic_sampling_of(algo: AlgoConfig) -> DynamicSampling | None:
    return DynamicSampling(algo.max_sampling_rounds, algo.mask_truncated) if algo.dynamic_sampling else None


def _restore_position(resume: Resume, stream: PromptStream) -> None:
    state = resume.manifest.state
    if state["data"] == stream.digest:
        stream.position = state["position"]
    elif resume.is_own:
        raise ConfigError(
            f"data.train, its templates or run.seed differ from those of step {resume.manifest.step}; a resumed run "
            "must use the same prompts. To train on other prompts from here, start a run with another run.name and "
            "with the path of this one as checkpoint.resume"
        )
    else:
        print(
            "oneworld: the prompts differ from those of the checkpoint, so the run starts with the first prompt",
            flush=True,
        )


def _build_evaluation(run: Run, rollouts: Rollouts, tokenizer: Tokenizer) -> Evaluation | None:
    config, data = run.config, run.inputs.data
    if not config.eval.interval:
        return None
    sets = data.eval_sets if data is not None else {}
    first = {name: prompts[: config.eval.num_prompts or None] for name, prompts in sets.items()}
    return Evaluation(run.world.mail, run.placement, config, rollouts, tokenizer, run.folder, first)


def _build_reporter(run: Run, rollouts: Rollouts, tokenizer: Tokenizer, step: int, trains: bool) -> Reporter:
    writer = None
    if run.inputs.data is not None and trains and not run.config.debug.dry_run:
        writer = MetricsWriter(run.folder, run.config.train.num_steps, step)
        run.world.at_end(lambda: writer.close(rollouts.engine_name))
    return Reporter(run.world, run.config, run.folder, tokenizer, writer)
