"""Compilations and other exceptional work are marked in the heartbeat: torch.compile, Triton, building an engine."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rl.config.schema import ROOT
from rl.data.batch import Batch
from rl.data.packing import over_micro_batches
from rl.rollout import fake_engine
from rl.rollout.engine import Completion, build_engine
from rl.rollout.fake_engine import FakeEngine
from rl.watch.compilation import mark_compilation
from rl.watch.heart import HEART, Heartbeat
from tests.mails import connected_worlds
from tests.unit.test_engine_failures import HARMLESS, fail
from tests.unit.test_probe_rides_along import batch_of
from tests.unit.test_reward_service import NUM_SAMPLES, STOP, Bench


def now() -> Heartbeat:
    beat = HEART.read()
    assert beat is not None
    return beat


RECOMPILES = """
import torch
from rl.watch.compilation import mark_compilation
from rl.watch.heart import HEART

seen = []

def backend(graph, inputs):
    seen.append(HEART.read())
    return graph.forward

def double(x, is_late=False):
    return x * 3 if is_late else x * 2

mark_compilation()
compiled = torch.compile(double, backend=backend, dynamic=True)
mark_compilation()
mark_compilation()
compiled(torch.ones(3))
compiled(torch.ones(4))
assert [beat.activity.exceptional for beat in seen] == ["compiling (torch.compile)"], seen
before = HEART.read()
assert before.activity.exceptional == "" and before.count == seen[0].count + 1
compiled(torch.ones(5))
assert HEART.read().count == before.count, "nothing was compiled"
compiled(torch.ones(5), is_late=True)
assert len(seen) == 2 and seen[1].count == before.count + 1
assert seen[1].activity.exceptional == "compiling (torch.compile)"
assert HEART.read().activity.exceptional == ""

def fails(graph, inputs):
    raise ZeroDivisionError

try:
    torch.compile(lambda x: x + 1, backend=fails)(torch.ones(2))
except Exception as error:
    assert "ZeroDivisionError" in repr(error), error
else:
    raise AssertionError("it should have failed")
assert HEART.read().activity.exceptional == ""

torch._dynamo.reset()
mark_compilation()
compiled(torch.ones(3))
assert seen[2].activity.exceptional == "compiling (torch.compile)"
"""


def test_a_recompilation_is_marked_while_it_lasts() -> None:
    """This needs a process of its own, since the import of vLLM turns compilation off."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-c", RECOMPILES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]


def test_marking_does_not_import_torch() -> None:
    code = "import sys; from rl.watch.compilation import mark_compilation; mark_compilation(); assert 'torch' not in "
    subprocess.run([sys.executable, "-c", code + "sys.modules"], cwd=ROOT, check=True, timeout=60)


class FakeTriton(ModuleType):
    """A stand-in for `triton.runtime.jit`, as far as it compiles."""

    def __init__(self) -> None:
        super().__init__("triton.runtime.jit")
        self.seen: list[tuple[str, tuple, dict]] = []
        fake = self

        class JITFunction:
            __name__ = "rotate"

            def _do_compile(self, *args: Any, **options: Any) -> str:
                fake.seen.append((now().activity.exceptional, args, options))
                if options.get("fails"):
                    raise ZeroDivisionError
                return "kernel"

        self.JITFunction = JITFunction


def test_a_kernel_that_triton_compiles_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = FakeTriton()
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", triton)
    mark_compilation()
    mark_compilation()
    kernel = triton.JITFunction()
    before = now().count
    assert kernel._do_compile("key", warmup=False) == "kernel"
    assert triton.seen == [("compiling rotate (Triton)", ("key",), {"warmup": False})]
    assert now().count == before + 2 and now().activity.exceptional == ""
    with pytest.raises(ZeroDivisionError):
        kernel._do_compile("key", fails=True)
    assert now().activity.exceptional == "", "an autotuner gets over it"


@pytest.mark.parametrize("jit", [None, SimpleNamespace(), SimpleNamespace(JITFunction=int)])
def test_an_unknown_triton_is_left_alone(jit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", jit)
    mark_compilation()


def test_every_build_of_an_engine_is_exceptional_work(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class SlowEngine(FakeEngine):
        def __init__(self, *args: Any):
            seen.append(now().activity.exceptional)
            super().__init__(*args)

    monkeypatch.setattr(fake_engine, "FakeEngine", SlowEngine)
    config: Any = SimpleNamespace(rollout=SimpleNamespace(engine="fake", max_num_seqs=4))
    seat: Any = SimpleNamespace(stop_token_ids=[1], device=None)
    engine = build_engine(config, Path(), seat)
    assert now().activity.exceptional == ""
    build_engine(config, Path(), seat, engine)
    assert seen == ["building the engine"] * 2 and now().activity.exceptional == ""


def test_micro_batches_report_their_shape() -> None:
    batch = batch_of(3, 300, 400, 2)
    seen: list[tuple[str, str, bool]] = []

    def compute(micro_batch: Batch) -> list[torch.Tensor]:
        seen.append((now().activity.item, now().shape, now().is_first_use))
        return [torch.zeros(int(micro_batch.loss_mask.sum()))]

    HEART.enter("a stage of this test")
    over_micro_batches(batch, [[2], [1], [0, 3], []], compute, "values")
    assert seen == [
        ("micro-batch 1 of 4", "values, up to 512 tokens", True),
        ("micro-batch 2 of 4", "values, up to 512 tokens", False),
        ("micro-batch 3 of 4", "values, up to 256 tokens", True),
        ("micro-batch 4 of 4", "values, up to 0 tokens", True),
    ]
    HEART.enter("start")


def test_engine_steps_report_their_shape_and_a_new_engine_has_used_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    class SeenEngine(FakeEngine):
        def step(self) -> list[Completion]:
            seen.append((now().shape, now().is_first_use))
            return super().step()

    monkeypatch.setattr(Bench, "make_engine", lambda bench: SeenEngine(8, STOP))
    reads, decodes = "reads up to 256 tokens of prompts", "decodes up to 8 responses"
    HEART.enter("another stage of this test")
    with connected_worlds(2) as worlds:
        bench = Bench(worlds)
        bench.start(0)
        for _ in range(2):
            bench.service.work()
        bench.start(1)
        bench.service.work()
        assert seen == [(reads, True), (decodes, True), (reads, False)]
        fail(bench.service, HARMLESS[0])
        bench.service.work()
        bench.service.engine.confirm(6)
        bench.service.work()
        assert bench.service.engine.num_unfinished == 2 * NUM_SAMPLES
        for _ in range(2):
            bench.service.work()
    assert seen[3:] == [(reads, True), (decodes, True)]
    HEART.enter("start")
