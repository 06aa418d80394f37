"""Import vLLM without work that a rank does not need.

A rank uses none of the web servers in vLLM, but vLLM imports their hundreds of pydantic models, and pydantic builds a
validator for each. And vLLM imports Inductor's lowerings to add its own operators to a list there. They take a second,
and ranks on CPUs never compile.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
    package = OVERRIDES.partition(".")[0]
    if LOWERINGS in sys.modules or package in sys.modules:
        return
    sys.modules[LOWERINGS] = None  # type: ignore[assignment]  # the import raises ImportError, which vLLM ignores
    try:
        overrides = importlib.import_module(OVERRIDES)
        add_operators = getattr(overrides, ADD_OPERATORS)
    except (ImportError, AttributeError):
        for name in (OVERRIDES, package):
            sys.modules.pop(name, None)
        return
    finally:
        del sys.modules[LOWERINGS]
    after_import(LOWERINGS, lambda module: add_operators())
