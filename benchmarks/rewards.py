"""Measure the reward pool: calls per second, and what attacks cost and leave behind. Prints one JSON line.

    python benchmarks/rewards.py [--calls 10000] [--workers 2] [--timeout 2] [--attacks 1]

--attacks percent of the calls hang, crash, raise, flood, fill memory or leave processes. The results of all other calls
are checked:
    functions           calls per second of each built-in function alone, on responses like those of models
    calls_per_s         of all calls, with the attacks
    timeouts, errors    calls that hung or crashed, and calls that raised
    kept, leaked        processes besides the server and its workers, before and after the pool is closed
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, also in an environment of one's own

from rl.config.schema import RewardConfig
from rl.rewards.functions import FUNCTIONS
from rl.rewards.launch import launch
from rl.rewards.pool import RewardPool
from tests.reward_attacks import SPEC, Results, marked, members, wait_for_none

HANG = ("sleeps", "loops", "leaves_children_and_hangs")
CRASH = ("exits", "segfaults", "closes_everything", "writes_nonsense", "bombs", "leaves_children_and_crashes")
RAISE = ("raises", "recurses", "returns_much", "fills_memory")
SURVIVE = ("prints", "leaves_children")
OPTIONS = {"length": {"most": 2000}}


def programs(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return programs with five tests each, half of them right."""
    tests = [f"assert total(range({number})) == {number * (number - 1) // 2}" for number in range(5)]
    wrong, right = ("def total(xs):\n    return len(xs)", "def total(xs):\n    return sum(xs)")
    return [(f"```python\n{right if number % 2 else wrong}\n```", {"tests": tests}) for number in range(count)]


def responses(count: int) -> list[tuple[str, str]]:
    """Return pairs of a response and an answer, half of them right."""
    lots = random.Random(0)
    pairs = []
    for _ in range(count):
        top, bottom, shift = lots.randint(1, 99), lots.randint(2, 99), lots.randint(0, 1)
        text = f"We divide {top} by {bottom} and check each step. " * lots.randint(1, 12)
        pairs.append(
            (f"<think>{text}</think><answer>$\\frac{{{top + shift}}}{{{bottom}}}$</answer>", f"{top}/{bottom}")
        )
    return pairs


class Outcome(NamedTuple):
    calls_per_s: float
    results: dict[int, dict[str, Any]]
    num_alive: int  # processes when all results have come
    num_leaked: int  # processes after the pool was closed


def run_pool(config: RewardConfig, workers: int, calls: list[tuple[str, dict[str, Any]]]) -> Outcome:
    results = Results()
    with marked() as mark:
        pool = RewardPool(launch(), config, workers, results.deliver, results.fail)
        pool.wait_ready()
        began = time.perf_counter()
        for number, (response, row) in enumerate(calls):
            pool.submit(number, "", response, row)
        results.wait(len(calls), timeout_s=3600)
        seconds = time.perf_counter() - began
        time.sleep(0.5)  # a sweep may be under way
        alive = len(members(mark))
        pool.close()
        return Outcome(len(calls) / seconds, results.by_key, alive, len(wait_for_none(mark, 1.0)))


def rate_functions(workers: int, count: int) -> dict[str, float]:
    rates = {}
    for name in FUNCTIONS:
        slow = name in ("math", "code")
        pairs = responses(count // 10 if slow else count)
        reward = {"environment_reward": 0.5} if name == "environment" else {}
        calls: list[tuple[str, dict[str, Any]]] = [
            (response, {"answer": answer} | reward) for response, answer in pairs
        ]
        calls = programs(count // 10) if name == "code" else calls
        options = {name: OPTIONS[name]} if name in OPTIONS else {}
        outcome = run_pool(RewardConfig(function=name, options=options), workers, calls)
        for number, (response, row) in enumerate(calls[:200]):
            value = FUNCTIONS[name]("", response, row, **options.get(name, {}))
            wanted = value["score"] if isinstance(value, dict) else value
            assert outcome.results[number]["score"] == wanted, (name, response, row)
        rates[name] = round(outcome.calls_per_s, 1)
    return rates


def run(args: argparse.Namespace) -> dict[str, Any]:
    lots, attacks = random.Random(1), HANG + CRASH + RAISE + SURVIVE
    calls: list[tuple[str, dict[str, Any]]] = []
    for number in range(args.calls):
        is_attack = lots.random() < args.attacks / 100
        calls.append((attacks[number % len(attacks)] if is_attack else str(number % 100), {}))
    config = RewardConfig(function=SPEC, timeout_s=args.timeout)
    outcome = run_pool(config, args.workers, calls)
    statuses = {"ok": 0, "timeout": 0, "crash": 0, "error": 0}
    for number, (response, _) in enumerate(calls):
        result = outcome.results[number]
        statuses[result["status"]] += 1
        if response.isdigit():
            assert (result["status"], result["score"]) == ("ok", float(response)), (response, result)
        elif response in HANG + CRASH:
            assert result["status"] in ("timeout", "crash"), (response, result)
        elif response in RAISE:
            assert result["status"] == "error", (response, result)
    return {
        "benchmark": "rewards",
        "calls": args.calls,
        "workers": args.workers,
        "timeout_s": args.timeout,
        "attacks": sum(not response.isdigit() for response, _ in calls),
        "calls_per_s": round(outcome.calls_per_s, 1),
        "timeouts": statuses["timeout"] + statuses["crash"],
        "errors": statuses["error"],
        "leaked": outcome.num_leaked,
        "kept": outcome.num_alive - 1 - args.workers,
        "functions": rate_functions(args.workers, args.calls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=2.0)
    parser.add_argument("--attacks", type=float, default=1.0, help="percent of the calls")
    args = parser.parse_args()
    print(json.dumps(run(args)), flush=True)


if __name__ == "__main__":
    main()
