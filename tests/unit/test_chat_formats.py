"""Chat formats of the families in tests/chat_families.py: ids, turns that are read, text from outside, refusals."""

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl.environments.chat import load_chat_format
from rl.environments.interface import ChatFormat, Message, ParsedTurn, ToolCall
from rl.environments.template import DATE
from tests.chat_families import FAMILIES, make_model_folder, make_tools

TOOLS = make_tools("search", "calculator")
CALLERS = [name for name, family in FAMILIES.items() if family.has_tools]
WRITES_CALLS = ["llama3", "qwen2", "qwen3", "qwen3_instruct", "mistral", "pythonic"]  # from `tool_calls` of a message
REASONS = ["qwen3", "smollm3"]
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = make_model_folder(tmp_path_factory.mktemp("models") / name, name)
        return folders[name]

    return find


def load(folder_of: Folders, name: str, role: str, on_rewrite: str = "refuse") -> ChatFormat:
    return load_chat_format(folder_of(name), TOOLS if role == "tool" else [], on_rewrite, has_step=role == "user")


@functools.cache
def tokenizer_of(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def tokenize(folder: Path, messages: list[Message], role: str) -> list[int]:
    """The template's rendering of the whole, tokenized at once. Each family gets its tools in its own way."""
    tokenizer, variables = tokenizer_of(folder), {}
    if role == "tool" and folder.name == "phi":
        has_own = messages[0]["role"] == "system"
        content = messages[0]["content"] if has_own else "You are a helpful assistant with some tools."
        described = json.dumps([tool["function"] for tool in TOOLS], ensure_ascii=False)
        messages = [{"role": "system", "content": content, "tools": described}, *messages[has_own:]]
    elif role == "tool":
        variables = {"xml_tools" if folder.name == "smollm3" else "tools": TOOLS}
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, strftime_now=DATE.strftime, **variables
    )
    return tokenizer.encode(text, add_special_tokens=False)


def some_text(rng: random.Random, name: str) -> str:
    letters = "abc d.e,\n\n  0{}[]()\"'\\:" + ("" if name == "pythonic" else "éß漢🙂\t")
    return "".join(rng.choice(letters) for _ in range(rng.randint(1, 30)))


def some_arguments(rng: random.Random, name: str) -> dict[str, Any]:
    values = [some_text(rng, name), rng.randint(-9, 9), 0.5, True, None, [1, "a"], {"b": {"c": "}"}}]
    return {key: rng.choice(values) for key in rng.sample("pqrs", rng.randint(0, 3))}


def written(call: dict[str, Any], name: str) -> str:
    function = json.dumps(call["function"], ensure_ascii=False)
    return f"<|tool_call|>{function}<|/tool_call|>" if name == "phi" else f"<tool_call>\n{function}\n</tool_call>"


def some_answer(rng: random.Random, name: str, role: str) -> tuple[Message, ParsedTurn]:
    """A turn of the model, as a message and as it should be read."""
    reasoning = ("Hm, " + some_text(rng, name)).strip() if name in REASONS else ""
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    if role == "user":
        text = ("Well, " + some_text(rng, name)).strip()
        return {"role": "assistant", "content": thought + text}, ParsedTurn(text, reasoning)
    calls = [
        {
            "id": "".join(rng.choice("abc123") for _ in range(9)) if name == "mistral" else f"call{number:05}",
            "type": "function",
            "function": {"name": rng.choice(["search", "calculator"]), "arguments": some_arguments(rng, name)},
        }
        for number in range(1 if name == "llama3" else rng.randint(1, 3))
    ]
    text = "" if name in ("llama3", "mistral") else rng.choice(["", "Let me see."])
    read = [
        ToolCall(call["function"]["name"], call["function"]["arguments"], id=call["id"] if name == "mistral" else "")
        for call in calls
    ]
    if name in WRITES_CALLS:
        separator = "\n" if text and name == "pythonic" else ""  # a list of calls begins a line
        message = {"role": "assistant", "content": thought + text + separator, "tool_calls": calls}
    else:
        message = {"role": "assistant", "content": thought + text + "\n".join(written(call, name) for call in calls)}
    return message, ParsedTurn(text, reasoning, read)


def some_conversation(rng: random.Random, name: str, role: str) -> Iterator[list[Message] | ParsedTurn]:
    """Prompt, answer, messages that follow, answer, messages, and so on."""
    is_system = rng.random() < 0.4 and name != "mistral"
    system = {"role": "system", "content": "Be brief." + rng.choice(["", " /no_think"] if name == "smollm3" else [""])}
    yield [*([system] if is_system else []), {"role": "user", "content": some_text(rng, name)}]
    for _ in range(rng.randint(1, 5)):
        message, turn = some_answer(rng, name, role)
        yield [message]
        yield turn
        observations = [{"role": role, "content": some_text(rng, name)} for _ in turn.calls or [None]]
        for call, observation in zip(message.get("tool_calls", []), observations, strict=False):
            observation["tool_call_id"] = call["id"]
        yield observations


@pytest.mark.parametrize(
    ("name", "role"),
    [*((name, "tool") for name in CALLERS), *((name, "user") for name in FAMILIES if name != "qwen3")],
)
def test_ids_of_a_conversation_are_those_of_the_templates_rendering(name: str, role: str, folder_of: Folders) -> None:
    """The model is taken to sample what the template writes for its turns. All other ids are ours."""
    chat, folder, rng = load(folder_of, name, role), folder_of(name), random.Random(1)
    assert chat.name == (FAMILIES[name].call_format if role == "tool" else "plain")
    assert chat.appends(role)
    end = tokenizer_of(folder).convert_tokens_to_ids(FAMILIES[name].end)
    for _ in range(40):
        prompt, *rest = some_conversation(rng, name, role)
        whole = tokenize(folder, [*prompt, *(m for part in rest if isinstance(part, list) for m in part)], role)
        ids = chat.render(prompt)
        assert whole[: len(ids)] == ids
        for turn, observations in zip(rest[1::3], rest[2::3], strict=True):
            completion = whole[len(ids) : whole.index(end, len(ids)) + 1]
            read = chat.parse(completion, ids)
            assert read == turn
            said = [{"role": message["role"], "content": message["content"]} for message in observations]
            ids += completion + chat.extend(completion, read, said, prompt)
            assert whole[: len(ids)] == ids
        assert ids == whole
