"""Score one row of the data with the real reward functions before a run is started, without torch and a model."""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rl.config.schema import ConfigError, RewardConfig
from rl.rewards.failure import ENVIRONMENT, RewardFailure, quote
from rl.rewards.find import read_rules
from rl.rewards.launch import launch
from rl.rewards.pool import SILENCE_S, RewardPool

ARBITRARY_RESPONSE = "I do not know."
NO_CONVERSATION = "The environment's own reward was not computed, because it needs a whole conversation"
# Types of exceptions that are the same for every response, if two different responses give the same text.
INDEPENDENT = ("KeyError", "NameError", "ImportError", "ModuleNotFoundError", "ResultTypeError")


@dataclass(frozen=True)
class TrialRow:
    """A row of the data as a reward function sees it. Without a tokenizer, the prompt has no chat template."""

    place: str  # file and line
    prompt: str
    values: dict[str, Any]  # all columns, and `answer`


class Trial(NamedTuple):
    text: str  # what was scored, and how
    has_score: bool  # at least one response got a score


def score_one_row(config: RewardConfig, row: TrialRow) -> Trial:
    """Score the reference answer, and an arbitrary text, as responses to one row.

    The functions run in a worker process with its limits, as in a run. Raise ConfigError if they cannot be imported, or
    if they fail in a way that does not depend on the response. Other failures are only described, since a run continues
    after them. The reward of an environment is left out, because it needs a conversation.
    """
    rules = read_rules(config)  # before a process is started
    others = {rule.spec: rule.weight for rule in rules if rule.spec != ENVIRONMENT}
    if not others:
        return Trial(NO_CONVERSATION, False)
    if len(others) < len(rules):
        trial = score_one_row(replace(config, function=others), row)
        return trial._replace(text=f"{trial.text}. {NO_CONVERSATION}")
    missing = [name for name in config.credentials if name not in os.environ]
    if missing:
        present = [name for name in config.credentials if name in os.environ]
        score_responses(replace(config, credentials=present), row, {})  # imports the functions
        return Trial(f"the reward functions were not called, because {', '.join(missing)} is not set here", False)
    responses = {"its answer": row.values["answer"], "an arbitrary text": ARBITRARY_RESPONSE}
    responses = {name: text for name, text in responses.items() if text}  # there may be no answer
    results = score_responses(config, row, responses)
    failures: list[RewardFailure] = [result["failure"] for result in results.values() if result["failure"] is not None]
    if len(failures) == len(results):
        tried = "both texts that were" if len(results) > 1 else "the only text that was"
        failure, response = results[next(iter(responses))]["failure"], next(iter(responses.values()))
        text = f"the functions failed for {tried} tried as a response. With the response {quote(response)}, {failure}"
        if _is_independent(failures, responses.values()):
            raise ConfigError(f"reward.function: {row.place}: {text}. What to change: {failure.remedy}")
        end = "A run in which every sample of the first step fails will end"
        return Trial(f"{row.place}: {text}. {end}. If such responses should get a score, {failure.remedy}", False)
    texts = []
    for name, response in responses.items():
        failure = results[name]["failure"]
        outcome = show_score(results[name]) if failure is None else f"has no score, because {failure}"
        texts.append(f"{name} {quote(response)} {outcome}")
    return Trial(f"{row.place}: {'; '.join(texts)}", True)


def _is_independent(failures: list[RewardFailure], responses: Iterable[str]) -> bool:
    """Return whether these failures of all responses show that every other response would fail too."""
    first = failures[0]
    if first.error not in INDEPENDENT or any((each.kind, each.text) != (first.kind, first.text) for each in failures):
        return False
    key = first.text.removeprefix("KeyError: ").strip("'\"")
    return first.error != "KeyError" or not any(key in response for response in responses)


def score_responses(config: RewardConfig, row: TrialRow, responses: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the result of each response by its name. Raise ConfigError if the functions cannot be imported."""
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


def show_score(result: dict[str, Any]) -> str:
    parts = [f"{name} {value:g}" for name, value in result["parts"].items()]
    return f"scores {result['score']:g}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")
