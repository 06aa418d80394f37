"""Run train.py and record every collective of its updates and weight syncs: `counted_train.py FOLDER JOBS`.

JOBS is a JSON list of `{"num_ranks": ..., "overrides": [...]}`. Ranks are forks of this process. Each writes a line of
JSON for each process group, update, sync and collective to FOLDER/JOB.RANK.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rl.learner.policy import PolicyTrainer
from rl.learner.sharded_trainer import ShardedTrainer
from rl.model import load
from rl.sync.transfer import BucketTransfer
from tests import forked_runs

load.MAX_GATHERED_AT_ONCE = 0  # the model stands in for a large one

# torch 2.13 has renamed the collectives that FSDP calls.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


class Record:
    def __init__(self, prefix: Path):
        self._prefix = prefix

    def write(self, kind: str, **facts: Any) -> None:
        with open(f"{self._prefix}.{os.environ['RANK']}", "a") as file:
            file.write(json.dumps({"kind": kind} | facts) + "\n")

    def collective(self, name: str, kind: str, size_of: Callable[..., int]) -> None:
        """Record calls of a function of torch.distributed."""
        original = getattr(dist, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            ranks = dist.get_process_group_ranks(kwargs.get("group"))
            self.write(kind, bytes=size_of(*args, **kwargs), ranks=ranks)
            return original(*args, **kwargs)

        setattr(dist, name, recorded)

    def install(self) -> None:
        self.collective(GATHER, "all_gather", lambda output, own, **options: output.nbytes)
        self.collective(SCATTER, "reduce_scatter", lambda output, input, **options: input.nbytes)
        self.collective("all_reduce", "all_reduce", lambda tensor, *args, **options: tensor.nbytes)
        self.collective("broadcast", "broadcast", lambda tensor, *args, **options: tensor.nbytes)
        new_group, run_passes, update = dist.new_group, ShardedTrainer._run_passes, PolicyTrainer.update
        buckets = BucketTransfer.buckets

        def recorded_group(ranks: list[int] | None = None, **options: Any) -> Any:
            self.write("group", ranks=ranks)
            return new_group(ranks, **options)

        def recorded_passes(
            trainer: ShardedTrainer, batch: Any, micro_batches: Any, *args: Any, **options: Any
        ) -> None:
            self.write("micro_batches", number=len(micro_batches))
            run_passes(trainer, batch, micro_batches, *args, **options)

        def recorded_update(trainer: PolicyTrainer, *args: Any, **options: Any) -> None:
            self.write("begin update")
            update(trainer, *args, **options)
            self.write("end update")

        def recorded_buckets(transfer: BucketTransfer, *args: Any) -> Iterator[tuple[Any, dict[int, Tensor]]]:
            self.write("begin sync")
            yield from buckets(transfer, *args)
            self.write("end sync")

        dist.new_group = recorded_group
        ShardedTrainer._run_passes = recorded_passes  # type: ignore[method-assign]
        PolicyTrainer.update = recorded_update  # type: ignore[method-assign]
        BucketTransfer.buckets = recorded_buckets  # type: ignore[method-assign]


def main() -> None:
    folder = Path(sys.argv[1])
    for number, job in enumerate(json.loads(sys.argv[2])):
        if not os.fork():  # so that recorders do not add up
            Record(folder / str(number)).install()
            os._exit(forked_runs.run(**job))
        _, status = os.wait()
        if status:
            sys.exit(1)


if __name__ == "__main__":
    main()
