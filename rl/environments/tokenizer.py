"""Load a tokenizer in a process that does without torch."""

import os
import sys
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError


def import_transformers() -> None:
    """Import transformers as if torch were not installed. Call this first in a process that needs only a tokenizer.

    transformers imports torch wherever it can, which costs seconds and hundreds of megabytes per process. An entry of
    None in sys.modules makes every `import torch` fail. It is removed afterwards, because the user's code may need
    torch. transformers remembers that there is none. The environment variable keeps it from saying so.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported already; this must be the first call of its process")
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from transformers import AutoTokenizer  # noqa: F401
    finally:
        del sys.modules["torch"]


def load_chat_tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a model folder. Raise ConfigError if that fails."""
    from transformers import AutoTokenizer  # not in every process that imports this module

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"the tokenizer in {folder} cannot be loaded without torch ({reason}), which conversations need; copy "
            "tokenizer.json and the model's other tokenizer files there"
        ) from None
