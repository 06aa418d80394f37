"""Run train.py and hold it at certain places: `held_train.py GATES [arguments of train.py]`.

At a gate, a rank creates GATES/NAME.reached and waits until GATES/NAME exists. Gates are held only if GATES/NAME.closed
exists.

    restart   before the ranks of a later attempt join
    update    before the third update
"""

import rl.world.bootstrap  # noqa: F401, I001  the watchdog before torch, as in train.py

import os
import sys
import time
from pathlib import Path
from typing import Any

import train
from rl.learner.policy import PolicyTrainer
from rl.run.plan import parse_or_plan


def pass_gate(gates: Path, name: str) -> None:
    if (gates / f"{name}.closed").exists():
        (gates / f"{name}.reached").touch()
        while not (gates / name).exists():
            time.sleep(0.05)


def main() -> None:
    gates = Path(sys.argv.pop(1))
    update, count = PolicyTrainer.update, 0

    def held_update(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            pass_gate(gates, "update")
        return update(*args, **kwargs)

    PolicyTrainer.update = held_update  # type: ignore[method-assign]
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        pass_gate(gates, "restart")
    train.main(parse_or_plan(None))


if __name__ == "__main__":
    main()
