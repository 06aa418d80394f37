"""No forward pass over the batch that nothing needs, and no reference model that nothing compares with."""

from typing import Any

import pytest
import torch
from torch import nn

from rl.config.schema import AlgoConfig
from rl.learner.scoring import LocalScorer, ScoringModels, local_models


@pytest.mark.parametrize(
    ("algo", "fields", "num_references"),
    [
        ({}, [], 0),
        ({"kl_coef": 0.1}, ["ref_logprobs"], 1),
        ({"kl_coef": 0.1, "kl_estimator": "full"}, [], 1),
        ({"num_epochs": 2}, ["old_logprobs"], 0),
        ({"num_mini_batches": 2, "kl_coef": 0.1}, ["old_logprobs", "ref_logprobs"], 1),
        ({"old_logprobs": "always"}, ["old_logprobs"], 0),
        ({"old_logprobs": "rollout", "num_mini_batches": 2, "num_epochs": 2}, [], 0),
        ({"old_logprobs": "rollout", "num_epochs": 2, "kl_coef": 0.1}, ["ref_logprobs"], 1),
        (
            {"old_logprobs": "rollout", "kl_coef": 0.1, "kl_place": "reward"},
            ["old_logprobs", "ref_logprobs"],
            1,
        ),
        ({"old_logprobs": "rollout", "certainty_coef": 0.1}, ["old_logprobs", "certainty"], 0),
    ],
)
def test_what_a_scorer_computes(algo: dict[str, Any], fields: list[str], num_references: int) -> None:
    settings, policy, reference, loaded = AlgoConfig(**algo), nn.Linear(1, 1), nn.Linear(1, 1), []

    def load_reference() -> nn.Module:
        loaded.append(reference)
        return reference

    assert settings.fields_to_score == fields
    models = local_models(settings, policy, load_reference)
    assert len(loaded) == num_references
    assert (models.get("old_logprobs") is policy) == ("old_logprobs" in fields)
    assert (models.get("ref_logprobs") is reference) == bool(num_references)
    if not fields:
        scorer: Any = LocalScorer(ScoringModels(models, {}, 1.0, torch.device("cpu")), fields, None)  # type: ignore[arg-type]
        assert scorer.score("the batch", version=1) == "the batch"
