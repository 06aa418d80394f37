"""Suggest a better placement, K (rollout.ahead) and Q (rollout.max_tokens_per_round) for a run, from its own files.

    python tools/suggest_placement.py RUN [--max-lag N] [--json]

RUN is the directory of a run that has made a few steps. Its speeds and lengths are measured: run.json, metrics.jsonl,
accounting.jsonl, and saved rollouts if there are any (debug.save_rollouts). Prints the settings to change and the
expected gain, or says that nothing is better. With --max-lag N, no token may be trained on more than N updates after it
was sampled, unless that is possible now. --max-lag 0 keeps the run on-policy.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # use this checkout, whatever is installed
from rl.common.text import count_of
from rl.report.printing import print_or_exit
from rl.run.suggest import Option, Suggestion, SuggestionError, suggest


def describe(suggestion: Suggestion, folder: Path) -> list[str]:
    """Return the lines that are printed."""
    run, best = suggestion.run, suggestion.best
    setup = run.present.setup
    rounds = f"rollout.ahead={setup.ahead}, rollout.max_tokens_per_round={setup.limit}"
    lines = [
        f"{folder}: {run.placement.summary()}; {rounds}",
        f"a step takes {run.step_s:.3g} s (mean of {count_of(run.num_steps, 'step')}; its measured parts explain "
        f"{suggestion.modelled_s:.3g} s); {run.bound or 'what bounds it is not known'}",
    ]
    if best is None:
        return [*lines, "nothing is better: no placement, K or Q of these ranks would be 5 % faster"]
    lines += ["", "change these settings:"]
    lines += [f"    {shlex.quote(change)}" for change in best.changes]
    lines.append(
        f"expected: {best.seconds:.3g} s per step, {best.gain:.2f} times as fast; the lag is at most {best.max_lag}"
    )
    others = [option for option in suggestion.options if option is not best]
    if others:
        lines += ["", "the fastest for other bounds of the lag:"]
        lines += [f"    {describe_option(option)}" for option in others]
    return [*lines, "", *(f"note: {note}" for note in suggestion.notes)]


def describe_option(option: Option) -> str:
    changes = " ".join(map(shlex.quote, option.changes))
    return f"lag {option.max_lag}: {option.gain:.2f} times as fast with {changes}"


def to_json(suggestion: Suggestion) -> dict[str, Any]:
    run, best = suggestion.run, suggestion.best
    found = {"step_s": run.step_s, "modelled_s": suggestion.modelled_s, "bound": run.bound, "changes": list[str]()}
    if best is not None:
        found |= {"changes": best.changes, "gain": best.gain, "expected_s": best.seconds, "max_lag": best.max_lag}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    parser.add_argument(
        "--max-lag", type=int, metavar="N", help="most updates between sampling and training of a token"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of text")
    args = parser.parse_args()
    try:
        suggestion = suggest(args.run, args.max_lag)
    except SuggestionError as error:
        sys.exit(f"tools/suggest_placement.py: {error}")
    lines = [json.dumps(to_json(suggestion))] if args.json else describe(suggestion, args.run)
    print_or_exit("\n".join(lines))


if __name__ == "__main__":
    main()
