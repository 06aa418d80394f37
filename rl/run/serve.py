"""Build the services of a rank: its engine, its rollout service and its weight sync. Ranks that are not actors run
these services until the run ends."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from rl.data.prompts import sample_seed
from rl.model.load import stop_token_ids
from rl.model.shards import TensorInfo
from rl.rollout.archive import GroupRecorder
from rl.rollout.engine import Engine, EngineSeat, build_engine, import_engine
from rl.rollout.recovery import EngineHost
from rl.rollout.service import RolloutService
from rl.rollout.turns import Conversations
from rl.run.models import build_logprob_service
from rl.run.open import Run
from rl.sync.donation import WeightDonation
from rl.sync.plan import make_plan
from rl.sync.probe import probe_of_run
from rl.sync.sources import WeightSource
from rl.sync.weights import Receiver, SyncService, SyncSettings, WeightSync, share_tensors
from rl.world.bootstrap import enable_garbage_collection
from rl.world.service import EndRun, EndService, Service, serve


def import_engine_of(run: Run) -> None:
    """Import what this rank's engine needs, if it hosts one."""
    if run.placement.engine_of(run.world.rank) is not None:
        with run.world.stage("build engine"):
            import_engine(run.config)


def build_rollout_service(run: Run) -> RolloutService | None:
    """Build this rank's part of an engine, and its rollout service. Return None if the rank hosts no engine."""
    config, world, index = run.config, run.world, run.placement.engine_of(run.world.rank)
    if index is None:
        return None
    ranks = run.placement.engines[index]
    seat = EngineSeat(
        name=f"oneworld-{world.id}-engine{index}",
        tp_rank=ranks.index(world.rank),
        tp_size=len(ranks),
        store=world.store.unsealed,
        device=world.device,
        sleeps="actor" in run.roles and config.rollout.sleep != "never",
        stop_token_ids=[] if config.debug.mean_response_tokens else stop_token_ids(run.model_folder),
    )

    def build(failed: Engine | None = None) -> Engine:
        with world.stage("build engine"):
            return build_engine(config, run.model_folder, seat, failed)

    engine = build()
    if engine.notice and index == seat.tp_rank == 0:
        print(f"oneworld: {engine.notice}", flush=True)
    # Each engine has its own seed. Each command of the phase rollout has others, because it samples a part of the run.
    start = int(world.id, 16) if run.phase.name == "rollout" else 0
    seed_noise(sample_seed(config.run.seed, start, index, 0))
    host = EngineHost(world, ranks, engine, build)
    world.at_end(lambda: host.engine.close())
    # Requests without seeds use each rank's generator. Other code uses it too, so ranks could sample different tokens.
    run_seed = config.run.seed if config.rollout.deterministic or seat.tp_size > 1 else None
    leader, max_num_groups = run.placement.leader, config.rollout.max_num_groups
    service = RolloutService(world, host, run.rewards, run.tokenizer, max_num_groups, run_seed, leader)
    if run.conversations is not None:
        service.conversations = Conversations(run.conversations.send, service.add_requests, config, run_seed)
    if run.stored is not None and host.is_lead:
        service.recorder = GroupRecorder(world.mail, leader, run.folder, run.stored.order)
    return service


def seed_noise(seed: int) -> None:
    """Seed the generators for requests that have no seed. vLLM's model runner V1 draws noise from that of torch, and V2
    draws seeds from that of numpy."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))


def build_sync(
    run: Run,
    tensors: list[TensorInfo],
    service: RolloutService | None,
    logprobs: Receiver | None = None,
    source: WeightSource | None = None,
) -> WeightSync:
    """Build the weight sync of a rank. A `source` sends weights; its engine and its logprob service receive them."""
    config, placement, device = run.config, run.placement, run.world.device
    plan, probe = make_plan(tensors, placement, config.sync.bucket_mb, device), probe_of_run(config, run.model_folder)
    # With rollout.ahead, hardly any token has lag 0, so only probes compare the engines with the learner.
    sync_config = replace(config.sync, probe_interval=1) if config.rollout.ahead else config.sync
    settings = SyncSettings(placement, plan, run.groups.sync_pgs, sync_config, device, probe)
    engine = service.engine if service is not None else None
    receivers: list[Receiver] = [receiver for receiver in (engine, logprobs) if receiver is not None]
    version = run.resume.version - 1 if run.resume is not None else 0  # the first publish adds 1
    sync = WeightSync(run.world.mail, settings, source, receivers, version)
    sync.before_version = partial(run.world.accounts.close_window, placement.leader)
    if service is not None:
        host = service.host
        host.sync = sync
        if config.rollout.ahead:  # then the actors cannot publish again the version that engines sample from
            host.donation = WeightDonation(run.world.mail, settings, sync, lambda: host.engine)
    run.world.send_orders_to(placement.leader)
    return sync


def serve_run(run: Run) -> None:
    """Build the services of this rank's roles, and run them until the leader ends the run."""
    world = run.world
    import_engine_of(run)
    rollout = build_rollout_service(run)
    logprobs = build_logprob_service(run) if "inference" in run.roles else None
    tensors = share_tensors(world.mail, run.placement, None, run.config.model.dtype)
    sync = build_sync(run, tensors, rollout, logprobs)
    end = EndService()
    followers = rollout.host.followers if rollout is not None else ()
    donation = rollout.host.donation if rollout is not None else None
    services: list[Service] = [SyncService(sync, world.mail, followers, world.progress.begin_step), end]
    services += [service for service in (donation, rollout, logprobs) if service is not None]
    enable_garbage_collection()
    with world.stage("serve"):
        serve(world, services, until=lambda: end.ended)


def end_run(run: Run) -> None:
    """Tell all ranks that only serve that the run is over. Every rank that drives calls this; only the leader sends."""
    if run.world.rank == run.placement.leader:
        for rank in range(run.placement.world_size):
            if rank not in run.placement.actors:
                run.world.mail.send(rank, EndRun())
