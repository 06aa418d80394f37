"""Run train.py with planted sleeps: `slow_train.py JSON [arguments of train.py]`.

The JSON has seconds: `engine` for every step of an engine, `update` for an update, on the rank `slow_actor` only or on
all actors, and `logprobs` for every batch that an inference rank scores. It also has a folder, into which every rank
writes when its windows began and ended.
"""

import rl.world.bootstrap  # noqa: F401, I001  the watchdog before torch, as in train.py

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train
from rl.learner.policy import PolicyTrainer
from rl.learner.scoring import ScoringModels
from rl.rollout.fake_engine import FakeEngine
from rl.run.plan import parse_or_plan
from rl.world.accounts import Accounts


def delayed(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def replaced(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return method(*args, **kwargs)

    return replaced


def main() -> None:
    told = json.loads(sys.argv[1])
    sys.argv[1:] = sys.argv[2:]
    rank = int(os.environ["RANK"])
    FakeEngine.step = delayed(FakeEngine.step, told.get("engine", 0.0))  # type: ignore[method-assign]
    ScoringModels.score = delayed(ScoringModels.score, told.get("logprobs", 0.0))  # type: ignore[method-assign]
    if told.get("slow_actor", rank) == rank:
        PolicyTrainer.update = delayed(PolicyTrainer.update, told.get("update", 0.0))  # type: ignore[method-assign]
    close, ends = Accounts.close_window, Path(told["folder"]) / f"windows_{rank}.txt"

    def close_window(accounts: Accounts, leader: int, version: int) -> None:
        with ends.open("a") as file:
            file.write(f"{version} {time.monotonic()}\n")
        close(accounts, leader, version)

    Accounts.close_window = close_window  # type: ignore[method-assign]
    train.main(parse_or_plan(None))


if __name__ == "__main__":
    main()
