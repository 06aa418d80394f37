"""The picture of a run's reward, drawn with Pillow, which tensorboard brings along."""

import io
import math
from collections.abc import Sequence

Points = list[tuple[int, float]]  # steps and values

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
