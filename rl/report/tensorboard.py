"""The events of a run for TensorBoard: scalars, histograms, texts, hyperparameters, and the layout of the charts."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from google.protobuf.message import Message
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.plugins.text import metadata as texts
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from torch.utils.tensorboard.summary import histogram_raw

from rl.report.histogram import Histogram
from rl.report.layout import make_layout, stack_stages, tag_of

# The metrics by which the tab HParams compares runs.
COMPARED = ("reward/mean", "eval/accuracy", "rollout/length_mean", "policy/entropy", "perf/tokens_per_s", "time/step")
COLUMN_TYPES = {"bool": api_pb2.DATA_TYPE_BOOL, "string": api_pb2.DATA_TYPE_STRING, "number": api_pb2.DATA_TYPE_FLOAT64}


class EventWriter:
    """Write a run's events. Those from `purge_step` on, of an earlier start, are no longer shown. `names` are the
    metrics that earlier starts have written."""

    def __init__(self, folder: Path, purge_step: int, names: Collection[str] = ()):
        self._first_step, self._names, self._layout = purge_step, set(names), Layout()
        self._file = EventFileWriter(str(folder))
        self._add(purge_step, session_log=SessionLog(status=SessionLog.START))
        self._write_layout(purge_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step. A kill after this call loses none of them."""
        scalars = {tag_of(name): value for name, value in values.items()} | stack_stages(values)
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=scalars[tag]) for tag in scalars]))
        if not values.keys() <= self._names:
            self._names |= values.keys()
            self._write_layout(step)
        self._file.flush()

    def write_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """Write counts in bins. TensorBoard shows the bins from the first to the last that is not empty."""
        edges, counts = histogram
        bins = [(left, right, count) for left, right, count in zip(edges, edges[1:], counts, strict=False) if count]
        if bins:
            # TensorBoard reads sums only to show a mean, which rollout/length_mean has exactly.
            middles = [((left + right) / 2, count) for left, right, count in bins]
            summary = histogram_raw(
                name,
                min=bins[0][0],
                max=bins[-1][1],
                num=sum(counts),
                sum=sum(middle * count for middle, count in middles),
                sum_squares=sum(middle * middle * count for middle, count in middles),
                bucket_limits=edges[1:],
                bucket_counts=counts,
            )
            self._add(step, summary=summary)

    def write_text(self, name: str, text: str, step: int) -> None:
        self._add_text(name, texts.create_summary_metadata("", ""), text.encode(errors="replace"), step)

    def describe(self, shown: Mapping[str, str], settings: Mapping[str, str | float | bool]) -> None:
        """Write texts about this start of the run, and its settings for the tab HParams. TensorBoard takes the columns
        of that tab from the first run, so all runs must have the same names, and the settings from a run's first
        start."""
        for name, text in shown.items():
            self.write_text(name, text, self._first_step)
        start, columns = SessionStartInfo(start_time_secs=time.time()), []
        for name, value in settings.items():
            kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
            setattr(start.hparams[name], f"{kind}_value", value)
            columns.append(api_pb2.HParamInfo(name=name, type=COLUMN_TYPES[kind]))
        metrics = [api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag_of(name))) for name in COMPARED]
        experiment = api_pb2.Experiment(hparam_infos=columns, metric_infos=metrics)
        parts = {
            hparams.EXPERIMENT_TAG: HParamsPluginData(experiment=experiment),
            hparams.SESSION_START_INFO_TAG: HParamsPluginData(session_start_info=start),
        }
        for tag, data in parts.items():
            about = hparams.create_summary_metadata(data)
            value = Summary.Value(tag=tag, metadata=about, tensor=hparams.NULL_TENSOR)
            self._add(self._first_step, summary=Summary(value=[value]))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write_layout(self, step: int) -> None:
        """Write the layout if it has changed. TensorBoard shows the last one."""
        layout = make_layout(self._names)
        if layout == self._layout:
            return
        self._layout = layout
        about = custom_scalars.create_summary_metadata()
        self._add_text(custom_scalars.CONFIG_SUMMARY_TAG, about, layout.SerializeToString(), step)

    def _add_text(self, tag: str, about: SummaryMetadata, text: bytes, step: int) -> None:
        content = TensorProto(dtype=DT_STRING, string_val=[text], tensor_shape=TensorShapeProto())
        self._add(step, summary=Summary(value=[Summary.Value(tag=tag, metadata=about, tensor=content)]))

    def _add(self, step: int, **content: Message) -> None:
        self._file.add_event(Event(step=step, wall_time=time.time(), **content))
