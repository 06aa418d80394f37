"""A tiny model learns to use tools on real vLLM. It does not learn if the answer to its first call says nothing."""

import json
import statistics
from pathlib import Path

import pytest

from tests.launcher import Result, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LIMIT_S = 300
OFF = {
    "calculator": "environment.tools=[tests/e2e/disabled_environments.py:add]",
    "guess": "environment.class=tests/e2e/disabled_environments.py:GuessWithoutHints",
}
# Without a sum, no answer is right. Without hints, five guesses find one of 31 numbers with probability 0.16.
CHANCE = {"calculator": 0.0, "guess": 5 / 31}


def learn(name: str, folder: Path, *settings: str) -> Result:
    return train(folder, 2, "--config", f"configs/tiny_{name}.yaml", *settings, timeout_s=LIMIT_S)


def first_and_last(result: Result, metric: str) -> tuple[float, float]:
    """Return the means of a metric over the first and the last five steps."""
    values = [row[metric] for row in result.metrics]
    return statistics.mean(values[:5]), statistics.mean(values[-5:])


@pytest.mark.parametrize("name", OFF)
def test_it_learns(name: str, tmp_path: Path) -> None:
    result = learn(name, tmp_path / "run")
    before, after = first_and_last(result, "reward/mean")
    assert before < 0.5
    assert after > 0.9
    _, calls = first_and_last(result, "environment/calls")
    assert calls > 1.9, "a solved conversation needs two calls"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert accuracies[-1] > 0.9
    assert all(row["policy/mismatch_kl"] < 1e-6 for row in result.metrics)


@pytest.mark.parametrize("name", OFF)
def test_it_does_not_learn_without_the_answers_of_its_tool(name: str, tmp_path: Path) -> None:
    result = learn(name, tmp_path / "run", OFF[name], "eval.interval=0")
    _, after = first_and_last(result, "reward/mean")
    assert after < CHANCE[name] + 0.1
    assert statistics.mean(row["environment/calls"] for row in result.metrics) > 0.5, "it still calls its tool"
