"""Our side of vLLM where no run on a CPU gets to: sleep, other versions, and what it refuses or gives up."""

import gc
import importlib
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.config.schema import Config
from rl.watch.heart import HEART

pytestmark = pytest.mark.timeout(120)  # the import of vLLM


@pytest.fixture(scope="module")
def engines() -> Any:
    """The module; what it puts into the environment is not for what other tests start."""
    before = dict(os.environ)
    module = importlib.import_module("rl.rollout.vllm.engine")
    os.environ.clear()
    os.environ.update(before)
    return module


class Machine:
    """In place of vLLM 0.26: what is awake, and what it hands out."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.pointer_to_data = {tag: SimpleNamespace(tag=tag, is_asleep=False) for tag in ("weights", "kv_cache")}
        executor = SimpleNamespace(sleeping_tags=set())
        core = SimpleNamespace(batch_queue=[], model_executor=executor, scheduler=None)
        self.sleeping_tags = executor.sleeping_tags
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core, get_output=lambda: self))
        self.most_awake = 2  # at a time
        self.has_blocks_in_use = False

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

    def reset_prefix_cache(self) -> bool:
        return not self.has_blocks_in_use

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
    return engines.VllmEngine(machine, SimpleNamespace(entered=nullcontext), seat, {})


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


@pytest.mark.parametrize("is_rebuilt", [False, True])
def test_a_build_beats_between_its_phases_and_marks_what_vllm_compiles(
    is_rebuilt: bool, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    handler: Any = sys.modules["torch._dynamo.callback"].callback_handler
    handler.start_callbacks.clear()
    group = SimpleNamespace(entered=nullcontext)

    def look() -> Any:
        beat = HEART.read()
        assert beat is not None
        seen.append((beat.item, bool(handler.start_callbacks)))
        return group

    def start(**options: Any) -> Any:
        look()
        return Machine()

    monkeypatch.setattr(engines, "PrivateDefaultGroup", lambda seat: look())
    monkeypatch.setattr(engines.vllm, "LLM", start)
    monkeypatch.setattr(engines.c10d, "barrier", look)
    for name in ("_turn_off_packing", "_forget_names_of_shared_memory", "spare"):
        monkeypatch.setattr(engines, name, lambda *args: None)
    seat = SimpleNamespace(stop_token_ids=[], shares_device=True, device=torch.device("cpu"), tp_size=1)
    failed = SimpleNamespace(abandon=look) if is_rebuilt else None
    engines.build(Config(), Path(), seat, failed)
    first = "the memory of the failed engine" if is_rebuilt else "its process groups"
    assert [item for item, _ in seen] == [first, "vLLM's start", "a barrier of the engine's ranks"]
    assert [is_marked for _, is_marked in seen] == [False, True, True]


@pytest.mark.parametrize(("limit_s", "is_frozen"), [(0.0, True), (100.0, False)])
def test_what_takes_long_to_look_through_for_garbage_is_left_out_from_then_on(
    limit_s: float, is_frozen: bool, engines: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LONG_COLLECTION_S", limit_s)
    try:
        gc.unfreeze()
        engine.sleep()
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.unfreeze()


def test_a_response_that_vllm_gives_up_is_an_error_that_says_so(engines: Any, engine: Any) -> None:
    """It comes without logprobs."""
    reason = engines.FinishReason.ABORT
    engine._unfinished["7-0"] = SimpleNamespace(id="7", logprobs=[])
    output = {"request_id": "7-0", "new_token_ids": [], "new_logprobs": None, "finish_reason": reason}
    engine._llm.outputs = [SimpleNamespace(**output)]
    with pytest.raises(RuntimeError, match="vLLM gave response 7 up after 0 tokens: abort"):
        engine.step()


def test_a_prefix_cache_that_is_not_cleared_is_an_error(engine: Any) -> None:
    """What is left in it was computed with older weights."""
    engine._llm.has_blocks_in_use = True
    with pytest.raises(RuntimeError, match="did not clear its prefix cache for version 3"):
        engine.confirm(3)
    assert engine.version == 0
    engine._llm.has_blocks_in_use = False
    engine.confirm(3)
    assert engine.version == 3


def test_what_a_probe_left_under_way_ends_before_the_prefix_cache_is_cleared(engine: Any) -> None:
    """With asynchronous scheduling a forward holds blocks when the probe has its answer."""
    machine = engine._llm
    client = machine.llm_engine.engine_core
    client.engine_core.batch_queue.append("a forward")
    machine.has_blocks_in_use = True

    def get_output() -> Any:
        client.engine_core.batch_queue.clear()
        machine.has_blocks_in_use = False
        return machine

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
    version: str, is_tested: bool, engines: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """And the engine says so, once a run: run.py prints the notice of the first engine's lead."""
    machine = Machine()
    machine.llm_engine.engine_core.engine_core.scheduler = scheduler = object()
    switched_on: list[Any] = []
    monkeypatch.setattr(engines.vllm, "__version__", version)
    monkeypatch.setattr(engines.vllm, "LLM", lambda **options: machine)
    monkeypatch.setattr(engines, "register_backend", lambda backend, path: switched_on.append(path))
    monkeypatch.setattr(engines, "spare", lambda scheduler, responses: switched_on.append(scheduler))
    monkeypatch.setattr(engines, "_forget_names_of_shared_memory", lambda seat: None)
    monkeypatch.setattr(engines.c10d, "barrier", lambda: None)
    group = SimpleNamespace(entered=nullcontext)
    seat = SimpleNamespace(name="test", tp_rank=0, tp_size=1, stop_token_ids=[], shares_device=True)
    seat.device = torch.device("cuda")
    built = engines.build(Config(), tmp_path, seat, failed=SimpleNamespace(abandon=lambda: group))
    assert switched_on == (["rl.rollout.vllm.attention.DecodeBackend", scheduler] if is_tested else [])
    assert (built.notice == "") == is_tested
    if not is_tested:
        assert built.notice.startswith(f"vLLM {version} is outside the tested versions (")
