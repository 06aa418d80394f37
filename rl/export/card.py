"""Write the model card of a merged model: its origin, training, results and reward curve.

Cards are published, so they contain no host names, and only the last part of a path.
"""

import html
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml

from rl.checkpoint.manifest import Manifest
from rl.config.differences import LOCAL_SETTINGS, default_settings, flatten
from rl.config.schema import resolve_path
from rl.export.reward_curve import Points, draw_curve

REWARD, ACCURACY = "reward/mean", "eval/accuracy"
PICTURE = "reward.png"
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
LOCATION = re.compile(r"(/|~|\.\.(/|$)|file:)")  # the beginning of a path on this machine
ADVANTAGES = {
    "grpo": "GRPO",
    "dr_grpo": "Dr.GRPO",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "reinforce_pp_baseline": "REINFORCE++-baseline",
    "gae": "PPO with a critic",
}
LOSSES = {"clip": "clipped-ratio", "gspo": "GSPO", "cispo": "CISPO"}


def model_card(
    manifest: Manifest, metrics: Sequence[Mapping[str, Any]], dtype: str, is_adapter: bool = False
) -> dict[str, bytes]:
    """Return the card's files, by name: README.md, and the picture of the reward curve if there are values to draw.

    `metrics` are the rows of the run's metrics.jsonl. Rows after the checkpoint's step are ignored. With `is_adapter`,
    the card is for adapters without their base model.
    """
    series = _series(metrics, manifest.step)
    rewards, accuracies = series.get(REWARD, []), series.get(ACCURACY, [])
    files = {}
    if rewards or accuracies:
        files[PICTURE] = draw_curve(f"{manifest.run_name}, step {manifest.step}", rewards, accuracies)
    config = without_location(manifest.config)
    path = str(manifest.config.get("model", {}).get("path", ""))
    is_on_hub = HUB_NAME.fullmatch(path) and not resolve_path(path).exists()
    library = "peft" if is_adapter else "transformers"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    front |= {"tags": ["oneworld", "reinforcement-learning"]} | ({"base_model": path} if is_on_hub else {})
    origin = f"[{path}](https://huggingface.co/{path})" if is_on_hub else _code(without_location(path))
    made = f"Adapters (LoRA) of {origin}, trained" if is_adapter else f"Trained from {origin}"
    parts = [
        f"---\n{_yaml(front)}---",
        f"# {html.escape(_plain(manifest.run_name))}, step {manifest.step}",
        f"{made} with reinforcement learning{_algorithm(manifest)} by oneworld.",
        _overview(manifest, dtype),
        _figures(manifest, series) if series else "The run's metrics were not found.",
        f"![reward by step]({PICTURE})" if PICTURE in files else "The reward curve was not found.",
        "## Settings that differ from the defaults",
        _differences(config),
        f"<details>\n<summary>All settings</summary>\n\n```yaml\n{_yaml(config)}```\n\n</details>",
    ]
    return {"README.md": ("\n\n".join(parts) + "\n").encode(), **files}


def _yaml(values: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def _algorithm(manifest: Manifest) -> str:
    """Return the run's kinds of advantage and loss as text. Names that this version does not know stay unchanged."""
    algo = manifest.config.get("algo", {})
    advantage, loss = str(algo.get("advantage", "")), str(algo.get("loss", ""))
    if not advantage or not loss:
        return ""
    own_advantage, own_loss = (_plain(spec.rpartition(":")[2]) for spec in (advantage, loss))  # without a local path
    return f" ({ADVANTAGES.get(advantage, own_advantage)}, {LOSSES.get(loss, own_loss)} loss)"


def _overview(manifest: Manifest, dtype: str) -> str:
    num_steps, num_updates = manifest.config.get("train", {}).get("num_steps"), manifest.state.get("num_updates")
    rows = {
        "run": _code(manifest.run_name),
        "step": f"{manifest.step} of {num_steps}" if num_steps else str(manifest.step),
        "optimizer updates": "unknown" if num_updates is None else str(num_updates),
        "saved": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(manifest.saved_at)),
        "weights": dtype,
    }
    if (lora := manifest.lora).is_set:
        rows["adapters"] = f"rank {lora.rank}, alpha {lora.alpha}, of {_plain(', '.join(lora.targets))}"
    return _table(["", ""], rows.items())


def _figures(manifest: Manifest, series: Mapping[str, Points]) -> str:
    keep = manifest.config.get("checkpoint", {})
    rows = []
    for name, points in series.items():
        pick = min if keep.get("best_is_lowest") and keep.get("best_metric") == name else max
        best = pick(points, key=lambda point: point[1])
        rows.append([_code(name), *(f"{value:.4g} (step {step})" for step, value in (points[0], points[-1], best))])
    return _table(["", "first", "last", "best"], rows)


def _differences(config: Mapping[str, Any]) -> str:
    defaults = default_settings()
    rows = [
        [_code(name), _code(value), _code(defaults.get(name, ""))]
        for name, value in flatten(config).items()
        if name not in LOCAL_SETTINGS and (name not in defaults or value != defaults[name])
    ]
    return _table(["setting", "value", "default"], rows) if rows else "None."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def without_location(value: Any) -> Any:
    """Return a setting with paths shortened to their last part."""
    if isinstance(value, Mapping):
        names = [without_location(str(name)) for name in value]  # data.train may map paths to weights
        if len(set(names)) < len(names):
            names = [f"{number}. {name}" for number, name in enumerate(names, start=1)]
        return {name: without_location(entry) for name, entry in zip(names, value.values())}
    if isinstance(value, list | tuple):
        return [without_location(entry) for entry in value]
    return PurePosixPath(value).name if isinstance(value, str) and LOCATION.match(value) else value


def _code(value: Any) -> str:
    text = _plain(str(value))
    return f"`{text}`" if text else ""


def _plain(text: str) -> str:
    """Return the text without characters that would end a table cell or inline code."""
    return " ".join(text.replace("`", "'").replace("|", "/").split())


def _series(metrics: Sequence[Mapping[str, Any]], last_step: int) -> dict[str, Points]:
    """Return the values of the reward and of all eval/ metrics, by name. If a step ran twice, its last value counts."""
    found: dict[str, dict[int, float]] = {}
    for row in metrics:
        step = row.get("step")
        if not isinstance(step, int) or step > last_step:
            continue
        for name, value in row.items():
            is_shown = name == REWARD or name.startswith("eval/")
            if is_shown and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, {})[step] = float(value)
    return {name: sorted(found[name].items()) for name in sorted(found, key=lambda name: (name != REWARD, name))}
