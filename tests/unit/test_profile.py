"""The table of a profile, by stage."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch.profiler import record_function

import train
from rl.config.load import load_config
from rl.report.profile import profiled, table
from rl.world.world import World


def span(name: str, category: str, start_ms: float, ms: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": category, "ts": start_ms * 1e3, "dur": ms * 1e3}


def test_kernels_count_in_the_stage_that_they_ran_in() -> None:
    events = [
        {"ph": "M", "name": "process_name"},
        span("stage update", "user_annotation", 100, 50),
        span("stage rollout", "user_annotation", 0, 100),
        span("stage rollout", "gpu_user_annotation", 1, 99),
        span("gemm", "kernel", 10, 20),
        span("gemm", "kernel", 40, 20),
        span("copy", "gpu_memcpy", 110, 5),
        span("gemm", "kernel", 120, 10),
        span("aten::mm", "cpu_op", 120, 10),
    ]
    assert table(events).splitlines() == [
        "rollout: 0.100 s, 0.040 s of kernels",
        "     0.040 s        2 x  gemm",
        "update: 0.050 s, 0.015 s of kernels",
        "     0.010 s        1 x  gemm",
        "     0.005 s        1 x  copy",
    ]


def test_a_profile_is_written(tmp_path: Path) -> None:
    with profiled(tmp_path / "profile" / "step_2.rank_0"), record_function("stage update"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    lines = (tmp_path / "profile" / "step_2.rank_0.txt").read_text().splitlines()
    assert lines[0].startswith("update: ") and any("aten::mm" in line for line in lines)
    assert (tmp_path / "profile" / "step_2.rank_0.json.gz").stat().st_size


def test_without_a_target_nothing_is_profiled() -> None:
    with profiled(None):
        assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(("settings", "steps"), [([], []), (["first"], [3]), (["first", "two"], [3, 4])])
def test_a_window_of_steps(settings: list[str], steps: list[int], tmp_path: Path) -> None:
    texts = {"first": "debug.profile_step=3", "two": "debug.profile_num_steps=2"}
    config = load_config(None, [texts[name] for name in settings])
    worlds = [SimpleNamespace(step=step, rank=5) for step in range(6)]
    targets = [train.profile_target(cast(World, world), config, tmp_path) for world in worlds]
    assert [target for target in targets if target] == [tmp_path / "profile" / f"step_{step}.rank_5" for step in steps]
