"""The events of a run, read with TensorBoard's own loader and plugins: charts, texts, hyperparameters, restarts."""

import itertools
import json
import math
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from rl.config.load import load_config
from rl.placement.roles import plan
from rl.report.layout import BOTTOM, OTHER, make_layout, stack_stages, tag_of
from rl.report.metrics_writer import MetricsWriter
from rl.report.tensorboard import EventWriter
from tests.event_reader import EventReader

STEP = {"reward/mean": 0.5, "reward/exact_match": 0.5, "time/step": 2.0, "time/rollout": 1.0, "time/update": 0.5}
STEP |= {"critic/loss": 1.0, "gpu/memory_gb/rank_0": 3.0, "perf/tokens_per_s": 9.0, "perf/tokens_per_s/engine_1": 9.0}
MEMORY = "system: memory and GPUs"
EVALUATIONS = "learning: evaluations, with intervals of 95 %"  # the title of their charts
EVALUATION = {"eval/accuracy": 0.5, "eval/sums/failed": 0.0}
for name in ("avg@4", "pass@2", "pass@4", "maj@4"):
    EVALUATION |= {f"eval/sums/{name}": 0.5, f"eval/sums/{name}_low": 0.4, f"eval/sums/{name}_high": 0.6}


def tags_of(chart: dict[str, Any]) -> list[str]:
    if "multiline" in chart:
        return chart["multiline"]["tag"]
    return [series[name] for series in chart["margin"]["series"] for name in ("value", "lower", "upper")]


def test_charts_follow_what_the_run_has_written_and_none_is_empty(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    writer.write(1, STEP)
    assert [*EventReader(tmp_path).charts()] == ["learning", "learning: critic", "generation", "system", MEMORY]
    writer.write(2, STEP | EVALUATION)
    writer.close()
    board = EventReader(tmp_path)
    for category in board.charts().values():
        for title, chart in category.items():
            if "margin" in chart:
                assert all(len(board.scalars(tag)) in (1, 2) for tag in tags_of(chart)), title
            else:
                assert any(board.matching(tag) for tag in tags_of(chart)), title
    assert [*board.charts()["learning"]] == ["reward: mean", "reward by function and part"]
    assert [*board.charts()[EVALUATIONS]] == ["sums: all pass rates", "sums: avg@4", "sums: maj@4", "sums: pass@4"]
    parts = board.charts()["learning"]["reward by function and part"]["multiline"]["tag"]
    assert [*board.matching(parts[0])] == ["reward/exact_match"]


def test_an_interval_is_a_band_of_its_estimate(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    writer.write(0, EVALUATION)
    writer.close()
    board = EventReader(tmp_path)
    (band,) = board.charts()[EVALUATIONS]["sums: avg@4"]["margin"]["series"]
    points = [board.scalars(band[name]) for name in ("lower", "value", "upper")]
    assert points == [[(0, pytest.approx(bound))] for bound in (0.4, 0.5, 0.6)]


def test_tags_that_few_look_at_come_last() -> None:
    names = [*STEP, *EVALUATION]
    groups = sorted({tag_of(name).partition("/")[0] for name in names})
    assert groups == ["eval", "perf", "reward", "time", "z_bounds", "z_critic", "z_gpu"]
    assert sum(tag_of(name).startswith("eval/") for name in names) == 6
    assert tag_of("eval/slow_low/avg@1") == "eval/slow_low/avg@1"


def test_bands_of_stages_add_up_to_a_step() -> None:
    values = {"time/step": 6.0, "time/rollout": 3.0, "time/update": 2.4, "time/evaluate": 9.0}
    bounds = stack_stages(values)
    expected = {BOTTOM: 0.0, "z_stages/rollout": 0.5, "z_stages/logprobs": 0.5, "z_stages/update": 0.9}
    assert bounds == pytest.approx(expected | {"z_stages/sync": 0.9, OTHER: 1.0})
    assert stack_stages({"eval/accuracy": 1.0}) == {}
    (chart,) = [chart for chart in make_layout(values).category[0].chart if chart.HasField("margin")]
    assert [(series.lower, series.upper) for series in chart.margin.series] == [*itertools.pairwise(bounds)]


def start(folder: Path, begin: int, end: int, lr: float) -> None:
    writer = MetricsWriter(folder, 99, begin)
    writer.describe_run(load_config(None, [f"actor.lr={lr}"]), plan({"actor,rollout": "all"}, 1, 1))
    for step in range(begin + 1, end + 1):
        values = {"reward/mean": step + lr, "time/step": 1.0}
        if step % 4 == 0:
            values |= {"eval/sums/avg@1": 0.5, "eval/sums/avg@1_low": 0.4, "eval/sums/avg@1_high": 0.6}
        writer.write_text("rollout/samples", f"step {step}, lr {lr}", step)
        writer.write(step, step + 1, values)
    os._exit(9)  # as after a kill: nothing is closed


def kill_after(folder: Path, begin: int, end: int, lr: float) -> None:
    """Write the steps after `begin` in a process that is then gone. It is no fork of this one, which has threads."""
    process = multiprocessing.get_context("spawn").Process(target=start, args=(folder, begin, end, lr))
    process.start()
    process.join()
    assert process.exitcode == 9


def test_a_killed_run_continues_its_curves_without_gaps_and_repetitions(tmp_path: Path) -> None:
    kill_after(tmp_path, 0, 9, 0.25)
    (first,) = tmp_path.glob("events.*")
    with first.open("ab") as file:
        file.write(b"\x30\x00\x00\x00")  # a record that was being written
    kill_after(tmp_path, 6, 7, 0.5)  # from the checkpoint of step 6
    kill_after(tmp_path, 6, 10, 0.75)
    board = EventReader(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 11)]
    assert board.scalars("reward/mean") == [(row["step"], row["reward/mean"]) for row in rows]
    assert [step for step, _ in board.scalars("eval/sums/avg@1")] == [4, 8]
    shown = [(step, text.removesuffix("</p>").partition("lr ")[2]) for step, text in board.texts("rollout/samples")]
    assert shown == [*((step, "0.25") for step in range(1, 7)), *((step, "0.75") for step in range(7, 11))]
    assert [step for step, _ in board.texts("run/config")] == [0, 7]
    assert "lr: 0.75" in board.texts("run/config")[-1][1]
    assert [*board.charts()] == ["learning", EVALUATIONS, "system"]


def test_a_resumed_run_has_its_charts_before_its_first_step(tmp_path: Path) -> None:
    kill_after(tmp_path, 0, 4, 0.25)
    kill_after(tmp_path, 4, 4, 0.5)
    assert [*EventReader(tmp_path).charts()[EVALUATIONS]] == ["sums: avg@1"]


def test_settings_and_placement_are_shown_without_credentials(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 9)
    settings = ["actor.lr=3e-4", "model.lora.rank=16", "rollout.engine_options={hf_token: hf_abcdefghijklmnopqrst}"]
    config = load_config(None, settings)
    writer.describe_run(config, plan({"rollout": "0", "actor": "1-2"}, 1, 3))
    writer.write(1, 2, STEP)
    writer.close("fake")
    board = EventReader(tmp_path)
    ((_, shown),) = board.texts("run/config")
    changed, _, everything = shown.partition("all settings")
    assert "lr: 0.0003" in changed and "max_grad_norm" not in changed and "max_grad_norm: 1.0" in everything
    assert "hf_abc" not in shown and "hf_token: '***'" in changed
    ((_, placement),) = board.texts("run/placement")
    assert "3 ranks on 1 node: rollout 0, actor 1-2; 1 engine" in placement
    found = board.hyperparameters()
    assert found["actor.lr"] == pytest.approx(3e-4)
    assert (found["algo.advantage"], found["rollout.num_samples_per_prompt"]) == ("grpo", 8)
    assert (found["model.lora.rank"], found["model.lora.alpha"]) == (16, 32) and "rank: 16" in changed
    assert found["reward/mean"] == 0.5
    assert "hf_abc" not in b"".join(path.read_bytes() for path in tmp_path.glob("events.*")).decode("latin-1")


def test_infinite_values_do_not_break_the_page(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, 0)
    writer.write(1, {"loss/policy": math.inf, "time/step": 0.0})
    writer.close()
    assert EventReader(tmp_path).scalars("loss/policy") == [(1, math.inf)]
