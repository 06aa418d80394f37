"""The live view as pure text: what a state looks like on terminals of several sizes."""

import re
import statistics
import time
from dataclasses import replace

import pytest
from rich.text import Text

from rl.common.bars import Bar
from rl.common.notices import Notice
from rl.report.frame import ASCII, LEAST_ROWS, UNICODE, RunView, format_time, render, sparkline, stage_shares
from rl.watch.activities import RoleActivity
from rl.watch.screen import LEAST_ABOVE

VALUES = {
    "time/step": 0.5,
    "time/rollout": 0.25,
    "time/update": 0.15,
    "time/sync": 0.05,
    "time/evaluate": 0.5,
    "perf/tokens_per_s": 2210.4,
    "loss/policy": 0.00271,
    "policy/mismatch_kl": 6.6e-14,
    "rollout/length_mean": 3.57,
}
ROLES = [
    RoleActivity("0-3", "actor", "update", 2.4, "micro-batch 3 of 4", 0),
    RoleActivity("4", "rollout", "serve", 75.0, "17 responses", 3000),
]
VIEW = RunView(
    "demo",
    elapsed_s=12.4,
    num_steps=50,
    step=20,
    left_s=3725.0,
    rewards=[0.0, 0.25, 0.5, 0.75],
    values=VALUES,
    bound="rollout-bound: actors wait 62 %",
    evaluation=(10, 0.365),
    activities=ROLES,
    bars=[Bar("evaluation", 200, "prompts", 50, 2.0), Bar("checkpoint 20", 2_000_000, "B", 500_000, 2.0)],
    warning=Notice("the entropy is low", 12),
)


def plain(view: RunView, columns: int, rows: int, **options: object) -> list[str]:
    return [Text.from_ansi(line).plain for line in render(view, columns, rows, **options)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (160, 50)])
def test_the_frame_has_its_parts(columns: int, rows: int) -> None:
    lines = plain(VIEW, columns, rows, glyphs=UNICODE)
    title, progress, reward, step, stages, bound, *rest = lines
    assert title == "── demo ".ljust(columns, "─")
    assert re.fullmatch(r"step 20/50  ━+─+  40%  0:12, about 1:02:05 left", progress) and len(progress) == columns
    assert progress.count("━") == pytest.approx(0.4 * (progress.count("━") + progress.count("─")), abs=1)
    assert reward == "reward    0.750  ▁▃▆█  eval 0.365 at step 10"
    assert step == "step      0.50 s  2,210 tokens/s  loss 0.00271  mismatch 6.6e-14  length 3.57"
    assert stages.startswith("stages    rollout 25%─") and "│update" in stages and "evaluate 50%─" in stages
    assert len(stages) == columns
    assert bound == "bound     rollout-bound: actors wait 62 %"
    actors, engine, evaluation, checkpoint, warning = rest
    assert re.fullmatch(r"ranks 0-3 actor: update  ━+─+  micro-batch 3 of 4  0:02", actors)
    assert engine == "rank 4    rollout: serve  17 responses  3,000 tokens/s  1:15"
    assert re.fullmatch(r"evaluation  ━{10}─{30}  25%  50/200 prompts", evaluation)
    assert re.fullmatch(r"checkpoint 20  ━+─+  25%  500.00 kB of 2.00 MB", checkpoint)
    assert warning == "warning   the entropy is low (12 times)"


@pytest.mark.parametrize("columns", [40, 50, 70])
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    lines = plain(VIEW, columns, 24, glyphs=UNICODE)
    assert max(map(len, lines)) <= columns
    assert any(line.endswith("…") for line in lines)


def test_wide_characters_count_twice() -> None:
    view = RunView("実験", warning=Notice("警" * 100, 3))
    for line in render(view, 60, 24, UNICODE):
        assert Text.from_ansi(line).cell_len <= 60


def test_a_warning_keeps_its_count_when_it_is_cut() -> None:
    last = plain(RunView("demo", warning=Notice("x" * 500, 7)), 80, 24, glyphs=UNICODE)[-1]
    assert last.endswith("x… (7 times)") and len(last) == 80


def test_a_text_of_a_rank_cannot_control_the_terminal() -> None:
    roles = [RoleActivity("0", "actor", "update", 0.0, "evil \x1b[2J\r\n", 0)]
    frame = render(RunView("a\x1b]0;b\x07", activities=roles, warning=Notice("\x1b[H", 1)), 80, 24)
    assert all(sequence.endswith("m") for line in frame for sequence in re.findall(r"\x1b\[[0-9;]*.", line))
    assert not re.search(r"[\x00-\x1a\x1c-\x1f\x7f]|\x1b[^\[]", "".join(frame))


def test_roles_leave_half_of_the_terminal_to_others() -> None:
    roles = [RoleActivity(str(rank), "actor", "update", 0.0, "", 0) for rank in range(16)]
    lines = plain(RunView("demo", num_steps=5, activities=roles), 80, 24, glyphs=UNICODE)
    assert len(lines) == 12
    assert lines[-1].strip() == "and 7 more: tools/status.py"


@pytest.mark.parametrize("num_bars", [2, 20])
def test_a_small_terminal_has_room_for_the_frame(num_bars: int) -> None:
    """Otherwise nothing would be painted, while the lines of steps go to the log only."""
    lines = plain(replace(VIEW, bars=[VIEW.bars[0]] * num_bars), 80, LEAST_ROWS, glyphs=UNICODE)
    assert len(lines) == LEAST_ROWS - LEAST_ABOVE
    assert lines[1].startswith("step 20/50") and lines[-1].startswith("warning")
    assert any("tools/status.py" in line for line in lines)


def test_before_the_first_step() -> None:
    lines = plain(RunView("demo", elapsed_s=7.0, activities=ROLES[:1]), 60, 24, glyphs=UNICODE)
    assert lines[0].startswith("── demo  starting, 0:07 ──")
    assert len(lines) == 2


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert "".join(plain(VIEW, 80, 24, glyphs=ASCII)).isascii()


@pytest.mark.parametrize("has_colours", [True, False])
def test_no_color_is_respected(has_colours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not has_colours:
        monkeypatch.setenv("NO_COLOR", "1")
    sequences = set(re.findall(r"\x1b\[([0-9;]*)m", "".join(render(VIEW, 80, 24))))
    colours = {code for sequence in sequences for code in sequence.split(";") if re.fullmatch(r"[349]\d|38|48", code)}
    assert bool(colours) == has_colours


def test_shares_of_a_step_add_up_to_one() -> None:
    shares = stage_shares(VALUES)
    assert shares == pytest.approx({"rollout": 0.25, "update": 0.15, "sync": 0.05, "evaluate": 0.5, "other": 0.05})


def test_a_sparkline_averages_what_it_has_no_room_for() -> None:
    assert sparkline([], 10, "ab") == ""
    assert sparkline([5.0, 5.0], 10, "abc") == "aa"
    assert sparkline([float("nan"), 0.0, float("inf"), 1.0], 10, "abc") == "ac"
    long = sparkline(range(1000), 30, UNICODE.levels)
    assert len(long) <= 30 and list(long) == sorted(long) and {long[0], long[-1]} == {"▁", "█"}


def test_times() -> None:
    assert [format_time(seconds) for seconds in (0, 59.6, 3599, 90061)] == ["0:00", "1:00", "59:59", "25:01:01"]


def test_drawing_is_cheap() -> None:
    """Two frames a second must take well under 1 % of a core. Other processes may disturb some of them."""
    render(VIEW, 160, 50)
    seconds = []
    for _ in range(20):
        started = time.thread_time()
        render(VIEW, 160, 50)
        seconds.append(time.thread_time() - started)
    assert statistics.median(seconds) < 0.005
