"""The placement, and what the model needs on each node, as far as the model can be read here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.checks.memory import Need, checkpoint_bytes, estimate, num_kept, on_cpu
from launch.checks.table import FAILED, OK, WARNING, Findings, Row
from rl.config.schema import Config, ConfigError
from rl.model.shape import check_model, count_parameters, local_folder
from rl.placement.roles import Placement, plan
from rl.watch.text import format_bytes, format_ranks

ROOM = 0.1  # of a GPU, for activations


@dataclass(frozen=True)
class Needs:
    config: Config
    placement: Placement
    roles: Sequence[Need]
    checkpoint: int

    @property
    def num_kept(self) -> int:
        return num_kept(self.config)

    def checkpoint_by_node(self, has_private_disks: bool) -> dict[int, int]:
        """Bytes of one step that lie on each node's disk: each actor writes its shard there."""
        local, actors = self.placement.num_ranks_per_node, self.placement.actors
        copies = self.config.checkpoint.copies if has_private_disks else 1
        counts = {node: sum(actor // local == node for actor in actors) for node in range(self.placement.num_nodes)}
        return {node: self.checkpoint * copies * count // len(actors) for node, count in counts.items()}

    def host_by_node(self, has_gpus: bool) -> list[int]:
        found = [0] * self.placement.num_nodes
        for need in self.roles:
            for rank in need.ranks:
                found[rank // self.placement.num_ranks_per_node] += need.host if has_gpus else on_cpu(need, self.config)
        return found


def check_placement(
    config: Config, num_nodes: int, num_local: int, gpus: Sequence[Mapping[str, Any]], trains: bool = True
) -> tuple[Row, Needs | None]:
    """A placement that does not fit the world is a mistake that train.py would end with too. `trains` False:
    --eval-only."""
    sizes = (config.rollout.tensor_parallel_size, config.actor.num_replicas)
    try:
        placement = plan(config.placement, num_nodes, num_local, *sizes)
        folder = local_folder(config.model.path)
        if folder is not None:
            check_model(config, folder)
    except ConfigError as error:
        return Row("placement", FAILED, str(error)), None
    counts = {}
    for path in filter(None, [config.model.path, config.critic.path]):
        model = local_folder(path)
        counts[path] = count_parameters(model) if model is not None else None
        if counts[path] is None:
            where = "cannot be read here" if model is None else f"has no weights in {model}"
            text = f"{placement.summary()}; {path} {where} yet, so memory and disk were not estimated"
            return Row("placement", WARNING, text), None
    policy = counts[config.model.path] or 0
    critic = counts.get(config.critic.path) or policy
    roles = estimate(config, placement, policy, critic, trains)
    needs = Needs(config, placement, roles, checkpoint_bytes(config, policy, critic))
    told, found = [_check_role(need, config, gpus) for need in needs.roles], Findings()
    for state, text in told:
        if state != OK:
            found.add(state, text)
    row = found.row("placement", f"{placement.summary()}; {policy / 1e6:.2f} M parameters")
    return Row(row.name, row.state, row.result, [*row.details, *[text for state, text in told if state == OK]]), needs


def _check_role(need: Need, config: Config, gpus: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    who = f"{','.join(need.roles)} ({format_ranks(need.ranks)})"
    parts = {"learner": need.learner, "engine's weights": need.engine}
    shown = ", ".join(f"{format_bytes(size)} {name}" for name, size in parts.items() if size)
    card = min((gpus[rank].get("total", 0) for rank in need.ranks), default=0)
    if not card or config.debug.share_gpu:
        return OK, f"{who}: each at least {format_bytes(on_cpu(need, config))} of host memory ({shown})"
    share = int(config.rollout.gpu_memory_fraction * card)
    worst_moment = need.on_device(share)
    text = f"{who}: each {shown}, and {format_bytes(need.host)} of host memory; its GPU has {format_bytes(card)}"
    if need.engine > share:
        return FAILED, f"{text}, of which the engine may fill {format_bytes(share)}; raise rollout.tensor_parallel_size"
    if worst_moment > card:
        return (
            FAILED,
            f"{text}, and {format_bytes(worst_moment)} would be in use at once; {_remedy(need, config, card)}",
        )
    limit = int((1 - ROOM) * card)
    if need.learner and max(need.learner, worst_moment if need.resting < need.learner else 0) > limit:
        return WARNING, f"{text}: little is left for activations; {_remedy(need, config, limit)}"
    return OK, text


def _remedy(need: Need, config: Config, limit: int) -> str:
    """What would help a rank that needs more than the limit, and is not set already."""
    is_actor, offload = "actor" in need.roles, config.actor.offload
    found = []
    if need.learner <= limit:  # so the engine beside it is what makes it too much
        found.append("lower rollout.gpu_memory_fraction")
        found += ["set actor.offload=rollout"] if is_actor and offload in ("none", "moments") else []
    elif is_actor and offload != "always":
        found.append("set actor.offload=always")
    return ", or ".join([*found, f"give {'the learner' if is_actor else 'inference'} more ranks"])
