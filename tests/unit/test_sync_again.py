"""A rebuilt engine gets the current version again. If it cannot be read back, it must pass the probe first."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from rl.config.schema import SyncConfig
from rl.model.load import load_model
from rl.model.shards import TensorInfo, local_slices
from rl.placement.roles import plan
from rl.sync import probe, weights
from rl.sync.layout import Destination, MemoryLayout, OpaqueLoader, Region
from rl.sync.plan import make_plan, transferred_tensors
from rl.sync.probe import learner_logprobs, make_probe
from rl.sync.weights import SyncError, SyncSettings, WeightSource, WeightSync
from tests.mails import connected

CPU = torch.device("cpu")
PROBE = make_probe(32, 16, limit=1e-3)
SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


class Engine:
    """Takes weights through its own loader or into memory that can be read. A stale engine computes with others."""

    def __init__(self, model: nn.Module, is_readable: bool = False, is_stale: bool = False):
        self.version, self.num_probes = 0, 0
        self._model, self._is_readable, self._is_stale = model, is_readable, is_stale

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout | OpaqueLoader:
        if not self._is_readable:
            return OpaqueLoader(lambda stream: [*stream] and None, "it packs its layers")
        memory = [torch.zeros(1, info.num_elements, dtype=info.torch_dtype) for info in tensors]
        return MemoryLayout(tensors, [Destination(i, Region(0, 1, to.numel(), 0), to) for i, to in enumerate(memory)])

    def begin_version(self) -> None:
        self.version = 0

    def confirm(self, version: int) -> None:
        self.version = version

    def probe(self, tokens: list[int]) -> list[float]:
        self.num_probes += 1
        return [logprob + 0.5 * self._is_stale for logprob in learner_logprobs(self._model, tokens, CPU)]


@pytest.fixture
def model(tmp_path: Path, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=2)).save_pretrained(tmp_path)
    return load_model(tmp_path, mesh, CPU, "float32", trainable=True)


@pytest.fixture
def sync(model: nn.Module, request: pytest.FixtureRequest) -> Iterator[WeightSync]:
    """A sync at version 3, which was not probed; `request.param` are the settings."""
    placement, config = plan({"actor,rollout": "all"}, 1, 1), SyncConfig(probe_interval=0, **request.param)
    tensors = transferred_tensors(model, "float32")
    with connected(1) as (mail,):
        engine = Engine(model, is_readable=config.bucket_mb == 1)
        settings = SyncSettings(placement, make_plan(tensors, placement, 1, CPU), [None], config, CPU, PROBE)
        sync = WeightSync(mail, settings, WeightSource(model, partial(local_slices, model)), [engine])
        for _ in range(3):
            sync.publish(step=1)
        assert (engine.version, engine.num_probes) == (3, 0 if config.verify == "off" else 2)
        sync.remove_receiver(engine)
        yield sync


@pytest.fixture
def offloaded_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a forward pass of the learner an error, since a collocated learner may be offloaded while engines sample."""

    def fail(*args: object) -> list[float]:
        raise AssertionError("a forward of a learner that is not on its device")

    monkeypatch.setattr(weights, "learner_logprobs", fail)


@pytest.mark.parametrize("sync", [{}, {"verify": "transport"}], indirect=True)
def test_a_rebuilt_engine_that_cannot_be_read_back_is_probed_before_it_serves(
    sync: WeightSync, model: nn.Module, offloaded_learner: None
) -> None:
    stale = Engine(model, is_stale=True)
    sync.add_receiver(stale)
    with pytest.raises(SyncError, match=r"version 3 .*not probed everywhere: rank 0 \(engine 0\): its logprobs"):
        sync.publish_again()
    assert (stale.version, stale.num_probes) == (0, 1)
    sync.remove_receiver(stale)
    right = Engine(model)
    sync.add_receiver(right)
    assert sync.publish_again() == 3
    assert (right.version, right.num_probes) == (3, 1)


@pytest.mark.parametrize(
    ("sync", "is_readable"), [({"bucket_mb": 1}, True), ({"verify": "off"}, False)], indirect=["sync"]
)
def test_an_engine_that_can_be_read_back_or_is_not_verified_is_not_probed(
    sync: WeightSync, model: nn.Module, is_readable: bool, offloaded_learner: None
) -> None:
    engine = Engine(model, is_readable, is_stale=True)
    sync.add_receiver(engine)
    assert sync.publish_again() == 3
    assert (engine.version, engine.num_probes) == (3, 0)


@pytest.mark.parametrize("sync", [{"bucket_mb": 1}], indirect=True)
def test_a_rebuilt_engine_that_can_no_longer_be_read_back_is_refused(sync: WeightSync, model: nn.Module) -> None:
    """The sync kept no logprobs to compare it with."""
    with pytest.raises(SyncError, match="cannot be read back, though the first one could: it packs its layers"):
        sync.add_receiver(Engine(model, is_readable=False))


def test_a_probe_on_a_gpu_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stances: list[str] = []

    @contextmanager
    def set_stance(stance: str) -> Iterator[None]:
        stances.append(stance)
        yield
        stances.pop()

    class Scored(Exception):
        pass

    def score(*args: object, **options: object) -> None:
        assert stances == ["force_eager"]
        raise Scored

    monkeypatch.setattr(torch.compiler, "set_stance", set_stance)
    monkeypatch.setattr(probe, "score_responses", score)
    with pytest.raises(Scored):
        learner_logprobs(nn.Module(), PROBE.tokens, torch.device("cuda"))
