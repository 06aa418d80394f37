"""Open a run: make all checks that need no model, connect the ranks, and find data, rewards and checkpoints."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rl.algo.choose import check_functions
from rl.checkpoint.resume import Resume, agree_on_resume
from rl.checkpoint.store import CheckpointStore
from rl.common.notices import NOTICES
from rl.common.text import format_ranks
from rl.config.modes import BOTH, PhaseOptions, Settings
from rl.config.schema import Config, with_debugger_timeouts
from rl.config.values import with_values
from rl.data.prompts import Tokenizer
from rl.data.sources import Data, check_files, read_data
from rl.environments.pool import ConversationPool
from rl.environments.protocol import Ask, Ended
from rl.learner.optimizers import check_optimizer
from rl.model.shape import check_model
from rl.model.tokenizer import load_tokenizer
from rl.placement.groups import Groups, make_groups
from rl.placement.roles import Placement, plan
from rl.report.live import LiveView, open_view
from rl.report.sizes import describe_data_parallelism
from rl.report.writers import check_writers
from rl.rewards.launch import ServerProcess, launch
from rl.rewards.pool import RewardPool
from rl.rollout.archive import StoredGroups
from rl.rollout.service import ConversationEnded, Scored, TurnAsked
from rl.run.agree import agree_on_settings, agree_on_steps
from rl.run.checks import check_lora, check_settings
from rl.run.environment import check_reward_use
from rl.run.find_data import find_datasets
from rl.run.find_models import find_models
from rl.run.hardware import send_hardware
from rl.run.lease import take_lease
from rl.watch.durations import DURATIONS
from rl.world.bootstrap import reward_server, tee_link
from rl.world.restarts import launcher_process
from rl.world.world import World

MAX_REWARD_WORKERS = 8


@dataclass(frozen=True)
class Run:
    """The checked settings, placement, folders and inputs from which a rank builds its roles."""

    world: World
    config: Config  # nothing in it is open: settings are derived, and train.num_steps is final
    placement: Placement
    groups: Groups
    folder: Path
    models: dict[str, Path]  # folders of model.path and, if it is set, critic.path
    store: CheckpointStore
    resume: Resume | None  # the checkpoint to resume from
    data: Data | None = None  # on the leader
    rewards: RewardPool | None = None  # on ranks that lead an engine
    conversations: ConversationPool | None = None  # on ranks that lead an engine, if the config has an environment
    phase: PhaseOptions = BOTH
    view: LiveView | None = None  # on the leader, if its console is a terminal
    stored: StoredGroups | None = None  # the groups of the next step that are in files; None in the phase both
    derived: Sequence[str] = ()  # names of the settings that the user has left open

    @property
    def start_step(self) -> int:
        """The last finished step."""
        return self.resume.manifest.step if self.resume is not None else 0

    @property
    def drives(self) -> bool:
        """Whether this rank runs the loop of the command. The others serve it."""
        return self.world.rank in self.placement.actors

    @property
    def roles(self) -> tuple[str, ...]:
        return self.placement.roles[self.world.rank]

    @property
    def model_folder(self) -> Path:
        return self.models["model.path"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.model_folder)


def open_run(world: World, settings: Settings, phase: PhaseOptions = BOTH, trains: bool = True) -> Run:
    """Check everything that can be checked without loading a model, then connect the process groups. `trains` is False
    with --eval-only."""
    config = with_debugger_timeouts(settings.config)
    folder = Path(config.run.dir) / _run_name(world, config, settings.name)
    lease = take_lease(world, folder)  # before anything is written to the folder
    world.begin_run(folder, config)
    placement = _place(world, config, phase)
    is_leader = world.rank == placement.leader
    world.progress.set_roles(",".join(placement.roles[world.rank]))
    warnings = check_settings(config, placement)
    if "actor" in placement.roles[world.rank]:  # the only ranks that need the user's file
        check_functions(config.algo)
        check_optimizer(config.actor.optimizer)
    if is_leader or "actor" in placement.roles[world.rank]:  # in the phase rollout, the leader loads the policy
        check_lora(config.model.lora)
    rewards = _start_rewards(world, config, placement)
    is_lead = any(ranks[0] == world.rank for ranks in placement.engines)
    conversation_server = launch("rl.environments.server") if is_lead and config.environment.is_set else None
    if is_leader:
        check_writers(config.metrics.writers)
        only = "" if phase.name == "both" else f"phase {phase.name}, "
        print(f"{folder}: {only}{placement.summary()}; loading", flush=True)
        if placement.rank_weights is not None or not placement.nodes.are_equal:
            print(f"oneworld: {_name_nodes(world, placement)}", flush=True)
        for warning in warnings:
            NOTICES.warn(warning)
    world.at_end(NOTICES.summarize)
    view = _open_view(world, folder) if is_leader else None
    with world.stage("find models"):
        models = find_models(world.mail, placement, config, folder)
        datasets = find_datasets(world.mail, placement, config, folder)
    check_model(config, models["model.path"])
    conversations = None
    if conversation_server is not None:
        conversations = _start_conversations(world, config, conversation_server, models["model.path"])
    with DURATIONS.measure("wait for rewards"):
        if rewards is not None:
            rewards.wait_ready()
    with DURATIONS.measure("connect"):
        world.meet("model found")  # a download may take long, and the calls below have a timeout
        world.connect(config.debug.share_gpu, config.world.transfer_timeout_s)
        send_hardware(world, placement)
        # A dry run must measure what the run would use, so both derive the same.
        derived = agree_on_settings(world, placement, settings.of_run, models, trains)
        config = with_values(config, derived)
        if is_leader:
            print(f"oneworld: {describe_data_parallelism(config, placement)}", flush=True)
        groups = make_groups(placement, world.rank, world.device.type, config.world.transfer_timeout_s)
    with world.stage("read data"):
        data = None
        if is_leader:
            check_files(config, datasets)
            data = read_data(config, load_tokenizer(models["model.path"]), datasets=datasets)
        config = agree_on_steps(world, placement, config, data)
    source = None if config.checkpoint.resume in ("auto", "never") else Path(config.checkpoint.resume)
    store = CheckpointStore(world.mail, folder / "checkpoints", source, placement.node_leads, lease)
    world.at_end(store.close)
    with world.stage("resume"):
        resume = agree_on_resume(world.mail, placement, store, config, [*derived])
    inputs = data, rewards, conversations
    return Run(world, config, placement, groups, folder, models, store, resume, *inputs, phase, view, None, [*derived])


def _open_view(world: World, folder: Path) -> LiveView | None:
    view = open_view(folder.name, tee_link(), world.collect_activities)
    if view is not None:
        world.at_end(view.close)
    return view


def _place(world: World, config: Config, phase: PhaseOptions) -> Placement:
    nodes = world.nodes
    sizes = (nodes.num_nodes, nodes.sizes, config.rollout.tensor_parallel_size, config.actor.num_replicas)
    return plan(config.placement, *sizes, phase.name)


def _name_nodes(world: World, placement: Placement) -> str:
    """Return the host and the ranks of each node. torchrun numbers the nodes, in the order of their addresses."""
    nodes = placement.nodes
    names = [f"node {nodes.node_of(lead)} is {world.hosts[lead]}" for lead in nodes.leads]
    return ", ".join(f"{name} ({format_ranks(nodes.ranks_of(node))})" for node, name in enumerate(names))


def _start_rewards(world: World, config: Config, placement: Placement) -> RewardPool | None:
    """Start the reward workers if this rank leads an engine. Otherwise stop its reward server and return None."""
    server = reward_server()
    if not any(ranks[0] == world.rank for ranks in placement.engines):
        server.stop()
        return None

    def deliver(key: tuple[int, ...], result: dict[str, Any]) -> None:
        world.mail.send(world.rank, Scored(key, result))

    share = len(os.sched_getaffinity(0)) // placement.nodes.sizes[placement.nodes.node_of(world.rank)]
    num_workers = config.reward.num_workers or max(1, min(MAX_REWARD_WORKERS, share))
    pool = RewardPool(server, config.reward, num_workers, deliver, world.mail.fail)
    world.at_end(pool.close)
    return pool


def _start_conversations(world: World, config: Config, server: ServerProcess, model_folder: Path) -> ConversationPool:
    """Load the user's tools or environment. Raise ConfigError if something is wrong with them."""

    def deliver(message: Ask | Ended) -> None:
        world.mail.send(world.rank, TurnAsked(message) if isinstance(message, Ask) else ConversationEnded(message))

    pool = ConversationPool(server, config, model_folder, deliver, world.mail.fail)
    world.at_end(pool.close)
    check_reward_use(config, pool.wait_ready())
    return pool


def _run_name(world: World, config: Config, config_name: str) -> str:
    """Return run.name. If it is empty, make a name that a restarted world gets again, and so finds its folder."""
    if config.run.name:
        return config.run.name
    if world.rank == 0:
        launcher = launcher_process()  # its create_time is inexact, but the same in all attempts
        started = time.strftime("%Y%m%d-%H%M%S", time.localtime(launcher.create_time()))
        world.store.set("run/name", f"{config_name}-{started}-{launcher.pid}")
    return world.store.get("run/name")
