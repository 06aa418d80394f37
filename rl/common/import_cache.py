"""Make the import of transformers faster.

transformers finds the names of its modules by reading the sources of all its models. It means to do so once, but keeps
only the last 128 of more than 500 folders. So it reads everything a second time, for half a second.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

MODULE, FUNCTION = "transformers.utils.import_utils", "create_import_structure_from_path"


def keep_scanned_folders() -> None:
    """Let transformers keep what it has read of all folders. Call this before its import."""
    if MODULE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Find one module in the usual way, and change it when it has been imported. Then this finder is not needed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            scan = getattr(getattr(module, FUNCTION, None), "__wrapped__", None)
            if scan is not None:  # otherwise this version works in another way
                setattr(module, FUNCTION, functools.cache(scan))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
