"""The prompt stream's order and position, the seeds of samples, and errors that name file and line."""

from pathlib import Path

import pytest

from rl.config import ConfigError, DataConfig
from rl.data.prompts import Prompt, PromptStream, read_prompts, sample_seed


class Letters:
    """Token ids are code points; the chat template puts tags around the message."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in conversation) + "<assistant>"


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(row, 0, f"text {row}", f"answer {row}", [row]) for row in range(count)]


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in prompts]


def test_stream_order_is_fixed() -> None:
    """A changed order would make old runs unrepeatable."""
    taken = PromptStream(make_prompts(6), seed=0).take(12)
    assert ids(taken) == [0, 5, 1, 4, 3, 2, 2, 0, 1, 5, 3, 4]
    assert [prompt.epoch for prompt in taken] == [0] * 6 + [1] * 6
    assert taken[6] == Prompt(2, 1, "text 2", "answer 2", [2])


def test_stream_order_depends_on_seed_and_epoch_alone() -> None:
    at_once = PromptStream(make_prompts(20), seed=7).take(60)
    stream = PromptStream(make_prompts(20), seed=7)
    in_pieces = [prompt for count in (1, 0, 30, 7, 22) for prompt in stream.take(count)]
    assert in_pieces == at_once
    epochs = [ids(at_once[start : start + 20]) for start in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert len(set(map(tuple, [*epochs, range(20)]))) == 4
    assert ids(PromptStream(make_prompts(20), seed=8).take(20)) != epochs[0]


@pytest.mark.parametrize("position", [0, 1, 4, 5, 6, 13, 1000])
def test_position_is_all_there_is_to_save(position: int) -> None:
    whole = PromptStream(make_prompts(5), seed=3)
    whole.take(position)
    assert whole.position == position
    resumed = PromptStream(make_prompts(5), seed=3)
    resumed.position = position
    assert resumed.take(8) == whole.take(8)
    assert resumed.position == position + 8


def test_take_may_cross_several_epochs() -> None:
    taken = PromptStream(make_prompts(2), seed=0).take(5)
    assert [prompt.epoch for prompt in taken] == [0, 0, 1, 1, 2]


def test_sample_seed_is_a_fixed_hash() -> None:
    """`printf 1/2/3/4 | b2sum -l 64`, without the lowest bit."""
    assert sample_seed(0, 0, 0, 0) == 0xF06EE5B05F9D7DA2 // 2
    assert sample_seed(1, 2, 3, 4) == 0xAAC61176BE6E3020 // 2


def test_sample_seeds_differ_in_every_argument() -> None:
    seeds = [sample_seed(a, b, c, d) for a in (0, 1, 11) for b in (0, 1, 11) for c in (0, 1, 11) for d in (0, 1, 11)]
    assert len(set(seeds)) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)


def write(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


GOOD = '{"prompt": "2+2=", "answer": 4}'


def test_read_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "", '{"prompt": "a", "answer": "b", "more": 1}')
    assert read_prompts(path, DataConfig(), Letters()) == [
        Prompt(0, 0, "2+2=", "4", [50, 43, 50, 61], {"prompt": "2+2=", "answer": 4}),
        Prompt(1, 0, "a", "b", [97], {"prompt": "a", "answer": "b", "more": 1}),
    ]


def test_read_prompts_under_other_keys_and_in_a_chat_template(tmp_path: Path) -> None:
    path = write(tmp_path, '{"question": "hi", "solution": "yo"}')
    data = DataConfig(prompt_key="question", answer_key="solution", chat_template=True)
    (prompt,) = read_prompts(path, data, Letters())
    assert (prompt.text, prompt.answer) == ("<user>hi<assistant>", "yo")
    assert prompt.tokens == [ord(letter) for letter in "<user>hi<assistant>"]


@pytest.mark.parametrize("separator", ["\u2028", "\u0085"])
def test_only_newlines_end_a_row(tmp_path: Path, separator: str) -> None:
    """JSON allows raw U+2028 and U+0085 inside a string, and `json.dumps(ensure_ascii=False)` writes them."""
    row = f'{{"prompt": "a{separator}b", "answer": ""}}'
    (prompt,) = read_prompts(write(tmp_path, row), DataConfig(), Letters())
    assert prompt.text == f"a{separator}b"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{broken", ["line 2 is not JSON", "each line is one object"]),
        ('{"prompt": "x"}', ["line 2 has no field 'prompt' or 'answer'", 'got \'{"prompt"', "data.answer_key"]),
        ('{"question": "x", "answer": "y"}', ["line 2 has no field 'prompt' or 'answer'", "data.prompt_key"]),
        ('["prompt", "answer"]', ["line 2 has no field 'prompt' or 'answer'"]),
        ("5", ["line 2 has no field 'prompt' or 'answer'"]),
        ('{"prompt": "12345", "answer": ""}', ["line 2 has 5 tokens", "data.max_prompt_tokens = 4", "drop the row"]),
        ('{"prompt": "", "answer": ""}', ["line 2 has 0 tokens", "a prompt has 1 to data.max_prompt_tokens"]),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, line: str, parts: list[str]) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ConfigError) as caught:
        read_prompts(path, DataConfig(max_prompt_tokens=4), Letters())
    assert [part for part in [path, *parts] if part not in str(caught.value)] == [], str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no prompts at nowhere\.jsonl; .* 'prompt' and 'answer'"):
        read_prompts("nowhere.jsonl", DataConfig(), Letters())
    with pytest.raises(ConfigError, match=r"train\.jsonl holds no prompts; it needs at least one line"):
        read_prompts(write(tmp_path, "", "  "), DataConfig(), Letters())
