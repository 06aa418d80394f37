"""The engine without a model, and the packing of a finished group."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl.data.prompts import Prompt
from rl.model.shards import TensorInfo
from rl.rollout.dispatch import NewTasks, Sampling, Task
from rl.rollout.engine import Completion, Request
from rl.rollout.fake_engine import FakeEngine
from rl.rollout.recovery import EngineHost, clear_frames
from rl.rollout.service import RolloutService
from rl.world.messages import Letter
from rl.world.world import World
from tests.mails import connected_worlds

STOP = 0


def make_engine(max_num_seqs: int = 8) -> FakeEngine:
    engine = FakeEngine(max_num_seqs, STOP)
    engine.confirm(1)
    return engine


def request(name: str, seed: int | None, max_tokens: int = 50) -> Request:
    return Request(name, [1, 2], Sampling(1, 1.0, max_new_tokens=50), max_tokens, seed)


def run(engine: FakeEngine, requests: list[Request]) -> dict[str, Completion]:
    engine.add(requests)
    ended: dict[str, Completion] = {}
    while engine.num_unfinished:
        ended |= {completion.id: completion for completion in engine.step()}
    return ended


def test_tokens_and_logprobs_follow_from_the_seed() -> None:
    ended = run(make_engine(), [request("a", seed=2), request("b", seed=3)])
    assert ended["a"].tokens == [9, 7, 5, 5, 0]
    assert ended["a"].logprobs[:2] == pytest.approx([-0.116994, -0.883691], abs=1e-6)
    assert len(ended["a"].logprobs) == 5
    assert ended["b"].tokens == [7, 4, 9, 9, 9, 4, 7, 0]


def test_without_a_seed_responses_differ() -> None:
    ended = run(make_engine(), [request(str(number), seed=None) for number in range(16)])
    assert len({tuple(one.logprobs) for one in ended.values()}) == 16


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_a_response_that_is_cut_and_continued_is_the_same_as_an_uncut_one(max_tokens: int) -> None:
    """Sequences change their order and their engine at every cut."""
    seeds = range(12)
    whole = run(make_engine(), [request(str(seed), seed) for seed in seeds])
    tokens: dict[str, list[int]] = {str(seed): [] for seed in seeds}
    logprobs: dict[str, list[float]] = {str(seed): [] for seed in seeds}
    unfinished = [request(str(seed), seed, max_tokens) for seed in seeds]
    while unfinished:
        ended = run(make_engine(max_num_seqs=3), unfinished[::-1])
        for name, completion in ended.items():
            tokens[name] += completion.tokens
            logprobs[name] += completion.logprobs
        unfinished = [
            replace(one, tokens=one.tokens + ended[one.id].tokens, noise=ended[one.id].noise)
            for one in unfinished
            if ended[one.id].is_cut
        ]
    assert tokens == {name: completion.tokens for name, completion in whole.items()}
    assert logprobs == {name: completion.logprobs for name, completion in whole.items()}


def test_neither_order_nor_other_requests_nor_batch_size_changes_a_sample() -> None:
    requests = [request(f"r{seed}", seed) for seed in range(12)]
    together = run(make_engine(max_num_seqs=12), requests)
    backwards = run(make_engine(max_num_seqs=3), requests[::-1])
    alone = run(make_engine(), [requests[5]])
    assert backwards == together
    assert alone["r5"] == together["r5"]


def test_a_response_ends_with_its_stop_token_or_is_cut() -> None:
    whole = run(make_engine(), [request("a", seed=2)])["a"]
    assert (whole.tokens[-1], whole.tokens.count(STOP), whole.is_cut) == (STOP, 1, False)
    cut = run(make_engine(), [request("a", seed=2, max_tokens=4)])["a"]
    assert (cut.tokens, cut.is_cut) == (whole.tokens[:4], True)
    exact = run(make_engine(), [request("a", seed=2, max_tokens=len(whole.tokens))])["a"]
    assert (exact.tokens, exact.is_cut) == (whole.tokens, False)


def test_without_a_stop_token_every_response_is_cut() -> None:
    engine = FakeEngine(8, None)
    engine.confirm(1)
    ended = run(engine, [request(str(seed), seed, max_tokens=40) for seed in range(8)])
    assert all((len(one.tokens), one.is_cut, None in one.tokens) == (40, True, False) for one in ended.values())


def test_one_step_decodes_one_token_of_at_most_max_num_seqs() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add([request(name, seed=2, max_tokens=2) for name in "abc"])
    assert engine.step() == []
    assert [completion.id for completion in engine.step()] == ["a", "b"]
    assert engine.num_unfinished == 1
    assert engine.step() == []
    assert [completion.id for completion in engine.step()] == ["c"]
    assert engine.num_unfinished == 0


def test_weights_come_before_samples() -> None:
    engine = FakeEngine(8, STOP)
    assert engine.version == 0
    with pytest.raises(AssertionError, match="before the first weight sync"):
        engine.add([request("a", seed=2)])
    layout = engine.memory_layout([TensorInfo("a", (2, 1), "bfloat16", True), TensorInfo("b", (), "int64", False)])
    layout.fill({0: torch.tensor([[1.0], [2.5]]), 1: torch.tensor(7)})
    assert {name: tensor.tolist() for name, tensor in engine.memory.items()} == {"a": [[1.0], [2.5]], "b": 7}
    engine.confirm(4)
    engine.add([request("a", seed=2)])
    assert (engine.version, engine.num_unfinished) == (4, 1)


def test_nothing_is_sampled_from_begin_version_to_confirm() -> None:
    engine = make_engine()
    engine.begin_version()
    assert engine.version == 0
    with pytest.raises(AssertionError, match="before the first weight sync"):
        engine.add([request("a", seed=2)])


TASK = Task(2, 3, 0, Prompt(9, 0, "text", "abc", [11, 12]), Sampling(2, 1.0, 3), version=6)


@pytest.fixture
def world() -> Iterator[World]:
    with connected_worlds(1) as (world,):
        yield world


@pytest.mark.parametrize(
    ("held", "has"), [(5, "verified version 5"), (7, "verified version 7"), (0, "verified no version")]
)
def test_a_service_refuses_a_task_of_another_version(world: World, held: int, has: str) -> None:
    engine = FakeEngine(8, STOP)
    engine.confirm(held)
    tokenizer: Any = None
    host = EngineHost(world, (0,), engine, lambda failed: failed)
    service = RolloutService(world, host, None, tokenizer, 4, 0, leader=0)
    work = Letter(0, NewTasks([TASK]))
    with pytest.raises(RuntimeError, match=f"weights of version 6, but this engine has {has}"):
        service.handle(work)
    engine.confirm(6)
    service.handle(work)
    assert engine.num_unfinished == 2


def test_an_error_holds_nothing_of_the_engine_once_its_frames_are_cleared() -> None:
    held: list[weakref.ref] = []

    def compute() -> None:
        tensor = torch.ones(2)
        held.append(weakref.ref(tensor))
        raise ValueError("of the kernel")

    def step() -> None:
        try:
            compute()
        except ValueError as error:
            raise RuntimeError("of the step") from error

    try:
        step()
    except RuntimeError as error:
        assert held[0]() is not None
        clear_frames(error)
        assert held[0]() is None
