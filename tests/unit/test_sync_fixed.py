"""Fixed tensors of a model with adapters: they are sent only to receivers that lack them, and proven in every sync."""

import gc
import queue
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from rl.config.schema import LoraConfig, SyncConfig
from rl.model.shards import TensorInfo, local_slices
from rl.placement.roles import plan
from rl.rollout.fake_engine import FakeEngine
from rl.sync.layout import Destination, MemoryLayout, OpaqueLoader, Region
from rl.sync.plan import Plan, transferred_tensors
from rl.sync.probe import make_probe
from rl.sync.sources import WeightSource
from rl.sync.transfer import BucketTransfer
from rl.sync.weights import StartSync, SyncError, SyncSettings, WeightSync
from rl.world.messages import Mailbox
from tests.adapted_model import fill_adapters, load_adapted, merged, save_exact
from tests.mails import connected

CPU = torch.device("cpu")

SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LORA = LoraConfig(rank=2, alpha=4, targets=["q_proj", "down_proj"])
WAIT_S = 20.0  # limit on waits for the other rank
FIXED = "model.embed_tokens.weight"


class HalvesEngine(FakeEngine):
    """Takes every tensor in two parts, as a fused parameter does. So it is verified by what it should hold."""

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> MemoryLayout:
        destinations = []
        for destination in super().memory_layout(tensors).destinations:
            count, view = destination.region.num_columns, destination.target
            for part in (slice(0, count // 2), slice(count // 2, count)):
                region = Region(part.start, 1, part.stop - part.start, 0)
                destinations.append(Destination(destination.tensor, region, view[:, part]))
        return MemoryLayout(tensors, destinations)


class LoadingEngine(FakeEngine):
    """Takes weights through its own loader, and cannot be read back."""

    def memory_layout(self, tensors: Sequence[TensorInfo]) -> Any:
        def load(weights: Iterator[tuple[str, Tensor]]) -> None:
            self.memory = {name: tensor.clone() for name, tensor in weights}

        return OpaqueLoader(load, "it packs its layers")


class TwoRanks:
    """An actor in this thread, and an engine on another rank, in a thread of its own."""

    def __init__(self, mails: Sequence[Mailbox], folder: Path, mesh: DeviceMesh, engine: FakeEngine, verify: Any):
        self.model, self.mesh, self.engine, self.round = load_adapted(folder, mesh, LORA, "float32"), mesh, engine, 0
        self.files, self.tensors = load_file(folder / "model.safetensors"), transferred_tensors(self.model, "float32")
        placement = plan({"actor": "0", "rollout": "1"}, 1, 2)
        config = SyncConfig(probe_interval=0, verify=verify, join_timeout_s=WAIT_S)
        sync_plan, pgs = Plan(tuple(self.tensors), (0,), (1,), bucket_bytes=2000), [None]
        settings = SyncSettings(placement, sync_plan, pgs, config, CPU, make_probe(32, 16, limit=1e-3))
        source = WeightSource(self.model, partial(local_slices, self.model))
        self._mail, self._thread = mails[1], ThreadPoolExecutor(1)
        there = self._thread.submit(WeightSync, mails[1], settings, None, [engine])
        self.sync, self.engine_sync = WeightSync(mails[0], settings, source, []), there.result(WAIT_S)

    def publish(self, again: bool = False) -> None:
        """Publish a version with other adapters, or the same one again. Check what the engine holds then."""
        there = self._thread.submit(lambda: self.engine_sync.join(self._mail.receive(StartSync).message.version))
        try:
            if again:
                self.sync.publish_again()
            else:
                self.round += 1
                fill_adapters(self.model, self.mesh, self.round)
                self.sync.publish(step=1)
        finally:
            error = there.exception(WAIT_S)
        assert error is None
        for info in self.tensors:
            held = self.engine.memory[info.name]
            assert torch.equal(held, merged(info, self.files, LORA, self.round)), info.name
        assert self.engine.version == self.sync.version

    def rebuild(self) -> FakeEngine:
        self.engine_sync.remove_receiver(self.engine)
        failed, self.engine = self.engine, type(self.engine)(4, 0)
        self.engine_sync.add_receiver(self.engine)
        return failed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    save_exact(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)), folder)
    return folder


@pytest.fixture
def make(folder: Path, mesh: DeviceMesh) -> Iterator[Callable[..., TwoRanks]]:
    with connected(2) as mails:
        yield lambda kind=FakeEngine, verify="full": TwoRanks(mails, folder, mesh, kind(4, 0), verify)


@pytest.fixture(autouse=True)
def num_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace broadcasts by a queue between the two threads. Return the sizes of what is sent."""
    sizes, on_the_way = [], queue.SimpleQueue()

    def broadcast(transfer: BucketTransfer, shard: int, buffer: Tensor) -> list[Any]:
        if transfer._rank == 0:
            sizes.append(buffer.nbytes)
            on_the_way.put(buffer.clone())
        else:
            buffer.copy_(on_the_way.get(timeout=WAIT_S))
        return []

    monkeypatch.setattr(BucketTransfer, "_broadcast", broadcast)
    return sizes


def sent(num_bytes: list[int], ranks: TwoRanks) -> str:
    """Return what was sent since the last call."""
    total = sum(num_bytes)
    num_bytes.clear()
    every, changing = (
        sum(info.num_bytes for info in ranks.tensors if info.is_merged or is_all) for is_all in (True, False)
    )
    return {every: "all", changing: "changing"}.get(total, f"{total} of {every} bytes, of which {changing} change")


@pytest.mark.parametrize("verify", ["full", "transport", "off"])
@pytest.mark.parametrize("kind", [FakeEngine, HalvesEngine])
def test_fixed_tensors_are_sent_with_the_first_version_alone(
    kind: type[FakeEngine], verify: str, make: Callable[..., TwoRanks], num_bytes: list[int]
) -> None:
    ranks, seen = make(kind, verify), []
    for _ in range(3):
        ranks.publish()
        seen.append(sent(num_bytes, ranks))
    assert seen == ["all", "changing", "changing"]


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("kind", [FakeEngine, HalvesEngine])
def test_a_receiver_that_may_lack_fixed_tensors_gets_all(
    kind: type[FakeEngine], verify: str, make: Callable[..., TwoRanks], num_bytes: list[int]
) -> None:
    ranks = make(kind, verify)
    ranks.publish()
    ranks.rebuild()
    num_bytes.clear()
    ranks.publish(again=True)
    assert sent(num_bytes, ranks) == "all"
    ranks.publish()
    assert sent(num_bytes, ranks) == "changing"
    # As after a donation: it holds the version, but no sync has written it.
    donor = ranks.rebuild()
    for name, tensor in donor.memory.items():
        ranks.engine.memory[name].copy_(tensor)
    ranks.engine.confirm(ranks.sync.version)
    ranks.publish()
    assert sent(num_bytes, ranks) == "all"
    ranks.publish()
    assert sent(num_bytes, ranks) == "changing"
    # As after the sleep of an engine, which drops its weights.
    for tensor in ranks.engine.memory.values():
        tensor.zero_()
    ranks.engine.version = 0
    ranks.publish()
    assert sent(num_bytes, ranks) == "all"


def test_a_removed_engine_is_freed(make: Callable[..., TwoRanks]) -> None:
    """Otherwise its weights would be in memory while the new engine is built."""
    ranks = make()
    for _ in range(2):
        ranks.publish()
    layout = weakref.ref(ranks.engine_sync.layout_of(ranks.engine))
    ranks.engine_sync.remove_receiver(ranks.engine)
    gc.collect()
    assert layout() is None


def test_an_engine_that_cannot_be_read_back_gets_all_tensors_with_every_version(make: Callable[..., TwoRanks]) -> None:
    ranks = make(LoadingEngine)
    for _ in range(3):
        ranks.engine.memory.clear()
        ranks.publish()  # compares all tensors


@pytest.mark.parametrize("kind", [FakeEngine, HalvesEngine])
def test_a_fixed_tensor_that_was_overwritten_in_an_engine_is_found(
    kind: type[FakeEngine], make: Callable[..., TwoRanks], num_bytes: list[int]
) -> None:
    ranks = make(kind)
    ranks.publish()
    ranks.engine.memory[FIXED].view(-1)[3] += 1
    num_bytes.clear()
    with pytest.raises(SyncError, match=rf"rank 1 \(engine 0\): holds other values than it received of {FIXED}$"):
        ranks.publish()
    assert sent(num_bytes, ranks) == "changing"
    assert ranks.engine.version == 0
    ranks.publish()  # the engine has no version any more, so it gets all tensors
    assert sent(num_bytes, ranks) == "all"


@pytest.mark.parametrize("kind", [FakeEngine, HalvesEngine])
def test_a_frozen_weight_that_changes_on_an_actor_is_found(
    kind: type[FakeEngine], make: Callable[..., TwoRanks]
) -> None:
    ranks = make(kind)
    ranks.publish()
    next(part.data for part in local_slices(ranks.model) if part.info.name == FIXED)[0, 0] += 1
    with pytest.raises(SyncError, match=rf"rank 1 \(engine 0\): received other bytes than were sent of {FIXED}$"):
        ranks.publish()
