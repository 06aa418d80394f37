"""Exceptions of an engine's step that the service recovers from, and those that end its rank."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl.rollout.engine import Completion
from rl.rollout.fake_engine import FakeEngine
from rl.rollout.followers import RebuildEngine, StepEngine
from rl.rollout.recovery import EngineFailed, EngineHost, EngineRebuilt
from rl.rollout.service import RolloutService
from rl.world.messages import Letter
from rl.world.orders import Order
from rl.world.world import World
from tests.mails import connected_worlds, take
from tests.unit.test_reward_service import NUM_SAMPLES, STOP, Bench

pytestmark = pytest.mark.timeout(20)
FAILED = "CUDA error: an illegal memory access was encountered"
BREAKING = [
    torch.AcceleratorError("an illegal memory access was encountered"),
    RuntimeError(FAILED),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered"),
    dist.DistBackendError("unhandled system error"),
    RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
]
HARMLESS = [
    ZeroDivisionError("planted"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    ValueError("no such CUDA option"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


def wrapped(error: Exception) -> Exception:
    """Wrap an error as engines do."""
    outer = ValueError("the engine's step failed")
    outer.__cause__ = error
    return outer


class FailingEngine(FakeEngine):
    error: Exception

    def step(self) -> list[Completion]:
        raise self.error


class LateEngine(FakeEngine):
    """Fails under the last responses, when others have ended."""

    def step(self) -> list[Completion]:
        if self.num_unfinished < NUM_SAMPLES:
            raise ZeroDivisionError("planted")
        return super().step()


class LateBench(Bench):
    def make_engine(self) -> FakeEngine:
        return LateEngine(8, STOP)


def fail(service: RolloutService, error: Exception) -> None:
    service.engine.__class__ = FailingEngine  # type: ignore[assignment]
    service.engine.error = error  # type: ignore[attr-defined]


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    with connected_worlds(2) as worlds:
        yield worlds


def test_a_group_that_fails_a_second_engine_ends_the_rank(worlds: list[World]) -> None:
    """Although shorter responses end in between, every time."""
    bench = LateBench(worlds)
    bench.start(0, 1)
    bench.sample()
    bench.service.engine.confirm(6)
    bench.service.work()
    assert bench.service.engine.num_unfinished == 2 * NUM_SAMPLES
    with pytest.raises(ZeroDivisionError, match="planted"):
        bench.sample()
    assert [key for key, *_ in bench.rewards.calls if key[3] == 1], "one has ended"


def test_a_second_exception_in_a_row_ends_the_rank(worlds: list[World]) -> None:
    """Also when work came in between."""
    bench = Bench(worlds)
    bench.start(0)
    fail(bench.service, HARMLESS[0])
    bench.service.work()
    bench.start(1)
    bench.service.engine.confirm(6)
    bench.service.work()
    fail(bench.service, HARMLESS[0])
    with pytest.raises(ZeroDivisionError, match="planted"):
        bench.service.work()


def test_each_group_may_fail_one_engine(worlds: list[World]) -> None:
    bench = Bench(worlds)
    for position in range(3):
        bench.start(position)
        fail(bench.service, HARMLESS[0])
        bench.service.work()
        bench.service.engine.confirm(6)
        bench.service.work()
        bench.sample()
    ended = [key for key, *_ in bench.rewards.calls]
    assert sorted(ended) == [(2, position, sample, 1) for position in range(3) for sample in range(NUM_SAMPLES)]


@pytest.mark.parametrize("error", [*BREAKING, wrapped(BREAKING[0])], ids=repr)
def test_an_error_of_the_device_or_a_process_group_ends_the_rank(error: Exception, worlds: list[World]) -> None:
    bench = Bench(worlds)
    bench.start(0)
    fail(bench.service, error)
    with pytest.raises(type(error)) as raised:
        bench.service.work()
    assert raised.value is error
    assert bench.service.engine is bench.engine


@pytest.mark.parametrize("error", [*HARMLESS, wrapped(HARMLESS[0])], ids=repr)
def test_any_other_error_is_survived(error: Exception, worlds: list[World]) -> None:
    bench = Bench(worlds)
    bench.start(0)
    fail(bench.service, error)
    bench.service.work()
    assert take(bench.leader, Order).message == Order("publish again")
    assert bench.service.engine is not bench.engine
    rebuilt = take(bench.leader, EngineRebuilt).message
    assert (rebuilt.engine, rebuilt.num_groups) == ("fake", 1)
    assert rebuilt.reason == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("error", "is_survived"), [(BREAKING[1], False), (HARMLESS[0], True)])
def test_a_follower_decides_alike(error: Exception, is_survived: bool, worlds: list[World]) -> None:
    """It tells the lead, which decides, or ends its own rank."""
    bench = Bench(worlds)
    tokenizer: Any = None
    engine = FakeEngine(8, STOP)
    host = EngineHost(bench.world, (1, 0), engine, lambda failed: FakeEngine(8, STOP))
    service = RolloutService(bench.world, host, None, tokenizer, 4, 0, leader=1)
    fail(service, error)
    step = Letter(1, StepEngine())
    if not is_survived:
        with pytest.raises(RuntimeError, match=FAILED):
            service.handle(step)
        return
    service.handle(step)
    take(bench.leader, EngineFailed)
    service.handle(Letter(1, RebuildEngine()))
    assert service.engine is not engine
