"""The layout of TensorBoard: which charts its tab Custom Scalars has, and under which tags metrics are written.

The layout has a chart only if the run has written one of its metrics, so no chart is empty. A chart's content does not
depend on which of its metrics those are, apart from evaluations and stages. So the layouts of several runs, which
TensorBoard merges, have their charts in common.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import NamedTuple

from tensorboard.plugins.custom_scalar.layout_pb2 import (
    Category,
    Chart,
    Layout,
    MarginChartContent,
    MultilineChartContent,
)

# TensorBoard sorts groups of tags by name and opens the first two, so these would hide evaluations and rewards.
LATE = ("critic", "environment", "gpu", "health", "host")
LATE_MARK = "z_"
BOUNDS = f"{LATE_MARK}bounds/"
BOUND = re.compile(r"eval/.*_(low|high)")
STAGES = ("rollout", "logprobs", "update", "sync")  # that have a band of their own; the rest of the step is `other`
OUTSIDE = ("checkpoint", "evaluate")  # stages after the step, which time/step does not include
BANDS = f"{LATE_MARK}stages/"
BOTTOM, OTHER = f"{BANDS}bottom", f"{BANDS}other"
PASS_RATE = re.compile(r"eval/.*/pass@[0-9]+")
NOT_PARTS = ("mean", "std", "no_signal", "timeouts", "errors")


class Lines(NamedTuple):
    """A chart with a line for each metric that one of the patterns matches as a whole."""

    title: str
    patterns: tuple[str, ...]


# A line has the colour of its run, so charts with several lines are for metrics that a reader can tell apart, and for
# open sets such as engines. The other metrics have charts of their own.
LEARNING = (
    Lines("reward: mean", ("reward/mean",)),
    Lines("reward by function and part", (rf"reward/(?!({'|'.join(NOT_PARTS)})$).*",)),
    Lines("reward: standard deviation", ("reward/std",)),
    Lines("share of groups without signal", ("reward/no_signal",)),
    Lines("entropy per token", ("policy/entropy",)),
    Lines("KL between old and new policy", ("policy/kl_old_new",)),
    Lines("KL to the reference", ("loss/kl", "reward/kl")),
    Lines("share of tokens at the clip bound", ("policy/clip_fraction",)),
    Lines("gradient norm", ("optim/grad_norm",)),
    Lines("mismatch of engine and learner", ("policy/(mismatch_kl|probe_gap)",)),
    Lines("KL of tokens that older weights sampled", ("policy/staleness_kl",)),
    Lines("lag in updates: mean and maximum", ("rollout/lag_(mean|max)",)),
)
CRITIC = (
    Lines("explained variance", ("critic/explained_variance",)),
    Lines("loss", ("critic/loss",)),
    Lines("values and returns: means", ("critic/(value|return)_mean",)),
    Lines("share of values at the clip bound", ("critic/clip_fraction",)),
    Lines("gradient norm", ("critic/grad_norm",)),
)
GENERATION = (
    Lines("response length in tokens: mean and maximum", ("rollout/length_(mean|max)",)),
    Lines("share of truncated responses", ("rollout/truncated",)),
    Lines("tokens per second", ("perf/tokens_per_s",)),
    Lines("tokens per second by engine", ("perf/tokens_per_s/engine_.*",)),
    Lines("KV cache in use", ("rollout/kv_use.*",)),
    Lines("preemptions", ("rollout/preemptions",)),
    Lines("prefix cache hits", ("rollout/prefix_hit_rate",)),
    Lines("groups that go on in the next round", ("rollout/carried",)),
    Lines("finished groups that wait for an update", ("rollout/queue",)),
    Lines("conversations: turns and calls", ("environment/(turns|calls)",)),
    Lines("conversations: how they ended", ("environment/ended_.*",)),
    Lines("conversations: failed calls", ("environment/(unknown_tool|bad_arguments|tool_.*)",)),
)
SYSTEM = (
    Lines("seconds by stage", (f"time/(step|{'|'.join((*STAGES, *OUTSIDE))})",)),
    Lines("busy share by role", ("perf/busy/.*",)),
    Lines("waiting share by role", ("perf/wait/.*",)),
    Lines("MFU", ("perf/mfu.*",)),
    Lines("weight sync in GB/s", ("perf/sync_gb_per_s",)),
    Lines("checkpoint seconds", ("perf/checkpoint_s",)),
    Lines("samples without a score: timeouts, errors", ("reward/(timeouts|errors)",)),
    Lines("health rules: 1 while a rule fires", ("health/.*",)),
)
MEMORY = (
    Lines("GPU memory by kind, in GB", ("gpu/memory_gb/(?!rank_).*",)),
    Lines("GPU memory by rank, in GB", ("gpu/memory_gb/rank_.*",)),
    Lines("GPU utilization by rank", ("gpu/utilization/.*",)),
    Lines("host memory by node, in GB", ("host/memory_gb/.*",)),
)


@cache
def tag_of(name: str) -> str:
    """Return the tag of a metric in TensorBoard. Most tags equal the metric's name."""
    if BOUND.fullmatch(name):
        return BOUNDS + name
    return LATE_MARK + name if name.partition("/")[0] in LATE else name


def stack_stages(values: Mapping[str, float]) -> dict[str, float]:
    """Return the upper bounds of the bands of stages, by tag: shares of the step's seconds, added up. The last is 1."""
    if not values.get("time/step"):
        return {}
    bounds, height = {BOTTOM: 0.0}, 0.0
    for stage in STAGES:
        height += values.get(f"time/{stage}", 0.0) / values["time/step"]
        bounds[BANDS + stage] = min(1.0, height)  # rounding may give a bit more
    return bounds | {OTHER: 1.0}


def make_layout(names: Collection[str]) -> Layout:
    """Return the layout for a run that has written the metrics of these names. A category has at most as many charts as
    TensorBoard shows on one page, unless there are many held-out sets. Within a category, it shows bands last."""
    charts = {
        "learning": _lines(LEARNING, names),
        "learning: evaluations, with intervals of 95 %": _evaluations(names),
        "learning: critic": _lines(CRITIC, names),
        "generation": _lines(GENERATION, names),
        "system": [*_lines(SYSTEM, names), *_stages(names)],
        "system: memory and GPUs": _lines(MEMORY, names),
    }
    found = {title: list(each) for title, each in charts.items()}
    return Layout(category=[Category(title=title, chart=each) for title, each in found.items() if each])


def _lines(charts: Iterable[Lines], names: Collection[str]) -> Iterable[Chart]:
    for chart in charts:
        if any(re.fullmatch(pattern, name) for pattern in chart.patterns for name in names):
            # TensorBoard wants only the beginning of a tag to match.
            tags = [f"{_tag_pattern(pattern)}$" for pattern in chart.patterns]
            yield Chart(title=chart.title, multiline=MultilineChartContent(tag=tags))


def _tag_pattern(pattern: str) -> str:
    return LATE_MARK + pattern if pattern.partition("/")[0] in LATE else pattern


def _evaluations(names: Collection[str]) -> Iterable[Chart]:
    """Yield the charts of each held-out set: its pass rates, and the mean, the majority vote and the pass rate of the
    most samples, each with its interval as a band."""
    estimates = [name for name in names if f"{name}_low" in names and f"{name}_high" in names]
    for folder in sorted({name.rpartition("/")[0] for name in estimates}):
        found = [name for name in estimates if name.rpartition("/")[0] == folder]
        passes = sorted((name for name in found if PASS_RATE.fullmatch(name)), key=_num_samples)
        set_name = folder.removeprefix("eval/")
        if len(passes) > 1:
            tags = [f"eval/{re.escape(set_name)}/pass@[0-9]+$"]
            yield Chart(title=f"{set_name}: all pass rates", multiline=MultilineChartContent(tag=tags))
        for name in sorted(name for name in found if name not in passes[:-1]):
            bounds = {"lower": tag_of(f"{name}_low"), "upper": tag_of(f"{name}_high")}
            band = MarginChartContent.Series(value=tag_of(name), **bounds)
            yield Chart(title=f"{set_name}: {name.rpartition('/')[2]}", margin=MarginChartContent(series=[band]))


def _num_samples(name: str) -> int:
    """Return the k of a metric such as pass@k."""
    return int(name.rpartition("@")[2])


def _stages(names: Collection[str]) -> Iterable[Chart]:
    """Yield the stack of stages. TensorBoard has no stacked chart, so each stage is a band from the bound of the stage
    below it to its own. All have one colour, so the title names them."""
    if "time/step" in names:
        tops = [*(BANDS + stage for stage in STAGES), OTHER]
        bands = [MarginChartContent.Series(value=top, lower=low, upper=top) for low, top in zip([BOTTOM, *tops], tops)]
        title = f"share of a step, from below: {', '.join(STAGES)}, other"
        yield Chart(title=title, margin=MarginChartContent(series=bands))
