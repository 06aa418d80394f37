"""Half characters and deep values, which a model or a tool may write, cost at most their own call."""

import msgspec
import pytest

from rl.environments.calls import read_hermes, read_llama, read_phi
from rl.environments.interface import ToolCall
from rl.environments.template import Neutralizer
from rl.environments.worker import CallAnswer, decode_answer, encode

HALF = "\ud800"


@pytest.mark.parametrize(
    "calls",
    [
        read_hermes(r'<tool_call>{"name": "\ud800"}</tool_call>')[1],
        read_hermes(r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>')[1],
        read_llama(r'{"name": "\ud800", "parameters": 3}')[1],
        read_phi(r'functools[{"name": "\udfff"}]')[1],
    ],
)
def test_a_name_with_half_a_character_can_be_sent(calls: list[ToolCall]) -> None:
    (call,) = calls
    assert call.problem and call.name == "?"
    msgspec.msgpack.encode(call)


def nested(depth: int) -> str:
    return '<tool_call>{"name": "a", "arguments": {"b": ' + "[" * depth + "]" * depth + "}}</tool_call>"


@pytest.mark.parametrize("depth", [200, 600, 900])
def test_arguments_that_are_nested_deeply_are_refused(depth: int) -> None:
    (call,) = read_hermes(nested(depth))[1]
    assert "nested" in call.problem and call.name == "a" and not call.arguments
    (call,) = read_hermes(nested(90))[1]
    assert not call.problem and Neutralizer(["<end>"]).clean(call.arguments)


def test_half_characters_in_answers_become_question_marks() -> None:
    answer = decode_answer("tool", encode(CallAnswer("ok", f"a{HALF}b \U0001f600")))
    assert answer is not None and answer.value == "a?b \U0001f600"
    answer = decode_answer("reset", encode(CallAnswer("ok", [{"role": "user", f"{HALF}": [HALF]}])))
    assert answer is not None and answer.value == [{"role": "user", "?": ["?"]}]
    answer = decode_answer("tool", encode(CallAnswer("error", text=HALF, place=HALF)))
    assert answer is not None and (answer.text, answer.place) == ("?", "?")
