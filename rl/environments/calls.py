"""Read the calls that a model has written, in the format of its family.

Each reader takes the text of a turn, without reasoning, and returns the text outside of calls and the calls in order.
A reader accepts what vLLM's parser of the same format accepts, if the arguments are an object that can be sent to a
tool. Where vLLM hands a broken call on as plain text, here it is a `ToolCall` with a `problem`, which the model gets to
read. Where vLLM drops a valid call because of the text around it, here the call counts.

| format     | how a call is written                                                                                   |
| ---------- | ------------------------------------------------------------------------------------------------------- |
| `hermes`   | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; also a list of such objects                 |
| `llama`    | `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`, several separated by `;`          |
| `mistral`  | `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}`          |
| `phi`      | `functools[{"name": ..., "arguments": {...}}]` or `<|tool_call|>[...]<|/tool_call|>`                    |
| `pythonic` | `[name(argument=1)]`, or lines of calls inside of `<function_calls>...</function_calls>`                |
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from rl.environments.interface import ToolCall

Found = tuple[str, list[ToolCall]]
ARGUMENTS = ("arguments",)  # how families call the arguments of a call
EITHER = ("arguments", "parameters")
MAX_DEPTH = 100  # of lists and objects in arguments


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


class Value(NamedTuple):
    """A JSON value in a text, or why there is none."""

    value: Any
    end: int  # the place after it
    problem: str = ""


def _read_json(text: str, start: int) -> Value:
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return Value(*_JSON.raw_decode(text, start))
    except json.JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated"):
            return Value(None, start, "it is cut off; write shorter calls, and close every bracket and quote")
        return Value(None, start, f"{error.msg} at {text[error.pos : error.pos + 20]!r}")
    except RecursionError:
        return Value(None, start, "it is nested too deeply")
    except ValueError as error:
        return Value(None, start, str(error))


def _broken(why: str, name: str = "") -> ToolCall:
    """Half characters, which JSON may have as escapes, are in no text that can be sent on."""
    return ToolCall(_whole(name), {}, problem=_whole(why))


def _whole(text: str) -> str:
    return text.encode(errors="replace").decode()


def _call_of(value: Any, keys: Sequence[str]) -> ToolCall:
    """Read a call from the JSON value that the model wrote. One of `keys` has the arguments."""
    if not isinstance(value, dict):
        return _broken(f"A call must be a JSON object with name and arguments, not {_kind(value)}.")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _broken('The call has no "name". It must be the name of a tool, as text.')
    key = next((key for key in keys if key in value), None)
    if key is None:
        return _broken(f'The call has no "{keys[0]}". Write {{}} if the tool needs none.', name)
    arguments = value[key]
    if not isinstance(arguments, dict):
        return _broken(f'"{key}" must be a JSON object, not {_kind(arguments)}.', name)
    identity = value.get("id")
    return _checked(ToolCall(name, arguments, id=identity if isinstance(identity, str) else ""))


def _checked(call: ToolCall) -> ToolCall:
    """Refuse values that cannot be sent to another process, such as whole numbers of more than 64 bits."""
    try:
        msgspec.msgpack.encode([call.name, call.arguments])
    except (ValueError, OverflowError, RecursionError, TypeError) as error:
        return _broken(f"The arguments have a value that no tool can take: {error}.", call.name)
    if _is_deep(call.arguments):
        return _broken(f"The arguments are nested more than {MAX_DEPTH} times.", call.name)
    return call


def _is_deep(value: Any, depth: int = 0) -> bool:
    """Templates and checks of arguments recurse into values, and not all of them as far as JSON does."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth > MAX_DEPTH or any(_is_deep(each, depth + 1) for each in inner)


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}.get(
        type(value), "null" if value is None else "a number"
    )


def _calls_of(value: Any, keys: Sequence[str]) -> list[ToolCall]:
    return [_call_of(one, keys) for one in value] if isinstance(value, list) else [_call_of(value, keys)]


def _between(text: str, opening: str, closing: str, keys: Sequence[str]) -> Found:
    """Read JSON between two tags. The closing tag may be missing at the end of the text."""
    pieces, calls, place = [], [], 0
    while (start := text.find(opening, place)) >= 0:
        pieces.append(text[place:start])
        inside = start + len(opening)
        value, end, problem = _read_json(text, inside)
        rest = end
        while rest < len(text) and text[rest].isspace():
            rest += 1
        if not problem and (rest == len(text) or text.startswith(closing, rest)):
            calls += _calls_of(value, keys) or [_broken(f"The list after {opening} is empty.")]
            place = rest + len(closing)
            continue
        if not problem:
            problem = f"after the JSON comes {text[rest : rest + 20]!r}, not {closing}"
        calls.append(_broken(f"The text after {opening} is no valid JSON: {problem}."))
        stop = text.find(closing, inside)
        place = len(text) if stop < 0 else stop + len(closing)
    return _joined([*pieces, text[place:]]), calls


def _joined(pieces: list[str]) -> str:
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip()))


def read_hermes(text: str) -> Found:
    return _between(text, "<tool_call>", "</tool_call>", ARGUMENTS)


PYTHON_TAG = "<|python_tag|>"
LIKE_A_CALL = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments)"\s*:')


def read_llama(text: str) -> Found:
    """Read JSON objects anywhere in the text. An object without a name is part of the text, unless the turn begins with
    it or it follows the tag."""
    before, tag, after = text.partition(PYTHON_TAG)
    body = after if tag else before
    must_be_call = bool(tag) or body.lstrip().startswith("{")
    pieces, calls, place = [before] if tag else [], [], 0
    if tag and "{" not in body:
        return _joined(pieces), [_broken(f"After {PYTHON_TAG} comes no JSON object.")]
    for brace in re.finditer(r"\{", body):
        start = brace.start()
        if start < place:
            continue
        value, end, problem = _read_json(body, start)
        if problem:
            if must_be_call or LIKE_A_CALL.match(body, start):
                pieces.append(body[place:start])
                calls.append(_broken(f"The call is no valid JSON: {problem}."))
                place = len(body)
                break
            continue
        if "name" in value or must_be_call or LIKE_A_CALL.match(body, start):
            pieces.append(body[place:start].strip(" ;,\n"))
            calls.append(_call_of(value, EITHER))
            place = end
            must_be_call = False
    return _joined([*pieces, body[place:].strip(" ;,\n") if calls else body[place:]]), calls


NAMED_CALL = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w*)\s*)?(?:\[ARGS\])?")


def read_mistral(text: str) -> Found:
    first, *segments = text.split("[TOOL_CALLS]")
    pieces, calls = [first], []
    for segment in segments:
        named = NAMED_CALL.match(segment)
        value, end, problem = _read_json(segment, named.end() if named else 0)
        if problem:
            what = "arguments are" if named else "text after [TOOL_CALLS] is"
            calls.append(_broken(f"The {what} no valid JSON: {problem}.", named[1] if named else ""))
            continue
        pieces.append(segment[end:])
        if named:
            calls.append(_call_of({"name": named[1], "arguments": value, "id": named[2]}, ARGUMENTS))
        else:
            calls += _calls_of(value, ARGUMENTS) or [_broken("The list after [TOOL_CALLS] is empty.")]
    return _joined(pieces), calls


FUNCTOOLS = re.compile(r"functools(?=\s*\[)")


def read_phi(text: str) -> Found:
    if "<|tool_call|>" in text:
        return _between(text, "<|tool_call|>", "<|/tool_call|>", EITHER)
    if not (marker := FUNCTOOLS.search(text)):
        return text.strip(), []
    value, end, problem = _read_json(text, marker.end())
    if problem:
        return text[: marker.start()].strip(), [_broken(f"The text after functools is no valid JSON: {problem}.")]
    calls = _calls_of(value, EITHER) or [_broken("The list after functools is empty.")]
    return _joined([text[: marker.start()], text[end:]]), calls


LIST_OF_CALLS = re.compile(r"^[ \t]*\[\s*[A-Za-z_][\w.]*\s*\(", re.MULTILINE)
BRACKETS = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|[\[({]|[\])}]""", re.DOTALL)
WRAPPED = re.compile(r"<function_calls>(.*?)(?:</function_calls>|\Z)", re.DOTALL)
JSON_NAMES = {"true": True, "false": False, "null": None}


def read_pythonic(text: str) -> Found:
    """Read a list of calls that begins a line. Text before and after the list stays text."""
    if wrapped := WRAPPED.search(text):
        lines = [line.strip() for line in wrapped[1].splitlines() if line.strip()]
        calls = [call for line in lines for call in _read_python(line if line[0] == "[" else f"[{line}]")]
        outside = _joined([text[: wrapped.start()], text[wrapped.end() :]])
        return outside, calls or [_broken("There is no call inside of <function_calls>.")]
    if not (start := LIST_OF_CALLS.search(text)):
        return text.strip(), []
    depth, end = 0, None
    for bracket in BRACKETS.finditer(text, start.start()):
        if bracket[1] is None:
            depth += 1 if bracket[0] in "[({" else -1
            if not depth:
                end = bracket.end()
                break
    if end is None:
        why = "The call is cut off or has an open bracket or quote. Write for example [name(argument=1)]."
        return text[: start.start()].strip(), [_broken(why)]
    return _joined([text[: start.start()], text[end:]]), _read_python(text[start.start() : end].strip())


def _read_python(source: str) -> list[ToolCall]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in the model's texts
            parsed = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = getattr(error, "msg", None) or str(error)
        return [_broken(f"The calls are no valid Python: {why}. Write for example [name(argument=1)].")]
    nodes = parsed.elts if isinstance(parsed, ast.List) else [parsed]
    return [_python_call(node) for node in nodes]


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        return _broken(f"{_source(node)} is no call. Write for example [name(argument=1)].")
    name = node.func.id if isinstance(node.func, ast.Name) else _source(node.func)
    if not re.fullmatch(r"[\w.]+", name):
        return _broken(f"{name} is not the name of a tool.")
    if node.args:
        return _broken(f"The arguments need names: write {name}(argument=value).", name)
    try:
        arguments = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError(f"**{_source(keyword.value)} is not allowed")
            arguments[keyword.arg] = _literal(keyword.value)
    except (ValueError, RecursionError) as error:
        return _broken(f"The arguments must be plain values: {error}.", name)
    return _checked(ToolCall(name, arguments))


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return [_literal(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in keys):
                raise ValueError(f"the keys of {_source(node)} must be texts")
            return {ast.literal_eval(key): _literal(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)):
            return -number if isinstance(sign, ast.USub) else number
        case ast.JoinedStr(values=parts) if all(isinstance(part, ast.Constant) for part in parts):
            return "".join(ast.literal_eval(part) for part in parts)
    raise ValueError(f"{_source(node)} is not one")


def _source(node: ast.expr) -> str:
    try:
        return ast.unparse(node)[:80]
    except RecursionError:
        return "an expression that is nested too deeply"


class CallFormat(NamedTuple):
    """How the models of a family write calls."""

    name: str
    read: Callable[[str], Found]
    tags: tuple[str, ...]  # the first one tells the format, wherever a template writes it
    openings: tuple[str, ...]  # one of them is where a call begins


CALL_FORMATS = {
    form.name: form
    for form in (
        CallFormat("mistral", read_mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), ("[TOOL_CALLS]",)),
        CallFormat("phi", read_phi, ("<|tool_call|>", "<|/tool_call|>"), ("<|tool_call|>", "functools[")),
        CallFormat("hermes", read_hermes, ("<tool_call>", "</tool_call>"), ("<tool_call>",)),
        CallFormat("pythonic", read_pythonic, ("<function_calls>", "</function_calls>"), ("<function_calls>", "[")),
        CallFormat("llama", read_llama, (PYTHON_TAG,), (PYTHON_TAG, "{")),
    )
}


def find_call_format(turn: str, prompt: str, name: str, tokens: Collection[str]) -> CallFormat | None:
    """Tell how a model writes calls.

    `turn` is what its template writes for a turn that calls the tool `name`, `prompt` is how it explains this tool, and
    `tokens` has the special tokens. What the template writes itself counts most. The tokens count least: a Llama
    model has a token for calls, but is not asked to use it.
    """
    if "<function=" in turn:  # XML inside of <tool_call>, as Qwen3-Coder writes it
        return None
    written = [form for form in CALL_FORMATS.values() if form.tags[0] in turn]
    if not written and f"[{name}(" in turn:
        written = [CALL_FORMATS["pythonic"]]
    if not written and "functools[" in prompt:
        written = [CALL_FORMATS["phi"]]
    if not written:
        written = [form for form in CALL_FORMATS.values() if form.tags[0] in prompt]
    if not written and re.search(rf'"name":\s*"{name}"', turn):
        written = [CALL_FORMATS["llama"]]
    if not written:
        written = [form for form in CALL_FORMATS.values() if form.tags[0] in tokens]
    return written[0] if written else None
