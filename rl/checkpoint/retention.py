"""Decide which steps are saved and which checkpoints are kept."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rl.config.schema import CheckpointConfig, ConfigError


@dataclass(frozen=True)
class Best:
    """The step at which `checkpoint.best_metric` was best so far."""

    step: int
    value: float


def update_best(best: Best | None, step: int, values: Mapping[str, float], config: CheckpointConfig) -> Best | None:
    """Return the best step so far. It remains `best` if this step is not better or has no value of the metric."""
    value = values.get(config.best_metric)
    if value is None or value != value:  # NaN is never best
        return best
    is_better = best is None or (value < best.value if config.best_is_lowest else value > best.value)
    return Best(step, value) if is_better else best


def is_due(step: int, num_steps: int, config: CheckpointConfig) -> bool:
    """Return whether this step is the last one or a multiple of `save_interval`."""
    return step == num_steps or (config.save_interval > 0 and step % config.save_interval == 0)


def steps_to_keep(steps: Iterable[int], best: Best | None, config: CheckpointConfig) -> set[int]:
    """Return the last `keep_last` of these steps, the multiples of `keep_every`, and the best one."""
    ordered = sorted(steps)
    chosen = set(ordered[-config.keep_last :])
    chosen |= {step for step in ordered if config.keep_every and step % config.keep_every == 0}
    if best is not None:
        chosen |= {best.step} & set(ordered)
    return chosen


def check_metric(values: Mapping[str, float], config: CheckpointConfig) -> None:
    """Raise if `checkpoint.best_metric` is missing. Metrics under eval/ are only expected after an evaluation."""
    name = config.best_metric
    is_expected = not name.startswith("eval/") or any(other.startswith("eval/") for other in values)
    if name and is_expected and name not in values:
        raise ConfigError(
            f"checkpoint.best_metric: got {name!r}, which no step reports; choose one of {', '.join(sorted(values))} "
            "or one under eval/"
        )
