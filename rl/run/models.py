"""Build the models of a rank (policy, critic and reference), and the objects that compute logprobs."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from rl.checkpoint.base import Share, check_same_base, digest_base
from rl.config.schema import LoraConfig
from rl.learner import scoring
from rl.learner.critic import CriticTrainer
from rl.learner.policy import PolicyTrainer
from rl.learner.sharded_trainer import ShardedModel
from rl.model.base_digest import BaseDigests
from rl.model.load import Compute, fill_with_noise, load_model
from rl.model.lora import Adapters, BaseModel, has_adapters
from rl.model.memory import describe_adapters
from rl.model.rotary import freeze_frequencies
from rl.model.shape import has_weights
from rl.run.open import Run
from rl.sync.probe import probe_of_run


def load_policy(run: Run) -> nn.Module:
    """Load the model that actors train, without the weights of the checkpoint, if there is one."""
    config = run.config
    trainable, on_host = _trained_part(run, config.model.lora), config.actor.offload == "always"
    return load(run, trainable, filled=run.resume is None, on_host=on_host)


def announce_adapters(run: Run, policy: nn.Module) -> None:
    """Print how much of the policy is trained, if it has adapters. The leader prints."""
    if run.data is None or not has_adapters(policy):
        return
    trained = [parameter.numel() for parameter in policy.parameters() if parameter.requires_grad]
    num_frozen = sum(parameter.numel() for parameter in policy.parameters() if not parameter.requires_grad)
    text = describe_adapters(run.config.model.lora.rank, len(trained) // 2, sum(trained), num_frozen)
    print(f"oneworld: {text}", flush=True)


def reference_of(run: Run, policy: nn.Module) -> Callable[[], nn.Module]:
    """Return a function that returns the reference policy. A policy with adapters has it inside. Otherwise, the first
    call loads it."""
    if has_adapters(policy):
        base = BaseModel(policy)
        return lambda: base
    return functools.cache(lambda: load_reference(run))


def build_learner(run: Run, model: nn.Module, reference: Callable[[], nn.Module]) -> PolicyTrainer:
    config, algo = run.config, run.config.algo
    num_updates = config.train.num_steps * algo.num_epochs * algo.num_mini_batches
    is_leader = run.world.rank == run.placement.leader
    return PolicyTrainer(
        ShardedModel(model, run.groups.actor_pg, run.world.device),
        config,
        num_updates,
        probe_of_run(config, run.model_folder).tokens if is_leader else (),
        reference if algo.kl_coef and algo.kl_estimator == "full" else None,
    )


def build_critic(run: Run) -> CriticTrainer | None:
    config = run.config
    if not config.algo.has_critic:
        return None
    folder = run.models.get("critic.path", run.model_folder)
    is_saved = run.resume is not None and run.resume.has_critic
    trainable, on_host = _trained_part(run, config.critic_lora), config.critic_offload == "always"
    model = load(run, trainable, filled=not is_saved, folder=folder, as_critic=True, on_host=on_host)
    return CriticTrainer(ShardedModel(model, run.groups.actor_pg, run.world.device), config)


def digest_bases(run: Run, policy: nn.Module, critic: CriticTrainer | None = None) -> dict[str, BaseDigests]:
    """Return the base models of adapters, as a checkpoint names them: of `model` and `critic`. Raise ConfigError if the
    checkpoint that the run resumes from has adapters of others. Called on all actors."""
    config, pg = run.config, run.groups.actor_pg
    if config.debug.dry_run:  # it saves nothing, and the model may have no weights
        return {}
    node_of, rank = run.placement.nodes.node_of, run.world.rank
    here = [actor for actor in run.placement.actors if node_of(actor) == node_of(rank)]
    share = Share(here.index(rank), len(here))
    found = {"model": digest_base(policy, config.model.path, run.model_folder, pg, share)}
    if critic is not None:
        folder = run.models.get("critic.path", run.model_folder)
        found["critic"] = digest_base(critic.model, config.critic.path or config.model.path, folder, pg, share)
    bases = {kind: base for kind, base in found.items() if base is not None}
    if run.resume is not None:
        check_same_base(run.resume.manifest, bases)
    return bases


def build_scorer(run: Run, learner: PolicyTrainer, reference: Callable[[], nn.Module]) -> scoring.Scorer:
    config, fields = run.config, run.config.algo.fields_to_score
    if run.placement.scorers:
        return scoring.RemoteScorer(run.world.mail, run.placement.scorers, fields)
    models = scoring.local_models(config.algo, learner.model, reference)
    # The reference inside of a policy with adapters is offloaded by the learner.
    offloads_reference = config.reference_offload == "rollout" and not has_adapters(learner.model)
    return scoring.LocalScorer(_scoring_models(run, models), fields, run.groups.actor_pg, offloads_reference)


def build_logprob_service(run: Run) -> scoring.LogprobService:
    names = dict.fromkeys(["old_logprobs", *run.config.algo.fields_to_score])
    names.pop("certainty", None)  # computed by the model of old_logprobs
    models = {name: load_reference(run) if name == "ref_logprobs" else load(run, trainable=False) for name in names}
    return scoring.LogprobService(run.world.mail, run.placement.scorers, _scoring_models(run, models))


def _scoring_models(run: Run, models: Mapping[str, nn.Module]) -> scoring.ScoringModels:
    config = run.config
    max_tokens = dict.fromkeys(models, config.inference.max_tokens_per_micro_batch)
    if "ref_logprobs" in models:
        max_tokens["ref_logprobs"] = config.reference_max_tokens
    return scoring.ScoringModels(models, max_tokens, config.rollout.temperature, run.world.device)


def load_reference(run: Run) -> nn.Module:
    """Load the reference policy. On inference ranks, actor.offload has no effect on it."""
    offload = run.config.reference_offload if "actor" in run.roles else run.config.reference.offload
    return load(run, trainable=False, on_host=offload == "always")


def _trained_part(run: Run, lora: LoraConfig) -> bool | Adapters:
    """Return what is trained of a model, for `load`: its adapters, or True for all of it."""
    return Adapters(lora, run.config.run.seed) if lora.is_set else True


def load(
    run: Run,
    trainable: bool | Adapters,
    filled: bool = True,
    folder: Path | None = None,
    as_critic: bool = False,
    on_host: bool = False,
) -> nn.Module:
    """Load a model, sharded over the ranks of its mesh. With `filled` False, a checkpoint brings its weights later. It
    brings only what is trained, so the weights under adapters are always filled. With `on_host`, weights are in host
    memory at all times."""
    mesh = run.groups.actor_mesh or run.groups.scorer_mesh
    assert mesh is not None
    config = run.config
    is_cuda, is_sampling = run.world.device.type == "cuda", run.phase.name == "rollout"
    # In the phase rollout, a model is loaded only to send it to the engines, one of which has this rank's device.
    compiled = config.actor.compile and is_cuda and not is_sampling
    recomputed = config.critic_recompute if as_critic else config.actor.recompute
    shares_prompts = config.rollout.num_samples_per_prompt > 1
    compute = Compute(compiled, recomputed, is_cuda if is_sampling else on_host, shares_prompts)
    dtype, folder = config.model.dtype, folder or run.model_folder
    filled = filled or isinstance(trainable, Adapters)
    is_made_up = filled and config.debug.dry_run and not has_weights(folder)
    filled = filled and not is_made_up
    model = load_model(folder, mesh, run.world.device, dtype, trainable, filled, compute, as_critic)
    freeze_frequencies(model, config.max_sequence_tokens)
    if is_made_up:
        fill_with_noise(model, mesh)
    return model
