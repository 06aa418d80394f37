"""Serve the metrics of the last step to Prometheus, from a thread of the leader (metrics.prometheus_port).

Names are those of metrics.jsonl with the characters that Prometheus allows: reward/mean becomes reward_mean. A last
part rank_R, engine_R or node_N becomes a label, so that gpu/memory_gb/rank_3 is gpu_memory_gb{rank="3"}.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

LABELLED = re.compile(r"(.+)/(rank|engine|node)_(\d+)")
NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]")
Key = tuple[str, tuple[tuple[str, str], ...]]  # a name, and labels


@cache
def prometheus_key(name: str) -> Key:
    """Return the name and the labels of a metric in Prometheus."""
    labels: tuple[tuple[str, str], ...] = ()
    if found := LABELLED.fullmatch(name):
        name, labels = found[1], ((found[2], found[3]),)
    name = NOT_ALLOWED.sub("_", name)
    return f"_{name}" if name[0].isdigit() else name, labels


class LastValues(Collector):
    """The values of the newest step. A scrape reads them in another thread, so they are replaced as a whole."""

    def __init__(self) -> None:
        self.values: dict[Key, float] = {}

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for (name, labels), value in self.values.items():
            family = families.setdefault(name, Metric(name, "the value of the last step", "gauge"))
            family.add_sample(name, dict(labels), value)
        yield from families.values()


class PrometheusEndpoint:
    """Listen for scrapes. `warning` says why there is no endpoint, if the port cannot be used: the run goes on."""

    def __init__(self, address: str, port: int):
        self._last, self._server, self.warning = LastValues(), None, ""
        registry = CollectorRegistry()
        registry.register(self._last)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            self.warning = (
                f"metrics.prometheus_port: cannot listen on port {port} of {address}: {error.strerror}. The run goes "
                "on without the endpoint; choose another port, or stop the program that uses it"
            )

    @property
    def port(self) -> int:
        return self._server.server_port if self._server is not None else 0

    def write(self, step: int, version: int, values: Mapping[str, float]) -> None:
        """Replace the values by those of a newer step."""
        rows = {"step": float(step), "version": float(version), **values}
        self._last.values = {prometheus_key(name): value for name, value in rows.items()}

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
