"""Run train.py with something broken: `broken_train.py WHAT RANK [arguments of train.py]`.

WHAT may be several things, joined by ` + `. Those that need a culprit are broken on that rank only.
"""

import rl.world.bootstrap  # noqa: F401, I001  the watchdog before torch, as in train.py

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from torch import Tensor

import train
from rl.world import signals
from rl.learner import policy
from rl.learner.policy import PolicyTrainer
from rl.rollout.fake_engine import FakeEngine
from rl.rollout.service import RolloutService
from rl.run import agree
from rl.run.derive import nominal_bytes
from rl.run.plan import parse_or_plan
from rl.sync.layout import MemoryLayout
from rl.sync.transfer import BucketTransfer
from rl.world.world import World

CALL = 2  # the broken method fails at this call
LATE_CALL = 4  # after three quick ones
LATE_STEP = 30  # the engine fails after so many steps
ENGINE_AFTER = "engine, once there is "  # a file, whose path follows
LONG_S = 5.0  # longer than the silence that a test allows for known work


def broken(method: Callable, action: Callable[[], None], pause_s: float = 0.0) -> Callable:
    """Run the action before a later call. Each call takes `pause_s` longer: a watchdog, which looks ten times a second,
    learns how long a stage takes only if it has seen it."""
    calls = 0

    def replaced(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == CALL:
            action()
        time.sleep(pause_s)
        return method(*args, **kwargs)

    return replaced


def from_version_2(fill: Callable, action: Callable[[], None]) -> Callable:
    """Replace MemoryLayout.fill by the action from the second version on. It gets the first tensor once per version."""
    version = 0

    def replaced(layout: MemoryLayout, whole: dict[int, Tensor]) -> None:
        nonlocal version
        version += 0 in whole
        fill(layout, whole) if version < 2 else action()

    return replaced


def failing_after_one(buckets: Callable) -> Callable:
    def replaced(*args: Any) -> Iterator[Any]:
        yield next(buckets(*args))
        fail()

    return replaced


def fail() -> None:
    reason = "a planted one"  # noqa: F841  a test of the debugger looks at it
    raise ZeroDivisionError("planted")


def fail_with_details() -> None:
    """Fail with a message that differs in each attempt, as when memory is short."""
    raise MemoryError(f"process {os.getpid()} has no memory left")


def hang() -> None:
    """Block the main thread in a C call, as in a collective whose peer is gone."""
    reader, _ = os.pipe()
    while True:
        os.read(reader, 1)


def sleep() -> None:
    """Sleep outside of any collective, with an interpreter that runs."""
    time.sleep(10_000)


def hang_disk() -> None:
    """Let every fsync hang from now on, with an interpreter that runs."""
    os.fsync = lambda file: sleep()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def freeze() -> None:
    """Call C code that never releases the interpreter."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def stop_here() -> None:
    answer = 41 + 1
    breakpoint()
    print(f"went on with {answer}", flush=True)


def name_cards() -> None:
    """Let each rank say that it has the card GPU-R. tests/nvml.py stands for NVML on a machine without cards."""
    connect = World.connect

    def replaced(world: World, *args: Any) -> None:
        connect(world, *args)
        world.faults.tell_watchdog("gpu", uuid=f"GPU-{world.rank}")

    World.connect = replaced


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def share_memory_and_kill() -> None:
    """Die with a named segment of shared memory, such as the ranks of a vLLM engine have."""
    SharedMemory(f"test-{os.getppid()}", create=True, size=1 << 20)
    kill()


def kill_later() -> None:
    """Die when the previous step is committed, which takes a moment."""
    time.sleep(3)
    kill()


def slow_down_engines() -> None:
    step = FakeEngine.step
    FakeEngine.step = lambda engine: time.sleep(0.02) or step(engine)


def vary_rewards() -> None:
    sys.argv.append("reward.function=tests/e2e/reward_functions.py:varied")


def engine_class() -> type:
    if [setting for setting in sys.argv if setting.startswith("rollout.engine=")][-1:] == ["rollout.engine=fake"]:
        return FakeEngine
    from rl.rollout.vllm.engine import VllmEngine

    return VllmEngine


def trace_work() -> None:
    """Write the beginning and the end of every update and engine step beside the run's folder. Ranks share a clock."""
    settings = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    path = Path(settings["run.dir"]) / f"{settings['run.name']}.{os.environ['RANK']}.spans.jsonl"

    def traced(name: str, method: Callable) -> Callable:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            began = time.time()
            try:
                return method(*args, **kwargs)
            finally:
                with path.open("a") as file:
                    print(json.dumps([name, began, time.time()]), file=file)

        return replaced

    engine = engine_class()
    engine.step = traced("engine step", engine.step)
    PolicyTrainer.update = traced("update", PolicyTrainer.update)


def fail_engines(times: int) -> None:
    """Let engines fail several times in a row, after their first steps."""
    errors = iter([False] * 3 + [True] * times)
    engine = engine_class()
    step = engine.step
    engine.step = lambda engine: fail() if next(errors, False) else step(engine)


def fail_engines_of_version(version: int) -> None:
    """Let engines fail once, in their third step with this version of the weights."""
    engine, num_steps = engine_class(), 0
    step = engine.step

    def replaced(engine: Any) -> Any:
        nonlocal num_steps
        num_steps += engine.version == version
        if num_steps == 3:
            num_steps += 1
            fail()
        return step(engine)

    engine.step = replaced


def fail_engine_after(file: Path) -> None:
    """Let an engine make its first steps, then sample nothing until there is this file, and then fail once."""
    count, step = 0, FakeEngine.step

    def replaced(engine: FakeEngine) -> Any:
        nonlocal count
        if count == LATE_STEP and not file.exists():
            time.sleep(0.01)
            return []  # the rank goes on, and delivers the groups that have ended
        count += 1
        if count == LATE_STEP + 1:
            fail()
        return step(engine)

    FakeEngine.step = replaced


def compile_and_sleep() -> None:
    """Call a compiled function in every step. The fourth call compiles another graph, which takes LONG_S seconds; the
    fifth only sleeps as long."""
    import torch._dynamo  # before a model is loaded, as on a rank that compiles layers

    calls = 0

    def compile_graph(graph: Any, inputs: list[Any]) -> Callable:
        time.sleep(LONG_S if calls == LATE_CALL else 0)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=compile_graph)
    compiled(torch.zeros(2))  # compiled once before the first update
    score_responses = policy.score_responses

    def replaced(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        compiled(torch.zeros(2, dtype=torch.int32 if calls == LATE_CALL else torch.float32))
        time.sleep(LONG_S if calls == LATE_CALL + 1 else 0)
        return score_responses(*args)

    policy.score_responses = replaced  # called once per micro-batch


def break_(what: str, culprit: int) -> None:
    is_culprit = int(os.environ["RANK"]) == culprit
    is_first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if (what == "update" and is_culprit) or (what == "update, once" and is_culprit and is_first_attempt):
        PolicyTrainer.update = broken(PolicyTrainer.update, fail)
    elif what == "breakpoint" and is_culprit:
        PolicyTrainer.update = broken(PolicyTrainer.update, stop_here)
    elif what == "cards":
        name_cards()
    elif what == "GPUs of 80 GB":
        agree.device_bytes = lambda device: nominal_bytes(80)
    elif what == "update, others hang":
        PolicyTrainer.update = broken(PolicyTrainer.update, fail if is_culprit else hang)
    elif what == "all hang":
        PolicyTrainer.update = broken(PolicyTrainer.update, hang)
    elif what == "rollout" and is_culprit:
        RolloutService.work = broken(RolloutService.work, fail)
    elif what in ("engine, once", "engine, twice") and (is_culprit or culprit < 0):
        fail_engines(100 if what == "engine, twice" else 1)
    elif what == "all engines, once":
        fail_engines(1)
    elif what == "no weights" and is_culprit:
        MemoryLayout.fill = lambda layout, whole: None
    elif what == "last engine" and int(os.environ["RANK"]) >= culprit and is_first_attempt:  # all of its ranks
        fail_engines_of_version(3)
    elif what.startswith(ENGINE_AFTER) and is_culprit:
        fail_engine_after(Path(what.removeprefix(ENGINE_AFTER)))
    elif what == "engine, twice in the first attempt" and is_culprit and is_first_attempt:
        fail_engines(2)
    elif what == "update, details" and is_culprit:
        PolicyTrainer.update = broken(PolicyTrainer.update, fail_with_details)
    elif what == "exchange" and is_culprit:
        BucketTransfer.buckets = failing_after_one(BucketTransfer.buckets)
    elif what == "first two killed" and int(os.environ["RANK"]) < 2:
        PolicyTrainer.update = broken(PolicyTrainer.update, kill)
    elif what in ("slow engine", "slow engines") and (is_culprit or what == "slow engines"):
        slow_down_engines()
    elif what == "traced":
        trace_work()
    elif what == "varied rewards":
        vary_rewards()
    elif what == "load" and is_culprit:
        MemoryLayout.fill = from_version_2(MemoryLayout.fill, fail)
    elif what == "loads once" and is_culprit:
        MemoryLayout.fill = from_version_2(MemoryLayout.fill, lambda: None)
    elif what == "packed layers" and is_culprit:
        from rl.rollout.vllm import build

        build.turn_off_packing = lambda: None
    elif what == "untested vLLM":
        import vllm

        vllm.__version__ = "99.0"
    elif what in ("sleeping", "stopped", "frozen") and is_culprit:
        fault = {"sleeping": sleep, "stopped": stop, "frozen": freeze}[what]
        policy.score_responses = broken(policy.score_responses, fault, pause_s=0.4)  # called once per micro-batch
    elif what == "compiles late, then sleeps" and is_culprit:
        compile_and_sleep()
    elif what == "disk hangs" and is_culprit:
        PolicyTrainer.update = broken(PolicyTrainer.update, hang_disk)
    elif what == "killed" and is_culprit:
        PolicyTrainer.update = broken(PolicyTrainer.update, kill)
    elif what == "killed with shared memory" and is_culprit:
        PolicyTrainer.update = broken(PolicyTrainer.update, share_memory_and_kill)
    elif what == "killed at once" and is_culprit:
        PolicyTrainer.update = lambda *args: kill()
    elif what == "slow start":
        print("starts slowly", flush=True)
        time.sleep(60)
    elif what == "short notice":
        signals.STOP_S = 1.0
    elif what == "not importable" and is_culprit:
        raise ModuleNotFoundError("planted")
    elif what == "killed early" and is_culprit:
        kill()
    elif what == "killed, once" and is_culprit and is_first_attempt:
        PolicyTrainer.update = broken(PolicyTrainer.update, kill_later)


def main() -> None:
    whats, culprit = sys.argv[1].split(" + "), int(sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    for what in whats:
        break_(what, culprit)
    train.main(parse_or_plan(None))


if __name__ == "__main__":
    main()
