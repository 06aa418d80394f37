"""The table of a profile, by stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function
from transformers import AutoTokenizer

from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.report.profile import profiled, table
from rl.run.reporter import Reporter
from tests.mails import connected_worlds


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
    tokenizer = AutoTokenizer.from_pretrained(ROOT / config.model.path)
    with connected_worlds(1) as (world,):
        rollouts: Any = None
        reporter = Reporter(world, config, tmp_path, tokenizer, rollouts, writer=None)
        for step in range(6):
            world.progress.begin_step(step)
            with reporter.profile():
                torch.ones(1)
    written = sorted(file.name for file in tmp_path.glob("profile/*.txt"))
    assert written == [f"step_{step}.rank_0.txt" for step in steps]
