"""The layout of TensorBoard: which charts its tab Custom Scalars has, and under which tags metrics are written.

The layout has a chart only if the run has written one of its metrics, so no chart is empty. A chart's content does not
depend on which of its metrics those are, apart from evaluations and stages. So the layouts of several runs, which
TensorBoard merges, have their charts in common.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)

# TensorBoard sorts groups of tags by name and opens the first two, so these would hide evaluations and rewards.
LATE = ("critic", "environment", "gpu", "host")
LATE_MARK = "z_"
BOUNDS = f"{LATE_MARK}bounds/"
BOUND = re.compile(r"eval/.*_(low|high)")
# The stages that get a band of their own, from the bottom up. The rest of the step is `other`.
STAGES = ("rollout", "logprobs", "update", "sync", "checkpoint", "evaluate")
OUTSIDE = ("checkpoint", "evaluate")  # stages that time/step does not include
BANDS = f"{LATE_MARK}stages/"
BOTTOM, OTHER = f"{BANDS}bottom", f"{BANDS}other"
MAX_PASS = re.compile(r"eval/.*/pass@(\d+)")
NOT_PARTS = ("mean", "std", "no_signal", "timeouts", "errors")


class Lines(NamedTuple):
    """A chart with a line for each metric that one of the patterns matches as a whole."""

    title: str
    patterns: tuple[str, ...]


LEARNING = (
    Lines("reward: mean and standard deviation", ("reward/(mean|std)",)),
    Lines("reward by function and part", (rf"reward/(?!({'|'.join(NOT_PARTS)})$).*",)),
    Lines("share of groups without signal", ("reward/no_signal",)),
)
LEARNING_LATER = (
    Lines("KL: to the old policy, to the reference", ("policy/kl_old_new", "loss/kl", "reward/kl")),
    Lines("entropy per token", ("policy/entropy",)),
    Lines("share of tokens at a clip bound", ("policy/clip_fraction", "critic/clip_fraction")),
    Lines("mismatch of engine and learner", ("policy/(mismatch_kl|staleness_kl|probe_gap)",)),
    Lines("gradient norm", ("optim/grad_norm", "critic/grad_norm")),
    Lines("lag: updates since a token was sampled", ("rollout/lag_(mean|max)",)),
    Lines("critic: explained variance", ("critic/explained_variance",)),
    Lines("critic: values and returns", ("critic/(value|return)_mean",)),
)
GENERATION = (
    Lines("response length in tokens", ("rollout/length_(mean|max)",)),
    Lines("share of truncated responses", ("rollout/truncated", "eval/.*/truncated")),
    Lines("tokens per second", ("perf/tokens_per_s",)),
    Lines("tokens per second by engine", ("perf/tokens_per_s/engine_.*",)),
    Lines("KV cache in use", ("rollout/kv_use.*",)),
    Lines("preemptions", ("rollout/preemptions",)),
    Lines("prefix cache hits", ("rollout/prefix_hit_rate",)),
    Lines("groups that go on or wait", ("rollout/(carried|queue)",)),
    Lines("conversations: turns and calls", ("environment/(turns|calls)",)),
    Lines("conversations: how they ended", ("environment/ended_.*",)),
    Lines("conversations: failed calls", ("environment/(unknown_tool|bad_arguments|tool_.*)",)),
)
SYSTEM = (
    Lines("seconds by stage", (f"time/(step|{'|'.join(STAGES)})",)),
    Lines("busy share by role", ("perf/busy/.*",)),
    Lines("waiting share by role", ("perf/wait/.*", "perf/waits_for_.*")),
    Lines("MFU", ("perf/mfu.*",)),
    Lines("GPU memory by kind, in GB", ("gpu/memory_gb/(?!rank_).*",)),
    Lines("GPU memory by rank, in GB", ("gpu/memory_gb/rank_.*",)),
    Lines("GPU utilization by rank", ("gpu/utilization/.*",)),
    Lines("host memory by node, in GB", ("host/memory_gb/.*",)),
    Lines("weight sync in GB/s", ("perf/sync_gb_per_s",)),
    Lines("checkpoint seconds", ("perf/checkpoint_s",)),
    Lines("samples without a score: timeouts, errors", ("reward/(timeouts|errors)",)),
)


def tag_of(name: str) -> str:
    """Return the tag of a metric in TensorBoard. Most tags equal the metric's name."""
    if BOUND.fullmatch(name):
        return BOUNDS + name
    return LATE_MARK + name if name.partition("/")[0] in LATE else name


def stack_stages(values: Mapping[str, float]) -> dict[str, float]:
    """Return the upper bounds of the bands of stages, by tag: shares of the step's seconds, added up. The last is 1."""
    if not values.get("time/step"):
        return {}
    seconds = {stage: values.get(f"time/{stage}", 0.0) for stage in STAGES}
    whole = values["time/step"] + sum(seconds[stage] for stage in OUTSIDE)
    bounds, height = {BOTTOM: 0.0}, 0.0
    for stage, share in seconds.items():
        height += share / whole
        bounds[BANDS + stage] = min(1.0, height)  # rounding may give a bit more
    return bounds | {OTHER: 1.0}


def make_layout(names: Collection[str]) -> Layout:
    """Return the layout for a run that has written the metrics of these names."""
    learning = [*_lines(LEARNING, names), *_evaluations(names), *_lines(LEARNING_LATER, names)]
    system = [*_stages(names), *_lines(SYSTEM, names)]
    charts = {"learning": learning, "generation": list(_lines(GENERATION, names)), "system": system}
    return Layout(category=[Category(title=title, chart=found) for title, found in charts.items() if found])


def _lines(charts: Iterable[Lines], names: Collection[str]) -> Iterable[Chart]:
    for chart in charts:
        if any(re.fullmatch(pattern, name) for pattern in chart.patterns for name in names):
            # TensorBoard wants only the beginning of a tag to match.
            tags = [f"{_tag_pattern(pattern)}$" for pattern in chart.patterns]
            yield Chart(title=chart.title, multiline=MultilineChartContent(tag=tags))


def _tag_pattern(pattern: str) -> str:
    return LATE_MARK + pattern if pattern.partition("/")[0] in LATE else pattern


def _evaluations(names: Collection[str]) -> Iterable[Chart]:
    """Yield a chart per held-out set, with the mean, the majority vote and the pass rate of the most samples. Each has
    its interval as a band."""
    estimates = [name for name in names if f"{name}_low" in names and f"{name}_high" in names]
    for folder in sorted({name.rpartition("/")[0] for name in estimates}):
        found = [name for name in estimates if name.rpartition("/")[0] == folder]
        passes = [name for name in found if MAX_PASS.fullmatch(name)]
        widest = max(passes, key=lambda name: int(name.rpartition("@")[2]), default=None)
        shown = sorted(name for name in found if name not in passes or name == widest)
        series = [
            MarginChartContent.Series(value=tag_of(name), lower=tag_of(f"{name}_low"), upper=tag_of(f"{name}_high"))
            for name in shown
        ]
        metrics = ", ".join(name.rpartition("/")[2] for name in shown)
        set_name = folder.removeprefix("eval/")
        yield Chart(title=f"evaluation {set_name}: {metrics}, 95 %", margin=MarginChartContent(series=series))
        if len(passes) > 1:
            tags = [f"eval/{re.escape(set_name)}/pass@[0-9]+$"]
            yield Chart(title=f"evaluation {set_name}: pass rates", multiline=MultilineChartContent(tag=tags))


def _stages(names: Collection[str]) -> Iterable[Chart]:
    """Yield the stack of stages. TensorBoard has no stacked chart, so each stage is a band from the bound of the stage
    below it to its own."""
    if "time/step" not in names:
        return
    shown = [stage for stage in STAGES if f"time/{stage}" in names]
    tops = [*(BANDS + stage for stage in shown), OTHER]
    series = [MarginChartContent.Series(value=top, lower=below, upper=top) for below, top in zip([BOTTOM, *tops], tops)]
    yield Chart(title="share of a step by stage, stacked", margin=MarginChartContent(series=series))
