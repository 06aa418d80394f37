"""The responses of a group over several rounds, as arrays and as a Batch."""

import statistics
from dataclasses import replace

import pytest

from rl.data.batch import Batch
from rl.data.prompts import Prompt, sample_seed
from rl.rollout.dispatch import Sampling, Task
from rl.rollout.engine import Completion, Request
from rl.rollout.group import Group
from rl.rollout.responses import Response, pack_group, unpack_group
from rl.rollout.service import make_requests

STOP = 0
PROMPT = Prompt(9, 1, "text", "abc", [11, 12])


def completion(tokens: list[int], is_cut: bool, noise: bytes = b"") -> Completion:
    return Completion("2/3/0", tokens, [-0.5 * token for token in tokens], is_cut, noise)


def test_a_finished_group() -> None:
    first, second = Response(reward=0.5), Response(reward=0.75)
    first.append(completion([5, STOP], is_cut=False), version=6, max_new_tokens=3)
    second.append(completion([7, STOP, 8], is_cut=True), version=6, max_new_tokens=3)
    batch = pack_group(PROMPT.tokens, 3, [first, second])
    assert batch.tokens.tolist() == [11, 12, 5, STOP, 11, 12, 7, STOP, 8]
    assert batch.lengths.tolist() == [4, 5]
    assert batch.prompt_lengths.tolist() == [2, 2]
    assert batch.versions.tolist() == [-1, -1, 6, 6, -1, -1, 6, 6, 6]
    assert batch.rollout_logprobs.tolist() == [0, 0, -2.5, 0, 0, 0, -3.5, 0, -4]
    assert batch.rewards.tolist() == [0.5, 0.75]
    assert batch.group_ids.tolist() == [3, 3]
    assert batch.truncated.tolist() == [False, True]
    assert batch.ended is None and batch.noise is None


@pytest.mark.parametrize(("limit", "is_ended", "is_truncated"), [(5, False, False), (4, True, True), (3, True, True)])
def test_only_max_new_tokens_truncates(limit: int, is_ended: bool, is_truncated: bool) -> None:
    response = Response()
    response.append(completion([1, 2], is_cut=True, noise=b"x"), 6, max_new_tokens=5)
    assert (response.is_ended, response.is_truncated, response.noise) == (False, False, b"x")
    response.append(completion([3, 4], is_cut=True, noise=b"y"), 7, max_new_tokens=limit)
    assert (response.is_ended, response.is_truncated) == (is_ended, is_truncated)
    assert response.noise == (b"" if is_ended else b"y")
    assert (response.tokens.tolist(), response.versions.tolist()) == ([1, 2, 3, 4], [6, 6, 7, 7])


def test_a_response_may_stop_exactly_at_the_limit() -> None:
    response = Response([1], [-0.5], [6])
    response.append(completion([2, STOP], is_cut=False), 7, max_new_tokens=3)
    assert (response.is_ended, response.is_truncated) == (True, False)


@pytest.mark.parametrize("noise", [b"", b"\x01\x00\x02"])
def test_an_unfinished_group_survives_a_message(noise: bytes) -> None:
    ended = Response([5, STOP], [-0.5, -0.25], [6, 7], b"", is_ended=True, is_truncated=True, reward=0.5)
    running = Response([7], [-1.0], [6], noise)
    batch = Batch.from_bytes(pack_group(PROMPT.tokens, 3, [ended, running]).to_bytes())
    assert batch.ended is not None and batch.ended.tolist() == [True, False]
    assert unpack_group(batch) == [ended, running]


def test_requests_ask_for_what_is_left() -> None:
    """Of three responses one has ended, one has a whole round left, and one is near max_new_tokens."""
    responses = [Response([5, STOP], [0, 0], [6, 6], is_ended=True), Response([7], [0], [6], b"x")]
    responses.append(Response([1, 2, 3, 4], [0] * 4, [6] * 4, b"y"))
    sampling = Sampling(3, 1.0, max_new_tokens=6, max_tokens_per_round=4)
    task = Task(2, 3, 0, PROMPT, sampling, version=7, is_carried=True)
    group = Group(task, carried=pack_group(PROMPT.tokens, 3, responses).to_bytes())
    group.begin()
    seeds = [sample_seed(0, 1, 9, sample) for sample in range(3)]
    assert make_requests([group], run_seed=0) == [
        Request("2/3/1", [11, 12, 7], sampling, 4, seeds[1], b"x"),
        Request("2/3/2", [11, 12, 1, 2, 3, 4], sampling, 2, seeds[2], b"y"),
    ]
    assert [each.cache_key for each in make_requests([group], None)] == ["", ""]
    kept = Group(replace(task, sampling=replace(sampling, keeps_kv=True)), carried=group.carried)
    kept.begin()
    assert [each.cache_key for each in make_requests([kept], None)] == ["1/9", "1/9"]
    assert group.again().responses == [] and group.again().carried == group.carried


def test_without_a_limit_a_request_asks_for_the_whole_response() -> None:
    group = Group(Task(2, 3, 0, PROMPT, Sampling(2, 1.0, 6), version=7))
    group.begin()
    requests = make_requests([group], run_seed=None)
    assert [(each.tokens, each.max_tokens, each.seed, each.noise) for each in requests] == [
        ([11, 12], 6, None, b"")
    ] * 2


def test_drawn_lengths_are_lognormal_and_cut() -> None:
    """The medians and the share above a limit are those of the distribution: 607, and 11.2 % above 2,048."""
    sampling = Sampling(1, 1.0, max_new_tokens=8192, mean_tokens=1000, length_seed=3)
    lengths = [sampling.length(replace(PROMPT, id=number), 0) for number in range(10_000)]
    assert (min(lengths) >= 1, max(lengths)) == (True, 8192)
    assert statistics.median(lengths) == pytest.approx(607, rel=0.05)
    assert statistics.mean(lengths) == pytest.approx(1000, rel=0.05)
    assert sum(length > 2048 for length in lengths) == pytest.approx(1120, rel=0.1)
    assert sum(length == 8192 for length in lengths) == pytest.approx(46, rel=0.5)
    for mean in (0, 9, 10):
        same = Sampling(1, 1.0, max_new_tokens=9, mean_tokens=mean)
        assert {same.length(PROMPT, sample) for sample in range(99)} == {9}


def test_a_drawn_length_depends_on_seed_epoch_prompt_and_sample_alone() -> None:
    sampling = Sampling(2, 1.0, max_new_tokens=10**12, mean_tokens=10**8, length_seed=3)
    length = sampling.length(PROMPT, 0)
    others = [sampling.length(PROMPT, 1), replace(sampling, length_seed=4).length(PROMPT, 0)]
    others += [sampling.length(replace(PROMPT, **{name: 5}), 0) for name in ("id", "epoch")]
    assert len({length, *others}) == 5
    same = replace(sampling, num_samples=8, temperature=0.5, max_new_tokens=10**13, max_tokens_per_round=3)
    assert same.length(replace(PROMPT, text="other", tokens=[1], place="there"), 0) == length


def test_a_response_ends_at_its_drawn_length() -> None:
    """Also if that is no multiple of the limit of a round. Only max_new_tokens counts as truncation."""
    sampling = Sampling(40, 1.0, max_new_tokens=9, max_tokens_per_round=4, mean_tokens=5)
    lengths = [sampling.length(PROMPT, sample) for sample in range(40)]
    assert {4, 5, 8, 9} <= set(lengths)
    group, num_tokens = Group(Task(2, 3, 0, PROMPT, sampling, version=7)), 0
    group.begin()
    while group.running:
        requests = make_requests([group], run_seed=None)
        for request in requests:
            sample = int(request.id.split("/")[-1])
            assert request.max_tokens == min(4, lengths[sample] - num_tokens)
            group.responses[sample].append(
                completion([1] * request.max_tokens, is_cut=True), 7, sampling.max_new_tokens, lengths[sample]
            )
        group.running = {number for number, each in enumerate(group.responses) if not each.is_ended}
        num_tokens += 4
    assert [len(each.tokens) for each in group.responses] == lengths
    assert [each.is_truncated for each in group.responses] == [length == 9 for length in lengths]


def test_a_carried_response_beyond_its_drawn_length_gets_one_more_token() -> None:
    """A run may resume with a smaller mean. An engine accepts no request for less than a token."""
    sampling = Sampling(1, 1.0, max_new_tokens=99, max_tokens_per_round=4, mean_tokens=1)
    task = Task(2, 3, 0, PROMPT, sampling, version=7, is_carried=True)
    response = Response([1] * 80, [0.0] * 80, [6] * 80)
    group = Group(task, carried=pack_group(PROMPT.tokens, 3, [response]).to_bytes())
    group.begin()
    assert sampling.length(PROMPT, 0) < 80
    assert [each.max_tokens for each in make_requests([group], run_seed=0)] == [1]
