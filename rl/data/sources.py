"""Read the prompts of a run: select columns, fill templates, drop long rows, and report what was skipped."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rl.common.text import count_of
from rl.config.schema import PLACEHOLDER, Config, ConfigError, DataConfig
from rl.data.prompts import Prompt, PromptStream, Tokenizer, WeightedSource
from rl.data.read import NO_DATASETS, DataRow, read_rows
from rl.watch.heart import HEART

ROWS_PER_BEAT = 1000
MAX_REPORTS = 5  # maximum number of malformed rows of a path that are printed
MAX_COLUMNS = 30  # maximum number of columns that a message lists
ABSENT = object()  # a row has no such column; null is another case


class BadRow(ValueError):
    """A malformed row. The message completes a sentence that begins with the row's place."""


class Data(NamedTuple):
    """The prompts of a run. Only the leader reads them."""

    stream: PromptStream
    eval_sets: dict[str, list[Prompt]]


def say(text: str) -> None:
    print(f"oneworld: {text}", flush=True)


def held_out_paths(config: Config) -> dict[str, str]:
    """Return the held-out files that a run reads, by the name of their set: none without an evaluation."""
    return config.data.eval_paths if config.eval.interval else {}


def used_paths(config: Config) -> list[str]:
    """Return all paths that a run reads."""
    return [*config.data.train_weights, *held_out_paths(config).values()]


def check_files(config: Config, datasets: Mapping[str, Path] = NO_DATASETS) -> None:
    """Raise ConfigError if a file is missing, or if its first row lacks a column. This needs no tokenizer."""
    for path in used_paths(config):
        first = next(read_rows(path, datasets), None)
        if first is not None and config.data.bad_rows == "fatal":
            draft = _draft(first, config.data, None)
            if isinstance(draft, BadRow):
                raise _fatal(first, draft)


def read_data(
    config: Config,
    tokenizer: Tokenizer | None,
    report: Callable[[str], None] = say,
    datasets: Mapping[str, Path] = NO_DATASETS,
) -> Data:
    """Read all files of the config, and report what was read and skipped.

    Call `check_files` first, which finds a missing file before the others are read. Without a tokenizer, prompts have
    no tokens, and neither their length nor the chat template is checked.
    """
    if config.data.chat_template and tokenizer is not None and tokenizer.chat_template is None:
        raise ConfigError(
            f"data.chat_template=true, but the tokenizer of {config.model.path} has no chat template; set "
            "data.chat_template=false, or give a model that was trained for chats"
        )
    prompts: list[Prompt] = []
    sources: list[WeightedSource] = []
    for path, weight in config.data.train_weights.items():
        found = read_prompts(path, config.data, tokenizer, report, datasets)
        prompts += [replace(prompt, id=len(prompts) + prompt.id) for prompt in found]
        if weight is not None:
            sources.append(WeightedSource(len(found), Fraction(str(weight))))
    held_out = held_out_paths(config)
    eval_sets = {name: read_prompts(path, config.data, tokenizer, report, datasets) for name, path in held_out.items()}
    return Data(PromptStream(prompts, config.run.seed, sources), eval_sets)


def read_prompts(
    path: str,
    data: DataConfig,
    tokenizer: Tokenizer | None,
    report: Callable[[str], None] = say,
    datasets: Mapping[str, Path] = NO_DATASETS,
) -> list[Prompt]:
    """Read the prompts of one path, with ids from 0, and report what was skipped."""
    prompts: list[Prompt] = []
    num_rows = num_bad = num_long = longest = 0
    limit = f"data.max_prompt_tokens = {data.max_prompt_tokens}"
    bos = _bos_tokens(data, tokenizer)
    for row, draft in _draft_rows(path, data, tokenizer, datasets):
        num_rows += 1
        try:
            prompt = _make_prompt(draft, len(prompts), bos)
        except BadRow as problem:
            if data.bad_rows == "fatal":
                raise _fatal(row, problem) from None
            num_bad += 1
            if num_bad <= MAX_REPORTS:
                report(f"skipped: {row.place} {problem}")
            continue
        longest = max(longest, len(prompt.tokens))
        if len(prompt.tokens) <= data.max_prompt_tokens:
            prompts.append(prompt)
        elif data.long_rows == "fatal":
            remedy = "raise the limit, drop the row or set data.long_rows=skip"
            raise ConfigError(f"{row.place} has {len(prompt.tokens)} tokens; a prompt has at most {limit}: {remedy}")
        else:
            num_long += 1
    summary = f"{path}: {count_of(len(prompts), 'prompt')} in {count_of(num_rows, 'row')}"
    summary += f", {num_bad} malformed" if num_bad else ""
    summary += f", {num_long} above {limit} (the longest has {longest})" if num_long else ""
    if not prompts:
        raise ConfigError(f"{summary}; at least one row must be left")
    report(summary)
    names = PLACEHOLDER.findall(data.template)
    if unfilled := [f"{{{name}}}" for name in names if name != "prompt" and _look_up(prompts[0].row, name) is ABSENT]:
        report(f"data.template: these are not columns of {path} and stay unchanged: {', '.join(unfilled)}")
    return prompts


def _fatal(row: DataRow, problem: BadRow) -> ConfigError:
    return ConfigError(f"{row.place} {problem} (or skip such rows: data.bad_rows=skip)")


def _bos_tokens(data: DataConfig, tokenizer: Tokenizer | None) -> list[int]:
    """Return the BOS token if the tokenizer adds it to a text.

    Llama's tokenizer does. Others, such as SmolLM's, have one but do not add it. A chat template contains it if needed.
    """
    if tokenizer is None or data.chat_template:
        return []
    first = tokenizer.encode("", add_special_tokens=True)[:1]
    return first if first == [tokenizer.bos_token_id] else []


def _draft_rows(
    path: str, data: DataConfig, tokenizer: Tokenizer | None, datasets: Mapping[str, Path]
) -> Iterator[tuple[DataRow, Prompt | BadRow]]:
    """Yield each row with its prompt, without id and BOS token, or with what is wrong."""
    rows = read_rows(path, datasets)
    num_rows = 0
    while some := list(islice(rows, ROWS_PER_BEAT)):
        num_rows += len(some)
        HEART.beat(f"row {num_rows} of {path}")
        drafts = [_draft(row, data, tokenizer) for row in some]
        if tokenizer is not None:
            drafts = _tokenize(drafts, tokenizer)
        yield from zip(some, drafts, strict=True)


def _draft(read: DataRow, data: DataConfig, tokenizer: Tokenizer | None) -> Prompt | BadRow:
    """Return the prompt of a row, without tokens, or what is wrong with the row."""
    if read.problem:
        return BadRow(read.problem)
    row = read.values
    try:
        content = _content(row, data)
        answer = _column(row, data.answer_key, "data.answer_key") if data.answer_key else ""
        answer = json.dumps(answer) if isinstance(answer, list | dict) else str(answer)
        is_chat = data.chat_template
        text = _chat(_conversation(content, data), tokenizer) if is_chat else _text(content, data.prompt_key)
    except BadRow as problem:
        return problem
    return Prompt(0, 0, text, answer, [], row, read.place)


def _tokenize(drafts: list[Prompt | BadRow], tokenizer: Tokenizer) -> list[Prompt | BadRow]:
    """Add tokens to drafts. The tokenizers of transformers take many texts in one call, in a third of the time."""
    texts = [draft.text for draft in drafts if isinstance(draft, Prompt)]
    encode_all: Any = tokenizer
    try:
        found = iter(encode_all(texts, add_special_tokens=False)["input_ids"] if texts else ())
    except Exception:  # the tokenizers package raises nothing narrower, and does not say which text is at fault
        return [_tokenize_one(draft, tokenizer) if isinstance(draft, Prompt) else draft for draft in drafts]
    return [_with_tokens(draft, next(found)) if isinstance(draft, Prompt) else draft for draft in drafts]


def _tokenize_one(draft: Prompt, tokenizer: Tokenizer) -> Prompt | BadRow:
    text = draft.text
    try:
        return _with_tokens(draft, tokenizer.encode(text, add_special_tokens=False))
    except Exception as error:
        return BadRow(f"has text that the tokenizer does not know: {text[:40]!r} ({error})")


def _with_tokens(draft: Prompt, tokens: list[int]) -> Prompt | BadRow:
    if not tokens:
        return BadRow("has 0 tokens; a prompt has at least 1")
    return Prompt(0, 0, draft.text, draft.answer, tokens, draft.row, draft.place)


def _make_prompt(draft: Prompt | BadRow, row_id: int, bos: Sequence[int]) -> Prompt:
    """Complete a draft. Raise BadRow if its row is malformed."""
    if isinstance(draft, BadRow):
        raise draft
    tokens = draft.tokens
    if tokens and tokens[:1] != bos:  # unless the text itself begins with it
        tokens = [*bos, *tokens]
    return Prompt(row_id, 0, draft.text, draft.answer, tokens, draft.row, draft.place)


def _look_up(row: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, or ABSENT. A dot leads into an object, unless a column has that very name."""
    if name in row:
        return row[name]
    is_null = False
    for match in re.finditer(r"\.", name):
        outer = row.get(name[: match.start()], ABSENT)
        found = _look_up(outer, name[match.end() :]) if isinstance(outer, dict) else ABSENT
        if outer is None or found is None:  # another split of the name may lead to a value
            is_null = True
        elif found is not ABSENT:
            return found
    return None if is_null else ABSENT


def _column_names(row: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all columns, each before the columns that are nested in it."""
    for name, value in row.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from _column_names(value, f"{prefix}{name}.")


def _list_columns(row: Mapping[str, Any]) -> str:
    names = [repr(name) for name in _column_names(row)]
    more = f" and {len(names) - MAX_COLUMNS} more" if len(names) > MAX_COLUMNS else ""
    return (", ".join(names[:MAX_COLUMNS]) or "none") + more


def _column(row: Mapping[str, Any], name: str, setting: str) -> Any:
    value = _look_up(row, name)
    if value is ABSENT:
        raise BadRow(f"has no column {name!r}; got {_list_columns(row)}: set {setting} to one of these")
    if value is None:
        raise BadRow(f"holds null in column {name!r}; a row needs a value there")
    return value


def _text(value: Any, column: str) -> str:
    if isinstance(value, list | dict):
        remedy = "messages with role and content need data.chat_template=true and no data.template"
        if isinstance(value, dict) and value:
            remedy = f"for a value inside it, write for example {column}.{next(iter(value))}"
        raise BadRow(f"holds a {type(value).__name__} in column {column!r}, not text; {remedy}")
    return str(value)


def _fill(data: DataConfig, row: Mapping[str, Any]) -> str:
    """Fill the template with this row's columns. Braces around other names stay unchanged."""
    texts = {}
    for name in PLACEHOLDER.findall(data.template):
        if name == "prompt":
            texts[name] = _text(_column(row, data.prompt_key, "data.prompt_key"), data.prompt_key)
        elif _look_up(row, name) is not ABSENT:
            texts[name] = _text(_column(row, name, "data.template"), name)
    if not texts:
        raise BadRow(f"has no column that data.template names; its columns are {_list_columns(row)}")
    return PLACEHOLDER.sub(lambda match: texts.get(match[1], match[0]), data.template)


def make_conversation(row: Mapping[str, Any], data: DataConfig) -> list[dict[str, str]]:
    """Return the messages of a row's prompt. The row was read before, so it has what the settings name."""
    return _conversation(_content(row, data), data)


def _content(row: Mapping[str, Any], data: DataConfig) -> Any:
    return _fill(data, row) if data.template else _column(row, data.prompt_key, "data.prompt_key")


def _conversation(content: Any, data: DataConfig) -> list[dict[str, str]]:
    """Return a prompt as messages."""
    if isinstance(content, list):
        for entry in content:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("role", "content")):
                found = f"{json.dumps(entry)[:80]} in {data.prompt_key!r}"
                raise BadRow(f"holds {found}; a message is {{role: text, content: text}}")
        conversation = [{"role": entry["role"], "content": entry["content"]} for entry in content]
        if not conversation or conversation[-1]["role"] == "assistant":
            raise BadRow(f"leaves nothing to answer: the messages in {data.prompt_key!r} must end with the user's")
    else:
        conversation = [{"role": "user", "content": _text(content, data.prompt_key)}]
    if data.system_prompt:
        if conversation[0]["role"] == "system":
            raise BadRow("has a system message of its own; leave data.system_prompt empty, or take it out of the row")
        conversation.insert(0, {"role": "system", "content": data.system_prompt})
    return conversation


def _chat(conversation: list[dict[str, str]], tokenizer: Tokenizer | None) -> str:
    """Return the conversation as the chat template writes it, or only its texts if there is no tokenizer."""
    if tokenizer is None:
        return "\n".join(message["content"] for message in conversation)
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise BadRow(f"does not fit the tokenizer's chat template ({type(error).__name__}: {error})") from None
