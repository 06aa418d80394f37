"""Checks of a run's settings that need no model and no torch. A run makes them at its start, and so does `--plan`."""

from importlib.util import find_spec

from rl.common.text import format_ranges, format_ranks
from rl.config.schema import Config, ConfigError, LoraConfig
from rl.evaluation.best_metric import check_best_metric
from rl.placement.roles import Placement

MAX_PORT = 65535
MIN_ADAPTER_LR = 1e-5  # usual learning rates of full training are below it, and those of adapters are not


def check_settings(config: Config, placement: Placement) -> list[str]:
    """Raise ConfigError if settings do not fit each other or the placement. Return warnings."""
    check_best_metric(config)
    _check_debugpy(config.debug.debugpy_port, placement.world_size)
    if placement.scorers and config.algo.kl_coef and config.algo.kl_estimator == "full":
        raise ConfigError(
            "algo.kl_estimator=full computes the reference on the actors, together with the policy, so the inference "
            "ranks cannot do it; give these ranks another role, or choose k1, k2 or k3"
        )
    shared = [rank for rank in placement.ranks("rollout") if placement.roles[rank] != ("rollout",)]
    others = f"{format_ranks(shared)} {'has' if len(shared) == 1 else 'have'} roles besides rollout"
    remedy = "separate the roles, for example placement.rollout=75% placement.actor=rest"
    if config.rollout.ahead and shared:
        raise ConfigError(
            f"rollout.ahead: got 1, but {others}; only an engine on ranks of its own can sample while the actors "
            f"train. Set rollout.ahead=0, or {remedy}. On shared ranks, rollout.max_tokens_per_round keeps long "
            "responses from holding up a step"
        )
    hosts = [rank for rank in placement.actors if "rollout" in placement.roles[rank]]
    if config.rollout.keep_kv and config.rollout.sleep == "always" and hosts:
        raise ConfigError(
            f"rollout.keep_kv: got true with rollout.sleep=always, but {format_ranks(hosts)} "
            f"{'is' if len(hosts) == 1 else 'are'} both actor and rollout, and an engine that sleeps during updates "
            f"loses its KV cache. Leave rollout.sleep out, set rollout.keep_kv=false, or {remedy}"
        )
    if config.actor.overlap and hosts:
        raise ConfigError(
            f"actor.overlap: got true, but {format_ranks(hosts)} {'is' if len(hosts) == 1 else 'are'} both actor and "
            f"rollout, and cannot train while sampling. Set actor.overlap=false, or {remedy}"
        )
    if config.model.lora.is_set and config.reference.offload != "actor" and not placement.scorers:
        raise ConfigError(
            f"reference.offload: got {config.reference.offload}, but with model.lora the reference is the policy "
            "without its adapters, and has no weights of its own to move. Leave reference.offload out: actor.offload "
            "moves these weights"
        )
    warnings = _warn_of_adapters(config) + (_warn_of_moves(config) if hosts else [])
    if placement.rank_weights is not None and placement.engines:
        used = {placement.nodes.node_of(ranks[0]) for ranks in placement.engines}
        if idle := [node for node in range(placement.num_nodes) if node not in used]:
            warnings.append(
                f"placement.rank_weights: node{'s' * (len(idle) > 1)} {format_ranges(idle)} "
                f"{'has' if len(idle) == 1 else 'have'} no engine, so the weight of such a node has no effect"
            )
    if placement.scorers and not config.algo.fields_to_score:
        why, remedy = "a single update per batch needs no old logprobs", "algo.old_logprobs=always"
        if config.algo.has_recorded_ratio:
            why = "the loss takes the engine's logprobs as old logprobs"
            remedy = "algo.old_logprobs=always algo.correction=token"
        warnings.append(
            "the inference ranks have nothing to compute. algo.kl_coef=0 needs no reference logprobs, and "
            f"{why}. Give these ranks another role, or set {remedy}"
        )
    return warnings


def check_lora(lora: LoraConfig) -> None:
    """Raise ConfigError if this installation cannot make adapters. Ranks that load no policy need not call this."""
    if lora.is_set and find_spec("peft") is None:
        raise ConfigError(
            f"model.lora.rank: got {lora.rank}, but adapters need peft, and it is not installed here; run `pip install "
            "peft` in the environment of every actor, or set model.lora.rank=0"
        )


def _warn_of_adapters(config: Config) -> list[str]:
    lora, lr = config.model.lora, config.actor.lr
    if not lora.is_set:
        if lora == LoraConfig():
            return []
        return ["model.lora: model.lora.rank=0 means no adapters, so the other settings of model.lora have no effect"]
    if config.actor.optimizer == "sgd" or not 0 < lr < MIN_ADAPTER_LR:  # the learning rates of SGD have another scale
        return []
    return [
        f"actor.lr: got {lr:g} with model.lora; adapters usually need about 10 times the learning rate of full "
        f"training. Try {10 * lr:g}"
    ]


def _warn_of_moves(config: Config) -> list[str]:
    """Warn of weights that leave a GPU for an engine that does not need the room. Moments may: they come back when
    activations are freed. With `always`, the weights move in any case."""
    offloads: dict[str, str] = {"actor": config.actor.offload}
    if config.algo.has_critic:
        offloads["critic"] = config.critic.offload
    if config.algo.kl_coef:
        offloads["reference"] = config.reference.offload
    if config.rollout.keep_kv:
        got, remedy = "rollout.keep_kv=true", "set rollout.keep_kv=false, or leave"
    elif config.rollout.sleep == "never":
        got, remedy = "rollout.sleep=never", "leave rollout.sleep or"
    else:
        return []
    return [
        f"{name}.offload: got rollout with {got}. The engine keeps its memory during updates, so weights must fit "
        f"beside it anyway, and moving them for each rollout only takes time; {remedy} {name}.offload out"
        for name, offload in offloads.items()
        if offload == "rollout"
    ]


def _check_debugpy(port: int, num_ranks: int) -> None:
    if not port:
        return
    if find_spec("debugpy") is None:
        raise ConfigError(
            f"debug.debugpy_port: got {port}, but debugpy is not installed here; run `pip install debugpy` in the "
            "environment of every node, or leave the setting out: then breakpoint() waits for tools/debug.py"
        )
    if port + num_ranks - 1 > MAX_PORT:
        raise ConfigError(
            f"debug.debugpy_port: got {port}, but {num_ranks} ranks need the ports {port} to {port + num_ranks - 1}; "
            f"choose at most {MAX_PORT - num_ranks + 1}, such as 5678"
        )
