"""Build the engine of a rank, its rollout service, and the weight sync."""

from collections.abc import Sequence

import torch

from rl.data.prompts import Tokenizer, sample_seed
from rl.learner.policy import PolicyTrainer
from rl.model.load import stop_token_ids
from rl.model.shards import TensorInfo
from rl.rollout.build import build_engine
from rl.rollout.engine import Engine, EngineSeat
from rl.rollout.groups import OpenGroups
from rl.rollout.recovery import EngineHost
from rl.rollout.service import RolloutService, SamplingSettings
from rl.run.open import Run
from rl.sync.plan import make_plan
from rl.sync.probe import probe_of_run
from rl.sync.weights import Receiver, SyncSettings, WeightSource, WeightSync


def build_rollout_service(run: Run, tokenizer: Tokenizer, index: int) -> RolloutService:
    """Build this rank's part of engine number `index`, and the service that samples on it."""
    config, world = run.config, run.world
    ranks = run.placement.engines[index]
    seat = EngineSeat(
        name=f"oneworld-{world.id}-engine{index}",
        tp_rank=ranks.index(world.rank),
        tp_size=len(ranks),
        store=world.store,
        device=world.device,
        shares_device="actor" in run.roles,
        stop_token_ids=[] if config.debug.ignore_stop_tokens else stop_token_ids(run.model_folder),
    )

    def build(failed: Engine | None = None) -> Engine:
        with world.stage("build engine"):
            return build_engine(config, run.model_folder, seat, failed)

    engine = build()
    if engine.notice and index == seat.tp_rank == 0:
        print(f"oneworld: {engine.notice}", flush=True)
    torch.manual_seed(sample_seed(config.run.seed, 0, index, 0))  # another seed for each engine
    host = EngineHost(world, ranks, engine, build)
    world.at_end(lambda: host.engine.close())
    # Without seeds, the ranks of an engine could sample different tokens, since other code uses their generators too.
    has_seeds = config.rollout.deterministic or seat.tp_size > 1
    settings = SamplingSettings(
        max_num_groups=max(1, config.rollout.max_num_seqs // config.rollout.num_samples_per_prompt),
        run_seed=config.run.seed if has_seeds else None,
        leader=run.placement.leader,
    )
    return RolloutService(world, host, settings, OpenGroups(run.inputs.rewards, tokenizer))


def build_sync(
    run: Run, tensors: list[TensorInfo], receivers: Sequence[Receiver], learner: PolicyTrainer | None = None
) -> WeightSync:
    config, placement, resume = run.config, run.placement, run.saved.resume
    settings = SyncSettings(
        placement,
        make_plan(tensors, placement, config.sync.bucket_mb, run.world.device),
        run.groups.sync_pgs,
        config.sync,
        run.world.device,
        probe_of_run(config, run.model_folder),
    )
    source = WeightSource(learner.model, learner.weight_slices) if learner is not None else None
    version = resume.version - 1 if resume is not None else 0  # the first publish adds 1
    sync = WeightSync(run.world.mail, settings, source, receivers, version)
    run.world.send_orders_to(placement.leader)
    return sync
