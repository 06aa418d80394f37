"""Samples in TensorBoard: what is shown, that no text breaks out of its block, and how they reach the leader."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.plugin_util import markdown_to_safe_html

from rl.config.schema import MetricsConfig
from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.placement.roles import plan
from rl.report.samples import MAX_CHARACTERS, MAX_TURNS, ReportedSample, show, shows_samples
from rl.rollout.held import HeldGroups
from rl.rollout.sample_exchange import SampleExchange
from tests.conversations import Said, Sample, batch_of_conversations
from tests.mails import connected

ONE = Sample(1.0, [[[1, 2], Said(0, [5, 5]), [9], Said(1, [7])]])
# The template rewrites 6 6 to 6.
SPLIT = Sample(0.5, [[[1, 2], Said(0, [6, 6])], [[1, 2, 6, 8, 8], Said(1, [7, 7, 7])]], True)
OBSERVED = "\r\n```\n</code>|*x*\n\n# no\n```"  # it would break out of a careless block
NAMES = {9: OBSERVED, 7: "<|eot|>", 10: "x" * MAX_CHARACTERS + "tail"}


class Letters:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens, "some model families mark calls with special tokens"
        return "".join(NAMES.get(token, chr(96 + token)) for token in token_ids)


def html_of(sample: ReportedSample) -> str:
    return markdown_to_safe_html(show([sample], Letters()))  # type: ignore[arg-type]


def single(prompt: list[int], response: list[int], reward: float = 0.25) -> Batch:
    batch = batch_of_conversations([[Sample(reward, [[prompt, Said(0, response)]])]])
    return batch.without(["turns", "samples"])


def test_a_response_is_shown_with_its_answer_and_the_parts_of_its_reward() -> None:
    result = {"parts": {"match": 0.25, "match/is_number": 1.0}, "status": "ok"}
    assert html_of(ReportedSample(single([1, 2], [3]), "*7*", result, [0.25, 1.0])) == (
        "<h3>sample 1: reward 0.25</h3>\n"
        "<p><strong>prompt</strong> (2 tokens)</p>\n<pre><code>ab\n</code></pre>\n"
        "<p><strong>reference answer</strong></p>\n<pre><code>*7*\n</code></pre>\n"
        "<p><strong>response</strong> (1 token)</p>\n<pre><code>c\n</code></pre>\n"
        "<p><strong>score</strong></p>\n"
        "<pre><code>reward  0.25\n  reward/match            0.25\n  reward/match/is_number  1\n"
        "rewards of all 2 samples of this prompt: 0.25 1\n</code></pre>"
    )


def test_failed_rewards_and_unknown_answers_are_said() -> None:
    failed = html_of(ReportedSample(single([1], [2], 0.0), "", {"parts": {}, "status": "timeout"}, [0.0]))
    assert "the reward functions failed: timeout" in failed
    assert "reference answer" not in failed
    assert "reward  0\n</code>" in html_of(ReportedSample(single([1], [2], 0.0), "", None, [0.0]))


def test_a_conversation_is_shown_turn_by_turn() -> None:
    assert html_of(ReportedSample(batch_of_conversations([[ONE]]), "", None, [1.0])) == (
        "<h3>sample 1: reward 1</h3>\n"
        "<p><strong>prompt</strong> (2 tokens)</p>\n<pre><code>ab\n</code></pre>\n"
        "<p><strong>model, turn 1</strong> (2 tokens)</p>\n<pre><code>ee\n</code></pre>\n"
        "<p><strong>environment</strong> (1 token)</p>\n"
        "<pre><code>\\r\n```\n&lt;/code&gt;|*x*\n\n# no\n```\n</code></pre>\n"
        "<p><strong>model, turn 2</strong> (1 token)</p>\n<pre><code>&lt;|eot|&gt;\n</code></pre>\n"
        "<p><strong>score</strong></p>\n<pre><code>reward  1\n</code></pre>"
    )
    split = html_of(ReportedSample(batch_of_conversations([[SPLIT]]), "", None, [0.5]))
    assert "<h3>sample 1: reward 0.5, cut after 5 tokens</h3>" in split
    assert "<p><strong>environment</strong> (2 tokens)</p>\n<pre><code>hh\n" in split


def test_long_texts_lose_their_middle_so_that_files_stay_small() -> None:
    shown = html_of(ReportedSample(single([1], [10]), "", None, [0.25]))
    assert "[... 4 characters left out ...]" in shown and shown.count("x") == MAX_CHARACTERS - 4
    talk = [part for turn in range(MAX_TURNS) for part in ([2], Said(turn, [3]))]
    long = html_of(ReportedSample(batch_of_conversations([[Sample(1.0, [[[1], *talk[1:]]])]]), "", None, [1.0]))
    assert f"<strong>{MAX_TURNS - 1} messages left out here</strong>" in long
    assert long.count("<strong>model, turn") == MAX_TURNS // 2
    assert f"model, turn {MAX_TURNS}<" in long and "model, turn 1<" in long


@pytest.mark.parametrize(("interval", "count", "steps"), [(5, 4, [1, 6, 11]), (0, 4, []), (1, 0, [])])
def test_samples_are_shown_every_few_steps(interval: int, count: int, steps: list[int]) -> None:
    metrics = MetricsConfig(samples_interval=interval, num_samples=count)
    assert [step for step in range(1, 13) if shows_samples(metrics, step)] == steps


class Stream:
    def at(self, number: int) -> Prompt:
        return Prompt(number, 0, "", f"answer {number}", [])


def held_by(actor: int, numbers: list[int], has_turns: bool) -> HeldGroups:
    """Return the groups that an actor holds of groups that are dealt to two actors. The prompt is the number."""
    own = [number for number in numbers if number % 2 == actor]
    talks = {number: [Sample(number / 10, [[[number], Said(0, [7])]]), Sample(1.0, [[[number]]])] for number in own}
    batches = {number: batch_of_conversations([talk]) for number, talk in talks.items()}
    if not has_turns:
        batches = {number: batch.without(["turns", "samples"]) for number, batch in batches.items()}
    results: Any = {number: [{"parts": {"n": number}, "status": "ok", "failure": object()}, None] for number in own}
    return HeldGroups({number: number % 2 for number in numbers}, batches, results)


@pytest.mark.parametrize("has_turns", [True, False])
def test_the_leader_gets_samples_of_different_prompts_from_all_actors(has_turns: bool) -> None:
    """Actor 0 is the leader. It owns the even groups. Three groups are shown."""
    numbers, placement = [5, 4, 7, 6], plan({"actor,rollout": "all"}, 1, 2)
    metrics = MetricsConfig(samples_interval=1, num_samples=3)
    with connected(2) as mails:
        worlds: list[Any] = [SimpleNamespace(mail=mail, rank=rank, step=1) for rank, mail in enumerate(mails)]
        exchanges = [SampleExchange(world, placement, metrics) for world in worlds]
        other = threading.Thread(target=exchanges[1].collect, args=(numbers, held_by(1, numbers, has_turns), None))
        other.start()
        exchanges[0].collect(numbers, held_by(0, numbers, has_turns), Stream())  # type: ignore[arg-type]
        other.join()
        found = exchanges[0].samples
        assert [sample.answer for sample in found] == ["answer 5", "answer 4", "answer 7"]
        assert [sample.batch.tokens.tolist() for sample in found] == [[5, 7], [4, 7], [7, 7]]
        assert [sample.result for sample in found] == [{"parts": {"n": n}, "status": "ok"} for n in (5, 4, 7)]
        assert [sample.rewards for sample in found] == [pytest.approx([n / 10, 1.0]) for n in (5, 4, 7)]
        assert torch.equal(found[0].batch.rewards, torch.tensor([0.5]))
        assert exchanges[1].samples == []
