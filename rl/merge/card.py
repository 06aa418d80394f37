"""The card of a merged model: what it was trained from, how, and what came of it, with a picture of the reward.

Cards are published. No path of a machine is in them, but for its last part, and no host's name.
"""

import dataclasses
import html
import io
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from rl.checkpoint.manifest import Manifest
from rl.config import Config, resolve_path

REWARD, ACCURACY = "reward/mean", "eval/accuracy"
PICTURE = "reward.png"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
LOCATION = re.compile(r"(/|~|\.\.(/|$)|file:)")  # how a path begins that says where on a machine something lies
OF_THE_RUN = ("run.dir", "run.name")  # say nothing about the model
Points = list[tuple[int, float]]  # steps and values


def model_card(manifest: Manifest, metrics: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, bytes]:
    """Files for the model's folder: README.md, and the picture where there is something to draw. `metrics` are the rows
    of the run's metrics.jsonl; rows of later steps do not count."""
    series = _series(metrics, manifest.step)
    rewards, accuracies = series.get(REWARD, []), series.get(ACCURACY, [])
    files: dict[str, bytes] = {}
    if rewards or accuracies:
        files[PICTURE] = draw_curve(f"{manifest.run_name}, step {manifest.step}", rewards, accuracies)
    config = _without_places(manifest.config)
    text = "\n\n".join(
        [
            _front_matter(manifest),
            f"# {html.escape(_plain(manifest.run_name))}, step {manifest.step}",
            _introduction(manifest, dtype),
            _figures(manifest, series) if series else "The run's metrics were not found.",
            f"![reward by step]({PICTURE})" if PICTURE in files else "The reward curve was not found.",
            "## Settings that differ from the defaults",
            _differences(config),
            f"<details>\n<summary>All settings</summary>\n\n```yaml\n{_yaml(config)}```\n\n</details>",
        ]
    )
    return {"README.md": f"{text}\n".encode(), **files}


def _front_matter(manifest: Manifest) -> str:
    values: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    values["tags"] = ["oneworld", "reinforcement-learning"]
    if base := _base_model(manifest):
        values["base_model"] = base
    return f"---\n{_yaml(values)}---"


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def _base_model(manifest: Manifest) -> str:
    """The model's name on the hub; empty where it was a folder."""
    path = str(manifest.config.get("model", {}).get("path", ""))
    return path if HUB_NAME.fullmatch(path) and not resolve_path(path).exists() else ""


def _introduction(manifest: Manifest, dtype: str) -> str:
    base, path = _base_model(manifest), str(manifest.config.get("model", {}).get("path", ""))
    origin = f"[{base}](https://huggingface.co/{base})" if base else _code(_without_places(path))
    num_steps, num_updates = manifest.config.get("train", {}).get("num_steps"), manifest.state.get("num_updates")
    rows = {
        "run": _code(manifest.run_name),
        "step": f"{manifest.step} of {num_steps}" if num_steps else str(manifest.step),
        "optimizer updates": "unknown" if num_updates is None else str(num_updates),
        "saved": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(manifest.saved_at)),
        "weights": dtype,
    }
    table = _table(["", ""], rows.items())
    return f"Trained from {origin} with group-relative reinforcement learning (GRPO) by oneworld.\n\n{table}"


def _figures(manifest: Manifest, series: Mapping[str, Points]) -> str:
    keep = manifest.config.get("checkpoint", {})
    rows = []
    for name, points in series.items():
        pick = min if keep.get("best_is_lowest") and keep.get("best_metric") == name else max
        best = pick(points, key=lambda point: point[1])
        rows.append([_code(name), *(f"{value:.4g} (step {step})" for step, value in (points[0], points[-1], best))])
    return _table(["", "first", "last", "best"], rows)


def _differences(config: Mapping[str, Any]) -> str:
    defaults = _flat(dataclasses.asdict(Config()))
    rows = [
        [_code(name), _code(value), _code(defaults.get(name, ""))]
        for name, value in _flat(config).items()
        if name not in OF_THE_RUN and (name not in defaults or value != defaults[name])
    ]
    return _table(["setting", "value", "default"], rows) if rows else "None."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """By dotted name; a placement is one value."""
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if isinstance(values, Mapping) and section != "placement":
            flat |= {f"{section}.{name}": value for name, value in values.items()}
        else:
            flat[section] = values
    return flat


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_places(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(entry) for entry in value]
    return PurePosixPath(value).name if isinstance(value, str) and LOCATION.match(value) else value


def _code(value: Any) -> str:
    text = _plain(str(value))
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    """Without what would end a table's cell or inline code."""
    return " ".join(text.replace("`", "'").replace("|", "/").split())


def _series(metrics: Sequence[Mapping[str, Any]], last_step: int) -> dict[str, Points]:
    """The reward and all evaluations, where they are numbers; a step that was done twice counts as it was at last."""
    found: dict[str, dict[int, float]] = {}
    for row in metrics:
        step = row.get("step")
        if not isinstance(step, int) or step > last_step:
            continue
        for name, value in row.items():
            is_ours = name == REWARD or name.startswith("eval/")
            if is_ours and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, {})[step] = float(value)
    return {name: sorted(found[name].items()) for name in sorted(found, key=lambda name: (name != REWARD, name))}


SCALE = 3  # drawn so much larger and then made smaller: Pillow's own lines are jagged
WIDTH, HEIGHT = 900, 450
LEFT, TOP, RIGHT, BOTTOM = 84, 62, 868, 388  # of the plot
HEAD, MARGIN = 27, 12  # height of the title's middle, and where it begins
INK, PALE, GRID = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, LIGHT_BLUE, ORANGE = "#2563eb", "#bfd3fb", "#ea580c"
MANY = 60  # points: from here on a moving mean is drawn over them


def draw_curve(title: str, rewards: Points, accuracies: Points) -> bytes:
    """A PNG: the reward as a line over the steps, evaluations as dots."""
    canvas = _Canvas(rewards + accuracies)
    names = ["reward"] * bool(rewards) + ["accuracy"] * bool(accuracies)
    canvas.axes("step", " and ".join(names))
    is_long = len(rewards) >= MANY
    if is_long:
        canvas.curve(rewards, LIGHT_BLUE, width=1.5)
        canvas.curve(_moving_mean(rewards), BLUE, width=2.5)
    else:
        canvas.curve(rewards, BLUE, width=2.5, radius=3 if len(rewards) <= MANY // 2 else 0)
    canvas.curve(accuracies, ORANGE, width=1, radius=4.5)
    legend = {BLUE: "mean reward, smoothed" if is_long else "mean reward"} if rewards else {}
    canvas.head(title, legend | ({ORANGE: "held-out accuracy"} if accuracies else {}))
    return canvas.png()


class _Canvas:
    """In units of the finished picture; `points` are all that will be drawn, so that they fit."""

    def __init__(self, points: Points):
        from PIL import Image, ImageDraw, ImageFont

        self._image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
        self._draw = ImageDraw.Draw(self._image)
        self._fonts = {size: ImageFont.load_default(size * SCALE) for size in (13, 14, 17)}
        first, last = min(step for step, _ in points), max(step for step, _ in points)
        self._first, self._last = (first, last) if first < last else (first - 1, last + 1)
        self._values = _ticks([value for _, value in points])

    def axes(self, below: str, beside: str) -> None:
        from PIL import Image, ImageDraw

        for value in self._values:
            _, y = self._place(self._first, value)
            self._line([(LEFT, y), (RIGHT, y)], GRID, 1)
            self._write(LEFT - 10, y, f"{value:g}", PALE, 13, "rm")
        for step in _ticks([self._first, self._last], at_least=1):
            x, _ = self._place(step, self._values[0])
            if LEFT <= x <= RIGHT:
                self._line([(x, BOTTOM), (x, BOTTOM + 5)], PALE, 1)
                self._write(x, BOTTOM + 16, f"{step:g}", PALE, 13)
        self._line([(LEFT, BOTTOM), (RIGHT, BOTTOM)], PALE, 1.2)
        self._write((LEFT + RIGHT) / 2, BOTTOM + 40, below, INK, 14)
        label = Image.new("RGB", ((BOTTOM - TOP) * SCALE, 20 * SCALE), "white")
        ImageDraw.Draw(label).text((label.width / 2, label.height / 2), beside, INK, self._fonts[14], "mm")
        self._image.paste(label.rotate(90, expand=True), (8 * SCALE, TOP * SCALE))

    def curve(self, points: Points, color: str, width: float, radius: float = 0) -> None:
        places = [self._place(*point) for point in points]
        if len(places) > 1:
            self._line(places, color, width)
        for x, y in places if radius else []:
            self._dot(x, y, color, radius)

    def head(self, title: str, legend: dict[str, str]) -> None:
        """Names by color at the right, and as much of the title as there is room for."""
        x = float(RIGHT)
        for color, name in reversed(legend.items()):
            self._write(x, HEAD, name, INK, 14, "rm")
            x -= self._fonts[14].getlength(name) / SCALE + 12
            self._dot(x, HEAD, color, 5)
            x -= 22
        while self._fonts[17].getlength(title) > (x - MARGIN) * SCALE and len(title) > 4:
            title = f"{title[:-4]}..."
        self._write(MARGIN, HEAD, title, INK, 17, "lm")

    def png(self) -> bytes:
        from PIL import Image

        file = io.BytesIO()
        self._image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(file, "PNG", optimize=True)
        return file.getvalue()

    def _place(self, step: float, value: float) -> tuple[float, float]:
        low, high = self._values[0], self._values[-1]
        x = LEFT + (RIGHT - LEFT) * (step - self._first) / (self._last - self._first)
        return x, BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low)

    def _write(self, x: float, y: float, text: str, color: str, size: int, anchor: str = "mm") -> None:
        self._draw.text((x * SCALE, y * SCALE), text, color, self._fonts[size], anchor)

    def _line(self, places: Sequence[tuple[float, float]], color: str, width: float) -> None:
        self._draw.line([(x * SCALE, y * SCALE) for x, y in places], color, round(width * SCALE), joint="curve")

    def _dot(self, x: float, y: float, color: str, radius: float) -> None:
        """With a white rim, so that it stands out from lines."""
        for size, fill in ((radius + 1.5, "white"), (radius, color)):
            self._draw.circle((x * SCALE, y * SCALE), size * SCALE, fill)


def _ticks(values: Sequence[float], at_least: float = 0) -> list[float]:
    """Round numbers that enclose the values, 1, 2 or 5 times a power of ten apart, five to nine of them."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    rough = span / 6
    power = 10.0 ** math.floor(math.log10(rough))
    apart = max(at_least, next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))
    first, last = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    first, last = (first, last) if first < last else (first - 1, last + 1)
    return [number * apart for number in range(first, last + 1)]


def _moving_mean(points: Points) -> Points:
    """Over a twentieth of the points, fewer at the ends."""
    reach = max(2, len(points) // 40)
    values = [value for _, value in points]
    windows = [values[max(0, at - reach) : at + reach + 1] for at in range(len(values))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows)]
