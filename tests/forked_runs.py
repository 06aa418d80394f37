"""Run train.py many times, with ranks that are forked from one process.

    python tests/forked_runs.py '[{"num_ranks": 2, "overrides": ["run.name=a", ...], "broken": "slow engine"}, ...]'

The imports of a rank take seconds, and here they happen once. The ranks get the variables that torchrun would set, and
nothing restarts them. `broken` names what broken_train.py breaks on rank 0. The program ends with the first run that
fails, unless it `may_fail`.
"""

import rl.world.bootstrap  # noqa: I001  first, as in train.py

import importlib
import json
import os
import signal
import sys
import time

import torch.utils.tensorboard
import transformers.models.llama.modeling_llama  # noqa: F401

import rl.rollout.fake_engine
import train
from rl.run.plan import parse_or_plan
from tests.e2e.broken_train import break_
from tests.ports import free_port


def run(num_ranks: int, overrides: list[str], broken: str = "") -> int:
    """Run train.py with these overrides. Return 0, or the exit code of a rank that failed."""
    port = free_port()
    ranks = {start_rank(rank, num_ranks, port, overrides, broken) for rank in range(num_ranks)}
    failed = 0
    while ranks:
        rank, status = os.waitpid(-1, 0)
        ranks.discard(rank)
        failed = failed or abs(os.waitstatus_to_exitcode(status))
        if failed:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return failed


def start_rank(rank: int, num_ranks: int, port: int, overrides: list[str], broken: str) -> int:
    sys.stdout.flush()
    if process := os.fork():
        return process
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    torch.set_num_threads(1)
    importlib.reload(rl.world.bootstrap)  # starts the rank's watchdog, log and reward server
    sys.argv[1:] = overrides
    break_(broken, culprit=0)
    train.main(parse_or_plan(None))
    os._exit(1)


def main() -> None:
    runs = json.loads(sys.argv[1])
    if not all("rollout.engine=fake" in each["overrides"] for each in runs):
        importlib.import_module("rl.rollout.vllm.build")  # imports vLLM
    for each in runs:
        started = time.monotonic()
        may_fail = each.pop("may_fail", False)
        failed = run(**each)
        if len(runs) > 1:
            print(f"this took {time.monotonic() - started:.1f} s: {' '.join(each['overrides'])}", flush=True)
        if failed and not may_fail:
            leave(failed)
    leave(0)


def leave(code: int) -> None:
    """End without the messages that packages print when the interpreter ends. Those of triton would stand last."""
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
