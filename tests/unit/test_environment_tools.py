"""Tests of tools: schemas worked out by hand, arguments, and what is refused before a run starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl.config.schema import ConfigError, EnvironmentConfig
from rl.environments.find import load_environment, own_files, read_environment
from rl.environments.tools import BadArgumentsError, Tool
from rl.environments.worker import MAX_RESULT, WrongResultError, read_messages, read_reward, read_step, read_text


def load_tool(folder: Path, source: str, name: str = "f") -> Tool:
    file = folder / f"tools_{len(list(folder.iterdir()))}.py"  # a process imports each path once
    file.write_text(source)
    return load_environment(read_environment(EnvironmentConfig(tools=[f"{file}:{name}"]))).tools[name]


GOOGLE = '''
from dataclasses import dataclass
from typing import Annotated, Literal
@dataclass
class Place:
    x: float
    y: float = 0.0
Kind = Literal["web", "news"]
def f(query: str, kind: Kind, places: list[Place] | None = None, schema: int = 3, *, _k: bool = False):
    """Search the web.

    Results come in the order of their quality.

    Args:
        query: what to search for,
            in a few words
        kind (str): where to search
        schema: number of results

    Returns:
        The results.
    """
    return [query, kind, places, schema, _k]
'''
PLACE = {
    "type": "object",
    "title": "Place",
    "additionalProperties": False,
    "properties": {"x": {"type": "number"}, "y": {"type": "number", "default": 0.0}},
    "required": ["x"],
}


def test_schema_of_a_google_docstring(tmp_path: Path) -> None:
    tool = load_tool(tmp_path, GOOGLE)
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Search the web.\n\nResults come in the order of their quality.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to search for, in a few words"},
                    "kind": {"type": "string", "enum": ["web", "news"], "description": "where to search"},
                    "places": {
                        "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Place"}}, {"type": "null"}],
                        "default": None,
                    },
                    "schema": {"type": "integer", "default": 3, "description": "number of results"},
                    "_k": {"type": "boolean", "default": False},
                },
                "required": ["query", "kind"],
                "$defs": {"Place": PLACE},
            },
        },
    }
    json.dumps(tool.schema)
    assert (tool.is_async, tool.is_method) == (False, False)


def test_schema_of_a_sphinx_docstring_and_types_as_text(tmp_path: Path) -> None:
    source = '''
from __future__ import annotations
async def f(number: int, names: list[str]) -> str:
    """Do something.

    :param number: how often
    :param names: of whom
    :returns: a text
    """
'''
    tool = load_tool(tmp_path, source)
    assert tool.is_async
    about = tool.schema["function"]
    assert about["description"] == "Do something."
    assert about["parameters"] == {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "description": "how often"},
            "names": {"type": "array", "items": {"type": "string"}, "description": "of whom"},
        },
        "required": ["number", "names"],
    }


def test_arguments_get_their_types(tmp_path: Path) -> None:
    tool = load_tool(tmp_path, GOOGLE)
    given = tool.read_arguments({"query": "a", "kind": "web", "places": [{"x": "1"}], "schema": "7"})
    assert given.keys() == {"query", "kind", "places", "schema"}, "those that were not given stay away"
    result = tool.call(**given)
    assert (result[2][0].x, result[2][0].y, result[3:]) == (1.0, 0.0, [7, False])


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"kind": "web"}, "query: it is missing (f takes query, kind, places, schema, _k)"),
        ({"query": "a", "kind": "tv"}, "kind: Input should be 'web' or 'news' (f"),
        ({"query": "a", "kind": "web", "K": 1}, "K: there is no such argument (f"),
        ({"query": 5, "kind": "web"}, "query: Input should be a valid string (f"),
        ({"query": "a", "kind": "web", "places": [{"y": 2}]}, "places.0.x: it is missing (f"),
        ({"query": "a", "kind": "web", "schema": 1.5}, "schema: Input should be a valid integer"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    tool = load_tool(tmp_path, GOOGLE)
    with pytest.raises(BadArgumentsError) as caught:
        tool.read_arguments(given)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('def f(a):\n    """Do."""', "tools: {file}:f: a has no type; write it, such as a: str"),
        ("def f(a: int): ...", "tools: {file}:f: it has no docstring; write one that tells the model what it does"),
        ('def f(*a: int):\n    """Do."""', "it takes *a: int; name each argument"),
        ('def f(**a: int):\n    """Do."""', "it takes **a: int; name each argument"),
        ('def f(a: int, /):\n    """Do."""', "a is positional only; remove the / from its signature"),
        ('def f(a: "Lost"):\n    """Do."""', "the types of its arguments cannot be read: name 'Lost' is not defined"),
        ('import socket\ndef f(a: socket.socket):\n    """Do."""', "the type of a, <class 'socket.socket'>, cannot be"),
        ('from typing import Callable\ndef f(a: Callable):\n    """Do."""', "have no JSON schema"),
        ('def f(a: int):\n    """Do.\n\n    Args:\n        b: c\n    """', "its docstring describes 'b', which is no"),
        ("f = 5", "has no function 'f'"),
        ("class f: ...", "is a class; name it in environment.class instead"),
        ('def g(a: int):\n    """Do."""\nf = g', "the function calls itself 'g'; use one name"),
    ],
)
def test_functions_that_are_no_tools(source: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tool(tmp_path, source)
    assert text.format(file=tmp_path / "tools_0.py") in str(caught.value)


CLASS = '''
class Game:
    attribute = 3
    def __init__(self, level: int = 1): ...
    def reset(self, row): ...
    def step(self, message): ...
    def reward(self): ...
    def _helper(self, anything): ...
    @property
    def score(self): ...
    def move(self, to: str) -> str:
        """Move.

        Args:
            to: where to
        """
    @staticmethod
    def look(far: bool = False) -> str:
        """Look."""
    @classmethod
    def smell(cls) -> str:
        """Smell."""
'''


def load_class(folder: Path, source: str, **settings: Any) -> Any:
    file = folder / f"game_{len(list(folder.iterdir()))}.py"
    file.write_text(source)
    config = EnvironmentConfig(class_=f"{file}:Game", **settings)
    return load_environment(read_environment(config))


def test_a_class(tmp_path: Path) -> None:
    loaded = load_class(tmp_path, CLASS, options={"level": 2})
    assert list(loaded.tools) == ["move", "look", "smell"], "in the order of their definition"
    assert loaded.schemas[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"to": {"type": "string", "description": "where to"}},
        "required": ["to"],
    }
    assert all(tool.is_method for tool in loaded.tools.values())
    assert (sorted(loaded.methods), loaded.is_async) == (["reset", "reward", "step"], False)
    assert load_class(tmp_path, CLASS.replace("def reward", "async def reward")).is_async
    assert load_class(tmp_path, CLASS.replace("def move", "async def move")).is_async


@pytest.mark.parametrize(
    ("source", "settings", "text"),
    [
        ("class Game: ...", {}, "the model cannot act on it; give it public methods as tools, or step(message)"),
        ("def Game(): ...", {}, "it is no class; for functions, set environment.tools"),
        (CLASS, {"options": {"depth": 2}}, "environment.options: got an unexpected keyword argument 'depth'"),
        (CLASS.replace("(self, row)", "(self)"), {}, "reset takes (self); it must take (row), besides self"),
        (CLASS.replace("(self, message)", "(self, a, b)"), {}, "step takes (self, a, b); it must take (message)"),
        (
            CLASS.replace("to: str", "to"),
            {},
            "move: to has no type; write it, such as to: str. If the model should not",
        ),
        (CLASS.replace('"""Smell."""', "..."), {}, "smell: it has no docstring"),
    ],
)
def test_classes_that_are_no_environments(source: str, settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_class(tmp_path, source, **settings)
    assert text in str(caught.value)


def test_tools_beside_a_class(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text('def add(a: int):\n    """Add."""\ndef look(a: int):\n    """Look."""')
    assert list(load_class(tmp_path, CLASS, tools=[f"{tmp_path}/own.py:add"]).tools) == ["add", "move", "look", "smell"]
    with pytest.raises(ConfigError, match=r"its method look and environment\.tools have the same name"):
        load_class(tmp_path, CLASS, tools=[f"{tmp_path}/own.py:look"])
    assert load_class(tmp_path, "class Game: ...", tools=[f"{tmp_path}/own.py:add"]).class_ is not None


def test_rollout_functions(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "async def good(task, generate, depth=1): ...\n"
        "async def few(task): ...\n"
        "def sync(task, generate): ...\n"
        "async def needs(task, generate, depth): ...\n"
    )
    load_environment(read_environment(EnvironmentConfig(rollout=f"{file}:good", options={"depth": 2})))
    for name, options, text in [
        ("few", {}, r"takes \(task\); write async def rollout\(task, generate\)"),
        ("sync", {}, "it must be asynchronous: async def rollout"),
        ("needs", {}, "environment.options: missing a required argument: 'depth'"),
        ("good", {"width": 2}, "environment.options: got an unexpected keyword argument 'width'"),
    ]:
        with pytest.raises(ConfigError, match=text):
            load_environment(read_environment(EnvironmentConfig(rollout=f"{file}:{name}", options=options)))


def test_settings_are_read_without_an_import(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    for file in (one, two):
        file.write_text("raise RuntimeError")
    config = EnvironmentConfig(tools=[f"{one}:f", f"{two}:g"], class_=f"{two}:Game", options={"a": 1}, timeout_s=3.0)
    spec = read_environment(config)
    assert (spec.tools, spec.class_, spec.options, spec.timeout_s) == (config.tools, config.class_, {"a": 1}, 3.0)
    assert own_files(config) == {str(one): one.resolve(), str(two): two.resolve()}
    assert own_files(EnvironmentConfig()) == {}
    for settings, text in [
        ({"tools": [f"{one}:f", f"{two}:f"]}, f"{one}:f and {two}:f have the same name"),
        ({"tools": [f"{one}:f"], "rollout": f"{two}:g"}, "environment.rollout: environment.tools is set too"),
        ({"class_": f"{one}:A", "rollout": f"{two}:g"}, "environment.rollout: environment.class is set too"),
        ({"tools": [f"{one}:f"], "options": {"a": 1}}, "environment.options: they are arguments of environment.class"),
        ({"tools": ["search"]}, "environment.tools: got 'search'"),
        ({"class_": f"{tmp_path}/none.py:A"}, f"environment.class: got '{tmp_path}/none.py:A', but no file"),
    ]:
        with pytest.raises(ConfigError) as caught:
            read_environment(EnvironmentConfig(**settings))
        assert text in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be imported: RuntimeError"):
        load_environment(read_environment(config))


def test_results_become_text() -> None:
    import numpy as np

    for value, text in [
        ("é\n", "é\n"),
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ({"a": ["é", None]}, '{"a": ["é", null]}'),
        (np.float32(0.5), "0.5"),
        ([np.int64(3)], "[3]"),
        (10**30, str(10**30)),
    ]:
        assert read_text("f", value) == text
    for wrong in ({1}, object(), b"a", [{1}], np.zeros(2), {(1, 2): 3}):
        with pytest.raises(WrongResultError, match=r"no JSON .*; return text, numbers, lists, dicts or None"):
            read_text("f", wrong)
    assert len(read_text("f", "x" * MAX_RESULT)) == MAX_RESULT
    for much in ("x" * (MAX_RESULT + 1), "é" * (MAX_RESULT // 2 + 1)):
        with pytest.raises(WrongResultError, match="return less than 1048576 bytes of text"):
            read_text("f", much)


def test_results_of_an_environment() -> None:
    message = {"role": "user", "content": "a"}
    assert [read_messages(value) for value in (None, "a", [message])] == [None, "a", [message]]
    for wrong in (5, [5], [{"role": "user"}], {"role": "user", "content": ""}):
        with pytest.raises(WrongResultError, match="return None, a text, or a list of messages"):
            read_messages(wrong)
    assert [read_step(value) for value in (("a", True), [5, False], (None, True))] == [
        ["a", True],
        ["5", False],
        ["", True],
    ]
    for wrong in ("a", ("a",), ("a", "b"), ("a", 1, 2), None):
        with pytest.raises(WrongResultError, match="return a pair"):
            read_step(wrong)
    assert read_reward({"a": 1, "b": 2}) == {"score": 3.0, "a": 1.0, "b": 2.0}
    assert read_reward(True) == 1.0
    for wrong in ("a", None, float("nan"), {}):
        with pytest.raises(WrongResultError, match="the reward: "):
            read_reward(wrong)
