"""Functions in a user's own file, which a setting names as file.py:function."""

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rl.config.schema import ConfigError, resolve_path


def is_own(spec: str) -> bool:
    """Return whether a setting names a function in a file, not a built-in one."""
    return ":" in spec


def check_spec(key: str, spec: str, built_in: Iterable[str]) -> str:
    """Return the name of the function, which must be built in or in a file that exists. `key` is the setting."""
    file, colon, name = spec.rpartition(":")
    if not colon and name not in built_in:
        raise ConfigError(f"{key}: got {spec!r}; choose one of {', '.join(built_in)}, or give file.py:function")
    if colon and not (name.isidentifier() and resolve_path(file).is_file()):
        what = f"no file at {file}" if name.isidentifier() else f"{name!r} is not the name of a function"
        raise ConfigError(f"{key}: got {spec!r}, but {what}; give the path of a file and a function: file.py:function")
    return name


def files_of(key: str, *specs: str) -> dict[str, Path]:
    """Return the files of the functions that are not built in, by their paths in the setting `key`."""
    own = [spec for spec in specs if is_own(spec)]
    for spec in own:
        check_spec(key, spec, ())
    return {spec.rpartition(":")[0]: _file_of(spec) for spec in own}


def _file_of(spec: str) -> Path:
    """Return the file of file.py:function. A relative path starts at the working directory, then at the repository."""
    return resolve_path(spec.rpartition(":")[0]).resolve()


def import_function(key: str, spec: str) -> Callable[..., Any]:
    """Return the function that file.py:function names. A process imports each file once."""
    path, name = _file_of(spec), spec.rpartition(":")[2]
    if path.suffix != ".py":
        raise ConfigError(f"{key}: got {spec!r}; the file's name must end in .py")
    try:
        module = _import_file(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {path} cannot be imported: {describe_error(spec, error)}") from None
    call = getattr(module, name, None)
    if call is None or not callable(call):
        own = [each for each, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ConfigError(f"{key}: {path} has no function {name!r}; it has {', '.join(own) or 'none at all'}")
    return call


def describe_error(spec: str, error: BaseException) -> str:
    """Return an exception of file.py:function as text, with the innermost line of that file."""
    file = str(_file_of(spec))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}: {error}" + (f" (line {lines[-1]})" if lines else "")


@functools.cache
def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"oneworld_own_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look the module up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def signature_of(call: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function, or None for a callable written in C."""
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):
        return None
