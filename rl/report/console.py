"""What a run prints about its steps: a line per step, or a live view on a terminal, and a summary at the end."""

import time
from collections.abc import Mapping, Sequence

from rl.common.notices import NOTICES
from rl.common.text import count_of
from rl.report.accounting import describe_bound
from rl.report.live import LiveView

# Labels and metrics of the line that a step prints.
SHOWN = {"reward": "reward/mean", "errors": "reward/errors", "timeouts": "reward/timeouts", "eval": "eval/accuracy"}
SHOWN |= {"loss": "loss/policy", "mismatch": "policy/mismatch_kl", "length": "rollout/length_mean"}
SHOWN |= {"tokens/s": "perf/tokens_per_s", "seconds": "time/step"}
FAILURES = ("errors", "timeouts")  # counts that are shown only if they are not 0


class RunConsole:
    """Print a line per step, and a summary at the end. `rewards` are those of earlier starts of the run.

    With a live view, the lines of steps go to the log only.
    """

    def __init__(
        self, name: str, num_steps: int, rewards: Sequence[float], step: int = 0, view: LiveView | None = None
    ):
        self._name, self._num_steps, self._started = name, num_steps, time.perf_counter()
        self._rewards, self._num_before = list(rewards), len(rewards)
        self._view = view
        if view is not None:
            view.begin(num_steps, step, self._rewards)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if "reward/mean" in values:
            self._rewards.append(values["reward/mean"])
        shown = "  ".join(
            f"{label} {values[name]:{'.0f' if label in FAILURES else '.4g'}}"
            for label, name in SHOWN.items()
            if name in values and (values[name] or label not in FAILURES)
        )
        bound = describe_bound(values)
        line = f"step {step}/{self._num_steps}  {shown}" + (bound and f"  {bound}")
        if self._view is not None:
            self._view.write(step, values, self._rewards, bound)
        if not shown:  # before the first step there is nothing to show without an evaluation
            return
        if self._view is not None and self._view.is_shown:
            self._view.log(line)
        else:
            print(line, flush=True)

    def warn(self, text: str) -> None:
        """Show a warning. Repetitions are counted."""
        NOTICES.warn(text)

    def close(self, engine_name: str) -> None:
        """Print a summary: the mean reward of the first and of the last 5 steps of the run, and the seconds of this
        start. After a resume, the summary says how many of the steps these seconds are for."""
        first, last = (sum(part) / max(1, len(part)) for part in (self._rewards[:5], self._rewards[-5:]))
        took, num_now = f"{time.perf_counter() - self._started:.0f} s", len(self._rewards) - self._num_before
        if self._num_before:
            took = (
                f"the last {num_now} of them in {took} after a resume" if num_now else "none of them after the resume"
            )
        steps = count_of(len(self._rewards), "step")
        engine = engine_name and f", engine {engine_name}"  # without one, nothing was sampled
        print(f"{self._name}: reward {first:.2f} -> {last:.2f} in {steps}, {took}{engine}", flush=True)
