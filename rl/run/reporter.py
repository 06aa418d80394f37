"""Write the reports of an actor rank: metrics, samples, saved rollouts and profiles."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rl.common.files import write_atomically
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.group_file import groups_to_bytes, split_groups
from rl.data.prompts import Tokenizer
from rl.report.metrics_writer import MetricsWriter
from rl.report.profile import profiled
from rl.report.samples import TAG, show
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import BatchTime
from rl.rollout.sample_exchange import SampleExchange
from rl.world.world import World

ROLLOUTS = "rollouts"  # subfolder of the run


def rollout_file(step: int, rank: int) -> str:
    """Return the name of the file in which an actor saves its groups of a step."""
    return f"step_{step}.rank_{rank}.safetensors"


class Reporter:
    """Write the reports of an actor. Only the leader has a metrics writer, and only in a training run."""

    def __init__(
        self,
        world: World,
        config: Config,
        folder: Path,
        tokenizer: Tokenizer,
        rollouts: Rollouts,
        writer: MetricsWriter | None,
        actors: Sequence[int] = (0,),
        exchange: SampleExchange | None = None,
    ):
        self._world, self._config, self._folder = world, config, folder
        self._tokenizer, self._rollouts, self._writer, self._actors = tokenizer, rollouts, writer, actors
        self._exchange = exchange

    @property
    def is_writing(self) -> bool:
        return self._writer is not None

    def profile(self) -> AbstractContextManager[None]:
        """Profile the step if debug.profile_step and debug.profile_num_steps select it."""
        first, step = self._config.debug.profile_step, self._world.step
        is_wanted = first and first <= step < first + self._config.debug.profile_num_steps
        return profiled(self._folder / "profile" / self._name() if is_wanted else None)

    def save_rollouts(self, batch: Batch, groups: Sequence[int]) -> None:
        """Save this rank's batch if debug.save_rollouts is set. tools/replay.py reads the files of a step.

        `groups` are the places in the prompt stream of all groups of the step, by their places in the batch.
        """
        if not self._config.debug.save_rollouts:
            return
        world, config = self._world, self._config
        facts = {
            "step": world.step,
            "world": world.id,  # files of an earlier start may be left if the run was resumed with other ranks
            "actors": self._actors,
            "config": dataclasses.asdict(config),
        }
        file = self._folder / ROLLOUTS / rollout_file(world.step, world.rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, groups_to_bytes(split_groups(batch, groups), facts))

    def report(self, step: int, version: int, values: dict[str, float], batch: Batch | None = None) -> None:
        """Write the metrics of one step, and every metrics.samples_interval steps also samples of its batch."""
        if self._config.debug.dry_run:
            return
        seconds = {f"time/{stage}": seconds for stage, seconds in self._world.progress.take_seconds().items()}
        if self._writer is None:
            return
        if batch is not None:
            values = values | {"perf/tokens_per_s": values["rollout/tokens"] / seconds["time/step"]}
            values |= measure_waits(seconds, self._rollouts.take_times())
            if self._exchange is not None and self._exchange.samples:
                self._writer.write_text(TAG, show(self._exchange.samples, self._tokenizer), step)
        self._writer.write(step, version, values | seconds | self._world.take_gpus())

    def _name(self) -> str:
        return f"step_{self._world.step}.rank_{self._world.rank}"


def measure_waits(seconds: Mapping[str, float], rounds: Sequence[BatchTime]) -> dict[str, float]:
    """Return the share of a step in which actors wait for sampling, engines wait for training, and all wait for the
    weight sync. Scoring is a part of sampling. The largest share bounds the step. Also name the engine that cost a
    round the most time."""
    step_s, sync_s = seconds["time/step"], seconds["time/sync"]
    trained_s = sum(each.trained_s for each in rounds)
    # The rounds, or what the actors waited for them if that is longer: then it includes the scores.
    sampling_s = max(sum(each.seconds for each in rounds), seconds["time/rollout"])
    waits = {
        "perf/waits_for_sampling": max(0.0, seconds["time/rollout"] - trained_s) / step_s,
        "perf/waits_for_training": max(0.0, step_s - sampling_s - sync_s) / step_s,
        "perf/waits_for_publishing": sync_s / step_s,
    }
    slowest = max(rounds, key=lambda each: each.cost_s, default=None)
    if slowest is not None and slowest.cost_s:
        waits |= {"perf/slowest_engine": float(slowest.slowest), "perf/slowest_engine_s": slowest.cost_s}
        waits |= {"perf/slowest_engine_speed": slowest.speed}
    return waits
