"""Responses that are cut and continued, and the prefix cache over versions of the weights, with the real vLLM."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import HashStore

from rl.config.load import load_config
from rl.config.schema import ROOT
from rl.model.shards import TensorInfo
from rl.rollout.dispatch import Sampling
from rl.rollout.engine import Completion, EngineSeat, Request

pytestmark = pytest.mark.timeout(120)
MODEL, BLOCK_SIZE, STOP, NUM_SEQUENCES, NUM_TOKENS = ROOT / "configs" / "tiny", 32, 0, 12, 40
MAX_STEPS = 500
SETTINGS = (
    "data.max_prompt_tokens=64",
    f"rollout.max_new_tokens={NUM_TOKENS}",
    "rollout.max_tokens_per_round=5",
    f"rollout.max_num_seqs={NUM_SEQUENCES}",
    "rollout.kv_cache_mb=1",  # too small for all sequences at once
)
OPTIONS = f"{{block_size: {BLOCK_SIZE}, max_num_batched_tokens: 70}}"  # two prompts take two steps


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return load_file(MODEL / "model.safetensors")


@pytest.fixture(scope="module")
def engines(vllm_environment: dict[str, str], weights: dict[str, Tensor]) -> Iterator[SimpleNamespace]:
    """Two engines. The second keeps its prefix cache over versions."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**vllm_environment, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        first = build_engine(keep_kv=False)
        second = build_engine(keep_kv=True, shares_groups_with=first)
        for engine in (first, second):
            load(engine, weights, version=1)
        yield SimpleNamespace(first=first, second=second)
        second.close()


def build_engine(keep_kv: bool, shares_groups_with: Any = None) -> Any:
    settings = (*SETTINGS, f"rollout.engine_options={OPTIONS}", f"rollout.keep_kv={str(keep_kv).lower()}")
    seat = EngineSeat("test", 0, 1, HashStore(), torch.device("cpu"), sleeps=False, stop_token_ids=[STOP])
    build = importlib.import_module("rl.rollout.vllm.build").build
    failed = shares_groups_with and SimpleNamespace(abandon=lambda: shares_groups_with._group)
    return build(load_config(overrides=settings), MODEL, seat, failed)


def load(engine: Any, weights: dict[str, Tensor], version: int) -> None:
    infos = [TensorInfo(name, tuple(one.shape), "float32", True) for name, one in weights.items()]
    engine.begin_version()
    engine.memory_layout(infos).fill(dict(enumerate(weights.values())))
    engine.confirm(version)


def changed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: one + 0.03 * torch.randn(one.shape, generator=generator) for name, one in weights.items()}


def sample(engine: Any, requests: Sequence[Request]) -> dict[str, Completion]:
    engine.add(requests)
    ended: dict[str, Completion] = {}
    for _ in range(MAX_STEPS):
        if not engine.num_unfinished:
            return ended
        ended |= {completion.id: completion for completion in engine.step()}
    raise AssertionError("it does not end")


def make_request(number: int, max_tokens: int = NUM_TOKENS, cache_key: str = "") -> Request:
    prompt = [5 + number, 6, 7, 8 + number] * 15
    sampling = Sampling(num_samples=1, temperature=2.0, max_new_tokens=NUM_TOKENS)
    return Request(str(number), prompt, sampling, max_tokens, seed=number, cache_key=cache_key)


def make_requests(max_tokens: int = NUM_TOKENS) -> list[Request]:
    return [make_request(number, max_tokens) for number in range(NUM_SEQUENCES)]


def sample_in_parts(
    engines: Sequence[Any], max_tokens: int, cut: Callable[[Completion], Completion] = lambda completion: completion
) -> dict[str, Completion]:
    """Sample requests of `max_tokens` tokens, with the engines in turn and each part in another order."""
    unfinished, whole, number = make_requests(max_tokens), dict[str, Completion](), 0
    while unfinished:
        ended = {name: cut(one) for name, one in sample(engines[number % len(engines)], unfinished).items()}
        number += 1
        for name, one in ended.items():
            before = whole.get(name, Completion(name, [], [], False))
            whole[name] = replace(
                one, tokens=before.tokens + one.tokens, logprobs=before.logprobs + one.logprobs, noise=b""
            )
        unfinished = [
            replace(one, tokens=one.tokens + ended[one.id].tokens, noise=ended[one.id].noise, max_tokens=left)
            for one in reversed(unfinished)
            if ended[one.id].is_cut and (left := min(max_tokens, NUM_TOKENS - len(whole[one.id].tokens)))
        ]
    return whole


def tokens_of(completions: dict[str, Completion]) -> dict[str, list[int]]:
    return {name: one.tokens for name, one in sorted(completions.items())}


def assert_same(found: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert tokens_of(found) == tokens_of(expected)
    for name, one in expected.items():
        assert found[name].logprobs == pytest.approx(one.logprobs, abs=1e-4)
        assert (found[name].id, found[name].is_cut) == (one.id, one.is_cut)


@pytest.fixture(scope="module")
def alone(engines: SimpleNamespace) -> dict[str, Completion]:
    """Uncut responses, sampled one at a time: nothing is preempted and no prompt is computed in chunks."""
    found: dict[str, Completion] = {}
    for request in make_requests():
        found |= sample(engines.first, [request])
    assert not any(one.num_preemptions for one in found.values())
    assert {one.is_cut for one in found.values()} == {False, True}
    return found


def test_preemption_and_chunks_of_a_prompt_do_not_change_the_noise(
    engines: SimpleNamespace, alone: dict[str, Completion]
) -> None:
    together = sample(engines.first, make_requests())
    assert any(one.num_preemptions for one in together.values())
    assert_same(together, alone)


def test_how_full_the_kv_cache_is(engines: SimpleNamespace) -> None:
    """It has 1 MB, too little for all sequences at once, so it is full until enough of them have ended."""
    engine, uses = engines.first, []
    engine.add(make_requests())
    while engine.num_unfinished:
        engine.step()
        uses.append(engine.kv_use)
    assert 0.9 < max(uses) <= 1 and uses[-1] == 0
    measure = importlib.import_module("rl.rollout.vllm.engine").measure_kv_cache
    assert 0.9 * 2**20 < measure(engine._llm) <= 2**20


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_a_response_that_is_cut_and_continued_is_the_same_as_an_uncut_one(
    max_tokens: int, engines: SimpleNamespace, alone: dict[str, Completion]
) -> None:
    assert_same(sample_in_parts([engines.first, engines.second], max_tokens), alone)


def test_without_its_noise_a_continued_response_differs(engines: SimpleNamespace, alone: dict[str, Completion]) -> None:
    found = sample_in_parts([engines.first], 5, cut=lambda completion: replace(completion, noise=b""))
    assert all(found[name].tokens[:5] == one.tokens[:5] for name, one in alone.items())
    assert all(found[name].tokens != one.tokens for name, one in alone.items() if len(one.tokens) > 10)


def test_without_a_seed_there_is_no_noise_to_carry(engines: SimpleNamespace) -> None:
    ended = sample(engines.first, [replace(one, seed=None) for one in make_requests(2)])
    assert {(one.noise, len(one.tokens), one.is_cut) for one in ended.values()} >= {(b"", 2, True)}
    assert {one.noise for one in sample(engines.first, make_requests(1)).values() if one.is_cut}.isdisjoint({b""})


@pytest.mark.parametrize("is_salted", [True, False])
def test_a_stale_entry_of_the_prefix_cache_is_not_used(
    is_salted: bool, engines: SimpleNamespace, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays in the cache if the cache is not cleared. Without the salt, it is used."""
    engine, request = engines.first, make_request(3)
    process = engine._process

    def without_salt(requests: Sequence[Request]) -> Iterator[Any]:
        for sent in process(requests):
            sent.cache_salt = None
            yield sent

    if not is_salted:
        monkeypatch.setattr(engine, "_process", without_salt)
    load(engine, weights, version=2)
    assert [sample(engine, [request])["3"].num_cached_tokens for _ in range(2)] == [0, BLOCK_SIZE]
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
        load(engine, changed(weights), version=3)
    stale = sample(engine, [request])["3"]
    load(engine, changed(weights), version=4)  # clears the cache
    fresh = sample(engine, [request])["3"]
    assert fresh.num_cached_tokens == 0
    assert stale.num_cached_tokens == (0 if is_salted else BLOCK_SIZE)
    assert (stale.logprobs[0] == pytest.approx(fresh.logprobs[0], abs=1e-4)) == is_salted
    assert (stale.tokens == fresh.tokens) == is_salted
    load(engine, weights, version=1)


def test_a_cache_key_reuses_entries_of_older_weights(engines: SimpleNamespace, weights: dict[str, Tensor]) -> None:
    engine = engines.second
    load(engine, weights, version=2)
    first = sample(engine, [make_request(3, 1, cache_key="a"), make_request(4, 1)])
    assert [one.num_cached_tokens for one in first.values()] == [0, 0]
    load(engine, changed(weights), version=3)
    requests = [make_request(3, 1, cache_key="a"), make_request(4, 1)]
    assert {name: one.num_cached_tokens for name, one in sample(engine, requests).items()} == {"3": BLOCK_SIZE, "4": 0}
    other = [make_request(3, 1, cache_key="b"), make_request(3, 1, cache_key="3")]
    assert [sample(engine, [one])["3"].num_cached_tokens for one in other] == [0, 0]
    load(engine, weights, version=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": None},
        {"sampling": Sampling(num_samples=1, temperature=0.0, max_new_tokens=NUM_TOKENS)},
        {"noise": bytes(16)},
    ],
    ids=["without seeds", "greedy", "noise of another kind of device"],
)
def test_a_response_continues_after_a_resume_with_other_settings(
    changes: dict[str, Any], engines: SimpleNamespace
) -> None:
    """A checkpoint holds the noise of carried responses. The resumed run may have no generator to set it in."""
    (cut,) = sample(engines.second, [make_request(3, 2)]).values()
    assert cut.is_cut and cut.noise
    request = replace(make_request(3, 2), tokens=make_request(3).tokens + cut.tokens, noise=cut.noise)
    assert sample(engines.second, [replace(request, **changes)])["3"].tokens
