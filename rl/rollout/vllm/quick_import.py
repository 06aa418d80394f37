"""Import vLLM without work that a rank does not need.

A rank uses none of the web servers in vLLM, but vLLM imports their hundreds of pydantic models, and pydantic builds a
validator for each. And vLLM imports Inductor's lowerings to add its own operators to a list there. They take a second,
and ranks on CPUs never compile.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rl.common.import_cache import after_import

LOWERINGS = "torch._inductor.lowering"
OVERRIDES = "vllm.env_override"
ADD_OPERATORS = "_patch_inductor_fallback_allow_list"


@contextmanager
def quick_import() -> Iterator[None]:
    """Import vLLM in the body. Models without settings of their own build their validators when they are first used."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        postpone_lowerings()
    usual = BaseModel.model_config
    BaseModel.model_config = ConfigDict(**usual, defer_build=True)  # new subclasses inherit it
    try:
        yield
    finally:
        BaseModel.model_config = usual


def postpone_lowerings() -> None:
    """Import vLLM's changes to torch without Inductor's lowerings. If these are imported later, vLLM changes them then.

    Do nothing if one of them is imported already, or if this version of vLLM cannot wait.
    """
    package, _, module = OVERRIDES.partition(".")
    if LOWERINGS in sys.modules or package in sys.modules or not _can_wait(package, module):
        return
    finders = [*sys.meta_path]
    sys.modules[LOWERINGS] = None  # type: ignore[assignment]  # the import raises ImportError, which vLLM ignores
    try:
        overrides = importlib.import_module(OVERRIDES)
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder in finders]
        return
    finally:
        del sys.modules[LOWERINGS]
    after_import(LOWERINGS, lambda module: getattr(overrides, ADD_OPERATORS)())


def _can_wait(package: str, module: str) -> bool:
    """Return whether this module of the package has the function to call later. Nothing is imported: an import that
    turns out to be useless would leave changes to torch behind."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return False
    file = Path(spec.origin).with_name(f"{module}.py")
    return file.is_file() and f"\ndef {ADD_OPERATORS}(" in file.read_text()
