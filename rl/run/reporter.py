"""Write the reports of an actor rank: metrics, samples, saved rollouts and profiles."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from rl.common.files import write_atomically
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.group_file import groups_to_bytes, split_groups
from rl.data.prompts import Tokenizer
from rl.model.flops import peak_flops
from rl.report.accounting import describe_bound, summarize
from rl.report.histogram import Histogram
from rl.report.metrics_writer import MetricsWriter
from rl.report.profile import profiled
from rl.report.rows import ROLLOUTS
from rl.report.samples import TAG, show
from rl.rollout.collect import Rollouts
from rl.rollout.dispatch import BatchTime
from rl.rollout.sample_exchange import SampleExchange
from rl.rollout.use import describe_uses
from rl.run.reporting import HealthWatch, RewardSummary
from rl.world.world import World


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
        health: HealthWatch | None = None,
    ):
        self._world, self._config, self._folder = world, config, folder
        self._tokenizer, self._rollouts, self._writer, self._actors = tokenizer, rollouts, writer, actors
        self._health = health
        self.exchange: SampleExchange | None = None  # set it before the first step to write samples
        self._rewards = RewardSummary(writer.kept_rewards if writer is not None else ())
        is_known = writer is not None and world.device.type == "cuda" and config.model.dtype == "bfloat16"
        peak = peak_flops(torch.cuda.get_device_name(world.device)) if is_known else None
        self._peak_flops = len(actors) * peak if peak else None  # of all actors

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

    def report(
        self,
        step: int,
        version: int,
        values: dict[str, float],
        batch: Batch | None = None,
        histograms: Mapping[str, Histogram] | None = None,
    ) -> None:
        """Write the metrics of one step, and every metrics.samples_interval steps also samples of its batch."""
        if self._config.debug.dry_run:
            return
        seconds = {f"time/{stage}": seconds for stage, seconds in self._world.progress.take_seconds().items()}
        if self._writer is None:
            return
        if batch is not None:
            values = values | {"perf/tokens_per_s": values["rollout/tokens"] / seconds["time/step"]}
            rounds = self._rollouts.take_times()
            values |= find_slowest(rounds)
            values |= measure_mfu(values, seconds, rounds, self._peak_flops)
            values |= describe_uses(self._rollouts.take_uses())
            account, nodes = self._world.accounts.take(version), self._world.nodes
            values |= summarize(account)
            prompt_tokens = round(float(batch.prompt_lengths.sum()) / max(1, batch.num_sequences), 1)
            bound = describe_bound(values | seconds)
            about = {"step": step, "bound": bound, "prompt_tokens": prompt_tokens, "nodes": nodes.sizes}
            self._writer.write_account(account, nodes.numbers, about)
            if self.exchange is not None and self.exchange.samples:
                self._writer.write_text(TAG, show(self.exchange.samples, self._tokenizer), step)
        values = values | seconds | self._world.take_usage()
        if self._health is not None:
            values |= self._health.check(step, values)
        self._writer.write(step, version, values, histograms)
        if "reward/mean" in values:
            self._world.tell_rewards(*self._rewards.add(values["reward/mean"]))

    def _name(self) -> str:
        return f"step_{self._world.step}.rank_{self._world.rank}"


def find_slowest(rounds: Sequence[BatchTime]) -> dict[str, float]:
    """Return metrics of the engine that cost a round of this step the most time."""
    slowest = max(rounds, key=lambda each: each.cost_s, default=None)
    if slowest is None or not slowest.cost_s:
        return {}
    found = {"perf/slowest_engine": float(slowest.slowest), "perf/slowest_engine_s": slowest.cost_s}
    return found | {"perf/slowest_engine_speed": slowest.speed}


def measure_mfu(
    values: Mapping[str, float], seconds: Mapping[str, float], rounds: Sequence[BatchTime], peak_flops: float | None
) -> dict[str, float]:
    """Return the share of the actors' peak that the update has used. There is none if the peak is not known. With
    actor.overlap, a part of the update has run during the rollout."""
    update_s = seconds["time/update"] + sum(each.trained_s for each in rounds)
    if not peak_flops or "perf/update_tflop" not in values:
        return {}
    return {"perf/mfu": values["perf/update_tflop"] * 1e12 / update_s / peak_flops}
