"""Read facts about a model from the files in its folder, without loading weights or importing torch."""

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from rl.common.files import is_plain
from rl.config.schema import ALL_LINEAR, Config, ConfigError, resolve_path

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def local_folder(path: str, commit: str | None = None) -> Path | None:
    """Return a model's local folder, which may be in the hub's cache. Return None if it has no config.json. `commit` is
    that of a model on the hub; by default the newest one in the cache."""
    folder = resolve_path(path)
    if not folder.exists() and not Path(path).is_absolute():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(path, "config.json", revision=commit)
        except ValueError:  # not a hub name
            return None
        return Path(found).parent if isinstance(found, str) else None
    return folder if (folder / "config.json").is_file() else None


def check_folder(setting: str, folder: Path) -> None:
    """Raise ConfigError if the folder is not that of a model."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{setting}: {folder} has no config.json; give the folder of a Hugging Face model")


def check_weights(folder: Path) -> None:
    """Raise ConfigError if a file with weights is missing."""
    missing = sorted(file for file in set(tensor_files(folder).values()) if not (folder / file).is_file())
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing[:3])}, which its {INDEX} lists; copy the whole folder")


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (SINGLE, INDEX))


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor in a model folder."""
    if not has_weights(folder):
        raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors can be read by slices")
    if (folder / INDEX).is_file():
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        # The files may be symlinks, as in the hub's cache, but their names must not lead elsewhere.
        wrong = [file for file in files.values() if not isinstance(file, str) or not is_plain(file)]
        if wrong:
            raise ConfigError(f"{folder / INDEX} names {wrong[0]!a}, which is not a file of this folder")
        return files
    with safe_open(folder / SINGLE, framework="numpy") as handle:
        return dict.fromkeys(handle.keys(), SINGLE)


class AdaptedLayers(NamedTuple):
    """The linear layers that get LoRA adapters. An adapter has rank x (inputs + outputs) parameters."""

    num_layers: int = 0
    num_inputs: int = 0  # of all these layers together
    num_outputs: int = 0


class ModelSize(NamedTuple):
    num_parameters: int
    num_in_matrices: int = 0  # in the matrices of its layers, which Muon trains
    adapted: AdaptedLayers = AdaptedLayers()


class ModelShape(NamedTuple):
    """Sizes in config.json on which activations, logits and KV cache depend."""

    num_layers: int
    hidden: int
    intermediate: int  # of all experts that a token uses
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool  # the output layer has the weights of the embedding
    has_qk_norm: bool = False  # queries and keys are normalized

    @property
    def num_in_layer(self) -> int:
        """Parameters in the matrices of a layer."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return (attention + 3 * self.intermediate) * self.hidden

    @property
    def num_in_root(self) -> int:
        """Parameters of embedding and output layer."""
        return (1 if self.is_tied else 2) * self.vocabulary * self.hidden

    @property
    def size(self) -> "ModelSize":
        """Parameters of a model whose weights are not here, without biases and norms."""
        in_layers = self.num_layers * self.num_in_layer
        return ModelSize(in_layers + self.num_in_root, in_layers)


# The names of sizes in config.json, with those of older families.
SHAPE_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocabulary": ("vocab_size",),
}
# Families in which a missing tie_word_embeddings means True. transformers leaves it out if it is.
TIED_FAMILIES = (
    *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gpt2", "gpt_neo", "opt", "bloom", "falcon", "mpt"),
    *("smollm3", "cohere", "cohere2", "starcoder2", "ernie4_5", "lfm2"),
)
QK_NORM_FAMILIES = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")


def read_shape(folder: Path) -> ModelShape | None:
    """Return the sizes in a model's config.json, or None if it lacks the number of layers, their width, or the
    vocabulary."""
    try:
        whole = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return None
    about = whole.get("text_config") or whole if isinstance(whole, dict) else None  # of a model that also reads images
    if not isinstance(about, dict):
        return None
    found: dict[str, int] = {}
    for size, names in SHAPE_NAMES.items():
        values = [about.get(name) for name in names]
        found[size] = next((value for value in values if isinstance(value, int) and value > 0), 0)
    if not found["num_layers"] or not found["hidden"] or not found["vocabulary"]:
        return None
    heads = found["num_heads"] or max(1, found["hidden"] // 64)
    experts, width = about.get("num_experts_per_tok"), about.get("moe_intermediate_size")
    intermediate = experts * width if experts and width else found["intermediate"] or 4 * found["hidden"]
    tied = [each["tie_word_embeddings"] for each in (about, whole) if each.get("tie_word_embeddings") is not None]
    return ModelShape(
        found["num_layers"],
        found["hidden"],
        intermediate,
        heads,
        found["num_kv_heads"] or heads,
        found["head_dim"] or max(1, found["hidden"] // heads),
        found["vocabulary"],
        is_tied=tied[0] is True if tied else about.get("model_type") in TIED_FAMILIES,
        has_qk_norm=about.get("model_type") in QK_NORM_FAMILIES,
    )


def measure_size(folder: Path, targets: Collection[str] = ()) -> ModelSize | None:
    """Count parameters from the headers of the safetensors files, and the layers that model.lora.targets would adapt.
    Return None if a file is missing or unreadable."""
    total = in_matrices = 0
    linear: list[tuple[int, ...]] = []
    try:
        for name, shape in _tensor_shapes(folder):
            total += math.prod(shape)
            if _is_matrix_of_layer(name, shape):
                in_matrices += math.prod(shape)
                if list(targets) == [ALL_LINEAR] or _module_of(name) in targets:
                    linear.append(shape)
    except (OSError, ValueError, KeyError, SafetensorError):
        return None
    outputs, inputs = (sum(shape[axis] for shape in linear) for axis in (0, 1))
    return ModelSize(total, in_matrices, AdaptedLayers(len(linear), inputs, outputs))


def _tensor_shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for file in sorted(set(tensor_files(folder).values())):
        with safe_open(folder / file, framework="numpy") as handle:
            for name in handle.keys():  # noqa: SIM118
                yield name, tuple(handle.get_slice(name).get_shape())


def _is_matrix_of_layer(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and any(part.isdigit() for part in name.split("."))  # layers are numbered


def _module_of(name: str) -> str:
    """Return the last part of the name of the module that has this parameter, such as q_proj."""
    return name.split(".")[-2] if "." in name else ""


def _check_targets(config: Config, folder: Path) -> None:
    """Raise ConfigError if a name in model.lora.targets is that of no linear layer. Whether a matrix in the files is
    that of a linear layer is known only when the model is built, so this does not find every mistake."""
    targets = config.model.lora.targets
    if not config.model.lora.is_set or targets == [ALL_LINEAR] or not has_weights(folder):
        return
    try:
        known = {_module_of(name) for name, shape in _tensor_shapes(folder) if _is_matrix_of_layer(name, shape)}
    except (OSError, ValueError, KeyError, SafetensorError):
        return  # loading the model says more
    if unknown := [target for target in targets if target not in known]:
        raise ConfigError(
            f"model.lora.targets: got {unknown[0]}, but no linear layer of {folder} has this name; adapters fit these: "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def check_model(config: Config, model_folder: Path) -> None:
    """Raise ConfigError if the settings do not fit the model's config.json."""
    shape = json.loads((model_folder / "config.json").read_text())
    if not isinstance(shape, dict):
        raise ConfigError(
            f"{model_folder}/config.json has no settings of a model; give the folder of a Hugging Face model"
        )
    heads, tp = shape.get("num_attention_heads", 0), config.rollout.tensor_parallel_size
    if heads % tp:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"rollout.tensor_parallel_size: got {tp}, but {model_folder} has {heads} attention heads; choose one of "
            f"{', '.join(map(str, divisors))}"
        )
    longest, positions = config.max_sequence_tokens, shape.get("max_position_embeddings")
    if positions and longest > positions:
        second = "environment.max_conversation_tokens" if config.environment.is_set else "rollout.max_new_tokens"
        room = positions - config.max_tokens_after_prompt  # for the prompt
        example = f"data.max_prompt_tokens={room}"
        if room < 1:
            half = positions // 2
            example = f"data.max_prompt_tokens={positions - half} and {second}={half}"
        raise ConfigError(
            f"data.max_prompt_tokens + {second}: got {longest}, but {model_folder} has {positions} "
            f"positions; lower them, for example {example}"
        )
    _check_targets(config, model_folder)
