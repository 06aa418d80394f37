"""Histograms of a step: in metrics.jsonl, and in TensorBoard."""

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray

from rl.report.histogram import Histogram
from rl.report.metrics_writer import MetricsWriter


def test_a_histogram_is_written_as_it_is(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 2)
    edges = [0, 4, 8, 12, 16]
    writer.write(1, 2, {"reward/mean": 1.0}, {"rollout/lengths": Histogram(edges, [0, 3, 0, 2])})
    writer.write(2, 3, {"reward/mean": 1.0}, {"rollout/lengths": Histogram(edges, [0, 0, 0, 0])})
    writer.close("fake")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/lengths"]["edges"] for row in rows] == [edges, edges]
    assert [row["rollout/lengths"]["counts"] for row in rows] == [[0, 3, 0, 2], [0, 0, 0, 0]]
    (file,) = tmp_path.glob("events.out.*")
    events = list(EventFileLoader(str(file)).Load())  # in the form that TensorBoard shows
    shown = {event.step: v for event in events for v in event.summary.value if v.tag == "rollout/lengths"}
    assert list(shown) == [1], "a step without samples shows nothing"
    # The left edge, the right edge and the count of each bin.
    assert make_ndarray(shown[1].tensor).tolist() == [[4, 8, 3], [8, 12, 0], [12, 16, 2]]
