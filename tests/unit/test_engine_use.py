"""What engines did in a step: from what their leads report to metrics, worked out by hand."""

import pytest

from rl.rollout.dispatch import Dispatcher, Pull
from rl.rollout.use import EngineUse, describe_uses
from tests.launcher import until
from tests.mails import connected


def test_metrics_of_two_engines() -> None:
    """The mean use of the KV cache is over the seconds of both engines, and an idle engine has no speed."""
    uses = {4: EngineUse(12, 4.0, 2.75, 0.75, 10**9), 2: EngineUse(3, 1.0, 0.25, 0.25, 2 * 10**9), 6: EngineUse()}
    assert describe_uses(uses) == {
        "perf/tokens_per_s/engine_2": 3.0,
        "perf/tokens_per_s/engine_4": 3.0,
        "rollout/kv_use": 3.0 / 5.0,
        "rollout/kv_use_max": 0.75,
        "gpu/memory_gb/kv": 2.0,
    }


def test_an_engine_without_a_kv_cache_has_only_a_speed() -> None:
    assert describe_uses({0: EngineUse(6, 2.0)}) == {"perf/tokens_per_s/engine_0": 3.0}
    assert describe_uses({}) == describe_uses({0: EngineUse()}) == {}


@pytest.mark.parametrize("count", [16, 17])
def test_many_engines_have_three_numbers(count: int) -> None:
    """Engine i samples i + 1 tokens per second."""
    values = describe_uses({engine: EngineUse(2 * engine + 2, 2.0) for engine in range(count)})
    if count == 16:
        assert values == {f"perf/tokens_per_s/engine_{engine}": engine + 1 for engine in range(16)}
    else:
        names = ("min", "median", "max")
        assert [values.pop(f"perf/tokens_per_s/engine_{name}") for name in names] == [1, 9, 17]
        assert values == {}


def test_the_dispatcher_adds_up_what_leads_report() -> None:
    with connected(3) as mails:
        dispatcher = Dispatcher(mails[0], [1, 2])
        mails[1].send(0, Pull(1, 0, use=EngineUse(5, 1.0, 0.5, 0.5)))
        mails[1].send(0, Pull(1, 0, use=EngineUse(7, 1.0, 0.25, 0.25)))
        until(lambda: dispatcher._uses[1].num_tokens == 12, "both pulls")
        assert dispatcher.take_uses() == {1: EngineUse(12, 2.0, 0.75, 0.5), 2: EngineUse()}
        assert dispatcher.take_uses() == {1: EngineUse(), 2: EngineUse()}
