"""Read the prompts of a run: select columns, fill templates, drop long rows, and report what was skipped."""

import json
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from rl.common.text import count_of
from rl.config.schema import PLACEHOLDER, Config, ConfigError, DataConfig
from rl.data.prompts import Prompt, PromptStream, Tokenizer, WeightedSource
from rl.data.read import read_rows
from rl.watch.heart import HEART

ROWS_PER_BEAT = 1000
MAX_REPORTS = 5  # maximum number of malformed rows of a path that are printed


class BadRow(ValueError):
    """A malformed row. The message completes a sentence that begins with the row's place."""


class Data(NamedTuple):
    """The prompts of a run. Only the leader reads them."""

    stream: PromptStream
    eval_sets: dict[str, list[Prompt]]


def read_data(config: Config, tokenizer: Tokenizer) -> Data:
    """Read all files of the config. Held-out files are read only if there is an evaluation."""
    prompts: list[Prompt] = []
    sources: list[WeightedSource] = []
    for path, weight in config.data.train_weights.items():
        found = read_prompts(path, config.data, tokenizer)
        prompts += [replace(prompt, id=len(prompts) + prompt.id) for prompt in found]
        if weight is not None:
            sources.append(WeightedSource(len(found), Fraction(str(weight))))
    held_out = config.data.eval_paths if config.eval.interval else {}
    eval_sets = {name: read_prompts(path, config.data, tokenizer) for name, path in held_out.items()}
    return Data(PromptStream(prompts, config.run.seed, sources), eval_sets)


def read_prompts(path: str, data: DataConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """Read the prompts of one path, with ids from 0, and print what was skipped."""
    prompts: list[Prompt] = []
    num_rows = num_bad = num_long = longest = 0
    limit = f"data.max_prompt_tokens = {data.max_prompt_tokens}"
    # Llama's tokenizer adds its BOS token to a text. Others, such as SmolLM's, have one but do not add it. A chat
    # template contains it if needed.
    bos = [] if data.chat_template else tokenizer.encode("", add_special_tokens=True)[:1]
    bos = bos if bos == [tokenizer.bos_token_id] else []
    for num_rows, row in enumerate(read_rows(path), start=1):
        if num_rows % ROWS_PER_BEAT == 0:
            HEART.beat(f"row {num_rows} of {path}")
        try:
            if row.problem:
                raise BadRow(row.problem)
            prompt = _make_prompt(row.values, len(prompts), data, tokenizer, bos)
        except BadRow as problem:
            if data.bad_rows == "fatal":
                raise ConfigError(f"{row.place} {problem} (or skip such rows: data.bad_rows=skip)") from None
            num_bad += 1
            if num_bad <= MAX_REPORTS:
                print(f"oneworld: skipped: {row.place} {problem}", flush=True)
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
    print(f"oneworld: {summary}", flush=True)
    columns = (*prompts[0].row, "prompt")
    if unfilled := [f"{{{name}}}" for name in PLACEHOLDER.findall(data.template) if name not in columns]:
        what = f"these are not columns of {path} and stay unchanged: {', '.join(unfilled)}"
        print(f"oneworld: data.template: {what}", flush=True)
    return prompts


def _make_prompt(row: dict[str, Any], row_id: int, data: DataConfig, tokenizer: Tokenizer, bos: list[int]) -> Prompt:
    content = _fill(data, row) if data.template else _column(row, data.prompt_key, "data.prompt_key")
    answer = _column(row, data.answer_key, "data.answer_key") if data.answer_key else ""
    text = _chat(content, data, tokenizer) if data.chat_template else _text(content, data.prompt_key)
    try:
        tokens = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise BadRow(f"has text that the tokenizer does not know: {text[:40]!r} ({error})") from None
    if not tokens:
        raise BadRow("has 0 tokens; a prompt has at least 1")
    if tokens[:1] != bos:  # unless the text itself begins with it
        tokens = bos + tokens
    answer = json.dumps(answer) if isinstance(answer, list | dict) else str(answer)
    return Prompt(row_id, 0, text, answer, tokens, row)


def _column(row: Mapping[str, Any], name: str, setting: str) -> Any:
    if name not in row:
        got = ", ".join(map(repr, row)) or "none"
        raise BadRow(f"has no column {name!r}; got {got}: set {setting} to one of these")
    if row[name] is None:
        raise BadRow(f"holds null in column {name!r}; a row needs a value there")
    return row[name]


def _text(value: Any, column: str) -> str:
    if isinstance(value, list | dict):
        remedy = "messages with role and content need data.chat_template=true and no data.template"
        raise BadRow(f"holds a {type(value).__name__} in column {column!r}, not text; {remedy}")
    return str(value)


def _fill(data: DataConfig, row: Mapping[str, Any]) -> str:
    """Fill the template with this row's columns. Braces around other names stay unchanged."""
    if "prompt" in PLACEHOLDER.findall(data.template):
        row = {**row, "prompt": _column(row, data.prompt_key, "data.prompt_key")}
    wanted = [name for name in PLACEHOLDER.findall(data.template) if name in row]
    if not wanted:
        raise BadRow(f"has no column that data.template names; its columns are {', '.join(map(repr, row))}")
    texts = {name: _text(_column(row, name, "data.template"), name) for name in wanted}
    return PLACEHOLDER.sub(lambda match: texts.get(match[1], match[0]), data.template)


def _chat(content: Any, data: DataConfig, tokenizer: Tokenizer) -> str:
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
    try:
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything
        raise BadRow(f"does not fit the tokenizer's chat template ({type(error).__name__}: {error})") from None
