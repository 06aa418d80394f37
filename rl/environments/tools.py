"""Typed Python functions as tools: their JSON schemas for chat templates, and the check of a call's arguments."""

import functools
import inspect
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from rl.config.schema import ConfigError

EXAMPLE = 'def add(a: int, b: int) -> int:\n    """Add two numbers.\n\n    Args:\n        a: the first number\n    """'
MAX_PROBLEMS = 5  # wrong arguments that a message names


class BadArgumentsError(ValueError):
    """A call does not fit its tool. The text is for the model to read."""


@dataclass(frozen=True)
class Tool:
    """A function, or a method of the environment's class, that the model may call."""

    name: str
    call: Callable[..., Any]  # of a method: the function in the class
    is_method: bool
    is_async: bool
    schema: dict[str, Any]  # as chat templates expect it
    arguments: type[BaseModel]  # fields are named by position; their aliases are the names of the arguments

    def read_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments as the types that the function declares. Raise BadArgumentsError if they do not fit.

        Types are converted where nothing is lost, such as "3" to an int. Arguments that were not given stay away, so
        the function's own defaults apply.
        """
        try:
            read = self.arguments.model_validate(given)
        except ValidationError as error:
            raise BadArgumentsError(self._describe(error)) from None
        fields = type(read).model_fields
        return {str(fields[field].alias): getattr(read, field) for field in fields if field in read.model_fields_set}

    def _describe(self, error: ValidationError) -> str:
        problems = []
        for each in error.errors(include_url=False, include_input=False, include_context=False)[:MAX_PROBLEMS]:
            place = ".".join(map(str, each["loc"]))
            known = {"missing": "it is missing", "extra_forbidden": "there is no such argument"}
            problems.append(f"{place}: {known.get(each['type'], each['msg'])}" if place else each["msg"])
        names = [field.alias for field in self.arguments.model_fields.values()]
        takes = f"takes {', '.join(map(str, names))}" if names else "takes no arguments"
        return f"{'; '.join(problems)} ({self.name} {takes})"


class _PlainSchema(GenerateJsonSchema):
    """Without titles, which only repeat the names of arguments."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def read_tool(place: str, call: Callable[..., Any], is_method: bool = False) -> Tool:
    """Return a function as a tool. `place` says in messages where it was found. `is_method`: its first parameter is
    the instance. Raise ConfigError if its signature or docstring does not say enough."""
    name = getattr(call, "__name__", "")
    if not inspect.isroutine(call):
        raise ConfigError(f"{place}: it must be a function, such as\n{EXAMPLE}")
    parameters = _read_parameters(place, call, is_method)
    doc = docstring_parser.parse(inspect.getdoc(call) or "")
    if not (doc.description or "").strip():
        raise ConfigError(
            f"{place}: it has no docstring; write one that tells the model what it does, such as\n{EXAMPLE}"
        )
    described = {param.arg_name: " ".join((param.description or "").split()) for param in doc.params}
    if unknown := [each for each in described if each not in parameters]:
        raise ConfigError(
            f"{place}: its docstring describes {unknown[0]!r}, which is no argument; it takes "
            f"{', '.join(parameters) or 'none'}. Correct the name in the docstring or in the signature"
        )
    arguments = _make_model(place, name, parameters, described)
    schema = _make_schema(place, arguments)
    about = {"name": name, "description": str(doc.description).strip(), "parameters": schema}
    is_async = inspect.iscoroutinefunction(call)
    return Tool(name, call, is_method, is_async, {"type": "function", "function": about}, arguments)


def _read_parameters(place: str, call: Callable[..., Any], is_method: bool) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each argument by name."""
    try:
        signature = inspect.signature(call)
        hints = typing.get_type_hints(_unwrap(call), include_extras=True)
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{place}: the types of its arguments cannot be read: {error}; import or correct them"
        ) from None
    found = {}
    for parameter in list(signature.parameters.values())[is_method:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"{place}: it takes {parameter}; name each argument, so that the model knows them all")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{place}: {parameter.name} is positional only; remove the / from its signature")
        if parameter.name not in hints:
            raise ConfigError(f"{place}: {parameter.name} has no type; write it, such as {parameter.name}: str")
        found[parameter.name] = (hints[parameter.name], parameter.default)
    return found


def _unwrap(call: Callable[..., Any]) -> Callable[..., Any]:
    call = inspect.unwrap(call)
    return call.func if isinstance(call, functools.partial) else call


def _make_model(
    place: str, name: str, parameters: dict[str, tuple[Any, Any]], described: dict[str, str]
) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for index, (parameter, (kind, default)) in enumerate(parameters.items()):
        given = ... if default is inspect.Parameter.empty else default
        fields[f"argument_{index}"] = (
            kind,
            Field(given, alias=parameter, description=described.get(parameter) or None),
        )
        try:  # one by one, to name the argument
            create_model(name, **{f"argument_{index}": fields[f"argument_{index}"]})
        except (PydanticUserError, TypeError) as error:
            raise ConfigError(
                f"{place}: the type of {parameter}, {kind!r}, cannot be checked: {str(error).splitlines()[0]}; use "
                "plain types such as str, int, float, bool, list[str], dict[str, int], Literal, dataclasses"
            ) from None
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _make_schema(place: str, arguments: type[BaseModel]) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a default that JSON does not know is left out
            schema = arguments.model_json_schema(by_alias=True, schema_generator=_PlainSchema)
    except PydanticUserError as error:
        raise ConfigError(
            f"{place}: the types of its arguments have no JSON schema: {str(error).splitlines()[0]}; use plain types"
        ) from None
    kept = {"type": "object", "properties": schema["properties"], "required": schema.get("required", [])}
    return kept | ({"$defs": schema["$defs"]} if "$defs" in schema else {})
