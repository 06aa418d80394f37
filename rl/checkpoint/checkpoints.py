"""What the loop knows of checkpoints: when a step has ended, when one is due, and what signals ask for."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from rl.checkpoint.resume import Resume
from rl.checkpoint.retention import Best, better, check_metric, is_due, kept
from rl.checkpoint.save import Saver
from rl.checkpoint.snapshot import Snapshot, generators
from rl.config.schema import CheckpointConfig
from rl.data.prompts import PromptStream
from rl.learner.critic import CriticTrainer
from rl.learner.policy import PolicyTrainer


class Checkpoints:
    """On every actor rank, called by all of them in the same order."""

    def __init__(
        self,
        saver: Saver,
        learner: PolicyTrainer,
        config: CheckpointConfig,
        num_steps: int,
        resume: Resume | None,
        critic: CriticTrainer | None = None,
    ):
        self._saver, self._learner, self._critic = saver, learner, critic
        self._config, self._num_steps = config, num_steps
        self._ended: tuple[int, dict[str, Any], dict[str, Any]] | None = None  # step, run's state, this rank's state
        self._saved_step = self._unprobed_step = 0  # the newest that was saved, and as long as it has no logits yet
        self._best: Best | None = None
        self._origin = resume.origin if resume is not None else ""
        self._is_ending, self._is_save_wanted = False, False  # a step's update has ended, the step itself not yet
        if resume is not None and resume.is_own:
            self._saved_step = resume.manifest.step
            self._unprobed_step = 0 if resume.has_probe else resume.manifest.step
            saver.steps, saver.saved_at = set(resume.committed), resume.manifest.saved_at
            best, before = resume.manifest.state["best"], resume.manifest.config["checkpoint"]
            same = all(before[name] == getattr(config, name) for name in ("best_metric", "best_is_lowest"))
            self._best = Best(**best) if best and same else None

    def end_update(self, step: int, version: int, stream: PromptStream | None) -> None:
        """The policy is that of this step, and the leader's prompt stream stands at its end: from here until the next
        update begins this is what a save saves."""
        state: dict[str, Any] = {"version": version, "num_updates": self._learner.num_updates, "origin": self._origin}
        state |= {"is_evaluated": False, "kl_coef": self._learner.kl_coef}
        if self._critic is not None:
            state["num_critic_updates"] = self._critic.num_updates
        if stream is not None:
            state |= {"position": stream.position, "data": stream.digest}
        self._ended = (step, state, generators())
        self._is_ending = True
        self._add_probe()

    def end_step(self, step: int, values: Mapping[str, float]) -> None:
        """Saves where a checkpoint is due; returns while it is written."""
        assert self._ended is not None
        self._ended[1]["is_evaluated"] = True
        is_wanted, self._is_save_wanted, self._is_ending = self._is_save_wanted, False, False
        check_metric(values, self._config)
        best = better(self._best, step, values, self._config)
        is_best, self._best = best is not self._best, best
        if is_best or is_wanted or is_due(step, self._num_steps, self._config):
            self._save()

    def wait_copied(self) -> None:
        """Before the policy changes."""
        self._saver.wait_copied()

    def obey(self, order: str) -> None:
        """A signal's wish, brought to every actor while it waits for rollouts: save now, or save and stop. A save may
        wait for the end of an evaluation, which decides what is best."""
        if order == "save" and self._is_ending:
            self._is_save_wanted = True
            return
        self._save()
        if order == "stop":
            # A probe is a collective, and only ranks that host engines have their weights elsewhere: all leave it to
            # the run that goes on.
            self.close(with_probe=not self._learner.offloads)
            self._saver.stop(f"step {self._saved_step} is saved" if self._saved_step else "no step had ended yet")

    def close(self, with_probe: bool = True) -> None:
        """The last checkpoint is complete."""
        if self._unprobed_step and with_probe:  # no update will bring its logits
            self._learner.run_probe()
            self._add_probe()
        self._saver.wait_done()

    def _add_probe(self) -> None:
        """Logits of the policy that was saved, which the learner has since."""
        step, self._unprobed_step = self._unprobed_step, 0
        if step and self._saver.is_leader:
            logits = self._learner.probe_logits
            assert logits is not None
            tokens = torch.tensor(self._learner.probe_tokens)
            self._saver.add_probe(step, {"tokens": tokens, "logits": logits.cpu()})

    def _save(self) -> None:
        if self._ended is None or self._ended[0] == self._saved_step:
            return
        self._saver.wait_committed()
        step, state, rank_state = self._ended
        trainers = [self._learner] if self._critic is None else [self._learner, self._critic]
        snapshot = Snapshot(
            step=step,
            parts=[part for each in trainers for part in each.state_slices()] if self._saver.is_owner else (),
            ready=self._saver.mark(),
            rank_state=rank_state,
            state={**state, "best": dataclasses.asdict(self._best) if self._best else None},
            steps_to_keep=frozenset(kept({*self._saver.steps, step}, self._best, self._config)),
        )
        self._saver.start(snapshot)
        self._saved_step = self._unprobed_step = step
