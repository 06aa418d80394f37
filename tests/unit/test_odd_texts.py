"""Half characters and deep values, which a model or a tool may write, cost at most their own call."""

from datetime import UTC, datetime

import msgspec
import pytest

from rl.environments.calls import read_hermes, read_llama, read_phi
from rl.environments.interface import ToolCall
from rl.environments.protocol import Ask, Ended, FromServer, Open, Recorded, ToServer, make_decoder
from rl.environments.protocol import encode as encode_message
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


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("tool", CallAnswer("ok", b"x")),
        ("tool", CallAnswer("ok", {"text": "x"})),
        ("tool", CallAnswer("lost", "x")),  # type: ignore[arg-type]
        ("reset", CallAnswer("ok", [{"role": "user", "content": b"x"}])),
        ("reset", CallAnswer("ok", [datetime(2026, 1, 1, tzinfo=UTC)])),
        ("reward", CallAnswer("ok", {1: 1.0})),
        ("reward", CallAnswer("ok", 1)),
        ("step", CallAnswer("ok", ["x", 1])),
    ],
)
def test_answers_that_are_no_plain_data_are_refused(kind: str, answer: CallAnswer) -> None:
    """A process that runs users' code may send anything."""
    assert decode_answer(kind, encode(answer)) is None


@pytest.mark.parametrize("body", [b"", b"[", b"{}", b"\xc1", b"\x97", b'["ok"', b"x" * 100, b"[" * 100_000])
def test_bytes_that_are_no_answer_are_refused(body: bytes) -> None:
    assert decode_answer("tool", bytearray(body)) is None


@pytest.mark.parametrize("odd", [1 << 80, -(1 << 70), HALF, {HALF: [1 << 64]}, float("inf"), 1, "plain"])
def test_rows_and_messages_with_any_values_reach_the_server_and_the_lead(odd: object) -> None:
    messages = [{"role": "user", "content": "hi", "odd": odd}]
    history = [Recorded([1], [2], messages, is_cut=True)]
    opened = Open((1, 2, 3, 0), {"odd": odd, "half": [odd]}, messages, [1], 5, history, {"calls": 1})
    assert make_decoder(ToServer)(bytearray(encode_message(opened))) == opened
    decode = make_decoder(FromServer)
    for message in (
        Ask((1, 2, 3, 0), 0, [1], 0, messages, {}),
        Ended((1, 2, 3, 0), "done", {"score": 1.0}, "", messages, {"turns": 1}),
    ):
        assert decode(bytearray(encode_message(message))) == message
