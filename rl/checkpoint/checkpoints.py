"""The training loop's interface to checkpoints: when to save what, which steps to keep, what to do on a signal, or when
a health rule ends the run."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from rl.checkpoint.resume import Resume
from rl.checkpoint.save import EndAction, Saver
from rl.checkpoint.snapshot import Snapshot, get_rng_states
from rl.config.schema import CheckpointConfig, ConfigError
from rl.data.rollout_state import RolloutState
from rl.learner.critic import CriticTrainer
from rl.learner.policy import PolicyTrainer
from rl.model.shards import reshard
from rl.watch.reports import UnhealthyRun

SaveAction = Literal["save", "stop", "save and fail", "fail"]  # the actions of rl/world/orders.py that save or end
ENDS: tuple[SaveAction, ...] = ("stop", "save and fail", "fail")  # those that end the run
# If tokens have lags, a step has these metrics only if it has tokens of lag 0, or tokens of a larger lag.
METRICS_OF_LAGS, LAG = ("policy/mismatch_kl", "policy/staleness_kl"), "rollout/lag_max"


class Best(NamedTuple):
    """The step at which `checkpoint.best_metric` was best so far."""

    step: int
    value: float


class Checkpoints:
    """Save checkpoints when they are due. All actor ranks call the same methods in the same order."""

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
        # Of the last update: step, state of the run, state of this rank, its groups.
        self._ended: tuple[int, dict[str, Any], dict[str, Any], Callable[[], bytes] | None] | None = None
        self._saved_step = 0  # the newest saved step
        self._unprobed_step = 0  # the newest saved step while it has no logits, else 0
        self._best: Best | None = None
        self._origin = resume.origin if resume is not None else ""
        self._is_updating = False  # the policy may have changed since the last `end_update`
        self._is_ending = False  # the update of a step has ended, but not its evaluation
        self._postponed: set[SaveAction] = set()  # until `end_update` or `end_step`
        self._failure = ""  # on the leader: why a health rule ends the run
        self._end: EndAction | None = None  # on the leader: how
        if resume is not None and resume.is_own:
            self._saved_step = resume.manifest.step
            self._unprobed_step = 0 if resume.has_probe else resume.manifest.step
            saver.restore(resume.committed, resume.manifest.saved_at)
            best, before = resume.manifest.state["best"], resume.manifest.config["checkpoint"]
            same = all(before[name] == getattr(config, name) for name in ("best_metric", "best_is_lowest"))
            self._best = Best(**best) if best and same else None

    def begin_update(self) -> None:
        """Wait until the policy may change. Until `end_update`, nothing can be saved."""
        self.wait_copied()
        self._is_updating = True

    def end_update(
        self, step: int, version: int, rollouts: RolloutState, is_evaluated: bool = False
    ) -> dict[str, float]:
        """Record the state after a step's update. Any save before the next update saves this state. Stop if that was
        ordered since `begin_update`. `is_evaluated` means that no evaluation of this step follows. Return the metrics
        of the last save, if it has ended since the last call."""
        state: dict[str, Any] = {"version": version, "num_updates": self._learner.num_updates, "origin": self._origin}
        state |= {"is_evaluated": is_evaluated, "kl_coef": self._learner.kl_coef}
        if self._critic is not None:
            state["num_critic_updates"] = self._critic.num_updates
        self._ended = (step, state | rollouts.facts, get_rng_states(), rollouts.write)
        self._is_updating, self._is_ending = False, True
        self._add_probe()
        for action in ENDS:
            if action in self._postponed:
                self.execute(action)
        times = self._saver.take_times()
        return (
            {} if times is None else {"perf/checkpoint_s": times.seconds, "perf/checkpoint_blocked_s": times.blocked_s}
        )

    def end_step(self, step: int, values: Mapping[str, float]) -> None:
        """Start a save if a checkpoint is due. `values` are the metrics of the step."""
        assert self._ended is not None
        # In the phase update, an evaluation that is due is left to the phase rollout.
        self._ended[1]["is_evaluated"] |= any(name.startswith("eval/") for name in values)
        is_wanted, self._is_ending = "save" in self._postponed, False
        self._postponed.clear()
        check_metric(values, self._config)
        best = update_best(self._best, step, values, self._config)
        is_best, self._best = best is not self._best, best
        is_saved = is_best or is_wanted or is_due(step, self._num_steps, self._config)
        # No later order would come in time: this step may not be worth saving, or the command ends after it.
        if (is_saved or step == self._num_steps) and (end := self._saver.share_end(self._end)):
            self.execute(end)
        if is_saved:
            self._save()

    def plan_end(self, reason: str, with_save: bool) -> EndAction:
        """Let a health rule end the run after this step. Called on the leader. Return the action that all actors must
        execute: they do in `end_step` if this step is to be saved or is the last one, else when they are ordered to."""
        self._failure, self._end = reason, "save and fail" if with_save else "fail"
        return self._end

    def wait_copied(self) -> None:
        """Wait until the copy to the host is done, so that the policy may change."""
        self._saver.wait_copied()

    def execute(self, action: SaveAction) -> None:
        """Save or end, after a signal or for a health rule. All actors call this while they wait for rollouts.

        If they wait for the round that engines sample during the update (rollout.ahead), the action is postponed to
        `end_update`, because the round belongs to the state after the update. During an evaluation, a save is postponed
        to `end_step`, because the result decides which step is best. With save_interval=-1, only
        "save" saves. "fail" never does: the weights may be spoilt, and their checkpoint could replace a good one.
        """
        if self._is_updating or (action == "save" and self._is_ending):
            self._postponed.add(action)
            return
        if action == "save" or (action != "fail" and self._config.save_interval >= 0):
            self._save()
        if action in ENDS:
            # The probe is a collective that needs the weights. If ranks offload them, the resumed run computes it.
            self.close(with_probe=not self._learner.offloads)
            saved = self._describe_saved()
            if action == "stop":
                self._saver.stop(saved)
            self._saver.stop(f"{self._failure} The newest checkpoint: {saved}", UnhealthyRun)

    def _describe_saved(self) -> str:
        if self._saved_step:
            return f"step {self._saved_step} is saved"
        if self._config.save_interval < 0:
            return "no step is saved, because checkpoint.save_interval=-1"
        return "no step had ended yet" if self._ended is None else "no step is saved"

    def close(self, with_probe: bool = True) -> None:
        """Wait until the last checkpoint is complete."""
        if self._unprobed_step and with_probe:  # no later update will compute the logits
            self._learner.run_probe()
            self._add_probe()
        self._saver.wait_done()

    def _add_probe(self) -> None:
        """Add the saved policy's logits, which the learner has computed after the save, to its checkpoint."""
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
        step, state, rank_state, write_groups = self._ended
        trainers = [self._learner] if self._critic is None else [self._learner, self._critic]
        for each in trainers:  # on all actors alike, because a batch may be half trained on
            reshard(each.model)
        snapshot = Snapshot(
            step=step,
            parts=[part for each in trainers for part in each.state_slices(with_frozen=False)]
            if self._saver.is_owner
            else (),
            rank_state=rank_state,
            state={**state, "best": self._best._asdict() if self._best else None},
            steps_to_keep=frozenset(steps_to_keep({*self._saver.steps, step}, self._best, self._config)),
            write_groups=write_groups,
        )
        self._saver.start(snapshot)
        self._saved_step = self._unprobed_step = step


def update_best(best: Best | None, step: int, values: Mapping[str, float], config: CheckpointConfig) -> Best | None:
    """Return the best step so far. It remains `best` if this step is not better or has no value of the metric."""
    value = values.get(config.best_metric)
    if value is None or value != value:  # NaN is never best
        return best
    is_better = best is None or (value < best.value if config.best_is_lowest else value > best.value)
    return Best(step, value) if is_better else best


def is_due(step: int, num_steps: int, config: CheckpointConfig) -> bool:
    """Return whether this step is the last one or a multiple of `save_interval`. None is if that is -1."""
    if config.save_interval < 0:
        return False
    return step == num_steps or (config.save_interval > 0 and step % config.save_interval == 0)


def steps_to_keep(steps: Iterable[int], best: Best | None, config: CheckpointConfig) -> set[int]:
    """Return the last `keep_last` of these steps, the multiples of `keep_every`, and the best one."""
    ordered = sorted(steps)
    chosen = {step for step in ordered if config.keep_every and step % config.keep_every == 0}
    chosen |= {step for step in ordered if best is not None and step == best.step}
    return chosen | set(ordered[-config.keep_last :])


def check_metric(values: Mapping[str, float], config: CheckpointConfig) -> None:
    """Raise if `checkpoint.best_metric` is missing. Some metrics are not in every step: those under eval/ follow an
    evaluation, and some depend on the lags of the tokens."""
    name = config.best_metric
    is_expected = not name.startswith("eval/") or any(other.startswith("eval/") for other in values)
    is_expected &= name not in METRICS_OF_LAGS or LAG not in values
    if name and is_expected and name not in values:
        raise ConfigError(
            f"checkpoint.best_metric: got {name!r}, which no step reports; choose one of {', '.join(sorted(values))} "
            "or one under eval/"
        )
