"""Load the tools, the class or the rollout function that the config names, and check them."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rl.config.functions import check_spec, files_of, import_function, signature_of
from rl.config.schema import ConfigError, EnvironmentConfig
from rl.environments.tools import Tool, read_tool

OWN_METHODS = {"reset": "(row)", "step": "(message)", "reward": "()", "close": "()"}  # and what they take
ROLLOUT = "async def rollout(task, generate): ..."


class EnvironmentSpec(msgspec.Struct, frozen=True):
    """What the conversation server loads and how it limits it."""

    tools: list[str]  # file.py:function
    class_: str  # file.py:Class, or empty
    rollout: str  # file.py:function, or empty
    options: dict[str, Any]
    timeout_s: float  # of each call
    num_workers: int  # maximum number of processes; 0: MAX_WORKERS of workers.py


@dataclass(frozen=True)
class LoadedEnvironment:
    """The user's code, imported and checked.

    A class with an asynchronous method lives in the process that all asynchronous code shares. Its methods that are not
    asynchronous run there too, so each of them keeps all others waiting while it runs.
    """

    tools: dict[str, Tool]  # by name; functions first, then the methods of the class
    class_: type | None
    rollout: Callable[..., Any] | None
    options: dict[str, Any]
    methods: dict[str, Callable[..., Any]]  # those of reset, step, reward and close that the class has
    is_async: bool  # of the class

    def function_of(self, kind: str, name: str = "") -> Callable[..., Any]:
        """Return the function that a call runs, to find its place in the user's file. `kind` is one of worker.py."""
        if kind == "tool":
            return self.tools[name].call
        if kind == "rollout":
            assert self.rollout is not None
            return self.rollout
        return self.methods.get(kind) or getattr(self.class_, "__init__")  # noqa: B009 (mypy)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]


def read_environment(config: EnvironmentConfig) -> EnvironmentSpec:
    """Return what the config names. Import nothing. Raise ConfigError if it names no file or excludes itself."""
    if config.rollout and (config.tools or config.class_):
        other = "environment.tools" if config.tools else "environment.class"
        raise ConfigError(
            f"environment.rollout: {other} is set too, but a rollout function makes its whole conversation itself; "
            "remove one of them"
        )
    names: dict[str, str] = {}
    for spec in config.tools:
        name = check_spec("environment.tools", spec, ())
        if name in names:
            raise ConfigError(
                f"environment.tools: {names[name]} and {spec} have the same name, so the model cannot tell them apart; "
                "rename one"
            )
        names[name] = spec
    for key, spec in (("environment.class", config.class_), ("environment.rollout", config.rollout)):
        if spec:
            check_spec(key, spec, ())
    if config.options and not (config.class_ or config.rollout):
        raise ConfigError(
            "environment.options: they are arguments of environment.class or environment.rollout, and neither is set"
        )
    return EnvironmentSpec(
        list(config.tools), config.class_, config.rollout, dict(config.options), config.timeout_s, config.num_workers
    )


def own_files(config: EnvironmentConfig) -> dict[str, Path]:
    """Return the files of tools, class and rollout function, by their paths in the config."""
    found = files_of("environment.tools", *config.tools)
    return found | files_of("environment.class", config.class_) | files_of("environment.rollout", config.rollout)


def load_environment(spec: EnvironmentSpec) -> LoadedEnvironment:
    """Import the user's files and check what they define. Raise ConfigError if something is wrong."""
    tools = [_load_tool(each) for each in spec.tools]
    if not spec.class_:
        rollout = _load_rollout(spec) if spec.rollout else None
        return LoadedEnvironment({tool.name: tool for tool in tools}, None, rollout, spec.options, {}, False)
    key = f"environment.class: {spec.class_}"
    found = import_function("environment.class", spec.class_)
    if not inspect.isclass(found):
        raise ConfigError(f"{key}: it is no class; for functions, set environment.tools")
    _check_options(key, found, spec.options)
    methods = {name: getattr(found, name) for name in OWN_METHODS if callable(getattr(found, name, None))}
    for name, method in methods.items():
        _check_method(f"{key}: {name}", inspect.getattr_static(found, name), method, OWN_METHODS[name])
    own = list(_read_methods(key, found))
    if not own and not tools and "step" not in methods:
        raise ConfigError(
            f"{key}: the model cannot act on it; give it public methods as tools, or step(message), which gets what "
            "the model says and returns (observation, done)"
        )
    by_name = {tool.name: tool for tool in tools}
    for tool in own:
        if tool.name in by_name:
            raise ConfigError(
                f"{key}: its method {tool.name} and environment.tools have the same name, so the model cannot tell "
                "them apart; rename one"
            )
        by_name[tool.name] = tool
    is_async = any(tool.is_async for tool in own) or any(map(inspect.iscoroutinefunction, methods.values()))
    return LoadedEnvironment(by_name, found, None, spec.options, methods, is_async)


def _load_tool(spec: str) -> Tool:
    call = import_function("environment.tools", spec)
    if inspect.isclass(call):
        raise ConfigError(f"environment.tools: {spec} is a class; name it in environment.class instead")
    tool = read_tool(f"environment.tools: {spec}", call)
    name = spec.rpartition(":")[2]
    if tool.name != name:  # a decorator without functools.wraps, or another name for a function
        raise ConfigError(
            f"environment.tools: {spec}: the function calls itself {tool.name!r}; use one name (a decorator needs "
            "functools.wraps)"
        )
    return tool


def _load_rollout(spec: EnvironmentSpec) -> Callable[..., Any]:
    key = f"environment.rollout: {spec.rollout}"
    rollout = import_function("environment.rollout", spec.rollout)
    if not inspect.iscoroutinefunction(rollout):
        raise ConfigError(f"{key}: it must be asynchronous: {ROLLOUT}")
    try:
        inspect.signature(rollout).bind_partial(None, None)
    except TypeError:
        raise ConfigError(f"{key} takes {inspect.signature(rollout)}; write {ROLLOUT}") from None
    _check_options(key, rollout, spec.options, None, None)
    return rollout


def _check_options(key: str, call: Callable[..., Any], options: dict[str, Any], *others: Any) -> None:
    signature = signature_of(call)
    try:
        if signature is not None:
            signature.bind(*others, **options)
    except TypeError as error:
        raise ConfigError(f"environment.options: {error}; {key.partition(': ')[2]} takes {signature}") from None


def _check_method(key: str, static: Any, method: Callable[..., Any], takes: str) -> None:
    signature = signature_of(method)
    given = [None] * ((takes != "()") + (not isinstance(static, staticmethod | classmethod)))
    try:
        if signature is not None:
            signature.bind(*given)
    except TypeError:
        raise ConfigError(f"{key} takes {signature}; it must take {takes}, besides self") from None


def _read_methods(key: str, class_: type) -> Iterator[Tool]:
    """Yield the public methods in the order of their definition, those of base classes first."""
    names = [name for base in reversed(class_.__mro__[:-1]) for name in vars(base)]
    for name in dict.fromkeys(names):
        static, value = inspect.getattr_static(class_, name), getattr(class_, name)
        if name.startswith("_") or name in OWN_METHODS or not inspect.isroutine(value):
            continue
        is_bound = isinstance(static, staticmethod | classmethod)
        try:
            tool = read_tool(f"{key}: {name}", value, is_method=not is_bound)
        except ConfigError as error:
            raise ConfigError(f"{error}. If the model should not call it, begin its name with _") from None
        if tool.name != name:
            raise ConfigError(f"{key}: the method {name} calls itself {tool.name!r}; a decorator needs functools.wraps")
        yield Tool(name, tool.call, True, tool.is_async, tool.schema, tool.arguments)
