"""What the leader reports with: the writer of metrics, the health rules, and events about engines."""

import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rl.report.events import read_events, write_event
from rl.report.health import Finding, Health
from rl.report.metrics_writer import MetricsWriter
from rl.report.prometheus import PrometheusEndpoint
from rl.report.writers import open_writers
from rl.rollout.recovery import EngineRebuilt
from rl.rollout.sampler import Sampler
from rl.run.open import Run
from rl.world.messages import Letter

NUM_REWARDS = 5
MAX_REASON = 300  # characters


class HealthWatch:
    """Check the health rules on the leader: pass on warnings, and end the run once if a rule says so."""

    def __init__(self, health: Health, writer: MetricsWriter, end_run: Callable[[Finding], None]):
        self._health, self._writer, self._end_run = health, writer, end_run
        self._is_ending = False

    def check(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Check the rules after a step, and return their metrics."""
        for finding in self._health.check(step, values):
            is_end = finding.is_stop and not self._is_ending
            if is_end or not finding.is_stop:
                self._writer.note("stop" if is_end else "warning", step, finding.text)
            if is_end:
                self._is_ending = True
                self._end_run(finding)
        return self._health.metrics()


class RewardSummary:
    """The mean reward of the first and of the last NUM_REWARDS steps. `rewards` are those of earlier starts of the
    run."""

    def __init__(self, rewards: Sequence[float]):
        self._first, self._last = [*rewards[:NUM_REWARDS]], deque(rewards, maxlen=NUM_REWARDS)

    def add(self, reward: float) -> tuple[float, float]:
        """Add a step, and return both means."""
        self._first = [*self._first, reward][:NUM_REWARDS]
        self._last.append(reward)
        return statistics.fmean(self._first), statistics.fmean(self._last)


def build_writer(run: Run) -> MetricsWriter | None:
    """Build the writer of metrics on the leader. There is none on other ranks and in a dry run."""
    if run.data is None or run.config.debug.dry_run:
        return None
    run.world.collect_usage()
    step, metrics = run.start_step, run.config.metrics
    others = open_writers(run.config, run.folder, is_new=not step)
    has_endpoint = metrics.prometheus_port > 0
    endpoint = PrometheusEndpoint(metrics.prometheus_address, metrics.prometheus_port) if has_endpoint else None
    is_phase = run.phase.name != "both"
    writer = MetricsWriter(run.folder, run.config.train.num_steps, step, others, is_phase, endpoint, run.view)
    writer.describe_run(run.config, run.placement)
    note_rebuilt_engines(run)
    return writer


def note_rebuilt_engines(run: Run) -> None:
    """Write an event for each engine that fails and is rebuilt, from now on. Called on the leader."""

    def note(letter: Letter[EngineRebuilt]) -> None:
        text = describe_rebuild(letter.message, letter.source, run.placement.engine_of(letter.source))
        # In another thread, since the disk may hang, and messages must still be read.
        args = run.folder, "warning", letter.message.step, text
        threading.Thread(target=write_event, args=args, daemon=True).start()

    run.world.mail.on(EngineRebuilt, note)


def describe_rebuild(rebuilt: EngineRebuilt, lead: int, index: int | None) -> str:
    """Describe the rebuild of an engine in one line, which fits into an event."""
    reason = rebuilt.reason.partition("\n")[0]
    reason = f"{reason}." if len(reason) <= MAX_REASON else reason[: MAX_REASON - 4] + " ..."
    return (
        f"engine {index} ({rebuilt.engine}) of rank {lead} failed: {reason} It was rebuilt in "
        f"{rebuilt.seconds:.0f} s, and its unfinished groups ({rebuilt.num_groups}) are sampled again"
    )


def build_health(run: Run, writer: MetricsWriter, sampler: Sampler, end_run: Callable[[Finding], None]) -> HealthWatch:
    """Build the health rules, in the state in which earlier starts of this run have left them. At the end of the run, a
    line about them comes before the writer's summary, which is the last line."""
    health = Health(run.config, sampler.max_lag)
    health.restore(writer.read_kept(), read_events(run.folder))

    def close() -> None:
        if summary := health.summary():
            print(f"oneworld: {summary}", flush=True)
        writer.close(sampler.rollouts.engine_name)

    run.world.at_end(close)
    return HealthWatch(health, writer, end_run)
