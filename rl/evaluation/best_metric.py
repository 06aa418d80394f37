"""Check checkpoint.best_metric against the metrics that an evaluation reports. No torch: `--plan` checks it first."""

from rl.config.schema import Config, ConfigError
from rl.evaluation.estimates import powers_of_two


def check_best_metric(config: Config) -> None:
    """Raise ConfigError for a best_metric that no evaluation reports. This needs no model and no data."""
    metric, k = config.checkpoint.best_metric, config.eval.num_samples
    sampled = [f"pass@{few}" for few in powers_of_two(k)[1:]] + ([f"maj@{k}"] if k > 1 else [])
    names = [f"{name}{end}" for name in (f"avg@{k}", *sampled) for end in ("", "_low", "_high")]
    names += ["length_mean", "truncated", *(["turns_mean"] if config.environment.is_set else []), "failed"]
    known = ["eval/accuracy", *(f"eval/{each}/{name}" for each in config.data.eval_paths for name in names)]
    if metric.startswith("eval/") and metric not in known:
        shown = [name for name in known if not name.endswith(("_low", "_high"))]
        raise ConfigError(
            f"checkpoint.best_metric: got {metric!r}, which no evaluation reports; choose one of {', '.join(shown)}"
        )
