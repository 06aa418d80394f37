"""Folders of runs for tests of reports, with numbers that are easy to check and with hostile texts."""

import json
from pathlib import Path
from typing import Any

from rl.common.events import EVENTS, Event
from rl.report.record import NodeRecord, RunRecord, write_record

BEGAN = 1_700_000_000.0
ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>\"'`|<!--"
KILLED = "rank 1 was lost at step 6"


def make_rows(num_steps: int, slope: float = 0.1) -> list[dict[str, Any]]:
    """Return rows in which every step takes 4 s: 2 s of sampling, 1 s of training, 1 s of neither."""
    rows: list[dict[str, Any]] = [{"step": 0, "version": 1, "at": BEGAN + 5, "eval/accuracy": 0.25} | estimate(0.25)]
    for step in range(1, num_steps + 1):
        row = {"step": step, "version": step + 1, "at": BEGAN + 5 + 4 * step, "reward/mean": slope * step}
        row |= {"policy/entropy": 1 / 3 / step, "rollout/tokens": 100.0, "perf/tokens_per_s": 25.0}
        row |= {"time/step": 4.0, "time/rollout": 2.0, "time/update": 1.0, "time/evaluate": 0.0}
        row |= {"perf/busy/actor": 0.25, "perf/wait/actor/rollout": 0.75}
        row |= {"rollout/lengths": {"edges": [0, 4, 8], "counts": [step, 1]}}
        rows.append(row)
    rows[-1] |= {"eval/accuracy": 0.75} | estimate(0.75)
    return rows


def estimate(value: float) -> dict[str, float]:
    return {"eval/sums/avg@1": value, "eval/sums/avg@1_low": value - 0.125, "eval/sums/avg@1_high": value + 0.125}


def make_events(num_steps: int) -> list[Event]:
    return [
        Event(BEGAN, 0, "start", "attempt 1", "world1"),
        Event(BEGAN + 22, 4, "checkpoint", "step 4 is saved"),
        Event(BEGAN + 24, 6, "fault", f"{KILLED}: {ATTACK}"),
        Event(BEGAN + 26, 4, "resume", "attempt 2 continues after step 4", "world2"),
        Event(BEGAN + 28, 5, "warning", "the reward is flat"),
        Event(BEGAN + 5 + 4 * num_steps, num_steps, "end", f"step {num_steps} of {num_steps} is done"),
    ]


def make_record(**settings: Any) -> RunRecord:
    config = {"model": {"path": ATTACK}, "train": {"num_steps": 8}, "actor": settings}
    return RunRecord(config, {"torch": "2.9"}, "abc123", "2 ranks", [NodeRecord("a CPU", 4, 16.0, [])])


def make_responses(score: float, text: str) -> list[dict[str, Any]]:
    response = {"text": text, "score": score, "status": "ok", "num_tokens": 3, "is_truncated": False}
    return [{"id": number, "prompt": f"1+{number}=", "answer": ATTACK, "responses": [response]} for number in range(9)]


def write_run(folder: Path, num_steps: int = 8, slope: float = 0.1, **settings: Any) -> Path:
    """Write the folder of a run, and return it."""
    (folder / "eval").mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", make_rows(num_steps, slope))
    write_lines(folder / EVENTS, [event._asdict() for event in make_events(num_steps)])
    write_record(folder, make_record(**settings))
    write_lines(folder / "eval" / "step_0.sums.jsonl", make_responses(0.0, f"early {ATTACK}"))
    write_lines(folder / "eval" / f"step_{num_steps}.sums.jsonl", make_responses(1.0, f"late {ATTACK}"))
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
