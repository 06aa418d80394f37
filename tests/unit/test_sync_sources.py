"""What an actor sends of a model with adapters: its rows, merged with the adapters whenever they are read."""

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from rl.config.schema import LoraConfig
from rl.model.adapter_names import adapters_of
from rl.model.shards import LocalSlice, TensorInfo, local_slices
from rl.sync.plan import Plan, transferred_tensors
from rl.sync.sources import Adapter, MergedSources, WeightSource, open_sources
from rl.sync.transfer import BucketTransfer
from rl.sync.verification import VersionDigests
from tests.adapted_model import load_adapted, merged, save_exact

CPU = torch.device("cpu")

SHAPE = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
LORA = LoraConfig(rank=4, alpha=8, targets=["q_proj", "v_proj", "down_proj"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    save_exact(LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)), folder)
    return folder


def source_of(model: nn.Module) -> WeightSource:
    return WeightSource(model, partial(local_slices, model))


def test_adapters_are_not_sent_and_their_weights_are_marked(folder: Path, mesh: DeviceMesh) -> None:
    """The tensors have the names, shapes and order of the model's files."""
    tensors = transferred_tensors(load_adapted(folder, mesh, LORA, "float32"), "bfloat16")
    files = load_file(folder / "model.safetensors")
    assert {info.name: info.shape for info in tensors} == {name: tuple(each.shape) for name, each in files.items()}
    assert [info.name for info in tensors] == [
        name for name, _ in LlamaForCausalLM.from_pretrained(folder).named_parameters()
    ]
    marked = [info.name for info in tensors if info.is_merged]
    assert marked == [info.name for info in tensors if info.name.split(".")[-2] in LORA.targets]
    assert len(marked) == 2 * len(LORA.targets)
    assert {info.dtype for info in tensors} == {"bfloat16"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("alpha", [8, 1])
def test_sources_are_the_weights_of_the_files_with_their_adapters(
    alpha: int, dtype: str, folder: Path, mesh: DeviceMesh
) -> None:
    lora = replace(LORA, alpha=alpha)
    model = load_adapted(folder, mesh, lora, dtype)
    tensors, files = transferred_tensors(model, dtype), load_file(folder / "model.safetensors")
    sources = open_sources(source_of(model), tensors, CPU)
    assert list(sources) == list(range(len(tensors)))
    for index, info in enumerate(tensors):
        wanted = merged(info, files, lora, round_number=0)
        assert sources[index].dtype == wanted.dtype
        assert torch.equal(sources[index], wanted.reshape(-1)), info.name
        is_changed = not torch.equal(wanted.float(), files[info.name])
        assert is_changed == info.is_merged


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_rows_of_all_shards_are_what_peft_merges(num_shards: int, dtype: str, folder: Path) -> None:
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=LORA.targets, init_lora_weights=False)
    model: Any = peft.get_peft_model(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), config)
    before = {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".default", ""): each.detach().clone()
        for name, each in model.named_parameters()
    }
    after = dict(model.merge_and_unload().named_parameters())
    infos = [TensorInfo(name, tuple(each.shape), dtype, True) for name, each in after.items()]
    found: dict[int, list[Tensor]] = {index: [] for index in range(len(infos))}
    for shard in range(num_shards):
        rows, adapters = {}, {}
        for index, info in enumerate(infos):
            own, (name_a, name_b) = slice(*info.rows(shard, num_shards)), adapters_of(info.name)
            rows[index] = before[info.name][own]
            if name_a in before:
                adapters[index] = Adapter(before[name_a], before[name_b][own], scale=7 / 5)
        assert len(adapters) == 6
        for index, part in MergedSources(infos, rows, adapters, CPU).items():
            found[index].append(part)
    limits = {"rtol": 1e-6, "atol": 1e-7} if dtype == "float32" else {"rtol": 2**-8, "atol": 0.0}
    for index, info in enumerate(infos):
        whole, wanted = torch.cat(found[index]).view(info.shape), after[info.name].to(info.torch_dtype)
        torch.testing.assert_close(whole.to(info.torch_dtype), wanted, **limits)


def test_offloaded_weights_are_read_from_their_slices(folder: Path, mesh: DeviceMesh) -> None:
    """While weights are offloaded, the model's own memory is freed. Here it has other values."""
    model = load_adapted(folder, mesh, LORA, "float32")
    tensors, files = transferred_tensors(model, "float32"), load_file(folder / "model.safetensors")
    copies = [LocalSlice(part.info, part.data.clone()) for part in local_slices(model)]
    for part in local_slices(model):
        part.data.fill_(9.0)
    sources = open_sources(WeightSource(model, lambda: copies), tensors, CPU)
    for index, info in enumerate(tensors):
        assert torch.equal(sources[index], merged(info, files, LORA, round_number=0).reshape(-1)), info.name


def test_reading_changes_no_weight(folder: Path, mesh: DeviceMesh) -> None:
    """float32 weights on the device could be merged in place by mistake."""
    model = load_adapted(folder, mesh, LORA, "float32")
    before = copy.deepcopy([part.data for part in local_slices(model)])
    sources = open_sources(source_of(model), transferred_tensors(model, "float32"), CPU)
    first, second = [*sources.values()], [*sources.values()]
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(part.data, old) for part, old in zip(local_slices(model), before, strict=True))


class WatchedSources(MergedSources):
    """Measures how many bytes of merged rows are alive at most."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.most_alive = 0

    def __getitem__(self, index: int) -> Tensor:
        rows = super().__getitem__(index)
        self.alive = [(ref, size) for ref, size in self.alive if not ref.expired()]
        self.alive.append((StorageWeakRef(rows.untyped_storage()), rows.nbytes))
        self.most_alive = max(self.most_alive, sum(size for _, size in self.alive))
        return rows


@pytest.mark.parametrize(
    ("owners", "receivers", "most_in_bucket"),
    [
        ((0,), (0,), 1),  # no transfer: a bucket of merged tensors, which goes directly into the engine
        ((0, 1), (9,), 0),  # rows are packed portion by portion
        ((0, 1), (0, 1), 0),
    ],
)
def test_merged_rows_never_take_more_than_a_bucket_and_a_portion(
    owners: tuple[int, ...], receivers: tuple[int, ...], most_in_bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, num_tensors, per_bucket, per_portion = 64, 24, 4, 2
    monkeypatch.setattr("rl.sync.plan.PORTION_BYTES", per_portion * size)
    infos = tuple(TensorInfo(f"t{index}", (4, 4), "float32", True, is_merged=True) for index in range(num_tensors))
    plan = Plan(infos, owners, receivers, bucket_bytes=per_bucket * size)
    assert len(plan.buckets) == num_tensors // per_bucket
    shard_rows = [info.rows(0, len(owners))[1] for info in infos]
    rows = {index: torch.ones(count, 4) for index, count in enumerate(shard_rows)}
    adapters = {index: Adapter(torch.ones(2, 4), torch.ones(count, 2), 0.5) for index, count in enumerate(shard_rows)}
    sources = WatchedSources(infos, rows, adapters, CPU)
    transfer = BucketTransfer(plan, [None] * len(owners), 0, CPU, reuse=True)
    digests = VersionDigests(plan, [], CPU, reads_back=False)
    for bucket, whole in transfer.buckets(sources, plan.buckets):
        digests.add_sent(bucket.ranges[0], sources)
        whole.clear()
    of_portion = per_portion * size // len(owners)
    assert of_portion <= sources.most_alive <= most_in_bucket * per_bucket * size + of_portion
