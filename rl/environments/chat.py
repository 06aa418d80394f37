"""Conversations as token ids, in the format of any model whose chat template appends.

Nothing here is written for a certain family, except how calls are read (rl/environments/calls.py). What follows a turn
of the model is found by rendering a short stand-in conversation with the model's own template:

    whole:      <user>?<end><assistant>Probe7x<end>\\n<tool>42<end>\\n<assistant>
    stand-in:                          Probe7x
    its end, which the model samples:         <end>
    what `extend` returns:                         \\n<tool>42<end>\\n<assistant>

So separators, merged tool messages, trimmed or quoted content and the beginning of the next turn are the template's.
If it only copies content, it need not run again for other content of the same kind (rl/environments/splicing.py).
The PyPI package `renderers` (0.1.12) has renderers written by hand for Qwen3 and Llama 3, which return the same ids.
But it cannot extend conversations of Qwen2, SmolLM, Phi and Mistral, so one derived method serves all families.

The extension is tokenized behind the end token that precedes it. That token is special, so that no merge of the
tokenizer crosses the boundary, and the ids equal those of the whole conversation, tokenized at once.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError
from rl.environments.calls import CALL_FORMATS, CallFormat, find_call_format
from rl.environments.interface import ChatFormat, Message, ParsedTurn, ToolCall
from rl.environments.splicing import Splicer
from rl.environments.template import PROBE, PROBE_TOOL, Neutralizer, Template, markup_strings, special_strings
from rl.environments.tokenizer import load_chat_tokenizer

QUESTION = {"role": "user", "content": "?"}
MANY = 1_000_000  # calls in a turn
TAG = re.compile(r"</?[\w-]+>|\[/?[A-Z_]+\]")
LEFT_OUT = " ... "  # instead of the middle of a long observation
OPEN, CLOSE = "<think>", "</think>"  # around reasoning, in all families that have it


def load_chat_format(
    model_folder: Path, tools: list[dict[str, Any]], on_rewrite: str, has_step: bool = False, tokenizer: Any = None
) -> ChatFormat:
    """Build the chat format of a model, and check it: raise ConfigError if conversations cannot be written.

    `tools` are JSON schemas, as chat templates take them. `has_step`: the environment answers with user messages. If
    the template changes earlier turns, `on_rewrite` says whether to refuse it.
    """
    tokenizer = tokenizer or load_chat_tokenizer(model_folder)
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {model_folder} has no chat template, which conversations need; choose a model that was "
            "trained for chats, or put a template into the model folder as chat_template.jinja"
        )
    roles = (["tool"] if tools else []) + (["user"] if has_step else [])
    chat = TemplateChat(tokenizer, tools, _stop_ids(model_folder, tokenizer), roles)
    if on_rewrite == "refuse":
        chat.refuse_rewrites()
    return chat


def _stop_ids(folder: Path, tokenizer: Any) -> list[int]:
    """Return the tokens at which the engine ends a turn."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return [tokenizer.eos_token_id]


class TemplateChat:
    """A chat format that follows the tokenizer's own template."""

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]], stops: list[int], roles: Sequence[str]):
        self._tokenizer, self._stops = tokenizer, frozenset(stops)
        self._template = Template(tokenizer, tools)
        self._special = special_strings(tokenizer)
        source = str(tokenizer.get_chat_template(tools=tools or None))
        self._takes_reasoning = "reasoning_content" in source
        self._reasons = "think>" in source or OPEN in tokenizer.get_added_vocab()
        self._speaker: Message = {"role": "assistant", "content": PROBE}
        self._caller = self._speaker
        self._needs_tools = True
        self._splicer: Splicer | None = None
        self._end, self._closing = self._find_end()
        self._end_length = len(self._encode(self._end))
        self._format = self._find_call_format() if tools else None
        self._calls_at_once = self._count_calls_at_once() if tools else 0
        if self._calls_at_once and self._end:
            self._caller = _message_of("", "", [ToolCall(PROBE, {})], self._takes_reasoning)
        self.name = self._format.name if self._format else "plain"
        self._neutral = self._make_neutralizers("tool" in roles)
        self._needs_tools = any(self._depends_on_tools(role) for role in roles)  # if not, `extend` takes half the time
        self._splicer = Splicer(source, self._write_following)
        self._rewrites = {role: self._find_rewrite(role, []) for role in roles}
        system = [{"role": "system", "content": "Be brief."}]
        self._system_rewrites = {role: self._rewrites[role] or self._find_rewrite(role, system) for role in roles}
        self._refuses = False

    def refuse_rewrites(self) -> None:
        """Raise ConfigError if the template changes earlier turns, now or when a conversation has a system message."""
        self._refuses = True
        self._refuse(self._rewrites)

    def _refuse(self, rewrites: dict[str, str], condition: str = "") -> None:
        for role, problem in rewrites.items():
            if problem:
                raise ConfigError(
                    f"the model's chat template changes earlier turns when a {role} message follows{condition}: "
                    f"{problem}. Choose a model or a template (chat_template.jinja in the model folder) that only "
                    "appends, or set environment.on_rewrite=split to train on each stretch between such changes"
                )

    def appends(self, role: str) -> bool:
        return not (self._rewrites if self._refuses else self._system_rewrites).get(role)

    def render(self, messages: Sequence[Message]) -> list[int]:
        if self._refuses and messages[0]["role"] == "system":
            self._refuse(self._system_rewrites, " and the conversation has a system message")
        try:
            return self._encode(self._template.write(self._clean(messages)))
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"the model's chat template cannot write a conversation with the roles "
                f"{', '.join(message['role'] for message in messages)} ({type(error).__name__}: {error}); change the "
                "messages of the data or of the environment's `reset`"
            ) from None

    def parse(self, completion: list[int], prompt: Sequence[int]) -> ParsedTurn:
        """Read a turn from its text, in which special tokens appear as their strings.

        So a tag counts whether the model sampled it as one token or spelled it, as in vLLM's parsers. Only the stop
        token at the end is read as an id. Calls inside of reasoning do not count.
        """
        is_open = self._decode(prompt[-8:]).rstrip().endswith(OPEN)
        reasoning, text = self._split_reasoning((OPEN if is_open else "") + self._text(completion))
        if self._format is None:
            return ParsedTurn(text.strip(), reasoning)
        text, calls = self._format.read(text)
        return ParsedTurn(text, reasoning, calls)

    def extend(
        self,
        completion: list[int],
        turn: ParsedTurn,
        messages: Sequence[Message],
        opening: Sequence[Message] = (),
    ) -> list[int]:
        following = self._following(turn, messages, opening)
        if not completion or completion[-1] not in self._stops:
            return self._encode(self._closing + following)
        return self._encode_behind_end(following)

    def message(self, completion: list[int], turn: ParsedTurn) -> Message:
        """Return the turn as a message. It has `tool_calls` if the template can write all of the turn's calls, and
        else the calls as the model wrote them in its content."""
        if len(turn.calls) <= self._calls_at_once and not any(call.problem for call in turn.calls):
            return _message_of(turn.reasoning, turn.text, turn.calls, self._takes_reasoning)
        text = self._text(completion).strip()
        is_open = turn.reasoning and OPEN not in text
        return {"role": "assistant", "content": f"{OPEN}\n{text}" if is_open else text}

    def shorten(self, text: str, max_tokens: int) -> str:
        if len(text.encode(errors="replace")) <= max_tokens:  # a token has at least one byte
            return text
        ids = self._encode(text)
        if len(ids) <= max_tokens:
            return text
        num_kept = max(0, max_tokens - len(self._encode(LEFT_OUT)))
        head, tail = ids[: num_kept - num_kept // 2], ids[len(ids) - num_kept // 2 :]
        return self._decode(head) + LEFT_OUT + self._decode(tail)

    def _text(self, completion: list[int]) -> str:
        """Decode a turn without its stop token."""
        has_stop = bool(completion) and completion[-1] in self._stops
        return self._decode(completion[:-1] if has_stop else completion)

    def _split_reasoning(self, text: str) -> tuple[str, str]:
        """Take out reasoning that begins before the first call. A tag inside of a call is part of its arguments."""
        thoughts, texts, place = [], [], 0
        while (start := text.find(OPEN, place)) >= 0:
            before = text[place:start]
            if self._format and any(opening in before for opening in self._format.openings):
                break
            texts.append(before)
            stop = text.find(CLOSE, start)
            thoughts.append(text[start + len(OPEN) : stop if stop >= 0 else None].strip())
            place = stop + len(CLOSE) if stop >= 0 else len(text)
        return "\n".join(filter(None, thoughts)), "".join([*texts, text[place:]])

    def _following(self, turn: ParsedTurn, messages: Sequence[Message], opening: Sequence[Message] = ()) -> str:
        """Return what the template writes after the end of the model's turn, if these messages follow.

        The system message of the conversation stays, because SmolLM3's says whether the model reasons.
        """
        results = 0
        cleaned = self._clean(messages)
        for message in cleaned:
            if message["role"] == "tool":
                call = turn.calls[results] if results < len(turn.calls) else ToolCall("", {})
                message.setdefault("tool_call_id", _call_id(call, results))
                results += 1
        has_system = bool(opening) and opening[0]["role"] == "system"
        system = opening[0]["content"] if has_system else None
        spliced = self._splicer.write(cleaned, system) if self._splicer else None
        return self._write_following(cleaned, system) if spliced is None else spliced

    def _write_following(self, messages: list[Message], system: Any) -> str:
        """Do the same with the template itself. `system`: the content of the system message, if there is one."""
        opening: list[Message] = []
        if system is not None:
            (message,) = self._clean([{"role": "system", "content": system}])
            opening = [{"role": "system", "content": str(message["content"]).replace(PROBE, "")}]
        return self._after_stand_in(messages, None if self._needs_tools else [], opening)

    def _after_stand_in(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, system: Sequence[Message] = ()
    ) -> str:
        """`tools`: None for those of the run."""
        stand_in = self._caller if any(message["role"] == "tool" for message in messages) else self._speaker
        whole = self._template.write([*system, QUESTION, stand_in, *messages], tools)
        after = whole.index(PROBE) + len(PROBE)  # the first one: a message from outside may have it too
        return whole[whole.index(self._end, after) + len(self._end) :]

    def _depends_on_tools(self, role: str) -> bool:
        """Tell whether the tools are needed to find what follows a turn. Mistral writes them at the last question."""
        messages = [{"role": role, "content": "Result", "tool_call_id": _call_id(ToolCall("", {}), 0)}]
        return self._after_stand_in(messages, []) != self._after_stand_in(messages, None)

    def _encode_behind_end(self, text: str) -> list[int]:
        return self._encode(self._end + text)[self._end_length :]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)

    def _clean(self, messages: Sequence[Message]) -> list[Message]:
        return [self._neutral.get(message["role"], self._neutral["user"]).clean(message) for message in messages]

    def _make_neutralizers(self, has_tools: bool) -> dict[str, Neutralizer]:
        """Special tokens never come from text. In results of tools, nothing looks like the template's tags either. What
        the model itself wrote keeps the tags of its calls."""
        own_tags = set(self._format.tags) if self._format else set()
        self._neutral = {"user": Neutralizer(self._special), "assistant": Neutralizer(self._special - own_tags)}
        around = self._following(ParsedTurn(""), [{"role": "tool", "content": PROBE}]) if has_tools else ""
        tags = {*markup_strings(self._tokenizer), *TAG.findall(around), *own_tags}
        return {**self._neutral, "tool": Neutralizer(self._special | tags)}

    def _find_end(self) -> tuple[str, str]:
        """Return the string of the token that ends the model's turn, and the text that closes a turn that was cut."""
        whole = self._try_to_write([QUESTION, self._speaker, QUESTION], "a user message")
        after = whole[whole.index(PROBE) + len(PROBE) :]
        ends = [string for string in (self._decode([stop]) for stop in self._stops) if string in after]
        if ends:
            end = min(ends, key=after.index)
            return end, after[: after.index(end)] + end
        for string in self._special:
            if after.lstrip().startswith(string):
                raise ConfigError(
                    f"the model's chat template ends a turn with {string}, but the engine stops only at "
                    f"{', '.join(map(self._decode, ([stop] for stop in self._stops)))}, so turns would not end; add "
                    f"{self._encode(string)[0]} to eos_token_id in the model folder's generation_config.json"
                )
        return "", ""

    def _find_call_format(self) -> CallFormat:
        prompt = self._template.write([QUESTION], [PROBE_TOOL])
        caller = _message_of("", "", [ToolCall(PROBE, {})], self._takes_reasoning)
        try:
            turn = self._template.write([QUESTION, caller], [PROBE_TOOL])[len(prompt) :]
        except Exception:  # a template may raise anything; then its prompt and its tokens must tell
            turn = ""
        if found := find_call_format(turn, prompt, PROBE, self._special):
            return found
        raise ConfigError(
            "how the model writes calls cannot be told from its chat template; these formats are known: "
            f"{', '.join(CALL_FORMATS)}. Choose a model of another family, put a template that writes tool_calls in "
            "one of these formats into the model folder as chat_template.jinja, or use an environment with `step` and "
            "no tools"
        )

    def _count_calls_at_once(self) -> int:
        """Return how many calls of a turn the template can write: 0 if it ignores `tool_calls`. Llama's allows one."""
        most = 0
        for count in (1, 2):
            calls = [ToolCall(f"{PROBE}{number}", {}) for number in range(count)]
            try:
                text = self._template.write([QUESTION, _message_of("", "", calls, self._takes_reasoning)])
            except Exception:  # a template may raise anything; this one refuses so many calls
                break
            if not all(call.name in text for call in calls):
                break
            most = count
        return MANY if most == 2 else most

    def _try_to_write(self, messages: list[Message], what: str) -> str:
        try:
            return self._template.write(messages)
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"the model's chat template cannot write {what} after a turn of the model ({type(error).__name__}: "
                f"{error}); choose another model, or another template (chat_template.jinja in the model folder)"
            ) from None

    def _find_rewrite(self, role: str, beginning: list[Message]) -> str:
        """Render a conversation of two answers step by step. Return where a step changed what was there before.

        Return an empty string if each step only appends, and appends what `extend` returns.
        """
        messages = [*beginning, QUESTION]
        try:
            before = self._template.write(messages)
        except Exception:  # no system messages; if a conversation has one, `render` says so
            return ""
        is_closed = CLOSE in before[before.rindex(QUESTION["content"]) :]
        for number in range(2):
            thought = f"Thought{number}x" if self._reasons and not is_closed else ""
            said = f"Answer{number}x"
            calls = [ToolCall(said, {})] if role == "tool" and self._calls_at_once else []
            answer = _message_of(thought, "" if calls else said, calls, self._takes_reasoning)
            result = {"role": role, "content": f"Result{number}x"}
            if role == "tool":
                result["tool_call_id"] = _call_id(ToolCall("", {}), 0)
            messages += [answer, result]
            after = self._try_to_write(messages, f"a {role} message")
            following = self._following(ParsedTurn(""), [result], beginning)
            if result["content"] not in following:
                raise ConfigError(
                    f"the model's chat template leaves out {role} messages, so the model would not see them; choose "
                    "another model, or another template (chat_template.jinja in the model folder)"
                )
            if not after.startswith(before):
                return f"what was {_difference(before, after)} then is {_difference(after, before)}"
            if not after.endswith(following):
                return f"after one turn it writes {following!r}, and later {after[-len(following) :]!r}"
            turn = after[len(before) : len(after) - len(following)]
            for word in (thought, said):
                if word not in turn:
                    return f"of a turn with the reasoning {thought!r} and the text {said!r} it writes {turn!r}"
            ids = self._encode_behind_end(following)
            if self._encode(after)[-len(ids) :] != ids:
                return f"the tokens of {following!r} depend on the text before"
            before = after
        return ""


def _message_of(reasoning: str, text: str, calls: Sequence[ToolCall], takes_reasoning: bool) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning and takes_reasoning:
        message["reasoning_content"] = reasoning
    elif reasoning:
        message["content"] = f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{text}"
    if calls:
        message["tool_calls"] = [
            {
                "id": _call_id(call, number),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls)
        ]
    return message


def _call_id(call: ToolCall, number: int) -> str:
    """Return the call's id if the model wrote one that Mistral's template takes, or else a fixed one."""
    return call.id if len(call.id) == 9 and call.id.isalnum() else f"call{number:05}"


def _difference(text: str, other: str) -> str:
    """Quote the place in `text` where it differs from `other`."""
    place = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return repr(text[max(0, place - 40) : place + 40])
