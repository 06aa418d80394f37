"""Load the tokenizer of a model."""

from pathlib import Path

from rl.config.schema import ConfigError
from rl.data.prompts import Tokenizer


def load_tokenizer(model_folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer  # takes seconds, because it imports torch

    try:
        return AutoTokenizer.from_pretrained(model_folder)
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"model.path: the tokenizer in {model_folder} cannot be loaded ({reason}); copy tokenizer.json, "
            "tokenizer_config.json and the model's other tokenizer files there"
        ) from None
