"""Draw the live view of a run: a state in, lines of text out. live.py says when, and rl/watch/screen.py where.

── demo ───────────────────────────────────────────────────────
step 23/50  ━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━  46%  0:12, about 0:14 left
reward 0.812  ▁▁▂▂▃▄▅▅▆▇█   eval 0.365 at step 0
...
"""

import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from rich.text import Text

from rl.common.bars import Bar
from rl.common.notices import Notice
from rl.common.text import format_bytes
from rl.watch.activities import RoleActivity
from rl.watch.screen import LEAST_ABOVE

LEAST_COLUMNS, LEAST_ROWS = 40, 12  # smaller terminals get plain lines
STAGES = {  # of a step, with their colours
    "rollout": "green",
    "handover": "bright_black",
    "logprobs": "cyan",
    "advantages": "bright_black",
    "update": "blue",
    "sync": "magenta",
    "evaluate": "yellow",
    "checkpoint": "red",
}
OTHER = "other"  # time of a step that no stage measures
NUMBERS = {"loss": "loss/policy", "mismatch": "policy/mismatch_kl", "length": "rollout/length_mean"}
LABEL = 10  # columns of the first word of a line
FRACTION = re.compile(r"(\d+) of (\d+)")


@dataclass
class RunView:
    """What the live view shows. Times are in seconds."""

    name: str
    elapsed_s: float = 0.0
    num_steps: int = 0  # 0 until the run begins its first step
    step: int = 0
    left_s: float | None = None  # an estimate; None until a step has ended
    rewards: Sequence[float] = ()  # of all steps so far
    values: Mapping[str, float] = field(default_factory=dict)  # metrics of the last step
    bound: str = ""  # what bounds the last step
    evaluation: tuple[int, float] | None = None  # the step and the accuracy of the last evaluation
    activities: Sequence[RoleActivity] = ()
    bars: Sequence[Bar] = ()
    warning: Notice | None = None


@dataclass(frozen=True)
class Glyphs:
    rule: str
    done: str
    left: str
    levels: str  # of a sparkline, from the lowest
    between: str  # two stages
    cut: str


UNICODE = Glyphs("─", "━", "─", "▁▂▃▄▅▆▇█", "│", "…")
ASCII = Glyphs("-", "#", "-", "_.-=+*%#", "|", "~")


def render(view: RunView, columns: int, rows: int, glyphs: Glyphs | None = None) -> list[str]:
    """Return the lines of the view for a terminal of this size, with colours unless NO_COLOR is set."""
    glyphs = glyphs or (UNICODE if "utf" in (sys.stdout.encoding or "").lower() else ASCII)
    lines = list(_draw(view, columns, rows, glyphs))
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=columns, highlight=False, legacy_windows=False)
    for line in lines:
        if line.cell_len > columns:
            line.truncate(columns - 1)
            line.append(glyphs.cut)
        console.print(line, no_wrap=True, overflow="crop", crop=True, soft_wrap=False)
    return output.getvalue().split("\n")[:-1]


def _draw(view: RunView, columns: int, rows: int, glyphs: Glyphs) -> Iterator[Text]:
    """Yield the lines: the fixed ones, as many roles as half of the terminal has room for, bars and the last warning.
    On a small terminal, fixed lines are left out from the last one on, then bars."""
    head = [_draw_title(view, columns, glyphs)]
    if view.num_steps:
        head.append(_draw_progress(view, columns, glyphs))
    if view.rewards:
        head.append(_draw_reward(view, columns, glyphs))
    if view.values.get("time/step"):
        head += [_draw_numbers(view), _draw_stages(view.values, columns, glyphs)]
        if view.bound:
            head.append(_labelled("bound", _clean(view.bound)))
    tail = [_draw_bar(bar, columns, glyphs) for bar in view.bars]
    if view.warning is not None:
        times = f" ({view.warning.times} times)" if view.warning.times > 1 else ""
        text = _clean(view.warning.text)
        room = max(10, columns - LABEL - len(times))
        text = text if len(text) <= room else text[: room - 1] + glyphs.cut
        tail.append(_labelled("warning", text + times, "yellow"))
    roles = list(map(partial(_draw_role, columns=columns, glyphs=glyphs), view.activities))
    most = rows - LEAST_ABOVE - 1  # lines besides that of a role; a screen paints no frame that is higher
    head = head[: max(2, most - len(tail))]
    tail = tail[-(most - len(head)) :]
    room = max(1, rows // 2 - len(head) - len(tail))
    if len(roles) > room:
        hidden = len(roles) - room + 1
        roles = [*roles[: room - 1], Text(f"{'':{LABEL}}and {hidden} more: tools/status.py", "dim")]
    yield from [*head, *roles, *tail]


def _draw_title(view: RunView, columns: int, glyphs: Glyphs) -> Text:
    state = "" if view.num_steps else f" starting, {format_time(view.elapsed_s)} "
    title = f" {_clean(view.name)} "
    line = Text(glyphs.rule * 2, "dim")
    line.append(title, "bold not dim")
    line.append(state)
    line.append(glyphs.rule * max(0, columns - line.cell_len))
    return line


def _draw_progress(view: RunView, columns: int, glyphs: Glyphs) -> Text:
    share = min(1.0, view.step / view.num_steps)
    left = "" if view.left_s is None else f", about {format_time(view.left_s)} left"
    begin, end = f"step {view.step}/{view.num_steps}  ", f"  {share:.0%}  {format_time(view.elapsed_s)}{left}"
    line = Text(begin, "bold")
    line.append_text(_bar(share, columns - len(begin) - len(end), glyphs))
    return line.append(end, "not bold")


def _draw_reward(view: RunView, columns: int, glyphs: Glyphs) -> Text:
    line = _labelled("reward", f"{view.rewards[-1]:.3f}  ")
    end = ""
    if view.evaluation is not None:
        step, accuracy = view.evaluation
        end = f"  eval {accuracy:.3f} at step {step}"
    line.append(sparkline(view.rewards, max(0, columns - line.cell_len - len(end)), glyphs.levels), "green")
    return line.append(end)


def _draw_numbers(view: RunView) -> Text:
    values = view.values
    numbers = [f"{values['perf/tokens_per_s']:,.0f} tokens/s"] if "perf/tokens_per_s" in values else []
    numbers += [f"{name} {values[metric]:.3g}" for name, metric in NUMBERS.items() if metric in values]
    return _labelled("step", "  ".join([f"{values['time/step']:.2f} s", *numbers]))


def _draw_stages(values: Mapping[str, float], columns: int, glyphs: Glyphs) -> Text:
    """Draw the shares of a step as a bar. A stage's name and share are written into its part, if there is room."""
    shares = stage_shares(values)
    line, width = _labelled("stages", ""), columns - LABEL
    begin, reached = 0, 0.0
    for name, share in shares.items():
        reached += share
        end = round(width * reached)
        cells, begin = end - begin, end
        if cells <= 0:
            continue
        label = next((text for text in (f"{name} {share:.0%}", name) if len(text) < cells), "")
        inside = label.ljust(cells - 1, glyphs.rule) if label else glyphs.rule * (cells - 1)
        line.append(inside + glyphs.between, STAGES.get(name, "bright_black"))
    return line


def stage_shares(values: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of a step's time by stage. An evaluation and a checkpoint after the step are counted too."""
    seconds = {stage: values.get(f"time/{stage}", 0.0) for stage in STAGES}
    after = seconds["evaluate"] + seconds["checkpoint"]
    whole = values["time/step"] + after
    seconds[OTHER] = max(0.0, whole - sum(seconds.values()))
    return {stage: spent / whole for stage, spent in seconds.items() if spent > 0}


def _draw_role(activity: RoleActivity, columns: int, glyphs: Glyphs) -> Text:
    who = f"{'ranks' if not activity.ranks.isdecimal() else 'rank'} {activity.ranks}"
    line = _labelled(who, f"{activity.roles.replace(',', ', ')}: ")
    line.append(activity.stage or "done", STAGES.get(activity.stage, ""))
    speed = f"  {activity.tokens_per_s:,} tokens/s" if activity.tokens_per_s else ""
    since = f"  {format_time(activity.stage_s)}" if activity.stage_s >= 1 and activity.stage else ""
    doing = _clean(activity.doing)
    if fraction := FRACTION.search(doing):
        done, total = int(fraction[1]), int(fraction[2])
        line.append("  ").append_text(_bar(done / total if total else 0.0, min(20, columns // 6), glyphs))
    if doing and doing != "done":
        line.append(f"  {doing}")
    return line.append(speed).append(since, "dim")


def _draw_bar(bar: Bar, columns: int, glyphs: Glyphs) -> Text:
    share = min(1.0, bar.done / bar.total) if bar.total else 0.0
    done = f"{bar.done}/{bar.total} {bar.unit}"
    if bar.unit == "B":
        done = f"{format_bytes(bar.done)} of {format_bytes(bar.total)}"
    line = Text(_clean(bar.title).ljust(LABEL) + "  ")
    end = f"  {share:.0%}  {done}"
    return line.append_text(_bar(share, min(40, columns - line.cell_len - len(end)), glyphs)).append(end)


def _bar(share: float, width: int, glyphs: Glyphs) -> Text:
    num_done = round(max(0, width) * share)
    return Text(glyphs.done * num_done, "green").append(glyphs.left * (max(0, width) - num_done), "dim")


def sparkline(values: Sequence[float], width: int, levels: str) -> str:
    """Return the curve of the values in at most `width` characters. Each is the mean of consecutive values."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite or width < 1:
        return ""
    size = max(1, -(-len(finite) // width))
    means = [sum(part) / len(part) for part in (finite[at : at + size] for at in range(0, len(finite), size))]
    low, high = min(means), max(means)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((mean - low) * scale)] for mean in means)


def format_time(seconds: float) -> str:
    """Return 0:07, 12:30 or 3:05:00."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text(f"{label} ".ljust(LABEL), "bold").append(text, f"not bold {style}")


def _clean(text: str) -> str:
    """Return the text in one line, without characters that control a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
