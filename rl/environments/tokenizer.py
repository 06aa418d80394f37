"""Load a tokenizer in a process that does without torch."""

import os
import sys
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError


def hide_torch() -> None:
    """Let transformers believe that torch is not installed. Call this first in a process that needs only a tokenizer.

    transformers imports torch wherever it can, which costs seconds and hundreds of megabytes per process. An entry of
    None in sys.modules makes every `import torch` fail, so this must never run in a process that trains or samples.
    transformers then says that PyTorch was not found; the environment variable turns such advice off.
    """
    if sys.modules.get("torch") is not None:
        raise RuntimeError("torch has been imported already; hide_torch() must be the first call of its process")
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def load_chat_tokenizer(folder: Path, needs_template: bool = True) -> Any:
    """Load the tokenizer of a model folder, which must have a chat template unless `needs_template` is false."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None and needs_template:
        raise ConfigError(
            f"the tokenizer of {folder} has no chat template, which conversations need; choose a model that was "
            "trained for chats, or put a template into the model folder as chat_template.jinja"
        )
    return tokenizer
