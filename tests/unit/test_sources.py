"""From rows to prompts: columns, templates, the length filter, skipped rows, and several files in one stream."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import models
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from rl.config.load import load_config
from rl.config.schema import Config, ConfigError, DataConfig, EvalConfig
from rl.data import sources
from rl.data.prompts import Prompt
from rl.data.read import read_rows
from rl.data.sources import Data, check_files, read_data, read_prompts


class Letters:
    """A tokenizer whose token ids are code points. Its chat template puts tags around the message."""

    bos_token_id = None
    chat_template = "tags"

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if "?!" in text:
            raise Exception("no [UNK]")
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        if conversation[0]["role"] == "refused":
            raise KeyError("refused")
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


def write(folder: Path, *lines: str, name: str = "train.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


GOOD = '{"prompt": "2+2=", "answer": 4}'


def text_of(tmp_path: Path, row: dict[str, Any], **data: Any) -> str:
    (prompt,) = read_prompts(write(tmp_path, json.dumps(row)), DataConfig(**data), Letters())
    assert prompt.tokens == [ord(letter) for letter in prompt.text]
    return prompt.text


def failure(path: str, **data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, DataConfig(**data), Letters())
    return str(caught.value)


def test_read_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, GOOD, "", '{"prompt": "a", "answer": "b", "more": 1}')
    prompts = read_prompts(path, DataConfig(), Letters())
    assert prompts == [
        Prompt(0, 0, "2+2=", "4", [50, 43, 50, 61], {"prompt": "2+2=", "answer": 4}, f"{path}, line 1"),
        Prompt(1, 0, "a", "b", [97], {"prompt": "a", "answer": "b", "more": 1}, f"{path}, line 3"),
    ]
    assert capsys.readouterr().out == f"oneworld: {path}: 2 prompts in 2 rows\n"


def test_other_columns_and_a_chat_template(tmp_path: Path) -> None:
    row = {"question": "hi", "solution": ["yo"]}
    columns = {"prompt_key": "question", "answer_key": "solution"}
    (prompt,) = read_prompts(write(tmp_path, json.dumps(row)), DataConfig(**columns, chat_template=True), Letters())
    assert (prompt.text, prompt.answer) == ("<user>hi<assistant>", '["yo"]')
    said = text_of(tmp_path, row, **columns, chat_template=True, system_prompt="be brief")
    assert said == "<system>be brief<user>hi<assistant>"


NESTED = {
    "extra": {"question": {"text": "2+2="}, "index": 3},
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "plain": "x",
    "a.b": "dotted",
    "a": {"b": "nested", "b.c": "inner dot"},
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward_model.ground_truth", "4"),
        ("extra.question.text", "2+2="),
        ("a.b", "dotted"),
        ("a.b.c", "inner dot"),
        ("extra.question", '{"text": "2+2="}'),
        ("extra.index", "3"),
    ],
)
def test_nested_columns(tmp_path: Path, name: str, value: str) -> None:
    """A column whose name has the dot wins."""
    data = DataConfig(prompt_key="plain", answer_key=name)
    (prompt,) = read_prompts(write(tmp_path, json.dumps(NESTED)), data, Letters())
    assert prompt.answer == value and prompt.row == NESTED
    if not value.startswith("{"):
        assert text_of(tmp_path, NESTED, prompt_key=name, answer_key="") == value
        assert text_of(tmp_path, NESTED, template=f"<{{{name}}}>", answer_key="") == f"<{value}>"


@pytest.mark.parametrize("outer", [None, {"b.c": None}, "text", {"b": 1}])
def test_an_outer_column_without_a_value_hides_no_other(tmp_path: Path, outer: Any) -> None:
    row = {"plain": "x", "a": outer, "a.b": {"c": 3}}
    (prompt,) = read_prompts(
        write(tmp_path, json.dumps(row)), DataConfig(prompt_key="plain", answer_key="a.b.c"), Letters()
    )
    assert prompt.answer == "3"


def test_nested_columns_of_parquet(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    row = {"prompt": [{"role": "user", "content": "2+2"}], "reward_model": {"ground_truth": "4", "style": "rule"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (prompt,) = read_prompts(
        str(path), DataConfig(answer_key="reward_model.ground_truth", chat_template=True), Letters()
    )
    assert (prompt.text, prompt.answer) == ("<user>2+2<assistant>", "4")


@pytest.mark.parametrize(
    ("row", "data", "problem"),
    [
        (
            {"prompt": "x", "reward_model": {"truth": "4", "more": {"n": 1}}},
            {"answer_key": "reward_model.ground_truth"},
            "has no column 'reward_model.ground_truth'; got 'prompt', 'reward_model', 'reward_model.truth', "
            "'reward_model.more', 'reward_model.more.n': set data.answer_key to one of these",
        ),
        (
            {"prompt": "x", "reward_model": None},
            {"answer_key": "reward_model.ground_truth"},
            "holds null in column 'reward_model.ground_truth'; a row needs a value there",
        ),
        ({"prompt": "x", "answer": "y"}, {"answer_key": "answer.text"}, "has no column 'answer.text'; got 'prompt'"),
        (
            {"prompt": {"text": "x"}, "answer": "y"},
            {},
            "holds a dict in column 'prompt', not text; for a value inside it, write for example prompt.text",
        ),
        (
            {"prompt": "x"} | {f"c{number}": 0 for number in range(40)},
            {},
            "has no column 'answer'; got 'prompt', 'c0', 'c1', 'c2', 'c3', 'c4', 'c5', 'c6', 'c7', 'c8', 'c9', 'c10', "
            "'c11', 'c12', 'c13', 'c14', 'c15', 'c16', 'c17', 'c18', 'c19', 'c20', 'c21', 'c22', 'c23', 'c24', 'c25', "
            "'c26', 'c27', 'c28' and 11 more: set data.answer_key",
        ),
    ],
)
def test_messages_name_nested_columns(tmp_path: Path, row: dict[str, Any], data: dict[str, Any], problem: str) -> None:
    path = write(tmp_path, json.dumps(row))
    assert failure(path, **data).startswith(f"{path}, line 1 {problem}")


def test_without_a_tokenizer_columns_are_checked_and_lengths_are_not(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}]
    path = write(tmp_path, json.dumps({"prompt": turns, "answer": "b"}))
    (prompt,) = read_prompts(path, DataConfig(chat_template=True, system_prompt="be brief", max_prompt_tokens=1), None)
    assert (prompt.text, prompt.tokens, prompt.answer) == ("be brief\nhi", [], "b"), "reward functions read the text"
    with pytest.raises(ConfigError, match="line 2 has no column 'answer'"):
        read_prompts(write(tmp_path, GOOD, '{"prompt": "x"}'), DataConfig(), None)


def test_a_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    class Plain(Letters):
        chat_template = None  # type: ignore[assignment]

    config = Config(data=DataConfig(train=write(tmp_path, GOOD), chat_template=True))
    with pytest.raises(ConfigError, match=r"the tokenizer of configs/tiny has no chat template; set data\.chat"):
        read_data(config, Plain())


def test_a_missing_file_is_found_before_the_others_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no prompts at nowhere\.jsonl"):
        read([write(tmp_path, GOOD), "nowhere.jsonl"])
    assert capsys.readouterr().out == ""


def test_reading_the_data_opens_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--plan has checked the files before."""
    opened, path = list[str](), write(tmp_path, GOOD)
    monkeypatch.setattr(sources, "read_rows", lambda each, datasets: opened.append(each) or read_rows(each))
    read_data(Config(data=DataConfig(train=path), eval=EvalConfig(interval=0)), Letters())
    assert opened == [path]


def test_without_an_answer_column(tmp_path: Path) -> None:
    (prompt,) = read_prompts(write(tmp_path, '{"prompt": "hi"}'), DataConfig(answer_key=""), Letters())
    assert prompt.answer == ""


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{prompt}", "2+2="),
        ("Q: {prompt}\nA: \\boxed{}", "Q: 2+2=\nA: \\boxed{}"),
        ("{level}. {question} {{question}} {nothing}", "3. {level} {{level}} {nothing}"),
        ("{a b}{", "spaced{"),
    ],
)
def test_templates(tmp_path: Path, template: str, text: str) -> None:
    """A column's own braces are not filled again."""
    row = {"prompt": "2+2=", "answer": "4", "question": "{level}", "level": 3, "a b": "spaced"}
    assert text_of(tmp_path, row, template=template) == text


def test_a_template_needs_no_prompt_column_and_may_go_into_a_chat(tmp_path: Path) -> None:
    row = {"question": "2+2", "answer": "4"}
    assert text_of(tmp_path, row, template="{question}=", chat_template=True) == "<user>2+2=<assistant>"
    assert text_of(tmp_path, row, template="{prompt}?", prompt_key="question") == "2+2?"


def test_a_template_may_name_the_prompt_and_a_column_inside_the_column_prompt(tmp_path: Path) -> None:
    row = {"prompt": {"text": "2+2=", "hint": "even"}, "answer": "4"}
    assert text_of(tmp_path, row, template="{prompt} ({prompt.hint})", prompt_key="prompt.text") == "2+2= (even)"
    path = write(tmp_path, json.dumps({"ask": {"text": "2+2="}, "answer": "4"}))
    message = failure(path, template="{prompt}", prompt_key="ask")
    assert "holds a dict in column 'ask', not text; for a value inside it, write for example ask.text" in message


def test_placeholders_that_are_no_columns_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, GOOD, GOOD)
    read_prompts(path, DataConfig(template="{prompt} \\frac{a}{b}"), Letters())
    told = f"oneworld: data.template: these are not columns of {path} and stay unchanged: {{a}}, {{b}}\n"
    assert capsys.readouterr().out.count(told) == 1


def test_messages_are_the_conversation(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    row = {"prompt": turns, "answer": "4"}
    text = "<user>1<assistant>2<user>3<assistant>"
    assert text_of(tmp_path, row, chat_template=True) == text
    assert text_of(tmp_path, row, chat_template=True, system_prompt="s") == f"<system>s{text}"


SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}


@pytest.mark.parametrize(
    ("line", "data", "problem"),
    [
        ("{broken", {}, "is not JSON (Expecting property name enclosed in double quotes"),
        ("5", {}, "holds 5, not an object with columns"),
        ('{"prompt": "x"}', {}, "has no column 'answer'; got 'prompt': set data.answer_key to one of these"),
        (
            '{"q": "x", "answer": "y"}',
            {},
            "has no column 'prompt'; got 'q', 'answer': set data.prompt_key to one of these",
        ),
        ("{}", {}, "has no column 'prompt'; got none: set data.prompt_key"),
        ('{"prompt": null, "answer": ""}', {}, "holds null in column 'prompt'; a row needs a value there"),
        ('{"prompt": "x", "answer": null}', {}, "holds null in column 'answer'"),
        ('{"prompt": "?!", "answer": ""}', {}, "has text that the tokenizer does not know: '?!' (no [UNK])"),
        ('{"prompt": "", "answer": ""}', {}, "has 0 tokens; a prompt has at least 1"),
        ('{"prompt": [], "answer": ""}', {}, "holds a list in column 'prompt', not text; messages with role"),
        ('{"prompt": {}, "answer": ""}', {"chat_template": True}, "holds a dict in column 'prompt', not text"),
        ('{"prompt": [], "answer": ""}', {"chat_template": True}, "leaves nothing to answer"),
        ('{"prompt": ["hi"], "answer": ""}', {"chat_template": True}, "holds \"hi\" in 'prompt'; a message is {role"),
        (
            json.dumps({"prompt": [USER, {"role": "assistant", "content": "4"}], "answer": "4"}),
            {"chat_template": True},
            "leaves nothing to answer: the messages in 'prompt' must end with the user's",
        ),
        (
            json.dumps({"prompt": [SYSTEM, USER], "answer": ""}),
            {"chat_template": True, "system_prompt": "s"},
            "has a system message of its own; leave data.system_prompt empty",
        ),
        (
            json.dumps({"prompt": [{"role": "refused", "content": ""}], "answer": ""}),
            {"chat_template": True},
            "does not fit the tokenizer's chat template (KeyError: 'refused')",
        ),
        (
            '{"x": 1, "answer": ""}',
            {"template": "{y}"},
            "has no column that data.template names; its columns are 'x', ",
        ),
        ('{"x": 1, "answer": ""}', {"template": "{x}{prompt}"}, "has no column 'prompt'; got 'x', 'answer'"),
        ('{"x": null, "answer": ""}', {"template": "{x}"}, "holds null in column 'x'"),
        ('{"x": [1], "answer": ""}', {"template": "{x}"}, "holds a list in column 'x', not text"),
    ],
)
def test_malformed_rows(
    tmp_path: Path, line: str, data: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are fatal, or reported and skipped. Both messages have file and line."""
    path = write(tmp_path, '{"prompt": "ok", "answer": "4", "x": "ok", "y": "ok"}', line)
    message = failure(path, **data)
    assert message.startswith(f"{path}, line 2 {problem}"), message
    assert message.endswith("(or skip such rows: data.bad_rows=skip)")
    prompts = read_prompts(path, DataConfig(**data, bad_rows="skip"), Letters())
    assert [prompt.answer for prompt in prompts] == ["4"]
    said = capsys.readouterr().out
    assert f"oneworld: skipped: {path}, line 2 {problem}" in said, said
    assert f"oneworld: {path}: 1 prompt in 2 rows, 1 malformed\n" in said


def test_the_first_few_skipped_rows_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, *["{}"] * 7, GOOD)
    (prompt,) = read_prompts(path, DataConfig(bad_rows="skip"), Letters())
    assert prompt.id == 0
    said = capsys.readouterr().out
    assert said.count("oneworld: skipped:") == 5
    assert "line 5 has no column 'prompt'" in said
    assert f"{path}: 1 prompt in 8 rows, 7 malformed\n" in said


def test_the_length_filter_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"prompt": "x" * length, "answer": ""}) for length in (4, 5, 9, 1)]
    path = write(tmp_path, *lines)
    prompts = read_prompts(path, DataConfig(max_prompt_tokens=4), Letters())
    assert [(prompt.id, prompt.text) for prompt in prompts] == [(0, "xxxx"), (1, "x")]
    account = f"{path}: 2 prompts in 4 rows, 2 above data.max_prompt_tokens = 4 (the longest has 9)"
    assert capsys.readouterr().out == f"oneworld: {account}\n"
    message = failure(path, max_prompt_tokens=4, long_rows="fatal")
    assert message.startswith(f"{path}, line 2 has 5 tokens; a prompt has at most data.max_prompt_tokens = 4: raise")


class Counting(Letters):
    """Count the calls with many texts, and those with one."""

    def __init__(self) -> None:
        self.num_texts: list[int] = []
        self.encoded: list[str] = []

    def __call__(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        self.num_texts.append(len(texts))
        return {"input_ids": [Letters().encode(text, add_special_tokens=False) for text in texts]}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded.append(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_rows_are_tokenized_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And alone only next to a text that the tokenizer refuses, to find that text."""
    monkeypatch.setattr(sources, "ROWS_PER_BEAT", 3)
    texts = ["a", "bb", "ccc", "d", "what?!", "", "e", "ff"]
    lines = [json.dumps({"prompt": text, "answer": index}) for index, text in enumerate(texts)]
    path, tokenizer, said = write(tmp_path, *lines, "{}"), Counting(), list[str]()
    prompts = read_prompts(path, DataConfig(bad_rows="skip"), tokenizer, said.append)
    assert [(prompt.id, prompt.text, prompt.answer) for prompt in prompts] == [
        *((0, "a", "0"), (1, "bb", "1"), (2, "ccc", "2"), (3, "d", "3"), (4, "e", "6"), (5, "ff", "7")),
    ]
    assert all(prompt.tokens == [ord(letter) for letter in prompt.text] for prompt in prompts)
    assert (tokenizer.num_texts, tokenizer.encoded) == ([3, 3, 2], ["", "d", "what?!", ""])  # the first is for BOS
    places = [line.partition(" has ")[0].removeprefix(f"skipped: {path}, line ") for line in said[:3]]
    assert places == ["5", "6", "9"]
    assert said[3] == f"{path}: 6 prompts in 9 rows, 3 malformed"


def test_no_row_left_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "", "  ")
    assert failure(path) == f"{path}: 0 prompts in 0 rows; at least one row must be left"
    path = write(tmp_path, GOOD, "{}")
    account = "0 prompts in 2 rows, 1 malformed, 1 above data.max_prompt_tokens = 1 (the longest has 4)"
    assert failure(path, bad_rows="skip", max_prompt_tokens=1) == f"{path}: {account}; at least one row must be left"


def read(train: Any, **eval_config: Any) -> Data:
    interval = 1 if eval_config.get("eval") else 0
    config = Config(data=DataConfig(train=train, **eval_config), eval=EvalConfig(interval=interval))
    check_files(config)
    return read_data(config, Letters())


def rows(name: str, count: int) -> list[str]:
    return [json.dumps({"prompt": f"{name}{index}", "answer": ""}) for index in range(count)]


def test_a_list_of_files_is_one_pool_in_the_order_of_one_file(tmp_path: Path) -> None:
    a, b = write(tmp_path, *rows("a", 4), name="a.jsonl"), write(tmp_path, *rows("b", 3), name="b.jsonl")
    whole = read(write(tmp_path, *rows("a", 4), *rows("b", 3), name="whole.jsonl")).stream
    pool = read([a, b]).stream
    assert pool.digest == whole.digest != read([b, a]).stream.digest
    taken, wanted = (
        [dataclasses.replace(prompt, place="") for prompt in map(each.at, range(21))] for each in (pool, whole)
    )
    assert taken == wanted


def test_a_mapping_mixes_by_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """3 : 1 is a a b a. Ids continue from file to file, without the skipped rows."""
    a = write(tmp_path, *rows("a", 4), "{}", name="a.jsonl")
    b = write(tmp_path, *rows("b", 3), name="b.jsonl")
    data = read({a: 0.75, b: 0.25}, bad_rows="skip")
    taken = [data.stream.at(position) for position in range(16)]
    assert "".join(prompt.text[0] for prompt in taken) == "aaba" * 4
    assert {prompt.text: prompt.id for prompt in taken} == {
        **{f"a{index}": index for index in range(4)},
        **{f"b{index}": 4 + index for index in range(3)},
    }
    assert len(data.stream) == 7
    said = capsys.readouterr().out
    assert f"{a}: 4 prompts in 5 rows, 1 malformed\n" in said and f"{b}: 3 prompts in 3 rows\n" in said
    digests = {
        read(train, bad_rows="skip").stream.digest for train in ([a, b], {a: 1, b: 1}, {b: 1, a: 3}, {a: 3, b: 1})
    }
    assert len(digests) == 4
    assert data.stream.digest in digests
    assert read({a: 3, b: 1}, bad_rows="skip", template="{prompt}!").stream.digest not in digests


def test_held_out_sets_have_names(tmp_path: Path) -> None:
    a, b = write(tmp_path, *rows("a", 2), name="a.jsonl"), write(tmp_path, *rows("b", 3), name="b.c.jsonl")

    def sizes(held_out: Any) -> dict[str, int]:
        return {name: len(prompts) for name, prompts in read(a, eval=held_out).eval_sets.items()}

    assert sizes(b) == {"b.c": 3}
    assert sizes([b, a]) == {"b.c": 3, "a": 2}
    assert sizes({"easy": a, "hard": b}) == {"easy": 2, "hard": 3}
    assert sizes("") == {}
    assert [prompt.id for prompt in read(a, eval=[a, b]).eval_sets["b.c"]] == [0, 1, 2]


def test_without_evaluation_held_out_files_are_not_read() -> None:
    config = dataclasses.replace(load_config(), eval=EvalConfig(interval=0))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval="nowhere.jsonl"))
    assert read_data(config, Letters()).eval_sets == {}


def test_a_held_out_set_without_a_row_is_an_error(tmp_path: Path) -> None:
    a, b = write(tmp_path, GOOD, name="a.jsonl"), write(tmp_path, "{}", name="b.jsonl")
    with pytest.raises(ConfigError) as caught:
        read(a, eval={"x": a, "y": b}, bad_rows="skip")
    assert str(caught.value) == f"{b}: 0 prompts in 1 row, 1 malformed; at least one row must be left"


def save_llama_3(folder: Path) -> None:
    """As in its hub repository, the template of tokenizer.json adds the BOS."""
    special = ["<|begin_of_text|>", "<|eot_id|>"]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary(special), []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in special])
    tokenizer.post_processor = TemplateProcessing(single=f"{special[0]} $A", special_tokens=[(special[0], 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def save_llama_2(folder: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    LlamaTokenizer(vocab=vocabulary, merges=[], add_bos_token=True).save_pretrained(folder)


def save_qwen(folder: Path) -> None:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = {"eos_token": special[2], "pad_token": special[0], "unk_token": special[0]}
    Qwen2Tokenizer(vocab=vocabulary(special), merges=[], **tokens).save_pretrained(folder)


def save_smollm(folder: Path) -> None:
    """The tokenizer has a BOS token and does not add it."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = {"bos_token": special[1], "eos_token": special[2], "unk_token": special[0]}
    GPT2Tokenizer(vocab=vocabulary(special), merges=[], **tokens).save_pretrained(folder)


def vocabulary(special: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}


@pytest.mark.parametrize(
    ("save", "bos"),
    [(save_llama_3, "<|begin_of_text|>"), (save_llama_2, "<s>"), (save_qwen, ""), (save_smollm, "")],
)
def test_plain_prompts_begin_as_the_tokenizer_begins(save: Callable[[Path], None], bos: str, tmp_path: Path) -> None:
    """A prompt has one BOS if the tokenizer adds one, even if the text already begins with it."""
    save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    path = write(tmp_path, *(json.dumps({"prompt": text, "answer": ""}) for text in ("2+2=", f"{bos}2+2=")))
    plain, given = read_prompts(path, DataConfig(), tokenizer)
    assert plain.tokens == tokenizer.encode("2+2=", add_special_tokens=True)
    assert (plain.tokens[0] == tokenizer.bos_token_id) == bool(bos)
    assert given.tokens.count(tokenizer.bos_token_id) == bool(bos)
    assert plain.text == "2+2="
    with pytest.raises(ConfigError, match="has 0 tokens"):
        read_prompts(write(tmp_path, '{"prompt": "", "answer": ""}'), DataConfig(), tokenizer)


def test_a_chat_template_writes_its_own_bos(tmp_path: Path) -> None:
    save_llama_3(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}:"
    (prompt,) = read_prompts(write(tmp_path, GOOD), DataConfig(chat_template=True), tokenizer)
    assert prompt.tokens == tokenizer.encode("2+2=:", add_special_tokens=True)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}:"
    (prompt,) = read_prompts(write(tmp_path, GOOD), DataConfig(chat_template=True), tokenizer)
    assert prompt.tokens == tokenizer.encode("2+2=:", add_special_tokens=False)


def test_a_bos_counts_as_a_token_of_the_prompt(tmp_path: Path) -> None:
    save_llama_3(tmp_path)
    path, tokenizer = write(tmp_path, GOOD), AutoTokenizer.from_pretrained(tmp_path)
    assert len(read_prompts(path, DataConfig(max_prompt_tokens=5), tokenizer)[0].tokens) == 5
    with pytest.raises(ConfigError, match="has 5 tokens"):
        read_prompts(path, DataConfig(max_prompt_tokens=4, long_rows="fatal"), tokenizer)
