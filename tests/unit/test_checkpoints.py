"""When the loop's checkpoints save what: after updates, at the ends of steps, on orders. The saver is a list here."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.checkpoint.checkpoints import Checkpoints
from rl.checkpoint.manifest import Manifest
from rl.checkpoint.resume import Resume
from rl.checkpoint.save import EndAction, SaveTimes
from rl.checkpoint.snapshot import Snapshot
from rl.config.schema import CheckpointConfig
from rl.data.rollout_state import RolloutState
from rl.watch.reports import UnhealthyRun
from rl.world.faults import Stopped


class Saver:
    is_owner = is_leader = True

    def __init__(self) -> None:
        self.steps: set[int] = set()
        self.saved_at = 0.0
        self.calls: list[Any] = []
        self.times: list[SaveTimes] = []
        self.num_shared = 0

    def restore(self, steps: Iterable[int], saved_at: float) -> None:
        self.steps, self.saved_at = set(steps), saved_at

    def start(self, snapshot: Snapshot) -> None:
        self.calls.append(snapshot)
        self.steps.add(snapshot.step)

    def add_probe(self, step: int, probe: dict[str, torch.Tensor]) -> None:
        self.calls.append((step, probe["logits"].item()))

    def stop(self, text: str, error: type[Exception] = Stopped) -> None:
        raise error(text)

    def share_end(self, end: EndAction | None) -> EndAction | None:
        self.num_shared += 1
        return end

    def wait_copied(self) -> None: ...
    def wait_committed(self) -> None: ...
    def wait_done(self) -> None: ...

    def take_times(self) -> SaveTimes | None:
        """Return the times of each save once."""
        return self.times.pop() if self.times else None

    @property
    def saved(self) -> list[int]:
        return [call.step for call in self.calls if isinstance(call, Snapshot)]

    @property
    def probed(self) -> list[tuple[int, float]]:
        return [call for call in self.calls if not isinstance(call, Snapshot)]


class Learner(SimpleNamespace):
    """Its logits are the number of the update that they come from; -1 of a forward without one."""

    def __init__(self) -> None:
        model = torch.nn.Module()
        super().__init__(num_updates=0, kl_coef=0.0, probe_tokens=[1], probe_logits=None, offloads=False, model=model)

    def update(self) -> None:
        self.probe_logits = torch.tensor(self.num_updates)  # by the policy before
        self.num_updates += 1

    def run_probe(self) -> None:
        self.probe_logits = torch.tensor(-1)

    def state_slices(self, with_frozen: bool) -> list:
        return []


def resumed(step: int, has_probe: bool = True, **checkpoint: Any) -> Resume:
    settings = {"best_metric": "eval/accuracy", "best_is_lowest": False} | checkpoint
    state = {"version": step + 1, "best": {"step": 2, "value": 0.9}}
    manifest = Manifest("r", "run", step, "w-1", 50.0, state, {"checkpoint": settings}, {}, ())
    return Resume(manifest, {}, True, (2, step), "", has_probe)


NO_ROLLOUTS = RolloutState({}, None)


def make(resume: Resume | None = None, **config: Any) -> tuple[Checkpoints, Saver, Learner]:
    saver, learner = Saver(), Learner()
    return Checkpoints(saver, learner, CheckpointConfig(**config), 100, resume), saver, learner


def train(checkpoints: Checkpoints, learner: Learner, step: int, **values: float) -> None:
    learner.update()
    checkpoints.end_update(step, step + 1, NO_ROLLOUTS, is_evaluated=True)
    checkpoints.end_step(step, {name.replace("_", "/"): value for name, value in values.items()})


def test_saves_when_due_and_logits_come_with_the_next_update() -> None:
    checkpoints, saver, learner = make(save_interval=2)
    for step in range(1, 6):
        train(checkpoints, learner, step)
    assert saver.saved == [2, 4]
    assert saver.probed == [(2, 2), (4, 4)]  # by the policy after update 2, which the third update ran first
    assert [call.state["num_updates"] for call in saver.calls if isinstance(call, Snapshot)] == [2, 4]


def test_the_last_step_is_saved_and_gets_a_forward_of_its_own() -> None:
    checkpoints, saver, learner = make(save_interval=0)
    train(checkpoints, learner, 99)
    train(checkpoints, learner, 100)
    checkpoints.close()
    assert saver.saved == [100]
    assert saver.probed == [(100, -1)]


def test_an_order_between_steps_saves_the_step_that_ended_once() -> None:
    checkpoints, saver, learner = make(save_interval=0)
    checkpoints.execute("save")
    assert saver.saved == []  # nothing has been trained
    train(checkpoints, learner, 1)
    checkpoints.execute("save")
    checkpoints.execute("save")
    assert saver.saved == [1]
    assert saver.calls[0].state["is_evaluated"]


def test_an_order_to_save_during_an_evaluation_waits_for_what_is_best() -> None:
    checkpoints, saver, learner = make(save_interval=0, best_metric="eval/accuracy")
    learner.update()
    checkpoints.end_update(1, 2, NO_ROLLOUTS)
    checkpoints.execute("save")
    assert saver.saved == []
    checkpoints.end_step(1, {"eval/accuracy": 0.5})
    assert saver.saved == [1]
    assert saver.calls[0].state["best"] == {"step": 1, "value": 0.5}


@pytest.mark.parametrize("values", [{}, {"eval/accuracy": 0.5}])
def test_an_evaluation_that_is_due_is_noted_as_done_only_if_there_are_values(values: dict[str, float]) -> None:
    """In the phase update there are none: the phase rollout evaluates the step."""
    checkpoints, saver, learner = make(save_interval=1)
    learner.update()
    checkpoints.end_update(1, 2, NO_ROLLOUTS)
    checkpoints.end_step(1, values)
    assert saver.calls[0].state["is_evaluated"] == bool(values)


def test_an_order_to_stop_during_an_evaluation_saves_at_once_and_notes_that_it_was_not_done() -> None:
    checkpoints, saver, learner = make(save_interval=0)
    learner.update()
    checkpoints.end_update(1, 2, NO_ROLLOUTS)
    with pytest.raises(Stopped, match="step 1 is saved"):
        checkpoints.execute("stop")
    assert saver.saved == [1]
    assert saver.probed == [(1, -1)]
    assert not saver.calls[0].state["is_evaluated"]


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_orders_in_the_round_of_an_update_wait_for_the_state_after_it(is_evaluated: bool) -> None:
    """With rollout.ahead, actors wait for a round after the update. The weights are no longer those of the last step,
    and the groups of the round are not known yet."""
    checkpoints, saver, learner = make(save_interval=0)
    train(checkpoints, learner, 1)
    checkpoints.begin_update()
    learner.update()
    checkpoints.execute("save")
    checkpoints.execute("save")
    assert saver.saved == []
    checkpoints.end_update(2, 3, NO_ROLLOUTS, is_evaluated)
    assert saver.saved == [], "the evaluation decides which step is best"
    checkpoints.end_step(2, {})
    assert saver.saved == [2]
    checkpoints.begin_update()
    learner.update()
    checkpoints.execute("stop")
    checkpoints.execute("save")
    assert saver.saved == [2]
    with pytest.raises(Stopped, match="step 3 is saved"):
        checkpoints.end_update(3, 4, NO_ROLLOUTS, is_evaluated)
    assert saver.saved == [2, 3]
    last = [call for call in saver.calls if isinstance(call, Snapshot)][-1]
    assert (last.state["is_evaluated"], last.state["num_updates"]) == (is_evaluated, 3)
    assert saver.probed == [(2, 2), (3, -1)]


def test_a_stop_while_weights_may_lie_in_host_memory_asks_no_rank_for_a_forward() -> None:
    """Ranks without an engine have theirs at hand, but a forward is a collective."""
    checkpoints, saver, learner = make(save_interval=0)
    learner.offloads = True
    train(checkpoints, learner, 1)
    with pytest.raises(Stopped, match="step 1 is saved"):
        checkpoints.execute("stop")
    assert (saver.saved, saver.probed) == ([1], [])


def test_a_stop_before_anything_was_trained() -> None:
    checkpoints, saver, _ = make()
    with pytest.raises(Stopped, match="no step had ended yet"):
        checkpoints.execute("stop")
    assert saver.calls == []


@pytest.mark.parametrize(
    ("changed", "best"),
    [({}, {"step": 2, "value": 0.9}), ({"best_metric": "reward/mean"}, None), ({"best_is_lowest": True}, None)],
)
def test_a_best_of_another_metric_is_forgotten(changed: dict[str, Any], best: dict | None) -> None:
    """Accuracy 0.6 would never beat a reward of 0.9."""
    resume = resumed(4, **changed)
    checkpoints, saver, learner = make(resume, save_interval=1, best_metric="eval/accuracy")
    learner.num_updates = 4
    train(checkpoints, learner, 5)
    assert saver.saved == [5]
    assert saver.calls[0].state["best"] == best
    assert saver.calls[0].steps_to_keep == {4, 5} | ({2} if best else set())
    assert saver.saved_at == 50.0


def test_a_step_that_was_killed_before_its_logits_gets_them_after_the_resume() -> None:
    checkpoints, saver, learner = make(resumed(4, has_probe=False), save_interval=0)
    learner.num_updates = 4
    train(checkpoints, learner, 5)
    assert saver.probed == [(4, 4)]
    checkpoints, saver, learner = make(resumed(4), save_interval=0)
    train(checkpoints, learner, 5)
    assert saver.probed == []


def test_a_save_is_measured_in_the_step_that_sees_its_end() -> None:
    checkpoints, saver, _ = make()
    assert checkpoints.end_update(1, 2, NO_ROLLOUTS) == {}
    saver.times.append(SaveTimes(4.5, 0.25))
    assert checkpoints.end_update(2, 3, NO_ROLLOUTS) == {"perf/checkpoint_s": 4.5, "perf/checkpoint_blocked_s": 0.25}
    assert checkpoints.end_update(3, 4, NO_ROLLOUTS) == {}


@pytest.mark.parametrize(("save_interval", "step"), [(2, 4), (0, 100)])
def test_a_step_whose_weights_a_health_rule_doubts_is_not_saved_though_it_is_due(save_interval: int, step: int) -> None:
    """Step 100 is the last of the command, so no order could end it later."""
    checkpoints, saver, learner = make(resumed(1), save_interval=save_interval, best_metric="")
    train(checkpoints, learner, 2)
    before = list(saver.saved)
    checkpoints.plan_end("health.entropy: collapsed.", with_save=False)
    saved = f"step {(before or [1])[-1]} is saved"
    with pytest.raises(UnhealthyRun, match=f"^health.entropy: collapsed. The newest checkpoint: {saved}$"):
        train(checkpoints, learner, step)
    assert saver.saved == before


@pytest.mark.parametrize("save_interval", [0, 1, -1])
def test_a_health_rule_ends_the_last_step_of_a_command_too(save_interval: int) -> None:
    checkpoints, saver, learner = make(save_interval=save_interval)
    assert checkpoints.plan_end("health.truncation: much.", with_save=True) == "save and fail"
    saved = "step 100 is saved" if save_interval >= 0 else "no step is saved, because checkpoint.save_interval=-1"
    with pytest.raises(UnhealthyRun, match=f"^health.truncation: much. The newest checkpoint: {saved}$"):
        train(checkpoints, learner, 100)
    assert saver.saved == ([100] if save_interval >= 0 else [])


def test_actors_ask_for_a_health_rule_only_at_steps_that_no_order_would_end_in_time() -> None:
    checkpoints, saver, learner = make(save_interval=2)
    checkpoints.plan_end("health.entropy: collapsed.", with_save=False)
    train(checkpoints, learner, 1)
    assert saver.num_shared == 0, "the order ends the run in the next step"
    with pytest.raises(UnhealthyRun, match=r"The newest checkpoint: no step is saved$"):
        checkpoints.execute("fail")
