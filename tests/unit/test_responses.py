"""The responses of a group over several rounds, as lists and as a Batch."""

import pytest

from rl.data.batch import Batch
from rl.data.prompts import Prompt, sample_seed
from rl.rollout.dispatch import Sampling, Task
from rl.rollout.engine import Completion, Request
from rl.rollout.responses import Response, pack_group, unpack_group
from rl.rollout.service import Group, make_requests

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
    assert (response.tokens, response.versions) == ([1, 2, 3, 4], [6, 6, 7, 7])


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
    assert [each.cache_key for each in make_requests([group], None, keeps_kv=True)] == ["1/9", "1/9"]
    assert group.again().responses == [] and group.again().carried == group.carried


def test_without_a_limit_a_request_asks_for_the_whole_response() -> None:
    group = Group(Task(2, 3, 0, PROMPT, Sampling(2, 1.0, 6), version=7))
    group.begin()
    requests = make_requests([group], run_seed=None)
    assert [(each.tokens, each.max_tokens, each.seed, each.noise) for each in requests] == [
        ([11, 12], 6, None, b"")
    ] * 2


def test_an_evaluation_never_uses_the_cache_of_older_weights() -> None:
    """Its prompts are the same every time, so a key without the version finds entries of the evaluation before."""
    group = Group(Task(2, 3, 0, PROMPT, Sampling(2, 1.0, 6), version=7))  # an evaluation has no limit per round
    group.begin()
    assert {each.cache_key for each in make_requests([group], run_seed=0, keeps_kv=True)} == {""}
