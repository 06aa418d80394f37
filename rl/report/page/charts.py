"""Charts as Vega-Lite specifications. altair builds and checks them; html.py and markdown.py draw them.

A chart has its own data, under the name `rows`. Colors suit a light and a dark background.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt

from rl.common.events import FREQUENT, KINDS
from rl.report.accounting import BUSY, WAIT
from rl.report.page.parts import Chart
from rl.report.page.read import RunData, is_number
from rl.report.page.series import MAX_POINTS, CurvePoint, make_curve, thin

ROWS = "rows"  # name of the data in every chart
RUN_COLORS = ["#3b8bd0", "#e0782f", "#2aa584", "#c765b4", "#b59a1c", "#7d72d6", "#d2515f", "#6b9a3a"]
EVENT_COLORS = {"start": "#2aa584", "resume": "#2aa584", "checkpoint": "#3b8bd0", "evaluation": "#7d72d6"}
EVENT_COLORS |= {"warning": "#b59a1c", "fault": "#d2515f", "stop": "#e0782f", "end": "#808080"}
# The stages of a step, and those after it. Others belong to the start of an attempt, and are not drawn.
STAGES = ["rollout", "logprobs", "advantages", "update", "sync", "handover", "evaluate", "checkpoint", "other"]
STAGE_COLORS = [*RUN_COLORS, "#909090"]
OUTSIDE_STEP = ("evaluate", "checkpoint")  # stages that time/step does not include
HEIGHT, SMALL_HEIGHT = 220, 160
MAX_BARS = 60
FEW_POINTS = 40  # curves with so few points show each of them
UNITS = [(120.0, 1.0, "seconds"), (7200.0, 60.0, "minutes"), (172_800.0, 3600.0, "hours")]  # limit, seconds, name
DAY_S = 86_400.0


def curve_chart(name: str, runs: Sequence[RunData], window: int = 0) -> Chart | None:
    """Draw a metric by step: the running mean of each run, with the exact values faint. None: no run has it."""
    curves = {run.name: make_curve(run.values(name), window) for run in runs}
    rows = [{"run": run, **point._asdict()} for run, curve in curves.items() for point in curve]
    if not rows:
        return None
    is_smoothed = any(point.mean != point.value for curve in curves.values() for point in curve)
    shows_points = max(len(curve) for curve in curves.values()) <= FEW_POINTS
    base = alt.Chart(alt.NamedData(ROWS)).encode(x=_by_step(), color=_by_run(runs))
    # A missing `point` is off, and the title of the axis would repeat that of the chart.
    points = alt.OverlayMarkDef(size=22) if shows_points else False
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False), axis=_numbers())
    layers = [base.mark_line(opacity=0.35 if is_smoothed else 1.0, strokeWidth=1.5, point=points).encode(y=y)]
    if is_smoothed:
        layers.append(base.mark_line(strokeWidth=2.5).encode(y=alt.Y("mean:Q")))
    tooltip = [alt.Tooltip("run:N"), alt.Tooltip("step:Q"), alt.Tooltip("value:Q"), alt.Tooltip("mean:Q")]
    layers.append(base.mark_circle(opacity=0, size=120).encode(y=alt.Y("value:Q"), tooltip=tooltip))
    return Chart(name, _finish(alt.layer(*layers), rows))


def evaluation_chart(name: str, runs: Sequence[RunData]) -> Chart | None:
    """Draw a metric of evaluations with its 95 % interval. None: no run has it."""
    rows = []
    for run in runs:
        for row in run.rows:
            low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
            if is_number(row.get(name)) and is_number(low) and is_number(high):
                rows.append({"run": run.name, "step": row["step"], "value": row[name], "low": low, "high": high})
    if not rows:
        return None
    base = alt.Chart(alt.NamedData(ROWS)).encode(x=_by_step(), color=_by_run(runs))
    tooltip = [alt.Tooltip(f"{field}") for field in ("run:N", "step:Q", "value:Q", "low:Q", "high:Q")]
    y = alt.Y("low:Q", title=None, scale=alt.Scale(zero=False), axis=_numbers())
    band = base.mark_area(opacity=0.18).encode(y=y, y2="high:Q")
    bars = base.mark_rule(opacity=0.6).encode(y="low:Q", y2="high:Q")
    line = base.mark_line(strokeWidth=2.5).encode(y="value:Q")
    points = base.mark_circle(size=50, opacity=1).encode(y="value:Q", tooltip=tooltip)
    caption = "The band is the 95 % interval over prompts."
    return Chart(name.removeprefix("eval/"), _finish(alt.layer(band, bars, line, points), rows), caption)


def stage_chart(run: RunData, title: str) -> Chart | None:
    """Draw the seconds of each stage, stacked, by step. Long runs have one bar for several steps, with their mean."""
    steps = [row for row in run.rows if is_number(row.get("time/step"))]
    if not steps:
        return None
    num_bars = min(MAX_BARS, len(steps))
    rows: list[dict[str, Any]] = []
    for index in range(num_bars):
        part = steps[index * len(steps) // num_bars : (index + 1) * len(steps) // num_bars]
        for order, (stage, seconds) in enumerate(mean_stages(part).items()):
            place = {"step": part[0]["step"], "last": part[-1]["step"], "order": order}
            rows.append(place | {"stage": stage, "seconds": seconds})
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
    per_bar = -(-len(steps) // num_bars)
    caption = f"Each bar is the mean of up to {per_bar} steps." if per_bar > 1 else ""
    return Chart(title, _finish(chart, rows), caption)


def mean_stages(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds per step of each stage, and the rest of the step as `other`."""
    names = [stage for stage in STAGES if any(f"time/{stage}" in row for row in rows)]
    found = {stage: sum(row.get(f"time/{stage}") or 0.0 for row in rows) / len(rows) for stage in names}
    inside = sum(seconds for stage, seconds in found.items() if stage not in OUTSIDE_STEP)
    return found | {"other": max(0.0, sum(row["time/step"] for row in rows) / len(rows) - inside)}


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
    steps = [row for row in run.rows if is_number(row.get("time/step"))]
    whole = sum(row["time/step"] for row in steps)
    found: dict[str, dict[str, float]] = {}
    for name in run.metrics():
        if name.startswith(f"{BUSY}/"):
            role, part = name.removeprefix(f"{BUSY}/"), "busy"
        elif name.startswith(f"{WAIT}/"):
            role, _, awaited = name.removeprefix(f"{WAIT}/").partition("/")
            part = f"waits for {awaited}"
        else:
            continue
        share = sum((row.get(name) or 0.0) * row["time/step"] for row in steps) / whole if whole else 0.0
        found.setdefault(role, {})[part] = share
    return found


def progress_chart(runs: Sequence[RunData]) -> Chart | None:
    """Draw the step that each run has reached by the time since its start: a line per attempt, and events on it."""
    curves, marks = [], []
    for run in runs:
        began = run.began_at
        if began is None:
            continue
        rare = [event for event in run.events if event.kind not in FREQUENT]
        reached = [(row["at"], row["step"]) for row in run.rows if is_number(row.get("at"))]
        starts = [event.at for event in rare if event.kind in ("start", "resume")]
        points = thin([CurvePoint(step, at, at) for at, step in reached], MAX_POINTS)
        points += [CurvePoint(event.step, event.at, event.at) for event in rare]
        for step, at, _ in sorted(points, key=lambda point: point.value):
            attempt = sum(start <= at for start in starts)
            curves.append({"run": run.name, "attempt": attempt, "elapsed": at - began, "step": step})
        for event in run.events:
            if event.kind not in ("checkpoint", "evaluation"):
                mark = {"run": run.name, "elapsed": event.at - began, "step": event.step}
                marks.append(mark | {"kind": event.kind, "text": event.text})
    rows: list[dict[str, Any]] = [row | {"part": "line"} for row in curves] + [row | {"part": "event"} for row in marks]
    if not rows:
        return None
    unit = _convert_elapsed(rows)
    base = alt.Chart(alt.NamedData(ROWS)).encode(x=_by_time(unit), y=alt.Y("step:Q", title="step"))
    # Lines connect points by time, because the step need not increase.
    line = base.transform_filter("datum.part === 'line'").mark_line(strokeWidth=2)
    line = line.encode(color=_by_run(runs), order=alt.Order("elapsed:Q"), detail=alt.Detail("attempt:N"))
    mark = base.transform_filter("datum.part === 'event'").mark_point(filled=True, size=70, opacity=1)
    tooltip = [alt.Tooltip(field) for field in ("run:N", "kind:N", "step:Q", "elapsed:Q", "text:N")]
    layers = alt.layer(line, mark.encode(color=_by_kind(rows), shape=_shape(rows), tooltip=tooltip))
    layers = layers.resolve_scale(color="independent")
    return Chart("Steps by time", _finish(layers, rows), "A restart goes back to the step of the last checkpoint.")


def event_chart(runs: Sequence[RunData]) -> Chart | None:
    """Draw all events on the time axis, one line of marks per kind, or per run and kind."""
    rows: list[dict[str, Any]] = []
    for run in runs:
        began = run.began_at or 0.0
        for event in run.events:
            lane = f"{run.name}: {event.kind}" if len(runs) > 1 else event.kind
            row = {"run": run.name, "lane": lane, "elapsed": event.at - began, "step": event.step}
            rows.append(row | {"kind": event.kind, "text": event.text})
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
    return Chart("Events by time", _finish(chart, rows, 40 + 22 * len(lanes)))


def length_chart(run: RunData, name: str, title: str) -> Chart | None:
    """Draw a histogram of each step as a column: darker bins have a larger share. Long runs show the sum of several
    steps in a column. None: the run has no such histogram."""
    steps = [row for row in run.rows if isinstance(row.get(name), dict) and sum(row[name].get("counts", ())) > 0]
    if not steps:
        return None
    num_columns = min(MAX_BARS, len(steps))
    rows = []
    for index in range(num_columns):
        part = steps[index * len(steps) // num_columns : (index + 1) * len(steps) // num_columns]
        sums: dict[tuple[float, float], int] = {}
        for row in part:
            edges, counts = row[name]["edges"], row[name]["counts"]
            for low, high, count in zip(edges, edges[1:], counts):
                sums[low, high] = sums.get((low, high), 0) + count
        whole = sum(sums.values())
        for (low, high), count in sums.items():
            if count:
                place = {"step": part[0]["step"], "low": low, "high": high}
                rows.append(place | {"count": count, "share": count / whole})
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


def _by_run(runs: Sequence[RunData]) -> alt.Color:
    names = [run.name for run in runs]
    colors = [RUN_COLORS[index % len(RUN_COLORS)] for index in range(len(names))]
    legend = _legend() if len(names) > 1 else None
    return alt.Color("run:N", title=None, scale=alt.Scale(domain=names, range=colors), legend=legend)


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
