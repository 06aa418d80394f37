"""Check that the placement fits the world, and that the model, if it can be read here, fits the memory of its ranks.

rl/model/memory.py estimates the memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from launch.checks.results import FAILED, OK, WARNING, CheckResult, Finding, summarize
from rl.common.text import format_bytes
from rl.config.schema import Config, ConfigError, Phase
from rl.model.memory import RoleMemory, checkpoint_bytes, estimate, estimate_adapters, host_bytes
from rl.model.shape import check_model, local_folder, measure_size
from rl.placement.roles import Placement, plan
from rl.run.derive import Derived, derive, read_models

ACTIVATION_SHARE = 0.1  # fraction of a GPU that should stay free during an update
ROLLOUT_SHARE = 0.03  # and while an engine works beside a learner


def check_placement(
    config: Config,
    num_nodes: int,
    num_local: int | Sequence[int],  # ranks on every node, or on each
    gpus: Sequence[Mapping[str, Any]],
    trains: bool = True,
    phase: Phase = "both",
) -> tuple[CheckResult, list[int], list[int]]:
    """Check the placement as train.py would, then the estimated memory. `trains` is False with --eval-only.

    Also return the bytes of host memory, and of one copy of a checkpoint, that each node needs, or empty lists.
    """
    tp = config.rollout.tensor_parallel_size
    try:
        placement = plan(config.placement, num_nodes, num_local, tp, config.actor.num_replicas, phase)
        if folder := local_folder(config.model.path):
            check_model(config, folder)
    except ConfigError as error:
        return CheckResult("placement", FAILED, str(error)), [], []
    sizes = {}
    for path in filter(None, [config.model.path, config.critic.path]):
        model = local_folder(path)
        sizes[path] = measure_size(model, config.model.lora.targets) if model else None
        if sizes[path] is None:
            where = f"has no weights in {model}" if model else "cannot be read here"
            text = f"{placement.summary()}; {path} {where} yet, so memory and disk were not estimated"
            return CheckResult("placement", WARNING, text), [], []
    policy = sizes[config.model.path]
    assert policy is not None
    derived = _derive(config, placement, gpus, trains)
    config = derived.config
    critic = (sizes.get(config.critic.path) or policy) if config.algo.has_critic else None
    roles = estimate(config, placement, policy, critic, trains)
    text = f"{placement.summary()}; {policy.num_parameters / 1e6:.2f} M parameters"
    if config.model.lora.is_set and trains:
        text += f"; {estimate_adapters(config.model.lora, policy)}"
    findings = [_check_role(role, config, gpus) for role in roles]
    if derived.values and derived.problem and all(state == OK for state, _ in findings):
        findings.append((WARNING, f"by its estimate, this run does not fit into its GPUs: {derived.problem}"))
    result = summarize("placement", findings, text)
    host = host_bytes(roles, placement, all("total" in gpu for gpu in gpus))
    return result, host, checkpoint_bytes(config, placement, policy, critic)


def _derive(config: Config, placement: Placement, gpus: Sequence[Mapping[str, Any]], trains: bool) -> Derived:
    """Return the settings that the run will derive."""
    folders = {setting: local_folder(path) for setting, path in config.model_paths.items()}
    models = read_models(config, {setting: folder for setting, folder in folders.items() if folder})
    smallest = min((gpu.get("total", 0) for gpu in gpus), default=0)
    are_alike = len({gpus[rank].get("name") for rank in placement.ranks("rollout")}) < 2
    return derive(config, placement, models, smallest, trains, are_alike)


def _check_role(role: RoleMemory, config: Config, gpus: Sequence[Mapping[str, Any]]) -> Finding:
    card = min((gpus[rank].get("total", 0) for rank in role.ranks), default=0)
    if not card or config.debug.share_gpu:
        return OK, f"{role.who}: each at least {format_bytes(role.host_on_cpu)} of host memory ({role.parts})"
    share = int(config.rollout.gpu_memory_fraction * card)
    peak = role.on_device(share)
    text = (
        f"{role.who}: each {role.parts}, and {format_bytes(role.host)} of host memory; its GPU has {format_bytes(card)}"
    )
    if role.engine > share:
        return FAILED, f"{text}, of which the engine may fill {format_bytes(share)}; raise rollout.tensor_parallel_size"
    if peak > card:
        return FAILED, f"{text}, and {format_bytes(peak)} would be in use at once; {_remedy(role, config, card)}"
    limit = int((1 - ACTIVATION_SHARE) * card)
    is_full = peak > (1 - ROLLOUT_SHARE) * card and bool(role.during_rollout)
    if role.learner and (role.learner > limit or is_full):
        return WARNING, f"{text}: little is left for activations; {_remedy(role, config, limit)}"
    return OK, text


def _remedy(role: RoleMemory, config: Config, limit: int) -> str:
    """Return what to change if a rank needs more than `limit` bytes, without what is set already."""
    is_actor, offload = "actor" in role.roles, config.actor.offload
    remedies = []
    if role.learner <= limit:  # the learner fits, but not together with the engine
        remedies.append("lower rollout.gpu_memory_fraction")
        remedies += ["set actor.offload=rollout"] if is_actor and offload in ("none", "moments") else []
    elif is_actor and offload != "always":
        remedies.append("set actor.offload=always")
    return ", or ".join([*remedies, f"give {'the learner' if is_actor else 'inference'} more ranks"])
