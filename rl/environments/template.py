"""What a tokenizer's chat template writes, and how text from outside is kept from looking like its special tokens."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from rl.config.schema import ConfigError
from rl.environments.interface import Message

# Some templates write today's date. Runs must not depend on the day, so all get the date that Llama's has built in.
DATE = datetime(2024, 7, 26)
PROBE = "Probe7x"  # letters and digits, which no template changes
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
Given = tuple[list[Message], dict[str, Any]]  # messages and variables for a template


def _as_variable(name: str) -> Callable[[list[Message], list[dict[str, Any]]], Given]:
    return lambda messages, tools: (messages, {name: tools})


def _in_system_message(messages: list[Message], tools: list[dict[str, Any]]) -> Given:
    """Phi-4-mini's template reads the tools from the system message. Its authors show it with this text."""
    has_own = bool(messages) and messages[0]["role"] == "system"
    system = messages[0] if has_own else {"role": "system", "content": "You are a helpful assistant with some tools."}
    described = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**system, "tools": described}, *messages[has_own:]], {}


# `xml_tools` is what SmolLM3's template calls them.
WAYS_TO_GIVE_TOOLS = (_as_variable("tools"), _as_variable("xml_tools"), _in_system_message)


class Template:
    """A tokenizer's chat template with the tools of a run."""

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]]):
        self._tokenizer, self._tools = tokenizer, tools
        self._give = WAYS_TO_GIVE_TOOLS[0]
        if tools:
            question = [{"role": "user", "content": "?"}]
            for self._give in WAYS_TO_GIVE_TOOLS:
                if PROBE in self.write(question, [PROBE_TOOL]):
                    break
            else:
                raise ConfigError(
                    "the model's chat template does not write the tools into the prompt, so the model would not know "
                    "them; choose a model that was trained to call tools, put a template that writes `tools` into the "
                    "model folder as chat_template.jinja, or use an environment with `step` and no tools"
                )

    def write(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """Return the template's text up to the beginning of the model's turn. `tools`: other ones than the run's."""
        tools = self._tools if tools is None else tools
        given, variables = self._give(list(messages), tools) if tools else (list(messages), {})
        return self._tokenizer.apply_chat_template(
            given, tokenize=False, add_generation_prompt=True, strftime_now=DATE.strftime, **variables
        )


def special_strings(tokenizer: Any) -> set[str]:
    """Return the strings that the tokenizer turns into special tokens. Some tokenizers do not mark all of them."""
    return {
        str(token.content)
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or re.fullmatch(r"<\|.*\|>", token.content)
    }


def markup_strings(tokenizer: Any) -> set[str]:
    """Return other added tokens that have the form of a tag, such as <think> or </tool_call>."""
    contents = (str(token.content) for token in tokenizer.added_tokens_decoder.values())
    return {content for content in contents if re.fullmatch(r"<\S+>|\[\S+\]", content)}


class Neutralizer:
    """Change certain strings so that they are ordinary text: a space goes behind the first character of each.

    `<|im_end|>` becomes `< |im_end|>`. All other text stays as it is.
    """

    def __init__(self, strings: Iterable[str]):
        rests: dict[str, list[str]] = {}
        for string in sorted(strings):
            if string.strip():
                rests.setdefault(string[0], []).append(re.escape(string[1:]))
        # Only the first character is consumed, so strings that overlap are all found.
        groups = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        self._pattern = re.compile("|".join(groups)) if groups else None

    def clean(self, value: Any) -> Any:
        """Return the value with all of its texts changed. Keys of mappings stay as they are."""
        if isinstance(value, str):
            return self._pattern.sub(r"\g<0> ", value) if self._pattern else value
        if isinstance(value, dict):
            return {key: self.clean(inner) for key, inner in value.items()}
        return [self.clean(inner) for inner in value] if isinstance(value, list) else value
