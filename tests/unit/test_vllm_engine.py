"""Our side of vLLM where no run on a CPU gets to: sleep, and a response that it gives up. And its cache manager,
which is asked for fewer tokens."""

import importlib
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(120)  # the import of vLLM


@pytest.fixture(scope="module")
def engines() -> Any:
    """The module; what it puts into the environment is not for what other tests start."""
    before = dict(os.environ)
    module = importlib.import_module("rl.rollout.vllm_engine")
    os.environ.clear()
    os.environ.update(before)
    return module


class Machine:
    """In place of vLLM 0.26: what is awake, and what it hands out."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.pointer_to_data = {tag: SimpleNamespace(tag=tag, is_asleep=False) for tag in ("weights", "kv_cache")}
        executor = SimpleNamespace(sleeping_tags=set())
        core = SimpleNamespace(batch_queue=[], model_executor=executor)
        self.sleeping_tags = executor.sleeping_tags
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core, get_output=lambda: self))
        self.most_awake = 2  # at a time

    @property
    def awake(self) -> set[str]:
        return {tag for tag, data in self.pointer_to_data.items() if not data.is_asleep}

    def sleep(self, level: int) -> None:
        if not self.sleeping_tags:  # else vLLM takes it for asleep
            self.collective_rpc("sleep", {"level": level})
            self.sleeping_tags |= {"weights", "kv_cache"}

    def collective_rpc(self, method: str, kwargs: dict[str, int]) -> None:
        assert method == "sleep" and kwargs == {"level": 2}
        for data in self.pointer_to_data.values():
            assert not data.is_asleep, "vLLM frees what is asleep once more"
            data.is_asleep = True

    def wake_up(self, tags: list[str]) -> None:
        assert self.sleeping_tags.issuperset(tags), "vLLM does nothing then"
        self.sleeping_tags.difference_update(tags)
        for tag in tags:
            self.pointer_to_data[tag].is_asleep = False
        self.most_awake = max(self.most_awake, len(self.awake))


@pytest.fixture
def engine(engines: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    machine = Machine()
    monkeypatch.setattr(engines, "CuMemAllocator", SimpleNamespace(get_instance=lambda: machine))
    seat = SimpleNamespace(stop_token_ids=[], shares_device=True, device=torch.device("cuda"))
    return engines.VllmEngine(machine, SimpleNamespace(entered=nullcontext), seat)


def test_an_engine_that_got_weights_and_no_request_sleeps_all_the_same(engine: Any) -> None:
    """And takes no cache for it, which has no place beside the learner."""
    machine = engine._llm
    engine.sleep()
    engine.sleep()
    assert machine.awake == set()
    machine.most_awake = 0
    for _ in range(2):
        engine.begin_version()
        assert machine.awake == {"weights"}
        engine.sleep()
        assert machine.awake == set()
    assert machine.most_awake == 1
    engine.begin_version()
    engine._wake("kv_cache")
    assert machine.awake == {"weights", "kv_cache"}
    engine.sleep()
    assert machine.awake == set()


def test_a_response_that_vllm_gives_up_is_an_error_that_says_so(engines: Any, engine: Any) -> None:
    """It comes without logprobs."""
    reason = engines.FinishReason.ABORT
    engine._unfinished["7-0"] = engines._Response("7", SimpleNamespace(num_preemptions=0))
    output = {"request_id": "7-0", "new_token_ids": [], "new_logprobs": None, "finish_reason": reason}
    engine._llm.outputs = [SimpleNamespace(**output)]
    with pytest.raises(RuntimeError, match="vLLM gave response 7 up after 0 tokens: abort"):
        engine.step()


BLOCK_SIZE = 4


def make_manager() -> Any:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=12, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    sizes = {"scheduler_block_size": BLOCK_SIZE, "hash_block_size": BLOCK_SIZE}
    return KVCacheManager(config, max_model_len=64, enable_caching=True, **sizes)


def make_request(name: str, tokens: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=50), None, block_hasher=hasher)


def decode(manager: Any, num_tokens: int, is_async: bool) -> list[Any]:
    """Two sequences, the first in by chunks, then token by token; returns their blocks after each, and how much others
    could share. Asynchronous scheduling allocates before it knows the token."""
    from vllm.v1.request import RequestStatus

    seen: list[Any] = []

    def allocate(request: Any, count: int) -> None:
        blocks = manager.allocate_slots(request, count, num_lookahead_tokens=0)
        seen.append((request.request_id, blocks and blocks.get_block_ids(allow_none=True)))
        seen.append(manager.get_block_ids(request.request_id))
        request.num_computed_tokens += count if blocks is not None else 0

    requests = [make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]), make_request("b", [7])]
    for request, chunks in zip(requests, ((2, 3, 4), (1,)), strict=True):
        for count in chunks:
            allocate(request, count)
            request.status = RequestStatus.RUNNING
    for number in range(num_tokens):
        for request in requests:
            if is_async:
                allocate(request, 1)
                request.append_output_token_ids(number)
                manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            else:
                request.append_output_token_ids(number)
                allocate(request, 1)
            seen.append(manager.get_computed_blocks(make_request("twin", [*request.all_token_ids, 0]))[1])
    return seen


@pytest.mark.parametrize("is_async", [False, True])
def test_the_cache_has_the_same_blocks_when_it_is_asked_at_their_ends(is_async: bool, engines: Any) -> None:
    """To its end: 11 blocks hold 44 tokens, the two have 9 + 1 and get 20 each."""
    plain, spared = make_manager(), make_manager()
    calls: list[int] = []
    allocate = spared.allocate_slots
    spared.allocate_slots = lambda *args, **options: (calls.append(1), allocate(*args, **options))[1]
    engines._look_for_blocks_at_their_ends(spared)
    expected = decode(plain, 20, is_async)
    assert decode(spared, 20, is_async) == expected
    assert ("a", None) in expected or ("b", None) in expected
    assert 4 + 20 <= len(calls) < 4 + 30  # the chunks, and half of the tokens: blocks are short here


def test_a_cache_with_windows_is_asked_for_every_token(engines: Any) -> None:
    manager = make_manager()
    manager.coordinator.single_type_managers = (SimpleNamespace(block_size=BLOCK_SIZE),)
    allocate = manager.allocate_slots
    engines._look_for_blocks_at_their_ends(manager)
    assert manager.allocate_slots == allocate
