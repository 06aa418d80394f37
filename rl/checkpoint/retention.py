"""Which checkpoints are made and which are kept. Pure: steps and numbers in, decisions out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rl.config.schema import CheckpointConfig, ConfigError


@dataclass(frozen=True)
class Best:
    """The step at which `checkpoint.best_metric` was best so far."""

    step: int
    value: float


def better(best: Best | None, step: int, values: Mapping[str, float], config: CheckpointConfig) -> Best | None:
    """The best step after this one; `best` itself where this one is not better, or was not measured."""
    value = values.get(config.best_metric)
    if value is None or value != value:  # NaN is never best
        return best
    is_better = best is None or (value < best.value if config.best_is_lowest else value > best.value)
    return Best(step, value) if is_better else best


def is_due(step: int, num_steps: int, config: CheckpointConfig) -> bool:
    return step == num_steps or (config.save_interval > 0 and step % config.save_interval == 0)


def kept(steps: Iterable[int], best: Best | None, config: CheckpointConfig) -> set[int]:
    """Of these steps the newest, those kept for good, and the best."""
    ordered = sorted(steps)
    chosen = set(ordered[-config.keep_last :])
    chosen |= {step for step in ordered if config.keep_every and step % config.keep_every == 0}
    if best is not None:
        chosen |= {best.step} & set(ordered)
    return chosen


def check_metric(values: Mapping[str, float], config: CheckpointConfig) -> None:
    """A name that no step reports would never be best, without a word."""
    name = config.best_metric
    is_due = not name.startswith("eval/") or any(other.startswith("eval/") for other in values)
    if name and is_due and name not in values:
        raise ConfigError(
            f"checkpoint.best_metric: got {name!r}, which no step reports; choose one of {', '.join(sorted(values))} "
            "or one under eval/"
        )
