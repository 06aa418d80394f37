"""Further writers of metrics (metrics.writers): wandb and swanlab, each in a process of its own on the leader's node.

    MetricsWriter --queue--> thread of the leader --pipe--> rl/report/writer_process.py --> wandb or swanlab

A step never waits for a writer. A writer that fails is reported once, and the run goes on without it: TensorBoard and
metrics.jsonl have every row.
"""

import dataclasses
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.common.credentials import NAME, hide_credentials, without_credentials
from rl.config.schema import ROOT, Config, ConfigError
from rl.report.writer_process import END_S

PROGRAM = "import sys; sys.path.insert(0, sys.argv[2]); import rl.report.writer_process as w; w.main(sys.argv[1])"
CLOSE_S = END_S + 5  # maximum seconds that the end of a run waits for a writer
MAX_ROWS = 10_000  # that wait for a slow writer; later ones are dropped


def check_writers(names: Sequence[str]) -> None:
    """Raise ConfigError if the package of a writer is not installed. Called on the leader, and by --plan."""
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, such as wandb's own, is no package
            raise ConfigError(
                f"metrics.writers: got {name}, which is not installed here; run `pip install {name}` in the "
                "environment of the leader's node, or remove it. TensorBoard and metrics.jsonl need nothing"
            )


def public_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run without credentials, for a service that others may read."""

    def hide(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(name): "***" if NAME.search(str(name)) else hide(each) for name, each in value.items()}
        return [hide(each) for each in value] if isinstance(value, list | tuple) else value

    settings = dataclasses.asdict(config)
    options = ("reward", "options"), ("algo", "options"), ("environment", "options"), ("rollout", "engine_options")
    for section, name in options:
        settings[section][name] = hide(settings[section][name])  # other keys have names such as data.prompt_key
    return json.loads(hide_credentials(json.dumps(settings)))


class ProcessWriter:
    """Send rows to the process of one writer. No method raises or waits, except that `close` waits for a while."""

    def __init__(self, name: str, about: Mapping[str, Any], folder: Path):
        self._name, self._log, self._has_failed = name, folder / f"{name}.log", False
        self._process: subprocess.Popen[bytes] | None = None
        self._rows: queue.Queue[str | None] = queue.Queue(MAX_ROWS)
        self._rows.put(json.dumps({**about, "folder": str(folder.resolve())}))
        self._thread = threading.Thread(target=self._run, name=f"writer {name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._put(json.dumps({"step": step, "values": dict(values)}))

    def close(self) -> None:
        """Wait until all rows are written, but not longer than CLOSE_S seconds."""
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._fail(f"it has not ended within {CLOSE_S} s")
        if self._process is not None:
            with suppress(ProcessLookupError):  # also its helpers
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _put(self, row: str | None) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._fail(f"it takes no rows, and {MAX_ROWS} are waiting")

    def _run(self) -> None:
        try:
            process = self._process = self._start()
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended
                while (row := self._rows.get()) is not None:
                    process.stdin.write(row.encode() + b"\n")
                    process.stdin.flush()
                process.stdin.close()
            if process.wait():
                self._fail(self._last_line())
        except OSError as error:
            self._fail(str(error))

    def _start(self) -> subprocess.Popen[bytes]:
        # The writer's own variables hold its credentials. Those of other services stay here.
        own = {key: value for key, value in os.environ.items() if key.startswith(f"{self._name.upper()}_")}
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-c", PROGRAM, self._name, str(ROOT)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=without_credentials(os.environ) | own,
                start_new_session=True,  # signals to the rank's process group do not end it before the last row
            )

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["it has ended without a message"]
        return hide_credentials(lines[-1])

    def _fail(self, reason: str) -> None:
        """Say once that the writer has failed."""
        if not self._has_failed:
            self._has_failed = True
            print(
                f"oneworld: metrics.writers: {self._name} has failed: {reason}. The run goes on without it; its log is "
                f"{self._log}. TensorBoard and metrics.jsonl have all metrics",
                flush=True,
            )


def open_writers(config: Config, folder: Path, is_new: bool) -> list[ProcessWriter]:
    """Start the writers of metrics.writers. `is_new` means that the run does not resume from a checkpoint."""
    if not config.metrics.writers:
        return []
    about = {"project": config.run.project, "name": folder.name, "config": public_settings(config), "is_new": is_new}
    return [ProcessWriter(name, about, folder) for name in config.metrics.writers]
