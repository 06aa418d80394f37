"""Score one row of the data with the real reward functions before a run is started, without torch and a model."""

import os
import threading
from dataclasses import dataclass, replace
from typing import Any

from rl.config.schema import ConfigError, RewardConfig
from rl.rewards.failure import RewardFailure, one_line
from rl.rewards.find import read_rules
from rl.rewards.launch import launch
from rl.rewards.pool import SILENCE_S, RewardPool

ARBITRARY_RESPONSE = "I do not know."
MAX_SHOWN = 60  # characters of a response in the text


@dataclass(frozen=True)
class TrialRow:
    """A row of the data as a reward function sees it. Without a tokenizer, its chat template is missing."""

    place: str  # file and line
    prompt: str
    values: dict[str, Any]  # all columns, and `answer`


def score_one_row(config: RewardConfig, row: TrialRow) -> str:
    """Score the reference answer, and an arbitrary text, as responses to one row. Return what was scored, and how.

    The functions run in a worker process with its limits, as in a run. Raise ConfigError if they cannot be imported, or
    if they fail for every response. One response that fails is only described, since a run continues after it.
    """
    read_rules(config)  # before a process is started
    missing = [name for name in config.credentials if name not in os.environ]
    if missing:
        present = [name for name in config.credentials if name in os.environ]
        _score(replace(config, credentials=present), row, {})  # imports the functions
        return f"the reward functions were not called, because {', '.join(missing)} is not set here"
    responses = {"its answer": row.values["answer"], "an arbitrary text": ARBITRARY_RESPONSE}
    responses = {name: text for name, text in responses.items() if text}  # there may be no answer
    results = _score(config, row, responses)
    failures: list[RewardFailure] = [result["failure"] for result in results.values() if result["failure"] is not None]
    if len(failures) == len(results):
        failure, response = failures[0], next(iter(responses.values()))
        raise ConfigError(
            f"reward.function: the functions fail for {row.place}, whatever the response is. With the response "
            f"{_quote(response)}, {failure}. What to change: {failure.remedy}"
        )
    texts = []
    for name, response in responses.items():
        failure = results[name]["failure"]
        outcome = _show_score(results[name]) if failure is None else f"has no score, because {failure}"
        texts.append(f"{name} {_quote(response)} {outcome}")
    return f"{row.place}: {'; '.join(texts)}"


def _score(config: RewardConfig, row: TrialRow, responses: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the result of each response by its name."""
    results: dict[str, dict[str, Any]] = {}
    reasons: list[BaseException] = []
    is_over = threading.Event()

    def deliver(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        if len(results) == len(responses):
            is_over.set()

    def fail(error: BaseException) -> None:
        reasons.append(error)
        is_over.set()

    pool = RewardPool(launch(), config, max(1, len(responses)), deliver, fail)
    try:
        pool.wait_ready()
        for name, response in responses.items():
            pool.submit(name, row.prompt, response, row.values)
        if responses and not is_over.wait(2 * (config.timeout_s + SILENCE_S)):
            reasons.append(TimeoutError("no result came"))
    except RuntimeError as error:
        reasons.append(error)
    finally:
        pool.close()
    if reasons:
        raise ConfigError(f"reward.function: {row.place} could not be scored: {reasons[0]}")
    return results


def _show_score(result: dict[str, Any]) -> str:
    parts = [f"{name} {value:g}" for name, value in result["parts"].items()]
    return f"scores {result['score']:g}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


def _quote(text: str) -> str:
    return repr(one_line(text, MAX_SHOWN))
