"""Checks of a run's settings that need no model and no torch. A run makes them at its start, and so does `--plan`."""

from rl.config.schema import Config, ConfigError
from rl.evaluation.best_metric import check_best_metric
from rl.placement.roles import Placement


def check_settings(config: Config, placement: Placement) -> list[str]:
    """Raise ConfigError if settings do not fit each other or the placement. Return warnings."""
    check_best_metric(config)
    if placement.scorers and config.algo.kl_coef and config.algo.kl_estimator == "full":
        raise ConfigError(
            "algo.kl_estimator=full computes the reference on the actors, together with the policy, so the inference "
            "ranks cannot do it; give these ranks another role, or choose k1, k2 or k3"
        )
    if placement.scorers and not config.algo.fields_to_score:
        return [
            "the inference ranks have nothing to compute. algo.kl_coef=0 needs no reference logprobs, and a single "
            "update per batch needs no old logprobs. Give these ranks another role, or set algo.old_logprobs=always"
        ]
    return []
