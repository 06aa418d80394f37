"""Build the page of a report from the data of its runs."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from rl.common.events import FREQUENT, Event
from rl.common.text import count_of
from rl.config.differences import find_differences
from rl.config.schema import Config
from rl.report.page.charts import (
    curve_chart,
    evaluation_chart,
    event_chart,
    length_chart,
    mean_stages,
    progress_chart,
    role_chart,
    stage_chart,
)
from rl.report.page.parts import Block, Chart, Page, Paragraph, Section, Table
from rl.report.page.read import RunData
from rl.report.page.responses import compare_responses
from rl.report.page.series import MAX_POINTS
from rl.report.page.summary import EVALUATION

# The metrics that are shown at once, by section. All others are shown on demand, in the section of their prefix.
REWARD = "reward/mean"  # beside the summary
LEARNING = ["reward/std", "reward/no_signal", "policy/entropy", "policy/kl_old_new", "loss/kl"]
LEARNING += ["policy/clip_fraction", "policy/mismatch_kl", "optim/grad_norm", "critic/explained_variance"]
GENERATION = ["rollout/length_mean", "rollout/truncated", "perf/tokens_per_s", "rollout/lag_mean"]
SYSTEM = ["time/step", "perf/mfu"]
AT_ONCE = (REWARD, *LEARNING, *GENERATION, *SYSTEM)
PREFIXES: dict[str, tuple[str, ...]] = {
    "Learning": ("reward/", "loss/", "policy/", "optim/", "critic/", "environment/", "health/")
}
PREFIXES |= {"Generation": ("rollout/",), "Time": ("time/", "perf/", "gpu/", "host/")}
HEADLINE, MAX_HEADLINES = "/avg@", 3  # estimates beside the summary
RUNNING_S = 600.0  # without an end and without news for longer, a run does not count as running
MAX_EVENTS = 60  # in the table
# Points of all curves that are shown at once, and of those that are shown on demand. They bound the size of the page.
MAX_AT_ONCE, MAX_ON_DEMAND, MIN_POINTS = 24_000, 64_000, 16
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class Resolution:
    """The most points of a curve on the page."""

    at_once: int
    on_demand: int


def choose_resolution(runs: Sequence[RunData]) -> Resolution:
    """Divide the points of a page by the number of its curves."""
    names = [name for run in runs for name in run.metrics()]
    num_at_once = sum(name in AT_ONCE or name in run.rows.estimates for run in runs for name in run.metrics())

    def divide(most: int, num_curves: int) -> int:
        return max(MIN_POINTS, min(MAX_POINTS, most // max(1, num_curves)))

    return Resolution(divide(MAX_AT_ONCE, num_at_once), divide(MAX_ON_DEMAND, len(names) - num_at_once))


def build_page(runs: Sequence[RunData], num_prompts: int = 4) -> Page:
    """Build the page. `num_prompts` is the number of prompts per set with responses."""
    title = f"Report of {', '.join(run.name for run in runs)}"
    resolution = choose_resolution(runs)
    sections = [
        _summarize(runs, resolution),
        _show_curves("Learning", LEARNING, runs, resolution),
        _show_evaluations(runs, resolution),
        _show_curves("Generation", GENERATION, runs, resolution, _length_charts(runs)),
        _show_curves("Time", SYSTEM, runs, resolution, _show_time(runs)),
        _show_events(runs),
        _show_samples(runs, num_prompts),
        _show_settings(runs),
        _show_environment(runs),
    ]
    return Page(title, [section for section in sections if section.blocks or section.further])


def _charts(found: Iterable[Chart | None]) -> list[Chart]:
    return [chart for chart in found if chart is not None]


def _by_run(runs: Sequence[RunData], rows: dict[str, Callable[[RunData], str]]) -> Table:
    """Return a table with a column for each run. Rows that are empty for all runs are left out."""
    cells = [[name, *(describe(run) for run in runs)] for name, describe in rows.items()]
    head = ["", *(run.name for run in runs)]
    return Table(head, [row for row in cells if any(row[1:])])


# Summary


def _summarize(runs: Sequence[RunData], resolution: Resolution) -> Section:
    """Return how the runs went: the main numbers and curves, so that a reader sees at once whether a run learns."""
    main: dict[str, Callable[[RunData], str]] = {
        "state": describe_state,
        "steps": _describe_steps,
        "reward": lambda run: _describe_ends(run, REWARD),
        "accuracy": _describe_accuracy,
    }
    others: dict[str, Callable[[RunData], str]] = {
        "started": _describe_start,
        "took": _describe_duration,
        "attempts": lambda run: _count_events(run, ("start", "resume")),
        "warnings": lambda run: _count_events(run, ("warning",)),
        "tokens sampled": _describe_tokens,
        "tokens/s": lambda run: _describe_median(run, "perf/tokens_per_s", "{:,.0f} in the median step"),
        "step": lambda run: _describe_median(run, "time/step", "{:.3g} s in the median"),
        "model": lambda run: str(run.record.config.get("model", {}).get("path", "")) if run.record else "",
        "ranks": lambda run: run.record.placement if run.record else "",
    }
    blocks: list[Block] = [_by_run(runs, main)]
    for run in runs:
        if run.is_cut:
            text = f"The last line of {run.name} is incomplete and was left out: the run is writing it, or was killed."
            blocks.append(Paragraph(text))
    if reward := curve_chart(REWARD, runs, resolution.at_once):
        blocks.append(replace(reward, caption=_describe_reward(runs)))
    blocks += _charts(evaluation_chart(name, runs, resolution.at_once) for name in _headlines(runs))
    return Section("Summary", [*blocks, _by_run(runs, others)])


def _describe_reward(runs: Sequence[RunData]) -> str:
    windows = {run.rows.curves[REWARD].window for run in runs if REWARD in run.rows.curves} - {1}
    mean = f" The strong line is the mean of the last {windows.pop()} steps." if len(windows) == 1 else ""
    return f"Mean reward of the responses that each step trained on.{mean}"


def describe_state(run: RunData, now: float | None = None) -> str:
    """Say whether a run is done, or how it ended."""
    now = time.time() if now is None else now
    last = next((event for event in reversed(run.events) if event.kind not in FREQUENT), None)
    if last is not None and last.kind == "end":
        return "done"
    if last is not None and last.kind in ("fault", "stop"):
        return f"{'failed' if last.kind == 'fault' else 'stopped'}: {last.text}"
    if run.last_news_at is None:
        return NOT_RECORDED
    if now - run.last_news_at < RUNNING_S:
        return "running when this report was written"
    return "no end was recorded: it was killed, or its node was lost"


def _describe_steps(run: RunData) -> str:
    whole = run.record.config.get("train", {}).get("num_steps") if run.record else 0
    return f"{run.rows.last_step} of {whole}" if whole else str(run.rows.last_step)


def _describe_ends(run: RunData, name: str) -> str:
    if name not in run.rows.curves:
        return ""
    curve = run.rows.curves[name]
    means = f"{fmean(curve.first):.3g} -> {fmean(curve.last):.3g}"
    return f"{means} (means of the first and the last {count_of(len(curve.first), 'step')})"


def _describe_accuracy(run: RunData) -> str:
    if "eval/accuracy" not in run.rows.curves:
        return ""
    points = run.rows.curves["eval/accuracy"].points()
    best = max(points, key=lambda point: point.value)
    return f"{points[0].value:.3g} -> {points[-1].value:.3g}, best {best.value:.3g} (step {best.step})"


def _describe_tokens(run: RunData) -> str:
    return f"{run.rows.curves['rollout/tokens'].total:,.0f}" if "rollout/tokens" in run.rows.curves else ""


def _describe_start(run: RunData) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.began_at)) if run.began_at is not None else NOT_RECORDED


def _describe_duration(run: RunData) -> str:
    began, ended = run.began_at, run.last_news_at
    return NOT_RECORDED if began is None or ended is None else format_seconds(ended - began)


def format_seconds(seconds: float) -> str:
    """Return a duration such as 1 d 2 h, 2 h 5 min, 3 min 20 s or 12 s."""
    whole = round(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "min"), (whole % 60, "s")]
    first = next((index for index, (count, _) in enumerate(parts) if count), 3)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count or first == 3)


def _count_events(run: RunData, kinds: Sequence[str]) -> str:
    return str(sum(event.kind in kinds for event in run.events)) if run.events else NOT_RECORDED


def _describe_median(run: RunData, name: str, text: str) -> str:
    values = run.rows.medians[name]
    return text.format(median(values)) if values else ""


# Evaluation and curves


def _measured(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics of evaluations that have a 95 % interval, in the order of their first appearance."""
    names = dict.fromkeys(name for run in runs for name in run.metrics() if name.startswith(EVALUATION))
    return [name for name in names if f"{name}_low" in names and f"{name}_high" in names]


def _headlines(runs: Sequence[RunData]) -> list[str]:
    return [name for name in _measured(runs) if HEADLINE in name][:MAX_HEADLINES]


def _show_evaluations(runs: Sequence[RunData], resolution: Resolution) -> Section:
    names = dict.fromkeys(name for run in runs for name in run.metrics() if name.startswith(EVALUATION))
    measured = _measured(runs)
    rows = []
    for run in runs:
        for row in (row for row in run.rows.evaluations if any(name in row for name in measured)):
            first = f"{run.name}, {row['step']}" if len(runs) > 1 else str(row["step"])
            rows.append([first, *(_describe_estimate(row, name) for name in measured)])
    head = ["run, step" if len(runs) > 1 else "step", *(name.removeprefix(EVALUATION) for name in measured)]
    hidden = sum(run.rows.num_evaluations - len(run.rows.evaluations) for run in runs)
    caption = "With the bounds of the 95 % interval over prompts."
    caption += f" {count_of(hidden, 'evaluation')} between the first and the last not shown." if hidden else ""
    bounds = {f"{name}{end}" for name in measured for end in ("_low", "_high")}
    others = [name for name in names if name not in bounds and name not in measured]
    shown = [name for name in measured if name not in _headlines(runs)]
    charts = _charts(evaluation_chart(name, runs, resolution.at_once) for name in shown)
    further = _charts(curve_chart(name, runs, resolution.on_demand) for name in others)
    return Section("Evaluation", [*charts, *([Table(head, rows, caption)] if rows else [])], further)


def _describe_estimate(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return ""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    interval = "" if low is None or high is None else f" ({low:.4g} to {high:.4g})"
    return f"{row[name]:.4g}{interval}"


def _show_curves(
    title: str, main: Sequence[str], runs: Sequence[RunData], resolution: Resolution, others: Sequence[Block] = ()
) -> Section:
    """Return a section with the curves of its main metrics, and those of its prefixes on demand."""
    names = sorted({name for run in runs for name in run.metrics()})
    # A part of the reward stands beside the reward, and metrics of any other prefix belong to the last section.
    known = tuple(prefix for prefixes in PREFIXES.values() for prefix in prefixes)
    further = [
        name
        for name in names
        if (name.startswith(PREFIXES[title]) or (title == "Time" and not name.startswith((*known, EVALUATION))))
        and name not in AT_ONCE
    ]
    charts = _charts(curve_chart(name, runs, resolution.at_once) for name in main)
    on_demand = _charts(curve_chart(name, runs, resolution.on_demand) for name in further)
    return Section(title, [*others, *charts], on_demand)


def _length_charts(runs: Sequence[RunData]) -> list[Chart]:
    return _charts(length_chart(run, _title_of("Lengths of responses", run, runs)) for run in runs)


def _title_of(title: str, run: RunData, runs: Sequence[RunData]) -> str:
    return f"{title}, {run.name}" if len(runs) > 1 else title


# Time and events


def _show_time(runs: Sequence[RunData]) -> list[Block]:
    charts = [*(stage_chart(run, _title_of("Seconds of each stage", run, runs)) for run in runs), role_chart(runs)]
    stages = {run.name: mean_stages(run.rows.stages.bars) for run in runs if run.rows.stages.bars}
    names = dict.fromkeys(stage for found in stages.values() for stage in found)
    rows = []
    for stage in names:
        cells = []
        for run in runs:
            found = stages.get(run.name, {})
            whole = sum(found.values())
            cells.append(f"{found[stage]:.3g} s ({found[stage] / whole:.0%})" if stage in found and whole else "")
        rows.append([stage, *cells])
    table = Table(["stage", *(run.name for run in runs)], rows, "Mean seconds per step, and the share of all stages.")
    return [*_charts(charts), *([table] if rows else [])]


def _show_events(runs: Sequence[RunData]) -> Section:
    charts = _charts([progress_chart(runs), event_chart(runs)])
    rows = []
    events = sorted(((event, run) for run in runs for event in run.events), key=lambda pair: pair[0].at)
    rare = [pair for pair in events if pair[0].kind not in FREQUENT]
    warnings = [pair for pair in events if pair[0].kind == "warning"]
    shown = sorted([*rare[-MAX_EVENTS:], *warnings[-MAX_EVENTS:]], key=lambda pair: pair[0].at)
    for event, run in shown:
        rows.append(
            [*([run.name] if len(runs) > 1 else []), _since(event, run), str(event.step), event.kind, event.text]
        )
    if not rows:
        return Section("Events", charts)
    head = [*(["run"] if len(runs) > 1 else []), "after", "step", "event", "text"]
    num = {kind: sum(event.kind == kind for event, _ in events) for kind in ("checkpoint", "evaluation")}
    caption = f"Besides {count_of(num['checkpoint'], 'checkpoint')} and {count_of(num['evaluation'], 'evaluation')}."
    hidden = len(rare) + len(warnings) - len(shown)
    caption += f" {count_of(hidden, 'older event')} not shown." if hidden else ""
    return Section("Events", [*charts, Table(head, rows, caption)])


def _since(event: Event, run: RunData) -> str:
    return format_seconds(event.at - (run.began_at or 0.0))


# Samples, settings and environment


def _show_samples(runs: Sequence[RunData], num_prompts: int) -> Section:
    samples = compare_responses(runs, num_prompts) if num_prompts else []
    if not samples:
        return Section("Samples", [])
    text = (
        "The first response to the first prompts of each set of held-out prompts, at the first and at the last "
        "evaluation. They were not chosen by their scores."
    )
    return Section("Samples", [Paragraph(text), *samples])


def _show_settings(runs: Sequence[RunData]) -> Section:
    recorded = [run for run in runs if run.record is not None]
    missing = [run.name for run in runs if run.record is None]
    blocks: list[Block] = []
    if missing:
        blocks.append(Paragraph(f"There is no run.json of {', '.join(missing)}, so the settings are not known."))
    configs = [run.record.config for run in recorded if run.record is not None]
    if len(configs) == 1:
        found, what = find_differences([configs[0], asdict(Config())]), "Settings that differ from the defaults."
        head = ["setting", recorded[0].name, "default"]
    else:
        found, what = find_differences(configs) if configs else {}, "Settings that differ between the runs."
        head = ["setting", *(run.name for run in recorded)]
    if found:
        rows = [[name, *map(_describe_value, values)] for name, values in found.items()]
        blocks.append(Table(head, rows, what))
    elif configs:
        blocks.append(Paragraph("No setting differs."))
    return Section("Settings", blocks)


def _describe_value(value: Any) -> str:
    """Return a setting as a user writes it."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_describe_value(part)}" for key, part in value.items())
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _show_environment(runs: Sequence[RunData]) -> Section:
    recorded = [run for run in runs if run.record is not None]
    if not recorded:
        return Section("Environment", [])
    names = dict.fromkeys(name for run in recorded if run.record for name in run.record.versions)

    def version(name: str) -> Callable[[RunData], str]:
        return lambda run: run.record.versions.get(name, "") if run.record else ""

    rows: dict[str, Callable[[RunData], str]] = {"commit": lambda run: run.record.commit if run.record else ""}
    rows |= {name: version(name) for name in names} | {"nodes": _describe_nodes}
    return Section("Environment", [_by_run(runs, rows)])


def _describe_nodes(run: RunData) -> str:
    """Describe the hardware. Equal nodes are counted."""
    if run.record is None:
        return ""
    texts = []
    for node in run.record.nodes:
        gpus = ", ".join(f"{node.gpus.count(name)} x {name}" for name in dict.fromkeys(node.gpus)) or "no GPU"
        texts.append(f"{gpus}; {count_of(node.num_cpus, 'CPU')} ({node.cpu}); {node.memory_gb:,.0f} GB")
    return " | ".join(f"{texts.count(text)} x [{text}]" for text in dict.fromkeys(texts))
