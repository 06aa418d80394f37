"""What the loop asks of an actor, with stand-ins for parts that need other ranks."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.config.schema import AlgoConfig, Config, RolloutConfig
from rl.data.batch import Batch
from rl.learner.policy import PolicyTrainer
from rl.run.actor import Actor
from rl.run.reporter import Reporter
from tests.unit.test_batch import make_batch


class Scorer:
    """Gives every token this logprob."""

    def __init__(self, logprob: float):
        self._logprob = logprob

    def score(self, batch: Batch, version: int) -> Batch:
        return batch.replace(old_logprobs=torch.full((batch.num_tokens,), self._logprob))


def make_actor(config: Config, learner: Any = None, scorer: Any = None) -> Actor:
    parts = dict.fromkeys(("sampler", "sync", "checkpoints", "evaluation"))
    world: Any = None
    reporter = Reporter(world, config, Path(), tokenizer=world, rollouts=world, writer=None)
    return Actor(config, learner, None, scorer, reporter=reporter, **parts)  # type: ignore[arg-type]


def test_logprobs_that_are_not_finite_do_not_reach_the_update() -> None:
    assert make_actor(Config(), scorer=Scorer(-1.0)).score(make_batch(), 1).old_logprobs is not None
    with pytest.raises(FloatingPointError, match="5 of 5 old_logprobs are not finite; the first is nan at token 0"):
        make_actor(Config(), scorer=Scorer(float("nan"))).score(make_batch(), 1)


@pytest.mark.parametrize("num_tokens", [0, 10])
def test_nothing_adapts_to_an_update_that_learnt_from_nothing(num_tokens: int) -> None:
    """The means of such an update are 0, which says nothing about the policy."""
    algo = AlgoConfig(kl_coef=0.1, kl_target=0.2, certainty_coef=1.0)
    learner = SimpleNamespace(_algo=algo, kl_coef=0.1)
    learner.adapt = lambda kl, count: PolicyTrainer.adapt(learner, kl, count)  # type: ignore[arg-type]
    values = {"policy/tokens": num_tokens, "loss/kl": 0.0, "loss/policy": 0.0, "policy/entropy": 0.0}
    found = make_actor(Config(algo=algo), learner=learner).adapt(values, num_prompts=2)
    assert (learner.kl_coef < 0.1, bool(found)) == (num_tokens > 0, num_tokens > 0)
    before = learner.kl_coef
    learner.adapt(float("nan"), 2)
    assert learner.kl_coef == before, "a KL that is no number adapts nothing"


TURNS = ["free", "start offload", "sync", "offload", "offload", "free"]


@pytest.mark.parametrize(
    ("sleep", "hosts_engine", "expected"),
    [
        ("always", True, TURNS),
        ("never", True, [each for each in TURNS if each != "free"]),
        ("always", False, ["start offload", "sync"]),
    ],
)
def test_memory_is_freed_before_an_engine_wakes_unless_both_keep_theirs(
    sleep: Any, hosts_engine: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine allocates its weights in the sync, and its KV cache after the offload."""
    done: list[str] = []
    monkeypatch.setattr("rl.run.actor.free_cached_memory", lambda device: done.append("free"))

    def say(what: str) -> Any:
        return lambda *arguments: done.append(what)

    part = SimpleNamespace(offloads=False, device=None, offload=say("offload"), start_offload=say("start offload"))
    actor = make_actor(replace(Config(), rollout=RolloutConfig(sleep=sleep)), learner=part, scorer=part)
    sampler: Any = SimpleNamespace(rollouts=SimpleNamespace(service=object() if hosts_engine else None))
    sync: Any = SimpleNamespace(publish=say("sync"))
    actor = replace(actor, sampler=sampler, sync=sync)
    actor.publish(1)
    actor.give_device_to_engine()
    assert done == expected
