"""The order and the position of the prompt stream, the mixing of sources, and the seeds of samples."""

import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from rl.data.prompts import Prompt, PromptStream, WeightedSource, decode_all, sample_seed, source_at


def make_prompts(count: int) -> list[Prompt]:
    return [Prompt(row, 0, f"text {row}", f"answer {row}", [row]) for row in range(count)]


def take(stream: PromptStream, count: int) -> list[Prompt]:
    """Return the first prompts."""
    return [stream.at(position) for position in range(count)]


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in prompts]


def test_stream_order_is_fixed() -> None:
    """A changed order would make old runs unrepeatable."""
    taken = take(PromptStream(make_prompts(6), seed=0), 12)
    assert ids(taken) == [0, 5, 1, 4, 3, 2, 2, 0, 1, 5, 3, 4]
    assert [prompt.epoch for prompt in taken] == [0] * 6 + [1] * 6
    assert taken[6] == Prompt(2, 1, "text 2", "answer 2", [2], number=6)


def test_stream_order_depends_on_seed_and_epoch_alone() -> None:
    at_once = take(PromptStream(make_prompts(20), seed=7), 60)
    stream = PromptStream(make_prompts(20), seed=7)
    anyhow = {position: stream.at(position) for position in random.Random(0).sample(range(60), 60)}
    assert [anyhow[position] for position in range(60)] == at_once
    epochs = [ids(at_once[start : start + 20]) for start in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert len(set(map(tuple, [*epochs, range(20)]))) == 4
    assert ids(take(PromptStream(make_prompts(20), seed=8), 20)) != epochs[0]


def test_sample_seed_is_a_fixed_hash() -> None:
    """`printf 1/2/3/4 | b2sum -l 64`, without the lowest bit."""
    assert sample_seed(0, 0, 0, 0) == 0xF06EE5B05F9D7DA2 // 2
    assert sample_seed(1, 2, 3, 4) == 0xAAC61176BE6E3020 // 2


def test_sample_seeds_differ_in_every_argument() -> None:
    seeds = [sample_seed(a, b, c, d) for a in (0, 1, 11) for b in (0, 1, 11) for c in (0, 1, 11) for d in (0, 1, 11)]
    assert len(set(seeds)) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)


def sources(*sizes_and_weights: tuple[int, float | str]) -> list[WeightedSource]:
    return [WeightedSource(size, Fraction(str(weight))) for size, weight in sizes_and_weights]


def letters(weights: list[int | str], count: int) -> str:
    fractions = [Fraction(weight) for weight in weights]
    return "".join("abcd"[source_at(position, fractions)[0]] for position in range(count))


def test_the_schedule_of_sources() -> None:
    """Due times worked out by hand. For 3 : 1, a is due at 1/6, 1/2, 5/6, and b at 1/2, after a. For 5 : 2 : 1, a is
    due at .1 .3 .5 .7 .9, b at .25 .75, c at .5, after a. For 1/3 : 2/3, a is due at 1/2 and b at 1/4, 3/4."""
    assert letters([3, 1], 8) == "aaba" * 2
    assert letters([5, 2, 1], 16) == "abaacaba" * 2
    assert letters(["1/3", "2/3"], 6) == "bab" * 2
    assert letters([1, 1, 1], 6) == "abc" * 2
    assert letters([7], 3) == "aaa"


WEIGHTS = [(3, 1), (5, 2, 1), (0.7, 0.3), (1, 1000), (3.14159, 2.71828, 1.41421), (1, 1, 1, 1)]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_position_takes_the_next_row_of_a_source_in_proportion(weights: tuple[float, ...]) -> None:
    """The position alone gives the same row as counting from the start. No source is ever further than
    (1 + number of sources) / 2 from its share."""
    fractions = [Fraction(str(weight)) for weight in weights]
    taken = [0] * len(weights)
    for position in range(2500):
        source, place = source_at(position, fractions)
        assert place == taken[source]
        taken[source] += 1
        for count, weight in zip(taken, fractions):
            assert abs(count - (position + 1) * weight / sum(fractions)) <= Fraction(1 + len(weights), 2)


def test_a_position_far_out_needs_no_history() -> None:
    assert source_at(4 * 10**15 + 2, [Fraction(3), Fraction(1)]) == (1, 10**15)


def test_mixed_stream_by_hand() -> None:
    """Two rows have weight 1 (ids 0, 1) and three have weight 3 (ids 2, 3, 4). The first source is due at 1/2, the
    second at 1/6, 1/2, 5/6. `random.Random("0/SOURCE/EPOCH").shuffle` orders their epochs: [0, 1], [1, 0]; [0, 2, 1],
    [1, 0, 2]."""
    taken = take(PromptStream(make_prompts(5), seed=0, sources=sources((2, 1), (3, 3))), 8)
    assert ids(taken) == [2, 0, 4, 3, 3, 1, 2, 4]
    assert [prompt.epoch for prompt in taken] == [0, 0, 0, 0, 1, 0, 1, 1]


def test_no_sample_of_a_mixed_stream_has_the_seed_of_another() -> None:
    taken = take(PromptStream(make_prompts(10), seed=1, sources=sources((3, 5), (7, 1))), 500)
    assert len({sample_seed(1, prompt.epoch, prompt.id, 0) for prompt in taken}) == 500


@pytest.mark.parametrize("mix", [sources((7, 1)), sources((2, 3), (5, 1)), sources((1, 0.1), (4, 0.7), (2, 0.2))])
def test_a_mixed_stream_resumes_at_any_position(mix: list[WeightedSource]) -> None:
    whole = take(PromptStream(make_prompts(7), seed=3, sources=mix), 60)
    for position in range(50):
        resumed = PromptStream(make_prompts(7), seed=3, sources=mix)
        assert [resumed.at(place) for place in range(position, position + 10)] == whole[position : position + 10]


def test_two_epochs_see_each_row_twice() -> None:
    stream = PromptStream(make_prompts(7), seed=3)
    assert Counter(ids(take(stream, 2 * len(stream)))) == dict.fromkeys(range(7), 2)
    mixed = PromptStream(make_prompts(8), seed=3, sources=sources((2, 1), (6, 3)))
    assert Counter(ids(take(mixed, 2 * len(mixed)))) == dict.fromkeys(range(8), 2)


def test_one_weight_is_no_mixture() -> None:
    alone = PromptStream(make_prompts(6), seed=0)
    weighted = PromptStream(make_prompts(6), seed=0, sources=sources((6, 0.3)))
    assert take(weighted, 12) == take(alone, 12)
    assert weighted.digest == alone.digest


def test_the_digest_depends_on_everything_that_orders_the_stream() -> None:
    def digest(*sizes_and_weights: tuple[int, float | str], prompts: list[Prompt] | None = None, seed: int = 0) -> str:
        return PromptStream(prompts or make_prompts(4), seed, sources(*sizes_and_weights)).digest

    assert digest() == "45262b435231d5f0"  # as in checkpoints from before sources had weights
    others = [
        digest(seed=1),
        digest(prompts=make_prompts(4)[::-1]),
        digest(prompts=[*make_prompts(3), Prompt(3, 0, "text 3", "answer", [3])]),
        digest(prompts=[*make_prompts(3), Prompt(3, 0, "text", "answer 3", [3])]),
        digest((1, 1), (3, 1)),
        digest((3, 1), (1, 1)),
        digest((1, 1), (3, 2)),
        digest((1, 2), (3, 1)),
    ]
    assert len({digest(), *others}) == 9
    assert digest((1, 0.5), (3, 0.25)) == digest((1, 2), (3, 1))  # the same stream


def tokenizer_of(model: Any, **options: Any) -> PreTrainedTokenizerFast:
    inner = tokenizers.Tokenizer(model)
    inner.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", **options)


def test_sequences_are_decoded_together_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that removes spaces from its texts is called for each sequence."""
    vocabulary = {"[UNK]": 0, "a": 1, " ": 2, ".": 3, "##b": 4}
    pieces = tokenizer_of(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="[UNK]"))
    words = tokenizer_of(tokenizers.models.WordPiece(vocab=vocabulary), clean_up_tokenization_spaces=True)
    sequences = [[1, 2, 3, 5], [], [1, 4, 1], [5, 5]]
    for tokenizer, texts in ((pieces, ["a   .", "", "a ##b a", ""]), (words, ["a  .", "", "a ##b a", ""])):
        alone = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in sequences]
        assert decode_all(tokenizer, sequences) == alone == texts
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda *args, **kwargs: "alone")
    assert decode_all(pieces, sequences) == ["a   .", "", "a ##b a", ""]
    assert decode_all(words, sequences) == ["alone"] * 4
