"""Charts as Vega-Lite specifications. altair builds and checks them; html.py and markdown.py draw them.

A chart has its own data, under the name `rows`. Colors suit a light and a dark background.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import altair as alt

from rl.common.events import FREQUENT, KINDS, Event
from rl.common.text import count_of
from rl.report.accounting import BUSY, WAIT
from rl.report.page.parts import Chart
from rl.report.page.read import RunData
from rl.report.page.series import MAX_POINTS, StepSum, thin
from rl.report.page.summary import STAGES, STEP_SECONDS

ROWS = "rows"  # name of the data in every chart
RUN_COLORS = ["#3b8bd0", "#e0782f", "#2aa584", "#c765b4", "#b59a1c", "#7d72d6", "#d2515f", "#6b9a3a"]
EVENT_COLORS = {"start": "#2aa584", "resume": "#2aa584", "checkpoint": "#3b8bd0", "evaluation": "#7d72d6"}
EVENT_COLORS |= {"warning": "#b59a1c", "fault": "#d2515f", "stop": "#e0782f", "end": "#808080"}
STAGE_COLORS = [*RUN_COLORS, "#909090"]
OUTSIDE_STEP = ("evaluate", "checkpoint")  # stages that time/step does not include
HEIGHT = 220
MAX_EVENTS = 100  # of a kind and run in a chart
MAX_TEXT = 160  # characters of an event's text in a chart
FEW_POINTS = 40  # curves with so few points show each of them
UNITS = [(120.0, 1.0, "seconds"), (7200.0, 60.0, "minutes"), (172_800.0, 3600.0, "hours")]  # limit, seconds, name
DAY_S = 86_400.0


def curve_chart(name: str, runs: Sequence[RunData], max_points: int = MAX_POINTS) -> Chart | None:
    """Draw a metric by step: the running mean of each run, with the exact values faint. Each run has at most
    `max_points` points. None: no run has the metric."""
    found = [(run.name, run.rows.curves[name].points(max_points)) for run in runs if name in run.rows.curves]
    if not found:
        return None
    is_smoothed = any(point.mean != point.value for _, curve in found for point in curve)
    shows_points = max(len(curve) for _, curve in found) <= FEW_POINTS
    rows: list[dict[str, Any]] = [
        {"run": run, "step": step, "value": value} | ({"mean": float(f"{mean:.6g}")} if is_smoothed else {})
        for run, curve in found
        for step, value, mean in curve
    ]
    spec = _curve_spec(tuple(run.name for run in runs), is_smoothed, shows_points)
    return Chart(name, spec | {"datasets": {ROWS: rows}})


@cache  # altair takes long to check a specification, and those of most metrics are equal
def _curve_spec(names: tuple[str, ...], is_smoothed: bool, shows_points: bool) -> dict[str, Any]:
    base = alt.Chart(alt.NamedData(ROWS)).encode(x=_by_step(), color=_by_run(names))
    # A missing `point` is off, and the title of the axis would repeat that of the chart.
    points = alt.OverlayMarkDef(size=22) if shows_points else False
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=_numbers())
    layers = [base.mark_line(opacity=0.35 if is_smoothed else 1.0, strokeWidth=1.5, point=points).encode(y=y)]
    if is_smoothed:
        layers.append(base.mark_line(strokeWidth=2.5).encode(y=alt.Y("mean:Q")))
    fields = ("run:N", "step:Q", "value:Q", *(["mean:Q"] if is_smoothed else []))
    tooltip = [alt.Tooltip(field) for field in fields]
    layers.append(base.mark_circle(opacity=0, size=120).encode(y=alt.Y("value:Q"), tooltip=tooltip))
    return _finish(alt.layer(*layers), [])


def evaluation_chart(name: str, runs: Sequence[RunData], max_points: int = MAX_POINTS) -> Chart | None:
    """Draw a metric of evaluations with its 95 % interval. None: no run has it."""
    rows = []
    for run in runs:
        if name in run.rows.estimates:
            for step, value, low, high in thin(run.rows.estimates[name].points(), max_points).tolist():
                rows.append({"run": run.name, "step": int(step), "value": value, "low": low, "high": high})
    if not rows:
        return None
    base = alt.Chart(alt.NamedData(ROWS)).encode(x=_by_step(), color=_by_run([run.name for run in runs]))
    tooltip = [alt.Tooltip(f"{field}") for field in ("run:N", "step:Q", "value:Q", "low:Q", "high:Q")]
    y = alt.Y("low:Q", title=None, scale=alt.Scale(zero=False), axis=_numbers())
    band = base.mark_area(opacity=0.18).encode(y=y, y2="high:Q")
    bars = base.mark_rule(opacity=0.6).encode(y="low:Q", y2="high:Q")
    line = base.mark_line(strokeWidth=2.5).encode(y="value:Q")
    points = base.mark_circle(size=50, opacity=1).encode(y="value:Q", tooltip=tooltip)
    caption = "On held-out prompts. The band is the 95 % interval over prompts."
    return Chart(name.removeprefix("eval/"), _finish(alt.layer(band, bars, line, points), rows), caption)


def stage_chart(run: RunData, title: str) -> Chart | None:
    """Draw the seconds of each stage, stacked, by step. Long runs have one bar for several steps, with their mean."""
    bars = run.rows.stages.bars
    rows: list[dict[str, Any]] = []
    for bar in bars:
        for order, (stage, seconds) in enumerate(mean_stages([bar]).items()):
            place = {"step": bar.first, "last": bar.last, "order": order}
            rows.append(place | {"stage": stage, "seconds": seconds})
    if not rows:
        return None
    used = [stage for stage in STAGES if any(row["stage"] == stage for row in rows)]
    scale = alt.Scale(domain=used, range=[STAGE_COLORS[STAGES.index(stage)] for stage in used])
    axis = alt.Axis(labelOverlap="greedy", labelAngle=0)
    chart = (
        alt.Chart(alt.NamedData(ROWS))
        .mark_bar()
        .encode(
            x=alt.X("step:O", title="step", axis=axis),
            y=alt.Y("seconds:Q", title="seconds", axis=_numbers()),
            color=alt.Color("stage:N", title=None, scale=scale, legend=_legend()),
            order=alt.Order("order:Q"),
            tooltip=[alt.Tooltip("stage:N"), alt.Tooltip("step:Q"), alt.Tooltip("last:Q"), alt.Tooltip("seconds:Q")],
        )
    )
    per_bar = run.rows.stages.num_steps
    caption = f"Each bar is the mean of up to {per_bar} steps." if per_bar > 1 else ""
    return Chart(title, _finish(chart, rows), caption)


def mean_stages(bars: Sequence[StepSum]) -> dict[str, float]:
    """Return the mean seconds per step of each stage, and the rest of the step as `other`. There is at least a bar."""
    num_steps = sum(bar.num_steps for bar in bars)
    names = [stage for stage in STAGES if any(f"time/{stage}" in bar.sums for bar in bars)]
    found = {stage: sum(bar.sums[f"time/{stage}"] for bar in bars) / num_steps for stage in names}
    inside = sum(seconds for stage, seconds in found.items() if stage not in OUTSIDE_STEP)
    return found | {"other": max(0.0, sum(bar.sums[STEP_SECONDS] for bar in bars) / num_steps - inside)}


def role_chart(runs: Sequence[RunData]) -> Chart | None:
    """Draw the shares of time in which the ranks of each role are busy, or wait for another role. None: no run has
    measured them."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        for role, shares in mean_shares(run).items():
            label = f"{run.name}: {role}" if len(runs) > 1 else role
            rows += [{"role": label, "part": part, "share": share} for part, share in shares.items()]
    if not rows:
        return None
    parts = sorted({row["part"] for row in rows}, key=lambda part: (part != "busy", part))
    scale = alt.Scale(domain=parts, range=[RUN_COLORS[2], *(RUN_COLORS[1], *RUN_COLORS[3:], "#909090")][: len(parts)])
    chart = (
        alt.Chart(alt.NamedData(ROWS))
        .mark_bar()
        .encode(
            y=alt.Y("role:N", title=None, axis=alt.Axis(labelLimit=110)),
            x=alt.X("share:Q", title="share of the time", axis=alt.Axis(format="%", tickCount=5)),
            color=alt.Color("part:N", title=None, scale=scale, legend=_legend()),
            order=alt.Order("part:N"),
            tooltip=[alt.Tooltip("role:N"), alt.Tooltip("part:N"), alt.Tooltip("share:Q", format=".1%")],
        )
    )
    labels = {row["role"] for row in rows}
    caption = "Means over all steps, by their duration, and over the ranks of a role."
    return Chart("Busy and waiting by role", _finish(chart, rows, 40 + 28 * len(labels)), caption)


def mean_shares(run: RunData) -> dict[str, dict[str, float]]:
    """Return the share of time that the ranks of each role are busy, or wait, by what they wait for."""
    whole = run.rows.curves[STEP_SECONDS].total if STEP_SECONDS in run.rows.curves else 0.0
    found: dict[str, dict[str, float]] = {}
    for name, weighted in run.rows.weighted.items():
        if name.startswith(f"{BUSY}/"):
            role, part = name.removeprefix(f"{BUSY}/"), "busy"
        else:
            role, _, awaited = name.removeprefix(f"{WAIT}/").partition("/")
            part = f"waits for {awaited}"
        found.setdefault(role, {})[part] = weighted / whole if whole else 0.0
    return found


def progress_chart(runs: Sequence[RunData]) -> Chart | None:
    """Draw the step that each run has reached by the time since its start: a line per attempt, and events on it."""
    curves, marks = [], []
    for run in runs:
        began = run.began_at
        if began is None:
            continue
        rare = [event for event in run.events if event.kind not in FREQUENT]
        starts = [event.at for event in rare if event.kind in ("start", "resume")]
        points = [(at, int(step)) for step, at in run.rows.progress.points().tolist()]
        points += [(event.at, event.step) for event in rare]
        for at, step in sorted(points):
            attempt = sum(start <= at for start in starts)
            curves.append({"run": run.name, "attempt": attempt, "elapsed": at - began, "step": step})
        for event in choose_events(run.events):
            if event.kind not in ("checkpoint", "evaluation"):
                marks.append({"run": run.name, "elapsed": event.at - began} | _describe_event(event))
    rows: list[dict[str, Any]] = [row | {"part": "line"} for row in curves] + [row | {"part": "event"} for row in marks]
    if not rows:
        return None
    unit = _convert_elapsed(rows)
    base = alt.Chart(alt.NamedData(ROWS)).encode(x=_by_time(unit), y=alt.Y("step:Q", title="step"))
    # Lines connect points by time, because the step need not increase.
    line = base.transform_filter("datum.part === 'line'").mark_line(strokeWidth=2)
    color = _by_run([run.name for run in runs])
    line = line.encode(color=color, order=alt.Order("elapsed:Q"), detail=alt.Detail("attempt:N"))
    mark = base.transform_filter("datum.part === 'event'").mark_point(filled=True, size=70, opacity=1)
    tooltip = [alt.Tooltip(field) for field in ("run:N", "kind:N", "step:Q", "elapsed:Q", "text:N")]
    layers = alt.layer(line, mark.encode(color=_by_kind(rows), shape=_shape(rows), tooltip=tooltip))
    layers = layers.resolve_scale(color="independent")
    resumed = any(row.get("kind") == "resume" for row in rows)
    caption = "A restart goes back to the step of the last checkpoint." if resumed else ""
    return Chart("Steps by time", _finish(layers, rows), caption)


def event_chart(runs: Sequence[RunData]) -> Chart | None:
    """Draw all events on the time axis, one line of marks per kind, or per run and kind."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        began = run.began_at or 0.0
        for event in choose_events(run.events):
            lane = f"{run.name}: {event.kind}" if len(runs) > 1 else event.kind
            rows.append({"run": run.name, "lane": lane, "elapsed": event.at - began} | _describe_event(event))
    if not rows:
        return None
    unit = _convert_elapsed(rows)
    order = [run.name for run in runs]
    lanes = sorted(
        {(order.index(row["run"]), KINDS.index(row["kind"]), row["lane"]) for row in rows},
    )
    chart = (
        alt.Chart(alt.NamedData(ROWS))
        .mark_tick(thickness=2, size=16)
        .encode(
            x=_by_time(unit),
            y=alt.Y("lane:N", title=None, sort=[lane for *_, lane in lanes], axis=alt.Axis(labelLimit=110)),
            color=_by_kind(rows, legend=None),
            tooltip=[alt.Tooltip(field) for field in ("run:N", "kind:N", "step:Q", "elapsed:Q", "text:N")],
        )
    )
    hidden = sum(len(run.events) for run in runs) - len(rows)
    caption = f"{count_of(hidden, 'more event')} not drawn." if hidden else ""
    return Chart("Events by time", _finish(chart, rows, 40 + 22 * len(lanes)), caption)


def choose_events(events: Sequence[Event]) -> list[Event]:
    """Return at most MAX_EVENTS events of each kind, at equal distances in their order, with the first and the last."""
    kept: list[Event] = []
    for kind in KINDS:
        found = [event for event in events if event.kind == kind]
        num = min(MAX_EVENTS, len(found))
        kept += [found[place * (len(found) - 1) // max(1, num - 1)] for place in range(num)]
    return sorted(kept, key=lambda event: event.at)


def _describe_event(event: Event) -> dict[str, Any]:
    text = event.text if len(event.text) <= MAX_TEXT else f"{event.text[: MAX_TEXT - 4]} ..."
    return {"step": event.step, "kind": event.kind, "text": text}


def length_chart(run: RunData, title: str) -> Chart | None:
    """Draw the lengths of responses in each step as a column: darker bins have a larger share. Long runs show the sum
    of several steps in a column. None: the run has no such histograms."""
    rows = []
    for bar in run.rows.lengths.bars:
        whole = sum(bar.sums.values())
        for (low, high), count in bar.sums.items():
            if count:
                rows.append({"step": bar.first, "low": low, "high": high, "count": count, "share": count / whole})
    if not rows:
        return None
    tooltip = [alt.Tooltip(f"{field}:Q") for field in ("step", "low", "high", "count")]
    chart = (
        alt.Chart(alt.NamedData(ROWS))
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap="greedy", labelAngle=0)),
            y=alt.Y("low:Q", title="tokens"),
            y2="high:Q",
            color=alt.Color("share:Q", title="share", scale=alt.Scale(scheme="blues"), legend=alt.Legend(orient="top")),
            tooltip=[*tooltip, alt.Tooltip("share:Q", format=".1%")],
        )
    )
    return Chart(title, _finish(chart, rows))


def _finish(
    chart: alt.Chart | alt.LayerChart | alt.FacetChart, rows: Sequence[Mapping[str, Any]], height: int = HEIGHT
) -> dict[str, Any]:
    """Return the specification with its data. altair checks it without the data, which would take long."""
    spec: dict[str, Any] = chart.properties(width="container", height=height).to_dict()
    spec["config"] = {}  # html.py and markdown.py have their own
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    spec["datasets"] = {ROWS: list(rows)}
    return spec


def _by_step() -> alt.X:
    return alt.X(
        "step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d", labelFlush=False), scale=alt.Scale(nice=False)
    )


def _by_time(unit: str) -> alt.X:
    return alt.X("elapsed:Q", title=f"{unit} since the start", axis=alt.Axis(format=".6~g", labelFlush=False))


def _numbers() -> alt.Axis:
    return alt.Axis(format=".6~g", tickCount=5)


def _legend(orient: Literal["top", "bottom"] = "top") -> alt.Legend:
    """Return a legend. The number of its columns depends on the width, so the theme of the page sets it."""
    return alt.Legend(orient=orient, labelLimit=140, symbolType="square", symbolOpacity=1, symbolStrokeWidth=3)


def _by_run(names: Sequence[str]) -> alt.Color:
    colors = [RUN_COLORS[index % len(RUN_COLORS)] for index in range(len(names))]
    legend = _legend() if len(names) > 1 else None
    return alt.Color("run:N", title=None, scale=alt.Scale(domain=list(names), range=colors), legend=legend)


def _kinds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [kind for kind in KINDS if any(row.get("kind") == kind for row in rows)]


def _by_kind(rows: Sequence[Mapping[str, Any]], **options: Any) -> alt.Color:
    kinds = _kinds(rows)
    scale = alt.Scale(domain=kinds, range=[EVENT_COLORS[kind] for kind in kinds])
    return alt.Color("kind:N", title=None, scale=scale, **({"legend": _legend("bottom")} | options))


def _shape(rows: Sequence[Mapping[str, Any]]) -> alt.Shape:
    shapes = {"start": "triangle-right", "resume": "triangle-right", "warning": "triangle-up", "fault": "cross"}
    kinds = _kinds(rows)
    scale = alt.Scale(domain=kinds, range=[shapes.get(kind, "circle") for kind in kinds])
    return alt.Shape("kind:N", title=None, scale=scale, legend=None)


def _convert_elapsed(rows: Sequence[dict[str, Any]]) -> str:
    """Convert `elapsed` from seconds to a unit that suits the longest, in place. Return the name of the unit."""
    longest = max(row["elapsed"] for row in rows)
    seconds, unit = next(((seconds, name) for limit, seconds, name in UNITS if longest <= limit), (DAY_S, "days"))
    for row in rows:
        row["elapsed"] /= seconds
    return unit
