"""The endpoint for Prometheus: names, labels, a port in use, and what it listens on."""

import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rl.config.load import load_config
from rl.config.schema import ConfigError
from rl.report.events import read_events
from rl.report.metrics_writer import MetricsWriter
from rl.report.prometheus import PrometheusEndpoint, prometheus_key
from tests.ports import free_port


def scrape(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples of a scrape, read by Prometheus' own parser. It refuses what is not in the format."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    assert {family.type for family in families} <= {"gauge"}
    return {(sample.name, tuple(sample.labels.items())): sample.value for sample in samples}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward/mean", ("reward_mean", ())),
        ("gpu/memory_gb/rank_3", ("gpu_memory_gb", (("rank", "3"),))),
        ("perf/tokens_per_s/engine_12", ("perf_tokens_per_s", (("engine", "12"),))),
        ("host/memory_gb/node_0", ("host_memory_gb", (("node", "0"),))),
        ("eval/gsm8k-v1.0/pass@4", ("eval_gsm8k_v1_0_pass_4", ())),
        ("perf/wait/actor/rollout", ("perf_wait_actor_rollout", ())),
        ("7b/x", ("_7b_x", ())),
    ],
)
def test_names(name: str, expected: tuple[str, tuple]) -> None:
    assert prometheus_key(name) == expected


def test_a_scrape_has_the_values_of_the_last_step(tmp_path: Path) -> None:
    endpoint = PrometheusEndpoint("127.0.0.1", free_port())
    writer = MetricsWriter(tmp_path, 10, endpoint=endpoint)
    assert scrape(endpoint.port) == {}
    writer.write(1, 2, {"reward/mean": 0.25, "eval/accuracy": 0.5})
    per_rank = {f"gpu/memory_gb/rank_{rank}": rank / 2 for rank in range(3)}
    values = {
        "reward/mean": 0.5,
        "perf/tokens_per_s": 9.0,
        "perf/tokens_per_s/engine_0": 9.0,
        "loss/policy": float("nan"),
    }
    writer.write(2, 3, values | per_rank)
    found = scrape(endpoint.port)
    assert str(found.pop(("loss_policy", ()))) == "nan"
    assert found == {
        **{("step", ()): 2, ("version", ()): 3, ("reward_mean", ()): 0.5, ("perf_tokens_per_s", ()): 9},
        **{("perf_tokens_per_s", (("engine", "0"),)): 9},
        **{("gpu_memory_gb", (("rank", str(rank)),)): rank / 2 for rank in range(3)},
    }
    port = endpoint.port
    writer.close("fake")
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)


def test_two_names_that_become_one_give_one_value(tmp_path: Path) -> None:
    endpoint = PrometheusEndpoint("127.0.0.1", free_port())
    endpoint.write(1, 1, {"eval/a-b": 0.1, "eval/a_b": 0.2})
    assert scrape(endpoint.port)["eval_a_b", ()] == 0.2
    endpoint.close()


def test_a_port_in_use_is_a_warning_and_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        writer = MetricsWriter(tmp_path, 10, endpoint=PrometheusEndpoint("127.0.0.1", port))
        writer.write(1, 2, {"reward/mean": 0.25})
        writer.close("fake")
    (event,) = (event for event in read_events(tmp_path) if event.kind == "warning")
    assert event.text.startswith(f"metrics.prometheus_port: cannot listen on port {port} of 127.0.0.1: Address already")
    assert event.text in capsys.readouterr().out


def test_it_is_off_by_default_and_listens_on_the_loopback() -> None:
    metrics = load_config().metrics
    assert (metrics.prometheus_port, metrics.prometheus_address) == (0, "127.0.0.1")
    with pytest.raises(ConfigError, match=r"metrics.prometheus_address: got 'localhost'; it must be an IP address"):
        load_config(None, ["metrics.prometheus_address=localhost"])
