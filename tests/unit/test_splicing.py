"""What follows a turn, from pieces that the template wrote before: it equals what the template itself writes."""

import random
from pathlib import Path

import pytest

from rl.environments.chat import TemplateChat, load_chat_format
from rl.environments.interface import Message, ParsedTurn, ToolCall
from rl.environments.splicing import HARD_TEXT, Splicer
from tests.chat_families import FAMILIES, make_model_folder, make_tools

TOOLS = make_tools("search")
# What keeps a family's template from being spliced.
DOES_MORE = {
    ("llama3", "tool"): "it quotes results",
    ("llama3", "user"): "it trims messages",
    ("qwen3", "user"): "it looks how a message begins",
}
CASES = [
    (name, role) for name, family in FAMILIES.items() for role in ("tool", "user") if role == "user" or family.has_tools
]
LETTERS = " \n\t'\"\\{}<>|&%aé…\u2028" + "0"


def load(folder: Path, name: str, role: str) -> TemplateChat:
    make_model_folder(folder, name)
    chat = load_chat_format(folder, TOOLS if role == "tool" else [], "split", has_step=role == "user")
    assert isinstance(chat, TemplateChat)
    return chat


def texts() -> list[str]:
    source = random.Random(3)
    drawn = ["".join(source.choices(LETTERS, k=source.randrange(1, 12))) for _ in range(40)]
    return [*drawn, "", " ", "<tool_response>x</tool_response>", "</think>", "{{ 7 }}", HARD_TEXT, "Probe7x", "x" * 999]


def answers(role: str, content: str, source: random.Random) -> tuple[ParsedTurn, list[Message]]:
    """Return a turn with one or two calls and their results, or one without calls and what a user says."""
    if role == "user":
        return ParsedTurn("said"), [{"role": "user", "content": content}]
    names = source.choices(["search", "unknown"], k=source.randrange(1, 3))
    turn = ParsedTurn("", "", [ToolCall(name, {}) for name in names])
    return turn, [{"role": "tool", "name": name, "content": content} for name in names]


@pytest.mark.parametrize(("name", "role"), CASES)
def test_spliced_texts_are_those_of_the_template(name: str, role: str, tmp_path: Path) -> None:
    chat, source = load(tmp_path, name, role), random.Random(5)
    splicer = chat._splicer
    assert splicer is not None
    for content in texts():
        turn, messages = answers(role, content, source)
        for system in (None, "Be brief.", f"Odd: {content}"):
            opening = [] if system is None else [{"role": "system", "content": system}]
            found = chat.extend([1, 2], turn, messages, opening)
            chat._splicer = None
            assert chat.extend([1, 2], turn, messages, opening) == found
            chat._splicer = splicer
    fields = {"name": "search", "tool_call_id": "call00000"} if role == "tool" else {}
    is_spliced = splicer.write([{"role": role, "content": "x", **fields}], None) is not None
    assert is_spliced == ((name, role) not in DOES_MORE)


PLAIN = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
# Templates that do more than copy the text of a message, each in another way.
HOSTILE = {
    "trims": PLAIN.replace("m.content", "m.content | trim"),
    "quotes": PLAIN.replace("m.content", "m.content | tojson"),
    "compares": PLAIN.replace("}}]", "}}{% if m.content == 'secret' %}!{% endif %}]"),
    "finds": PLAIN.replace("}}]", "}}{% if 'secret' in m.content %}!{% endif %}]"),
    "is found": PLAIN.replace("}}]", "}}{% if m.content in 'my secret' %}!{% endif %}]"),
    "is found in a list": PLAIN.replace("}}]", "}}{% if m.content in ['secret'] %}!{% endif %}]"),
    "looks at its beginning": PLAIN.replace("}}]", "}}{% if m.content.startswith('secret') %}!{% endif %}]"),
    "slices": PLAIN.replace("}}]", "}}{% if m.content[:6] == 'secret' %}!{% endif %}]"),
    "counts": PLAIN.replace("}}]", "}}{% if m.content | length == 6 %}!{% endif %}]"),
    "looks it up": PLAIN.replace("}}]", "}}{{ {'secret': '!'}[m.content] }}]"),
    "adds and compares": PLAIN.replace("}}]", "}}{% if m.content + 'x' == 'secretx' %}!{% endif %}]"),
    "adds before and compares": PLAIN.replace("}}]", "}}{% if 'x' + m.content == 'xsecret' %}!{% endif %}]"),
    "joins with ~": PLAIN.replace("}}]", "}}{% if m.content ~ 'x' == 'secretx' %}!{% endif %}]"),
    "joins with a filter": PLAIN.replace("}}]", "}}{% if [m.content] | join('') == 'secret' %}!{% endif %}]"),
    "formats": PLAIN.replace("}}]", "}}{% if '%s' | format(m.content) == 'secret' %}!{% endif %}]"),
    "formats with %": PLAIN.replace("}}]", "}}{% if '%s' % m.content == 'secret' %}!{% endif %}]"),
    "keeps it in a block": PLAIN.replace(
        "}}]", "}}{% set k %}{{ m.content }}{% endset %}{% if k == 'secret' %}!{% endif %}]"
    ),
    "keeps it in a macro": "{% macro k(m) %}{{ m.content }}{% endmacro %}"
    + PLAIN.replace("}}]", "}}{% if k(m) == 'secret' %}!{% endif %}]"),
    "filters a block": PLAIN.replace("{{ m.content }}", "{% filter upper %}{{ m.content }}{% endfilter %}"),
    "writes it twice": PLAIN.replace("}}]", "}}{{ m.content }}]"),
    "leaves it out": PLAIN.replace("{{ m.content }}", ""),
    "raises": PLAIN.replace("}}]", "}}{{ raise_exception('no') }}]"),
}
HARMLESS = {
    "copies": PLAIN,
    "adds": PLAIN.replace("m.role }}|{{ m.content", "m.role + '|' + m.content"),
    "asks whether it is a text": PLAIN.replace("m.content", "m.content if m.content is string else '?'"),
    "asks whether it is there": PLAIN.replace("m.content", "m.content or '?'"),
    "has a default": PLAIN.replace("m.content", "m.content | default('?')"),
    "keeps it in a variable": PLAIN.replace("{{ m.content", "{% set k = namespace(v=m.content) %}{{ k.v"),
}


def splice(source: str, content: str) -> str | None:
    """Write a message from pieces of this template. The environment is that of transformers."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = _compile_jinja_template(source)
    splicer = Splicer(source, lambda messages, system: template.render(messages=messages))
    return splicer.write([{"role": "tool", "content": content}], None)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_does_more_than_copy_a_text_is_run(name: str) -> None:
    assert splice(HOSTILE[name], "secret") is None
    assert splice(HOSTILE[name], "other") is None


@pytest.mark.parametrize("name", HARMLESS)
def test_a_template_that_only_copies_is_not(name: str) -> None:
    for content in ("x", " a\n", "<|end|>", HARD_TEXT):
        assert splice(HARMLESS[name], content) == f"[tool|{content}]"
    assert splice(HARMLESS[name], "") is None, "a template may ask whether there is a text"


def test_the_template_runs_once_for_all_texts_of_a_shape() -> None:
    written: list[str | None] = []

    def write(messages: list[Message], system: str | None) -> str:
        written.append(system)
        return "".join(f"({message['role']} {message['content']!s})" for message in messages)

    splicer = Splicer("{{ messages }}", write)
    for content in ("a", "b"):
        for system in (None, "Be brief."):
            splicer.write([{"role": "tool", "content": content}], system)
    assert written == [None, "Be brief."]
    assert splicer.write([{"role": "tool", "content": ["a part"]}], None) is None
    assert splicer.write([{"role": "tool", "content": "a"}], [{"text": "Be brief."}]) is None
    assert len(written) == 2
