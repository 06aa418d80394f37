"""Our side of vLLM where no run on a CPU gets to: sleep, and a response that it gives up."""

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
    """In place of vLLM: what is awake, and what it hands out."""

    def __init__(self) -> None:
        self.awake = {"weights", "kv_cache"}
        self.outputs: list[Any] = []
        core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=[]), get_output=lambda: self)
        self.llm_engine = SimpleNamespace(engine_core=core)

    def sleep(self, level: int) -> None:
        assert level == 2 and self.awake == {"weights", "kv_cache"}, "vLLM frees what is asleep once more"
        self.awake = set()

    def wake_up(self, tags: list[str]) -> None:
        self.awake |= set(tags)


@pytest.fixture
def engine(engines: Any) -> Any:
    seat = SimpleNamespace(stop_token_ids=[], shares_device=True, device=torch.device("cuda"))
    return engines.VllmEngine(Machine(), SimpleNamespace(entered=nullcontext), seat)


def test_an_engine_that_got_weights_and_no_request_sleeps_all_the_same(engine: Any) -> None:
    machine = engine._llm
    engine.sleep()
    engine.sleep()
    assert machine.awake == set()
    engine.begin_version()
    assert machine.awake == {"weights"}
    engine.sleep()
    assert machine.awake == set()
    engine.begin_version()
    engine._wake("kv_cache")
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
