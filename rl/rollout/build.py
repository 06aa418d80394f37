"""Build the engine that the config names. Only ranks with a vLLM engine import vLLM."""

from pathlib import Path

from rl.config.schema import Config
from rl.rollout.engine import Engine, EngineSeat
from rl.rollout.fake_engine import FakeEngine
from rl.watch.heart import HEART


def build_engine(config: Config, model_folder: Path, seat: EngineSeat, failed: Engine | None = None) -> Engine:
    """Build an engine, as a replacement for `failed` if that is given. The failed engine must not be used afterwards.

    Each build counts as exceptional work, because earlier builds do not tell how long compilation and graph capture
    take.
    """
    with HEART.exceptional("building the engine"):
        if config.rollout.engine == "fake":
            return FakeEngine(config.rollout.max_num_seqs, next(iter(seat.stop_token_ids), None), seat.device)
        HEART.beat("the import of vLLM")
        from rl.rollout.vllm.build import VllmEngine, build  # here, because the import takes seconds

        assert failed is None or isinstance(failed, VllmEngine)
        return build(config, model_folder, seat, failed)
