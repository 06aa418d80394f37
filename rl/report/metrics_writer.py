"""Write the metrics of each step: to metrics.jsonl, TensorBoard, the console, and to other services."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl.common.events import Kind, write_event
from rl.config.schema import Config
from rl.placement.roles import Placement
from rl.report.accounting import AccountingFile
from rl.report.console import RunConsole
from rl.report.histogram import Histogram
from rl.report.live import LiveView
from rl.report.prometheus import PrometheusEndpoint
from rl.report.rows import RowFile
from rl.report.run_texts import list_hyperparameters, make_texts
from rl.report.tensorboard import EventWriter
from rl.watch.ledger import StepAccount

ACCURACY = "eval/accuracy"  # every evaluation has it


class Sink(Protocol):
    """A place for metrics beside metrics.jsonl. Writing must not delay a step, and must not raise."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Write the metrics of a run. Only the leader has a writer.

    `step` is the step from which the run resumes; 0: it starts over, unless this command `continues` a run in phases.
    `others` and the endpoint for Prometheus get the metrics too. `view` shows them on a terminal.
    """

    def __init__(
        self,
        run_dir: Path,
        num_steps: int,
        step: int = 0,
        others: Sequence[Sink] = (),
        continues: bool = False,
        endpoint: PrometheusEndpoint | None = None,
        view: LiveView | None = None,
    ):
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir, self._num_steps, self._step = run_dir, num_steps, step
        self._rows = RowFile(run_dir, step, continues)
        self._accounting = AccountingFile(run_dir, step)
        self._events = EventWriter(run_dir, step + 1 if step or continues else 0, self._rows.names)
        self.kept_rewards = self._rows.rewards  # of earlier starts of the run
        self._console = RunConsole(run_dir.name, num_steps, self.kept_rewards, step, view)
        self._sinks: list[Sink] = [self._events, *others]
        self._endpoint = endpoint
        if endpoint is not None and endpoint.warning:
            self.note("warning", step, endpoint.warning)

    def write(
        self, step: int, version: int, values: Mapping[str, float], histograms: Mapping[str, Histogram] | None = None
    ) -> None:
        """Write a step's metrics. `version` is the newest published version, from which the next step samples.
        Histograms go to metrics.jsonl and TensorBoard only."""
        self._step = step
        histograms = histograms or {}
        self._rows.write(step, version, values, histograms)
        if ACCURACY in values:
            self.note("evaluation", step, f"{ACCURACY} {values[ACCURACY]:.4g}")
        for name, histogram in histograms.items():
            self._events.write_histogram(name, histogram, step)
        for sink in self._sinks:
            sink.write(step, values)
        if self._endpoint is not None:
            self._endpoint.write(step, version, values)
        self._console.write(step, values)

    def read_kept(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of metrics.jsonl that earlier starts of the run have written."""
        return self._rows.read_kept()

    def describe_run(self, config: Config, placement: Placement) -> None:
        """Show the settings and the placement in TensorBoard."""
        self._events.describe(make_texts(config, placement), list_hyperparameters(config))

    def write_account(self, account: StepAccount, nodes: Sequence[int], about: Mapping[str, Any]) -> None:
        """Write what the ranks did in a step to accounting.jsonl. See AccountingFile."""
        self._accounting.write(account, nodes, about)

    def write_text(self, name: str, text: str, step: int) -> None:
        self._events.write_text(name, text, step)

    def note(self, kind: Kind, step: int, text: str) -> None:
        """Write an event to events.jsonl, and show a warning on the console."""
        write_event(self._run_dir, kind, step, text)
        if kind == "warning":
            self._console.warn(text)

    def close(self, engine_name: str) -> None:
        """Note the end of the run, print a summary and close the files."""
        self.note("end", self._step, f"step {self._step} of {self._num_steps} is done")
        self._console.close(engine_name)
        self.close_files()

    def close_files(self) -> None:
        self._rows.close()
        self._accounting.close()
        for sink in self._sinks:
            sink.close()
        if self._endpoint is not None:
            self._endpoint.close()
