"""Read a run's events as TensorBoard does: through its loader and its plugins."""

import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin
from tensorboard.plugins.text.text_plugin import TextPlugin

EVERYTHING = {"scalars": 100_000, "text": 1000, "tensors": 1000, "histograms": 1000}
RUN = "."


class EventReader:
    """What TensorBoard shows of the folder of one run, without a browser."""

    def __init__(self, folder: Path):
        multiplexer = EventMultiplexer(tensor_size_guidance=EVERYTHING)
        multiplexer.AddRunsFromDirectory(str(folder))
        multiplexer.Reload()
        self._provider, self._context = MultiplexerDataProvider(multiplexer, str(folder)), RequestContext()
        plugins: dict[str, Any] = {}
        context = TBContext(data_provider=self._provider, plugin_name_to_instance=plugins, logdir=str(folder))
        plugins["scalars"] = ScalarsPlugin(context)
        self._charts, self._texts, self._hparams = CustomScalarsPlugin(context), TextPlugin(context), context

    @property
    def tags(self) -> list[str]:
        found = self._provider.list_scalars(self._context, experiment_id="", plugin_name="scalars")
        return sorted(found.get(RUN, {}))

    def scalars(self, tag: str) -> list[tuple[int, float]]:
        return self.matching(f"{tag}$").get(tag, [])

    def matching(self, pattern: str) -> dict[str, list[tuple[int, float]]]:
        """Return steps and values of the tags that TensorBoard finds for a pattern of a chart."""
        found = self._charts.scalars_impl(self._context, RUN, pattern, "")
        assert found["regex_valid"], pattern
        return {tag: [(step, value) for _, step, value in points] for tag, points in found["tag_to_events"].items()}

    def charts(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the charts by the titles of their category and their own."""
        layout = self._charts.layout_impl(self._context, "")
        layout = json.loads(layout) if isinstance(layout, str) else layout
        return {
            category["title"]: {chart["title"]: chart for chart in category["chart"]}
            for category in layout.get("category", [])
        }

    def texts(self, tag: str) -> list[tuple[int, str]]:
        """Return steps and HTML of a text."""
        return [(event["step"], event["text"]) for event in self._texts.text_impl(self._context, RUN, tag, "", True)]

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the tab HParams shows of the run."""
        context = backend_context.Context(self._hparams)
        request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=10, include_metrics=True)
        request.allowed_statuses.extend([api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_RUNNING])
        experiment = context.experiment_from_metadata(
            self._context,
            "",
            True,
            context.hparams_metadata(self._context, ""),
            context.hparams_from_data_provider(self._context, "", 0),
        )
        request.col_params.extend(
            [api_pb2.ColParams(hparam=column.name) for column in experiment.hparam_infos]
            + [api_pb2.ColParams(metric=column.name) for column in experiment.metric_infos]
        )
        handler = list_session_groups.Handler(self._context, context, "", request)
        (group,) = handler.run().session_groups
        values = {
            name: getattr(value, value.WhichOneof("kind"))  # a number, a text or a truth value
            for name, value in group.hparams.items()
        }
        return values | {metric.name.tag: metric.value for metric in group.metric_values}
