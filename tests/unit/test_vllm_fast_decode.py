"""The fast path for decode steps does the same as vLLM's own schedulers, on any mix of requests."""

import importlib
import random
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.schema import ROOT

pytestmark = pytest.mark.timeout(120)
BLOCK_SIZE, STOP_TOKEN, MAX_STEPS = 4, 2, 1500


@pytest.fixture
def fast_decode(vllm_imported: None) -> Any:
    return importlib.import_module("rl.rollout.vllm.fast_decode")


def make_cache_config(num_blocks: int) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def make_scheduler(is_async: bool, num_blocks: int, max_tokens: int, shares_prefixes: bool, policy: str) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=str(ROOT / "configs" / "tiny"),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=48,
        max_num_seqs=8,
        max_num_batched_tokens=max_tokens,
        enable_prefix_caching=shares_prefixes,
        enable_chunked_prefill=True,
        scheduling_policy=policy,
        async_scheduling=False,
        enforce_eager=True,
    ).create_engine_config()
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = BLOCK_SIZE, num_blocks
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=config,
        kv_cache_config=make_cache_config(num_blocks),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def make_request(name: str, tokens: list[int], max_tokens: int, priority: int) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    start_hashes()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[STOP_TOKEN], logprobs=0)
    options = {"block_hasher": get_request_block_hasher(BLOCK_SIZE, sha256), "priority": priority}
    return Request(name, tokens, params, None, arrival_time=float(name), **options)


@cache
def start_hashes() -> None:
    """Choose the hash before all blocks. In vLLM 0.26 it is random."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(sha256)


class Run:
    """Random requests that share prefixes, stop, are preempted for want of blocks or aborted, and all that a scheduler
    does with them. With asynchronous scheduling one step still runs while the next is scheduled."""

    def __init__(self, seed: int, fast_decode: Any, is_fast: bool):
        self.counts: Counter[str] = Counter()
        self.seen: list[Any] = []
        self._generator = generator = random.Random(seed)
        self._is_async = generator.random() < 0.6
        sizes = {"num_blocks": generator.randint(14, 40), "max_tokens": generator.choice([8, 9, 13, 33])}
        kinds = {"shares_prefixes": generator.random() < 0.8, "policy": generator.choice(["fcfs", "fcfs", "priority"])}
        self._scheduler = make_scheduler(self._is_async, **sizes, **kinds)
        self._scheduler.use_v2_model_runner = generator.random() < 0.5
        self._fast_decode, self._is_fast, self._responses = fast_decode, is_fast, dict[str, Any]()
        self.are_continued = generator.random() < 0.7
        if is_fast:
            assert fast_decode.supports_fast_decode(self._scheduler)
            self._scheduler.schedule = self._counted(self._scheduler.schedule)
            fast_decode.install_fast_decode(self._scheduler, self._responses, self.are_continued)
        elif not self.are_continued:
            fast_decode.share_only_hashed_blocks(self._scheduler)
        self._num_left = generator.randint(6, 16)
        self._prefix = [generator.randint(3, 9) for _ in range(40)]
        self._under_way: list[tuple[Any, dict[str, bool]]] = []
        self._num_sampled: Counter[str] = Counter()
        self._drops_tokens = False

    def go(self) -> "Run":
        for _ in range(MAX_STEPS):
            self._disturb()
            self._schedule()
            if len(self._under_way) > self._is_async or not self._under_way[-1][0].num_scheduled_tokens:
                self._update(*self._under_way.pop(0))
            is_empty = not any(scheduled.num_scheduled_tokens for scheduled, _ in self._under_way)
            if is_empty and not self._num_left and not self._scheduler.requests:
                return self
        raise AssertionError("it does not end")

    def _counted(self, schedule: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.counts[f"scheduled while {self._scheduler.pause_state.name}"] += 1
            return schedule(*args)

        return counted

    def _disturb(self) -> None:
        from vllm.v1.request import RequestStatus

        generator, scheduler = self._generator, self._scheduler
        for _ in range(generator.randint(1, 4) if self._num_left and generator.random() < 0.5 else 0):
            if self._num_left:
                length = generator.randint(1, 30)
                prefix = self._prefix[: generator.randint(0, length)]
                tokens = prefix + [generator.randint(3, 9) for _ in range(length - len(prefix))]
                limits = (generator.randint(1, 40), generator.randint(0, 3))
                request = make_request(str(self._num_left), tokens, *limits)
                scheduler.add_request(request)
                if self._is_fast:
                    self._responses[request.request_id] = self._fast_decode.RunningResponse(request.request_id, request)
                self._num_left -= 1
        if generator.random() < 0.02 and scheduler.requests:
            name = generator.choice(sorted(scheduler.requests))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if generator.random() < 0.1:
            scheduler.prev_step_scheduled_req_ids.clear()  # as after a step that had no room for them
        if generator.random() < 0.02:
            self.seen.append(scheduler.reset_prefix_cache(reset_running_requests=True))
            self._drops_tokens = True

    def _schedule(self) -> None:
        scheduler = self._scheduler
        known = {name: request.num_tokens for name, request in scheduler.requests.items()}
        scheduled = scheduler.schedule()
        cached, counts = scheduled.scheduled_cached_reqs, scheduled.num_scheduled_tokens
        starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        samples = {name: starts[name] + count >= known[name] for name, count in counts.items()}  # or has more prompt
        self._num_sampled += Counter(samples)
        new = [(new.req_id, new.block_ids, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self.seen.append((repr(scheduled), dict(counts), new, vars(cached).copy(), free))
        self.seen.append(set(scheduler.prev_step_scheduled_req_ids))
        self.counts["preempted"] += len(scheduled.preempted_req_ids or ())
        self._under_way.append((scheduled, samples))

    def _update(self, scheduled: Any, samples: dict[str, bool]) -> None:
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        generator, scheduler, names = self._generator, self._scheduler, list(scheduled.num_scheduled_tokens)
        sampled: list[list[int]] = [
            [STOP_TOKEN if generator.random() < 0.03 else generator.randint(3, 9)] if samples[name] else []
            for name in names
        ]
        logprobs = np.array([[generator.random()] for _ in names], dtype=np.float32).reshape(-1, 1)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(np.zeros_like(logprobs, np.int32), logprobs, np.zeros(len(names), np.int32)),
        )
        before = {name: len(response.logprobs) for name, response in self._responses.items()}
        requests = dict(scheduler.requests)
        if not self._is_fast and not self.are_continued:
            for request in scheduler.running:
                request._block_hasher = None
        results = scheduler.update_from_output(scheduled, output)
        for request in requests.values():
            is_cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            if is_cut and request.num_output_tokens == request.max_tokens and not self._drops_tokens:
                num_beyond = self._num_sampled[request.request_id] - request.max_tokens
                self.counts += Counter({"cut": 1, "sampled beyond the limit": num_beyond})
        tokens = [
            (one.request_id, one.new_token_ids, one.finish_reason, one.new_logprobs.logprobs[:, 0].tolist())
            for result in results.values()
            for one in result.outputs
        ]
        appended = [response for name, response in self._responses.items() if len(response.logprobs) > before[name]]
        self.counts["appended by us"] += len(appended)
        tokens += [
            (one.id, one.request.output_token_ids[-1:], None, one.logprobs[before[one.id] :]) for one in appended
        ]
        self.counts["hashed responses"] += any(
            len(request.block_hashes) * BLOCK_SIZE > request.num_prompt_tokens for request in requests.values()
        )
        self.seen.append(sorted(tokens))
        self.seen.append([state_of(request) for _, request in sorted(scheduler.requests.items())])
        self.seen.append(len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block))  # that others may share


def state_of(request: Any) -> tuple[Any, ...]:
    counts = (request.num_computed_tokens, request.num_output_placeholders, request.num_in_flight_tokens)
    tokens = (list(request.all_token_ids), list(request.output_token_ids), list(request.block_hashes))
    return (request.request_id, request.status, request.is_prefill_chunk, counts, tokens)


def test_every_step_equals_that_of_vllm(fast_decode: Any) -> None:
    counts: Counter[str] = Counter()
    for seed in range(60):
        theirs, ours = (Run(seed, fast_decode, is_fast).go() for is_fast in (False, True))
        assert ours.seen == theirs.seen, f"seed {seed}"
        assert ours.counts["hashed responses"] == 0 or ours.are_continued, f"seed {seed}"
        counts += ours.counts
    assert counts["preempted"] > 50 and counts["appended by us"] > 2000, counts
    assert counts["scheduled while PAUSED_ALL"] > 500 and counts["hashed responses"] > 500, counts
    # Otherwise the state of the random generator would not be that after the last token (noise.py).
    assert counts["cut"] > 100 and counts["sampled beyond the limit"] == 0, counts


class Manager:
    """A cache manager that counts how often it is asked."""

    empty_kv_cache_blocks = "none"

    def __init__(self, group: Any):
        self.coordinator = SimpleNamespace(single_type_managers=(group,))
        self.num_calls = 0

    def allocate_slots(self, request: Any, num_new_tokens: int, **options: Any) -> str:
        self.num_calls += 1
        return "some"


def test_a_cache_is_asked_only_at_the_ends_of_blocks(fast_decode: Any) -> None:
    manager = Manager(SimpleNamespace(block_size=BLOCK_SIZE))
    fast_decode.allocate_at_block_ends(SimpleNamespace(kv_cache_manager=manager))
    answers = []
    for number in range(2 * BLOCK_SIZE):
        request = SimpleNamespace(status=fast_decode.RequestStatus.RUNNING, num_computed_tokens=number)
        answers.append(manager.allocate_slots(request, 1, num_lookahead_tokens=0))
    assert answers == 2 * ["some", "none", "none", "some"]
    assert manager.num_calls == 4


@pytest.mark.parametrize(
    "change",
    [{"connector": 1}, {"num_spec_tokens": 2}, {"use_pp": True}, {"needs_kv_cache_zeroing": True}, {"group": 1}],
)
def test_other_caches_and_sequences_are_left_to_vllm(change: dict[str, Any], fast_decode: Any) -> None:
    group = fast_decode.FullAttentionManager.__new__(fast_decode.FullAttentionManager)

    def make(group: Any, **options: Any) -> Any:
        plain = {"connector": None, "num_spec_tokens": 0, "use_pp": False, "needs_kv_cache_zeroing": False}
        return SimpleNamespace(**(plain | options), kv_cache_manager=Manager(group))

    assert fast_decode.supports_fast_decode(make(group))
    assert not fast_decode.supports_fast_decode(make(**({"group": group} | change)))
