"""The models of a rank: policy, critic and reference, and who computes logprobs."""

from pathlib import Path

from torch import nn

from rl.learner.critic import Critic
from rl.learner.policy import Learner
from rl.learner.scoring import LocalScorer, LogprobService, RemoteScorer, Scorer
from rl.model.load import Compute, fill_with_noise, find_model, has_weights, load_model
from rl.model.positions import freeze as freeze_positions
from rl.run.open import Run, score_fields


def build_learner(run: Run) -> Learner:
    config = run.config
    model = _load(run, trainable=True, filled=run.saved.resume is None)
    updates = config.train.num_steps * config.algo.num_epochs * config.algo.num_mini_batches
    return Learner(model, run.groups.actor_pg, run.world.device, config.actor, config.algo, config.rollout, updates)


def build_critic(run: Run) -> Critic | None:
    config, resume = run.config, run.saved.resume
    if not config.algo.has_critic:
        return None
    folder = find_model(config.critic.path) if config.critic.path else run.model_folder
    is_saved = resume is not None and resume.has_critic
    model = _load(run, trainable=True, filled=not is_saved, folder=folder, as_critic=True)
    max_tokens = config.inference.max_tokens_per_micro_batch
    return Critic(model, run.groups.actor_pg, run.world.device, config.actor, config.algo, config.critic, max_tokens)


def build_scorer(run: Run, learner: Learner) -> Scorer:
    config, fields = run.config, score_fields(run.config)
    if run.placement.scorers:
        return RemoteScorer(run.world.mail, run.placement.scorers, fields)
    models = {"old_logprobs": learner.model} if config.algo.has_old_pass else {}
    if config.algo.kl_coef:
        models["ref_logprobs"] = reference = _load(run, trainable=False)
        if config.algo.kl_estimator == "full":
            learner.reference = reference
    max_tokens, temperature = config.inference.max_tokens_per_micro_batch, config.rollout.temperature
    is_offloaded = config.actor.offload == "rollout"
    return LocalScorer(models, fields, run.groups.actor_pg, max_tokens, temperature, run.world.device, is_offloaded)


def build_logprob_service(run: Run) -> LogprobService:
    config = run.config
    names = [name for name in score_fields(config) if name != "certainty"]  # the model of old_logprobs gives it
    models = {name: _load(run, trainable=False) for name in dict.fromkeys(["old_logprobs", *names])}
    max_tokens = config.inference.max_tokens_per_micro_batch
    return LogprobService(
        run.world.mail, run.placement.scorers, models, max_tokens, config.rollout.temperature, run.world.device
    )


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
