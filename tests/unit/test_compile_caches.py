"""A run finds the code that earlier runs have compiled."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.environment import activated_environment
from rl.config.schema import ROOT, Config, DataConfig, RolloutConfig

VARIABLES = re.compile(r"TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|VLLM_CACHE_ROOT|CUDA_CACHE_PATH|fx_graph_cache")


def test_only_the_environment_places_caches() -> None:
    """So nothing puts them into the folder of a run, and tests/security/test_pickles.py tests the places."""
    files = [ROOT / "train.py", *(path for name in ("rl", "launch", "tools") for path in (ROOT / name).rglob("*.*"))]
    sources = [path for path in files if path.suffix in (".py", ".sh")]
    found = {str(path.relative_to(ROOT)) for path in sources if VARIABLES.search(path.read_text())}
    assert len(sources) > 300 and found == {"launch/env.sh"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_layers_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their forward and backward passes, from another folder and with the model in another place."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(name: str) -> dict[str, int]:
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, str(ROOT / "tests" / "compiled_layers.py"), str(folder / "model")]
        options: dict[str, Any] = {"cwd": folder, "env": activated_environment(), "timeout": 300}
        done = subprocess.run(command, capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stderr[-2000:]
        assert sorted(path.name for path in folder.iterdir()) == ["model"], "something else was written here"
        return json.loads(done.stdout)

    first, second = run("first"), run("second")
    assert first["misses"] > 0 == first["hits"]
    assert second["hits"] > 0 == second["misses"]
    assert second["bypassed"] == 0


@pytest.mark.timeout(120)
def test_vllm_looks_for_compiled_code_under_the_same_name(
    vllm_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is a hash of settings and variables. Nothing that a launch makes up is among them."""
    import torch
    from vllm import envs
    from vllm.config.utils import hash_factors
    from vllm.engine.arg_utils import EngineArgs

    from rl.rollout.engine import EngineSeat
    from rl.rollout.vllm.build import _engine_options

    for name, value in vllm_environment.items():
        monkeypatch.setenv(name, value)

    def name_of(launch: str, rank: str, folder: Path, max_new_tokens: int = 32) -> tuple[str, str]:
        for variable in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "ONEWORLD_TOLD_FILE", "TMPDIR"):
            monkeypatch.setenv(variable, launch)
        for variable in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
            monkeypatch.setenv(variable, rank)
        seat = {"tp_rank": 0, "tp_size": 1, "store": torch.distributed.HashStore(), "device": torch.device("cpu")}
        seat |= {"sleeps": True, "stop_token_ids": [], "name": f"oneworld-{launch}-engine{rank}"}
        rollout, data = RolloutConfig(max_new_tokens=max_new_tokens, max_num_seqs=256), DataConfig(max_prompt_tokens=32)
        options = _engine_options(Config(rollout=rollout, data=data), folder, EngineSeat(**seat))
        config = EngineArgs(**options).create_engine_config()
        return config.compute_hash(), hash_factors(envs.compile_factors())

    model = ROOT / "configs" / "tiny"
    first = name_of("one", "0", model)
    monkeypatch.chdir(ROOT / "configs")
    assert name_of("two", "1", Path("tiny")) == first
    assert name_of("two", "1", Path("tiny"), max_new_tokens=40)[0] != first[0]
