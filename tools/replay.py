"""Recompute what a step of a run trained on, and say whether the recorded metrics match: docs/replay.md.

    python tools/replay.py RUN --step N [--json]

RUN is the folder of a run that was started with debug.save_rollouts=true. Groups, lag and advantages are recomputed
from the stored rollouts. The loss is recomputed as well if the checkpoint of step N - 1 exists, or if N is 1. This
needs neither a GPU nor vLLM.

Exit status: 0 if everything matches, 1 if something differs, 2 if the step cannot be replayed.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
import torch.distributed as dist

from rl.checkpoint.manifest import CheckpointError
from rl.common.text import count_of, format_ranges
from rl.config.schema import ConfigError
from rl.report.printing import print_or_exit
from rl.run.replay import (
    Replay,
    ReplayError,
    SavedStep,
    describe_groups,
    read_step,
    replay,
    summarize_lags,
    summarize_samples,
)

DIFFERS, NOT_REPLAYED = 1, 2  # exit status
MAX_GROUPS = 20  # shown; --json has all


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    head, _, details = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=head, epilog=details, formatter_class=raw)
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--step", type=int, required=True, help="step to recompute, from 1")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    what = "do not load the model, which needs about 16 bytes of host memory per parameter"
    parser.add_argument("--no-loss", dest="with_loss", action="store_false", help=what)
    what = "limit of relative differences of metrics that need the model; default: 0.001, for bfloat16 0.05"
    parser.add_argument("--tolerance", type=float, metavar="LIMIT", help=what)
    return parser.parse_args(arguments)


@contextmanager
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def as_json(saved: SavedStep, result: Replay) -> str:
    metrics = [
        {
            "name": each.name,
            "recorded": each.recorded,
            "recomputed": each.recomputed,
            "limit": each.limit,
            "matches": each.is_equal,
        }
        for each in result.comparisons
    ]
    return json.dumps(
        {
            "run": str(saved.folder),
            "step": saved.step,
            "matches": result.is_equal,
            "metrics": metrics,
            "not_recomputed": result.notes,
            "groups": describe_groups(saved),
        }
    )


def as_text(saved: SavedStep, result: Replay) -> str:
    rows = describe_groups(saved)
    head = ["group", "samples", "prompt tokens", "response tokens", "versions", "lag mean", "lag max", "reward mean"]
    lines = [f"step {saved.step} of {saved.folder}: {count_of(len(rows), 'group')}, {summarize_lags(rows)}"]
    if different := summarize_samples(rows):
        lines.append(different)
    lines += ["", *_table([head, *map(_cells, rows[:MAX_GROUPS])])]
    if len(rows) > MAX_GROUPS:
        lines.append(f"and {len(rows) - MAX_GROUPS} more, which --json shows")
    compared = [
        [each.name, _number(each.recorded), _number(each.recomputed), "equal" if each.is_equal else "DIFFERS"]
        for each in result.comparisons
    ]
    lines += ["", *_table([["metric", "recorded", "recomputed", ""], *compared]), ""]
    lines += [f"not recomputed: {note}" for note in result.notes]
    wrong = [each for each in result.comparisons if not each.is_equal]
    lines += [
        f"DIFFERS: {each.name}: {_number(each.recorded)} was recorded, but the stored groups give "
        f"{_number(each.recomputed)}; rounding explains at most {each.limit:.2g}"
        + (each.reason and f" ({each.reason})")
        for each in wrong
    ]
    if not wrong:
        lines.append(f"all {count_of(len(compared), 'value')} match")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    lengths, versions = row["response_tokens"], row["versions"]
    lag = [f"{row['lag_mean']:.2f}", str(row["lag_max"])] if "lag_max" in row else ["", ""]
    sizes = [str(row["group"]), str(row["samples"]), str(row["prompt_tokens"]), f"{min(lengths)}-{max(lengths)}"]
    return [*sizes, format_ranges(versions), *lag, f"{row['reward_mean']:.4g}"]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.7g}"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    try:
        with world_of_one():
            saved = read_step(args.run, args.step)
            result = replay(saved, args.with_loss, args.tolerance)
    except (ReplayError, ConfigError, CheckpointError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return NOT_REPLAYED
    print_or_exit(as_json(saved, result) if args.json else as_text(saved, result))
    return 0 if result.is_equal else DIFFERS


if __name__ == "__main__":
    sys.exit(main())
