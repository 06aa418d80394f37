"""Serve the actors until the run ends, on ranks that only sample or compute logprobs."""

from transformers import AutoTokenizer

from rl.run.engines import build_rollout_service, build_sync
from rl.run.models import build_logprob_service
from rl.run.open import Run
from rl.sync.weights import Receiver, SyncService, share_tensors
from rl.world.bootstrap import enable_garbage_collection
from rl.world.service import EndRun, EndService, Service, serve


def serve_run(run: Run) -> None:
    """Build the services of this rank's roles, and run them until the leader ends the run."""
    world = run.world
    rollout = None
    if (index := run.placement.engine_of(world.rank)) is not None:
        rollout = build_rollout_service(run, AutoTokenizer.from_pretrained(run.model_folder), index)
    logprobs = build_logprob_service(run) if "inference" in run.roles else None
    tensors = share_tensors(world.mail, run.placement, None, run.config.model.dtype)
    receivers: list[Receiver] = [rollout.engine] if rollout is not None else []
    receivers += [logprobs] if logprobs is not None else []
    sync = build_sync(run, tensors, receivers)
    if rollout is not None:
        rollout.host.add_user(sync)
    end = EndService()
    followers = rollout.host.followers if rollout is not None else ()
    services: list[Service] = [SyncService(sync, world.mail, followers, world.progress.begin_step), end]
    services += [service for service in (rollout, logprobs) if service is not None]
    if rollout is not None:
        rollout.begin()
    enable_garbage_collection()
    with world.stage("serve"):
        serve(world, services, until=lambda: end.ended)


def end_run(run: Run) -> None:
    """Tell the ranks that only serve that the run is over. Every actor calls this; only the leader sends."""
    if run.world.rank == run.placement.leader:
        for rank in range(run.placement.world_size):
            if rank not in run.placement.actors:
                run.world.mail.send(rank, EndRun())
