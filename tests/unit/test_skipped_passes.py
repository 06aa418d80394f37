"""No pass over the batch that nothing asks for: old and reference logprobs have one of their own where they must."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl import run
from rl.config.schema import AlgoConfig, Config


@pytest.mark.parametrize(
    ("algo", "fields", "num_references"),
    [
        ({}, [], 0),
        ({"kl_coef": 0.1}, ["ref_logprobs"], 1),
        ({"kl_coef": 0.1, "kl_estimator": "full"}, [], 1),
        ({"num_epochs": 2}, ["old_logprobs"], 0),
        ({"num_mini_batches": 2, "kl_coef": 0.1}, ["old_logprobs", "ref_logprobs"], 1),
    ],
)
def test_what_a_scorer_computes(
    algo: dict[str, Any], fields: list[str], num_references: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, loaded = Config(algo=AlgoConfig(**algo)), []
    monkeypatch.setattr(run, "_load", lambda *args, **kwargs: loaded.append(kwargs))
    world: Any = SimpleNamespace(device=torch.device("cpu"))
    this: Any = SimpleNamespace(
        config=config,
        world=world,
        placement=SimpleNamespace(scorers=[]),
        groups=SimpleNamespace(actor_pg=None),
    )
    learner: Any = SimpleNamespace(model="the policy", reference=None)
    scorer: Any = run._build_scorer(this, learner)
    assert scorer._fields == fields and len(loaded) == num_references
    assert ("old_logprobs" in scorer._models) == ("old_logprobs" in fields)
    if not fields:
        assert scorer.score("the batch", version=1) == "the batch"
