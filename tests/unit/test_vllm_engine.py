"""Our side of vLLM where no run on a CPU gets to: sleep, other versions, refused settings and aborted responses."""

import gc
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.schema import Config, EnvironmentConfig, RolloutConfig
from rl.learner.offload import ALLOCATOR_VARIABLES, SHORT_OF_MEMORY, avoid_fragments
from rl.rollout.dispatch import Sampling
from rl.rollout.engine import Request, import_engine
from rl.watch.heart import HEART

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("vllm_imported")]


@pytest.fixture
def build() -> Any:
    return importlib.import_module("rl.rollout.vllm.build")


@pytest.fixture
def memory() -> Any:
    return importlib.import_module("rl.rollout.vllm.memory")


class FakeVllm:
    """A stand-in for vllm.LLM, with the sleep of vLLM 0.26."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.pointer_to_data = {tag: SimpleNamespace(tag=tag, is_asleep=False) for tag in ("weights", "kv_cache")}
        executor = SimpleNamespace(sleeping_tags=set())
        core = SimpleNamespace(batch_queue=[], model_executor=executor, scheduler=None)
        self.sleeping_tags = executor.sleeping_tags
        client = SimpleNamespace(engine_core=core, get_output=lambda: self)
        self.llm_engine = SimpleNamespace(engine_core=client, input_processor=None)
        self.most_awake = 2  # at a time
        self.has_blocks_in_use = False

    @property
    def awake(self) -> set[str]:
        return {tag for tag, data in self.pointer_to_data.items() if not data.is_asleep}

    def sleep(self, level: int) -> None:
        if not self.sleeping_tags:  # otherwise vLLM believes that all of it sleeps
            self.collective_rpc("sleep", {"level": level})
            self.sleeping_tags |= {"weights", "kv_cache"}

    def collective_rpc(self, method: str | Callable[[Any], Any], kwargs: dict[str, int] | None = None) -> list[Any]:
        if callable(method):
            return [method(SimpleNamespace(model_runner=SimpleNamespace(kv_caches=[])))]
        assert method == "sleep" and kwargs == {"level": 2}
        for data in self.pointer_to_data.values():
            assert not data.is_asleep, "vLLM would free sleeping memory a second time"
            data.is_asleep = True
        return [None]

    def reset_prefix_cache(self) -> bool:
        return not self.has_blocks_in_use

    def wake_up(self, tags: list[str]) -> None:
        assert self.sleeping_tags.issuperset(tags), "vLLM does nothing then"
        self.sleeping_tags.difference_update(tags)
        for tag in tags:
            self.pointer_to_data[tag].is_asleep = False
        self.most_awake = max(self.most_awake, len(self.awake))


@pytest.fixture
def llm(memory: Any, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    llm = FakeVllm()
    monkeypatch.setattr(memory, "CuMemAllocator", SimpleNamespace(get_instance=lambda: llm))
    return llm


@pytest.fixture
def engine(build: Any, llm: FakeVllm) -> Any:
    seat = SimpleNamespace(stop_token_ids=[], sleeps=True, device=torch.device("cuda"))
    return build.VllmEngine(llm, SimpleNamespace(entered=nullcontext), seat)


def test_an_engine_that_got_weights_but_no_request_sleeps_again(engine: Any, llm: FakeVllm) -> None:
    """It allocates no cache in between, for which the learner leaves no room."""
    engine.sleep()
    engine.sleep()
    assert llm.awake == set()
    llm.most_awake = 0
    for _ in range(2):
        engine.begin_version()
        assert llm.awake == {"weights"}
        engine.sleep()
        assert llm.awake == set()
    assert llm.most_awake == 1
    engine.begin_version()
    engine.confirm(1)
    engine.add([])
    assert llm.awake == {"weights", "kv_cache"}
    assert engine.version == 1
    engine.sleep()
    assert llm.awake == set()
    assert engine.version == 0, "it holds no weights, so a sync must not leave any out"


def test_an_engine_that_stays_awake_keeps_its_memory_and_its_version(
    build: Any, llm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It collects garbage when the learner gets its turn, so that Python does not in the middle of a rollout."""
    seat = SimpleNamespace(stop_token_ids=[], sleeps=False, device=torch.device("cuda"))
    engine = build.VllmEngine(llm, SimpleNamespace(entered=nullcontext), seat)
    collections: list[None] = []
    monkeypatch.setattr(sys.modules[build.VllmEngine.__module__], "collect_garbage", lambda: collections.append(None))
    engine.begin_version()
    engine.confirm(1)
    engine.sleep()
    assert llm.awake == {"weights", "kv_cache"} and engine.version == 1 and len(collections) == 1


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_build_beats_between_its_phases_and_marks_what_vllm_compiles(
    is_rebuilt: bool, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    handler: Any = sys.modules["torch._dynamo.callback"].callback_handler
    handler.start_callbacks.clear()
    group = SimpleNamespace(entered=nullcontext)

    def look() -> Any:
        beat = HEART.read()
        assert beat is not None
        seen.append((beat.activity.item, bool(handler.start_callbacks)))
        return group

    def start(**options: Any) -> Any:
        look()
        return FakeVllm()

    monkeypatch.setattr(build, "PrivateDefaultGroup", lambda seat: look())
    monkeypatch.setattr(build.vllm, "LLM", start)
    monkeypatch.setattr(build.c10d, "barrier", look)
    for name in ("turn_off_packing", "unlink_shared_memory", "install_fast_decode", "Generators"):
        monkeypatch.setattr(build, name, lambda *args: None)
    seat = SimpleNamespace(stop_token_ids=[], sleeps=True, device=torch.device("cpu"), tp_size=1)
    failed = SimpleNamespace(abandon=look) if is_rebuilt else None
    build.build(Config(), Path(), seat, failed)
    first = "the memory of the failed engine" if is_rebuilt else "its process groups"
    assert [item for item, _ in seen] == [first, "vLLM's start", "a barrier of the engine's ranks"]
    assert [is_marked for _, is_marked in seen] == [False, True, True]


@pytest.mark.parametrize("is_failing", [False, True])
def test_an_engine_is_built_without_pages(is_failing: bool, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's all-reduce gives other processes handles of the graphs' memory, and memory in pages has none. vLLM 0.26
    turns pages on again by a setting of its own, which drops ours."""
    applied, seen = list[str](), list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, "")
    avoid_fragments()

    def start(**options: Any) -> Any:
        seen.extend([applied[-1], os.environ["PYTORCH_CUDA_ALLOC_CONF"]])
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if is_failing:
            raise RuntimeError("no memory")
        return FakeVllm()

    monkeypatch.setattr(build.vllm, "LLM", start)
    for name in ("turn_off_packing", "unlink_shared_memory", "install_fast_decode", "Generators"):
        monkeypatch.setattr(build, name, lambda *args: None)
    monkeypatch.setattr(build.c10d, "barrier", lambda: None)
    seat = SimpleNamespace(stop_token_ids=[], sleeps=True, device=torch.device("cpu"), tp_size=2)
    failed = SimpleNamespace(abandon=lambda: SimpleNamespace(entered=nullcontext))
    with pytest.raises(RuntimeError, match="no memory") if is_failing else nullcontext():
        build.build(Config(), Path(), seat, failed)
    assert seen == ["expandable_segments:False"] * 2
    assert applied[-1] == os.environ["PYTORCH_CUDA_ALLOC_CONF"] == SHORT_OF_MEMORY


@pytest.mark.parametrize(("limit_s", "is_frozen"), [(0.0, True), (100.0, False)])
def test_objects_are_frozen_if_garbage_collection_takes_long(
    limit_s: float, is_frozen: bool, memory: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "LONG_COLLECTION_S", limit_s)
    try:
        gc.unfreeze()
        engine.sleep()
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_end_of_an_engine_collects_no_garbage(engine: Any, llm: FakeVllm, is_failing: bool) -> None:
    """The process ends next. vLLM would unfreeze the objects of all imports and visit them twice."""
    collected: list[int] = []

    def shutdown() -> None:
        gc.unfreeze()
        collected.append(gc.collect())
        assert gc.get_freeze_count() > 0
        if is_failing:
            raise RuntimeError("no")

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    llm.llm_engine.engine_core.shutdown = shutdown
    gc.collect()
    gc.disable()
    gc.freeze()
    usual = gc.collect, gc.unfreeze
    try:
        Cycle()
        with pytest.raises(RuntimeError, match="no") if is_failing else nullcontext():
            engine.close()
        assert collected == [0]
        assert (gc.collect, gc.unfreeze) == usual and gc.collect() > 0
    finally:
        gc.unfreeze()
        gc.enable()


def test_an_aborted_response_is_an_error(engine: Any, llm: FakeVllm) -> None:
    """It comes without logprobs."""
    from vllm.v1.engine import FinishReason

    engine.responses["7-0"] = SimpleNamespace(id="7", logprobs=[])
    output = {"request_id": "7-0", "new_token_ids": [], "new_logprobs": None, "finish_reason": FinishReason.ABORT}
    llm.outputs = [SimpleNamespace(**output)]
    with pytest.raises(RuntimeError, match="vLLM gave up on response 7 after 0 tokens: abort"):
        engine.step()


def test_a_prefix_cache_that_is_not_cleared_is_an_error(engine: Any, llm: FakeVllm) -> None:
    """What is left in it was computed with older weights."""
    llm.has_blocks_in_use = True
    with pytest.raises(RuntimeError, match="did not clear its prefix cache for version 3"):
        engine.confirm(3)
    assert engine.version == 0
    llm.has_blocks_in_use = False
    engine.confirm(3)
    assert engine.version == 3


def test_forwards_end_before_the_prefix_cache_is_cleared(engine: Any, llm: FakeVllm) -> None:
    """With asynchronous scheduling a forward still holds blocks when a probe has its answer."""
    client = llm.llm_engine.engine_core
    client.engine_core.batch_queue.append("a forward")
    llm.has_blocks_in_use = True

    def get_output() -> Any:
        client.engine_core.batch_queue.clear()
        llm.has_blocks_in_use = False
        return llm

    client.get_output = get_output
    engine.confirm(3)
    assert engine.version == 3


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        *((version, True) for version in ("0.26.0", "0.26.1", "0.29.0rc1", "0.32.0", "0.32.0+cpu", "0.32.7.post1")),
        *((version, False) for version in ("0.25.9", "0.33.0", "0.33.0rc1", "1.0.0", "0.33.1.dev7+g12ab", "dev")),
    ],
)
def test_outside_the_tested_versions_the_fast_paths_are_off(
    version: str, is_tested: bool, build: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The engine has a notice then, which a run prints once."""
    llm = FakeVllm()
    llm.llm_engine.engine_core.engine_core.scheduler = scheduler = object()
    switched_on: list[Any] = []
    monkeypatch.setattr(build.vllm, "__version__", version)
    monkeypatch.setattr(build.vllm, "LLM", lambda **options: np.random.seed(0) or llm)  # as vLLM does
    monkeypatch.setattr(build, "use_our_kernels", lambda must_repeat: switched_on.append(f"kernels, {must_repeat}"))
    monkeypatch.setattr(build, "warm_up_what_is_used", lambda rollout: switched_on.append("warm-up"))
    monkeypatch.setattr(build, "install_fast_decode", lambda scheduler, *options: switched_on.append(scheduler))
    monkeypatch.setattr(build, "Generators", lambda llm: switched_on.append("noise"))
    monkeypatch.setattr(build, "unlink_shared_memory", lambda seat: None)
    monkeypatch.setattr(build.c10d, "barrier", lambda: None)
    group = SimpleNamespace(entered=nullcontext)
    seat = SimpleNamespace(name="test", tp_rank=0, tp_size=1, stop_token_ids=[], sleeps=True)
    seat.device = torch.device("cuda")
    np.random.seed(1)
    expected = np.random.get_state()[1].tolist()
    built = build.build(Config(), tmp_path, seat, failed=SimpleNamespace(abandon=lambda: group))
    assert np.random.get_state()[1].tolist() == expected, "all engines would draw the same seeds for their requests"
    assert switched_on == (["kernels, False", "warm-up", "noise", scheduler] if is_tested else [])
    assert (built.notice == "") == is_tested
    if not is_tested:
        assert built.notice.startswith(f"vLLM {version} is outside the tested versions (")
        rollout = RolloutConfig(max_new_tokens=8, max_tokens_per_round=4)
        build.build(Config(rollout=rollout), tmp_path, seat, failed=SimpleNamespace(abandon=lambda: group))
        assert switched_on == ["noise"]  # responses are continued, which is not a matter of speed


def test_engines_on_gpus_use_our_kernels(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the sampler is a stand-in, since it needs Triton."""
    used: list[str] = []
    sampling = SimpleNamespace(use_our_sampler=lambda must_repeat: used.append(f"sampler, {must_repeat}"))
    monkeypatch.setitem(sys.modules, "rl.rollout.vllm.sampling", sampling)
    monkeypatch.setattr(build, "register_backend", lambda backend, path: used.append(path))
    build.use_our_kernels(must_repeat=True)
    assert used == ["rl.rollout.vllm.attention.DecodeBackend", "sampler, True"]


def test_the_warm_up_compiles_what_a_run_samples_with(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = build.SamplingParams.for_sampler_warmup()
    assert theirs.repetition_penalty != 1 and theirs.logit_bias, "vLLM's warm-up compiles the kernels of everything"
    monkeypatch.setattr(build.SamplingParams, "for_sampler_warmup", build.SamplingParams.for_sampler_warmup)
    build.warm_up_what_is_used(RolloutConfig(temperature=0.8, top_p=0.9))
    ours = build.SamplingParams.for_sampler_warmup()
    assert ours == build.SamplingParams(temperature=0.8, top_p=0.9, logprobs=0) and not ours.logit_bias
    assert build.SamplingParams.for_sampler_warmup() is not ours, "requests may change it"


@pytest.mark.parametrize(
    ("config", "are_continued"),
    [
        (Config(), False),
        (Config(rollout=RolloutConfig(max_tokens_per_round=4)), False),  # in the next round, with other weights
        (Config(rollout=RolloutConfig(max_tokens_per_round=4, keep_kv=True)), True),
        (Config(environment=EnvironmentConfig(tools=["file.py:tool"])), True),
    ],
)
def test_only_responses_that_are_continued_with_their_kv_cache_are_in_the_prefix_cache(
    config: Config, are_continued: bool, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(build.vllm, "LLM", lambda **options: FakeVllm())
    monkeypatch.setattr(build, "install_fast_decode", lambda scheduler, responses, value: given.append(value))
    for name in ("turn_off_packing", "unlink_shared_memory", "Generators"):
        monkeypatch.setattr(build, name, lambda *args: None)
    monkeypatch.setattr(build.c10d, "barrier", lambda: None)
    group = SimpleNamespace(entered=nullcontext)
    seat = SimpleNamespace(stop_token_ids=[], sleeps=True, device=torch.device("cpu"), tp_size=1, name="engine")
    build.build(config, Path(), seat, SimpleNamespace(abandon=lambda: group))
    assert given == [are_continued]


def test_collections_skip_what_the_import_of_vllm_has_created() -> None:
    gc.unfreeze()
    import_engine(Config(rollout=RolloutConfig(engine="fake")))
    assert gc.get_freeze_count() == 0
    import_engine(Config())
    assert gc.get_freeze_count() > 100_000
    gc.unfreeze()


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (40, [1, 2, 4, 8, 16, 24, 32, 40]),
        (200, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 200]),
    ],
)
def test_graphs_are_captured_up_to_all_sequences_of_an_engine(build: Any, max_num_seqs: int, sizes: list[int]) -> None:
    assert build.graph_sizes(max_num_seqs) == sizes


def test_no_more_than_a_quarter_is_padded(build: Any) -> None:
    sizes = build.graph_sizes(4096)
    assert len(sizes) == 35 and sizes[-1] == 4096
    assert all(after <= before * 1.25 for before, after in pairwise(sizes) if before >= 32)


GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4], "cudagraph_mode": "FULL_DECODE_ONLY"}


def test_only_conversations_need_graphs_for_steps_with_prompts(build: Any) -> None:
    config = Config(rollout=RolloutConfig(max_num_seqs=4))
    assert build.graph_options(config) == GRAPHS
    config = replace(config, environment=EnvironmentConfig(tools=["tools.py:add"]))
    assert build.graph_options(config) == GRAPHS | {"cudagraph_mode": "FULL_AND_PIECEWISE"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, GRAPHS),
        ({"compilation_config": {"mode": 3}}, GRAPHS | {"mode": 3}),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, GRAPHS | {"cudagraph_mode": "PIECEWISE"}),
        ({"compilation_config": {"cudagraph_capture_sizes": [2]}}, {"cudagraph_capture_sizes": [2]}),
        ({"compilation_config": {"max_cudagraph_capture_size": 8}}, {"max_cudagraph_capture_size": 8}),
        ({"compilation_config": 0}, 0),
    ],
)
def test_engine_options_may_choose_other_graphs(build: Any, settings: dict[str, Any], expected: Any) -> None:
    seat = SimpleNamespace(device=torch.device("cuda"), tp_size=1, sleeps=True, name="engine")
    config = Config(rollout=RolloutConfig(max_num_seqs=4, engine_options=settings))
    assert build._engine_options(config, Path("model"), seat)["compilation_config"] == expected
    seat.device = torch.device("cpu")
    options = build._engine_options(config, Path("model"), seat)
    assert options.get("compilation_config") == settings.get("compilation_config")


@pytest.mark.parametrize(
    ("max_num_seqs", "settings", "expected"),
    [
        (4, {}, 4096),
        (5000, {}, 5000),
        (4, {"max_num_batched_tokens": 64}, 64),
        (4, {"enable_chunked_prefill": False}, None),  # then a step must hold the longest prompt
    ],
)
def test_tokens_of_a_step(build: Any, max_num_seqs: int, settings: dict[str, Any], expected: int | None) -> None:
    seat = SimpleNamespace(device=torch.device("cuda"), tp_size=1, sleeps=True, name="engine")
    config = Config(rollout=RolloutConfig(max_num_seqs=max_num_seqs, engine_options=settings))
    assert build._engine_options(config, Path("model"), seat).get("max_num_batched_tokens") == expected
    seat.device = torch.device("cpu")
    on_cpu = build._engine_options(config, Path("model"), seat).get("max_num_batched_tokens")
    assert on_cpu == settings.get("max_num_batched_tokens"), "on a CPU it is vLLM's default"


class Inputs:
    """vLLM's input processor, as far as requests go through it."""

    def __init__(self) -> None:
        self.checked: list[tuple[list[int], float]] = []

    def process_inputs(self, name: str, prompt: Any, params: Any, supported_tasks: object) -> Any:
        tokens = prompt["prompt_token_ids"]
        self.checked.append((tokens, params.temperature))
        from vllm.v1.engine import EngineCoreRequest

        return EngineCoreRequest(name, tokens, None, params.clone(), None, 1.0, None, None, None)

    def assign_request_id(self, request: Any) -> None:
        assert request.external_req_id is None
        request.external_req_id, request.request_id = request.request_id, f"{request.request_id}-random"


def test_requests_with_the_same_sampling_are_checked_once(engine: Any, llm: FakeVllm) -> None:
    inputs = llm.llm_engine.input_processor = Inputs()
    llm.llm_engine.get_supported_tasks = lambda: ("generate",)
    warm, cold = Sampling(4, 1.0, 8), Sampling(4, 0.5, 8)
    engine.version = 3
    requests = [
        Request("0/0/0", [1, 2], warm, 5, seed=10),
        Request("0/0/1", [1, 2], warm, 4, seed=None),
        Request("0/0/2", [1, 2], warm, 5, seed=12),
        Request("0/1/0", [1, 3], warm, 5, seed=13),
        Request("0/1/1", [1, 3], cold, 5, seed=14),
        Request("0/1/2", [1, 3], cold, 5, seed=15, cache_key="0/1"),
    ]
    sent = [*engine._process(requests[:4]), *engine._process(requests[4:])]
    assert inputs.checked == [([1, 2], 1.0), ([1, 3], 0.5)]
    assert [one.cache_salt for one in sent] == ["3"] * 5 + ["key 0/1"]
    for request, one in zip(requests, sent, strict=True):
        assert (one.external_req_id, one.request_id) == (request.id, f"{request.id}-random")
        assert one.prompt_token_ids is request.tokens, "vLLM may append to it"
        params = one.sampling_params
        expected = request.sampling.temperature, request.max_tokens, request.seed
        assert (params.temperature, params.max_tokens, params.seed) == expected
    assert len({id(one.sampling_params) for one in sent}) == len(sent)
