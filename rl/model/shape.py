"""Read facts about a model from the files in its folder, without loading weights or importing torch."""

import json
import math
from pathlib import Path

from rl.config.schema import Config, ConfigError, resolve_path


def local_folder(path: str) -> Path | None:
    """Return a model's local folder, which may be in the hub's cache. Return None if it has no config.json."""
    folder = resolve_path(path)
    if not folder.exists() and not Path(path).is_absolute():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(path, "config.json")
        except ValueError:  # not a hub name
            return None
        return Path(found).parent if isinstance(found, str) else None
    return folder if (folder / "config.json").is_file() else None


def count_parameters(folder: Path) -> int | None:
    """Count parameters from the headers of the safetensors files. Return None if a file is missing or unreadable."""
    index, files = folder / "model.safetensors.index.json", [folder / "model.safetensors"]
    try:
        if index.is_file():
            files = [folder / name for name in set(json.loads(index.read_text())["weight_map"].values())]
        return sum(_count_in(file) for file in files)
    except (OSError, ValueError, KeyError):
        return None


def _count_in(file: Path) -> int:
    with file.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        if size > file.stat().st_size:
            raise ValueError(f"{file} is not a safetensors file")
        head = json.loads(handle.read(size))
    return sum(math.prod(entry["shape"]) for name, entry in head.items() if name != "__metadata__")


def check_model(config: Config, model_folder: Path) -> None:
    """Raise ConfigError if the settings do not fit the model's config.json."""
    shape = json.loads((model_folder / "config.json").read_text())
    heads, tp = shape.get("num_attention_heads", 0), config.rollout.tensor_parallel_size
    if heads % tp:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"rollout.tensor_parallel_size: got {tp}, but {model_folder} has {heads} attention heads; choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    longest, positions = config.max_sequence_tokens, shape.get("max_position_embeddings")
    if positions and longest > positions:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens: got {longest}, but {model_folder} has {positions} "
            "positions; lower one of them, for example "
            f"data.max_prompt_tokens={max(1, positions - longest + config.data.max_prompt_tokens)}"
        )
