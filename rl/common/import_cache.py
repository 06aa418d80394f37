"""Make the import of transformers faster, and change modules of other packages when they are imported.

transformers finds the names of its modules by reading the sources of all its models. It means to do so once, but keeps
only the last 128 of more than 500 folders. So it reads everything a second time, for half a second. It also looks at
every line of a source to find `__all__`, which is near the end.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

SCANNER = "transformers.utils.import_utils"
SCAN, FIND_NAMES = "create_import_structure_from_path", "fetch__all__"


def keep_scanned_folders() -> None:
    """Let transformers keep what it has read of all folders, and find names faster. Call this before its import."""
    if SCANNER not in sys.modules:
        after_import(SCANNER, _quicken_scan)


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change` with a module when it has been imported. It must not be imported yet."""
    sys.meta_path.insert(0, _Finder(name, change))


def _quicken_scan(module: ModuleType) -> None:
    scan = getattr(getattr(module, SCAN, None), "__wrapped__", None)
    if scan is not None:  # otherwise this version works in another way
        setattr(module, SCAN, functools.cache(scan))
    find_names = getattr(module, FIND_NAMES, None)
    if find_names is not None:
        # The names are those after the last line that begins with __all__, so the text before it is not needed.
        setattr(module, FIND_NAMES, lambda source: find_names(source[source.rfind("\n__all__") + 1 :]))


class _Finder(importlib.abc.MetaPathFinder):
    """Find one module in the usual way, and change it when it has been imported. Then this finder is not needed."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]):
        self._name, self._change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
