"""The phase rollout: engines without a learner. The lead of the first engine loads the weights and drives the phase.

    checkpoint or model --> lead --> every engine, proven --> evaluation --> groups of the next step, in files

Each slice of a checkpoint is compared with its digest in the manifest when it is read. The weight sync then proves that
every engine holds what was read (docs/weight_sync.md).
"""

import functools
import time
from dataclasses import dataclass

from torch import nn

from rl.checkpoint.resume import SliceReader, fill
from rl.common.text import count_of
from rl.data.trajectory_files import trajectory_folder
from rl.evaluation.evaluation import Evaluation, is_evaluation_due, show_evaluation
from rl.model.lora import trained_slices
from rl.model.shards import local_slices
from rl.report.metrics_writer import MetricsWriter
from rl.report.rows import read_metrics
from rl.rollout.archive import ArchiveDispatcher
from rl.rollout.balance import Balancer
from rl.rollout.collect import Rollouts
from rl.rollout.sampler import Sampler
from rl.run.build import build_evaluation, build_sampler, error_if_all_fail
from rl.run.models import digest_bases, load_policy
from rl.run.open import Run
from rl.run.record import say_stop
from rl.run.reporting import note_rebuilt_engines
from rl.run.serve import build_rollout_service, build_sync, import_engine_of
from rl.sync.sources import WeightSource
from rl.sync.weights import WeightSync, share_tensors
from rl.watch.heart import HEART
from rl.world.bootstrap import enable_garbage_collection
from rl.world.faults import Stopped
from rl.world.orders import Action


@dataclass(frozen=True)
class RolloutLead:
    """The rank that drives the phase rollout, with a method for each of its stages."""

    run: Run
    sync: WeightSync
    sampler: Sampler
    evaluation: Evaluation | None
    archive: ArchiveDispatcher | None  # None: all steps are done, or only an evaluation was asked for

    @property
    def step(self) -> int:
        """The step whose groups are sampled."""
        return self.run.start_step + 1

    def publish(self) -> int:
        """Send the weights to all engines, and return their version."""
        return self.sync.publish(self.step)

    def evaluate(self, version: int) -> None:
        """Evaluate the weights, if that is due and was not done yet. Of several parts, only the first evaluates."""
        run, step = self.run, self.run.start_step
        has_both = run.phase.split == "all" and run.phase.part[0] == 1
        is_wanted = run.phase.split == "eval-only" or (has_both and self._is_evaluation_left(version))
        if self.evaluation is None or not is_wanted:
            return
        values = self.evaluation.run(step, version)
        writer = MetricsWriter(run.folder, run.config.train.num_steps, step, continues=True, view=run.view)
        writer.write(step, version, values)
        writer.close_files()
        show_evaluation(run.folder, step, values)

    def _is_evaluation_left(self, version: int) -> bool:
        run, step = self.run, self.run.start_step
        is_done = run.resume is not None and run.resume.manifest.state["is_evaluated"]
        rows = read_metrics(run.folder / "eval.jsonl")
        is_done = is_done or any((row.get("step"), row.get("version")) == (step, version) for row in rows)
        return is_evaluation_due(run.config, step) and not is_done

    def sample(self, version: int) -> None:
        """Sample the groups of the next step that are in no file yet."""
        if self.archive is None:
            return
        self.run.world.progress.begin_step(self.step)
        began = time.perf_counter()
        self.sampler.sample_rounds(version)
        took = time.perf_counter() - began
        done, step = self.archive, self.step
        if not done.num_stored + done.num_asked + done.num_missing:
            print(f"oneworld: step {step} needs no further groups: the checkpoint has them", flush=True)
            return
        part = f", part {self.run.phase.part[0]} of {self.run.phase.part[1]}" if self.run.phase.samples_part else ""
        tokens = f"{count_of(done.num_tokens, 'token')} in {took:.1f} s"
        print(
            f"oneworld: the phase rollout of step {step}{part} is done: {count_of(done.num_written, 'group')} sampled "
            f"({tokens}), {done.num_stored} were there before; {self._folder}",
            flush=True,
        )

    @property
    def _folder(self) -> str:
        return str(trajectory_folder(self.run.folder, self.step))

    def stop(self) -> None:
        """End the phase after a signal. What is finished is in files already."""
        text = "nothing was being sampled"
        if self.archive is not None:
            num_done = self.archive.num_stored + self.archive.num_written
            text = f"{self._folder} has {count_of(num_done, 'group')}"
        raise Stopped(f"{text}; the same command continues (run.name={self.run.folder.name})")


def build_rollout_lead(run: Run) -> RolloutLead:
    """Build the rank that drives the phase rollout. The other ranks call `serve_run`."""
    config, mail = run.config, run.world.mail
    HEART.describe(num_steps=config.train.num_steps)
    say_stop(run)
    import_engine_of(run)
    model = _load_weights(run)
    tensors = share_tensors(mail, run.placement, model, config.model.dtype)
    service = build_rollout_service(run)
    sync = build_sync(run, tensors, service, source=WeightSource(model, functools.partial(local_slices, model)))
    lead: RolloutLead

    def execute(action: Action) -> None:
        if action == "stop":
            lead.stop()
        elif action == "publish again":
            with run.world.stage("sync"):
                sync.publish_again()  # a finished group is saved already, so the action save has nothing to do

    balancer = Balancer(mail, run.groups.actor_pg, run.placement.actors, hidden_size=1)  # one rank balances nothing
    all_failed = error_if_all_fail(config, is_resumed=run.resume is not None)
    rollouts = Rollouts(run.world, run.placement, config.algo.num_mini_batches, service, execute, balancer, all_failed)
    archive = None
    if run.stored is not None:
        archive = rollouts.use_archive(run.stored.groups, run.phase.is_in_part)
    sampler = build_sampler(run, rollouts, trains=run.stored is not None)
    lead = RolloutLead(run, sync, sampler, build_evaluation(run, rollouts), archive)
    note_rebuilt_engines(run)
    enable_garbage_collection()
    return lead


def _load_weights(run: Run) -> nn.Module:
    """Load the weights of the checkpoint, or of the model if there is none."""
    model, resume = load_policy(run), run.resume
    if resume is not None:
        with run.world.stage("resume"):
            digest_bases(run, model)  # raises if the base model is another one
            node_lead = run.placement.nodes.lead_of(run.world.rank)
            fill([("model", part) for part in trained_slices(model)], SliceReader(resume, run.store, node_lead), 0, 1)
    return model
