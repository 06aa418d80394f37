"""Chooses the engine that the config names; a rank without a vLLM engine does not import vLLM."""

from pathlib import Path

from rl.config.schema import Config
from rl.rollout.engine import Engine, EngineSeat
from rl.rollout.fake_engine import FakeEngine
from rl.watch.heart import HEART


def build_engine(config: Config, model_folder: Path, seat: EngineSeat, failed: Engine | None = None) -> Engine:
    """Build an engine. `failed` is the one that it replaces, which nothing may use any more. Each build is exceptional
    work: it loads, compiles and captures as much as it has to, whatever the one before took."""
    with HEART.exceptional("building the engine"):
        if config.rollout.engine == "fake":
            return FakeEngine(config.rollout.max_num_seqs, next(iter(seat.stop_token_ids), None), seat.device)
        HEART.beat("the import of vLLM")
        from rl.rollout.vllm import engine as vllm_engine  # seconds of imports that ranks without an engine do not need

        assert failed is None or isinstance(failed, vllm_engine.VllmEngine)
        return vllm_engine.build(config, model_folder, seat, failed)
