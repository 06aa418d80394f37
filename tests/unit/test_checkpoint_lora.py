"""Checkpoints of a run with adapters (LoRA): what a step holds, and with what a run may resume from it."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from rl.checkpoint.base import Share, check_same_base, digest_base
from rl.checkpoint.manifest import CheckpointError, Manifest
from rl.checkpoint.resume import SliceReader, fill, find_checkpoint, preview_resume
from rl.checkpoint.settings import check_settings_of_checkpoint
from rl.checkpoint.snapshot import Snapshot
from rl.checkpoint.write import CheckpointWriter, RunDescription
from rl.config.load import load_config
from rl.config.schema import ConfigError
from rl.model.base_digest import BaseDigests, FrozenTensor
from rl.model.shards import LocalSlice, TensorInfo
from rl.placement.roles import plan
from tests.mails import stores_on
from tests.saved_steps import OpenStores, rows_of, save

WEIGHT = TensorInfo("layers.0.up.weight", (7, 5), "bfloat16", sharded=True)
A = TensorInfo("layers.0.up.lora_A.weight", (2, 5), "float32", sharded=True)  # fewer rows than ranks
B = TensorInfo("layers.0.up.lora_B.weight", (7, 2), "float32", sharded=True)
VALUES = {A.name: torch.linspace(-1, 1, 10).view(2, 5), B.name: torch.linspace(0, 1, 14).view(7, 2)}
BASE = BaseDigests("org/base", {"layers.0.up.weight": FrozenTensor("bfloat16", "0123456789abcdef")})


def manifest(bases: dict[str, BaseDigests] | None = None, critic: bool = False, **changes: Any) -> Manifest:
    """The manifest of step 4 of a run with these settings, by dotted name with double underscores."""
    settings = {"model__lora__rank": 2, "model__lora__alpha": 4} | changes
    config = load_config(None, [f"{name.replace('__', '.')}={value}" for name, value in settings.items()])
    state = {"bases": {kind: asdict(base) for kind, base in (bases or {}).items()}}
    found = Manifest("r1", "first", 4, "w1-4", 1.0, state, asdict(config), {}, ())
    if critic:
        from rl.checkpoint.manifest import File, Slice

        head = Slice("critic", "head", "F32", (1,), (0,), (1,), 0, 4, "")
        found = replace(found, files=(File("optimizer-00000-of-00001.safetensors", 4, "", (), (head,)),))
    return found


def test_a_step_holds_adapters_and_nothing_of_the_base_model(tmp_path: Path) -> None:
    """Adapters are saved in float32 in a bfloat16 run, once, because they are the masters themselves."""
    run = RunDescription("first", {}, (replace(WEIGHT, dtype="bfloat16"),), {"config.json": b"{}"}, {"model": BASE})
    parts = [("model", LocalSlice(info, VALUES[info.name])) for info in (A, B)]
    parts += [("exp_avg", LocalSlice(info, VALUES[info.name] + 1)) for info in (A, B)]
    pieces = [[part.data.reshape(-1)] for _, part in parts]
    with stores_on([tmp_path]) as (store,):
        placement = plan({"actor,rollout": "all"}, 1, 1)
        writer = CheckpointWriter(store, placement, 0, run, copies=1)
        files = writer.write("step_4.tmp-w1-4", "w1-4", Snapshot(4, parts, {}, {}, frozenset()), pieces)
    slices = {(part.kind, part.name): part.dtype for file, _ in files for part in file.slices}
    assert slices == {(kind, info.name): "F32" for kind in ("model", "exp_avg") for info in (A, B)}
    folder = tmp_path / "step_4.tmp-w1-4"
    model = safetensors.torch.load_file(folder / "model-00000-of-00001.safetensors")
    assert set(model) == set(VALUES) and all(torch.equal(model[name], VALUES[name]) for name in VALUES)
    weights = sum(part.num_bytes for file, _ in files for part in file.slices)
    assert weights == 2 * 4 * (A.num_elements + B.num_elements), "weights and moments of adapters only"


@pytest.mark.parametrize("num_readers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_writers", [1, 4])
def test_adapters_are_loaded_at_any_number_of_ranks(
    roots: list[Path], open_stores: OpenStores, num_writers: int, num_readers: int
) -> None:
    stores = open_stores(roots)
    values = {("model", name): value for name, value in VALUES.items()}
    values |= {("exp_avg", name): value + 1 for name, value in VALUES.items()}
    save(roots, 4, (A, B), values, num_shards=num_writers)
    found = find_checkpoint(stores[0], "auto")
    for shard in range(num_readers):
        parts = [
            (kind, LocalSlice(info, torch.full_like(rows_of(values[kind, info.name], info, shard, num_readers), -9)))
            for kind in ("model", "exp_avg")
            for info in (A, B)
        ]
        fill(parts, SliceReader(found, stores[0], own_lead=0), shard, num_readers)
        for kind, part in parts:
            assert torch.equal(part.data, rows_of(values[kind, part.info.name], part.info, shard, num_readers))


def test_the_base_model_survives_json() -> None:
    found = Manifest.from_json(manifest({"model": BASE}).to_json(), "here")
    assert found.bases == {"model": BASE} and found.lora.rank == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body["state"].update(bases={"model": {"path": "x"}}),
        lambda body: body["state"].update(bases={"model": {"path": "x", "tensors": {"w": "0"}}}),
        lambda body: body["state"].update(bases={"model": {"path": "x", "tensors": {"../w": ["float32", "0"]}}}),
        lambda body: body["state"].update(bases=[1]),
        lambda body: body["config"]["model"].update(lora=[1]),
        lambda body: body["config"]["model"]["lora"].update(rank=-1),
        lambda body: body["config"]["model"]["lora"].update(alpha=0),
        lambda body: body["config"]["model"]["lora"].update(targets="q_proj"),
    ],
)
def test_a_damaged_manifest_is_refused(damage: Any) -> None:
    import json

    body = json.loads(manifest({"model": BASE}).to_json())
    damage(body)
    with pytest.raises(CheckpointError, match="here is damaged"):
        Manifest.from_json(json.dumps(body).encode(), "here")


def test_a_manifest_from_before_adapters_can_be_read() -> None:
    old = replace(manifest(), config={"model": {"path": "x", "dtype": "float32"}}, state={})
    assert not old.lora.is_set and old.bases == {}
    check_settings_of_checkpoint(old, load_config(None, []))


WITH = {"model__lora__rank": 2, "model__lora__alpha": 4}
OTHERS = [
    ({"model__lora__rank": 4}, "model.lora.rank: got 4, but the adapters of step 4 were trained with 2"),
    ({"model__lora__alpha": 8}, "model.lora.alpha: got 8, but the adapters of step 4 were trained with 4"),
    ({"model__lora__targets": "[q_proj]"}, "set model.lora.targets=[all-linear]. To change adapters, merge"),
    ({"model__lora__rank": 0}, "step 4 holds adapters and no other weights; set model.lora.rank=2. To train all"),
]


def settings(**values: Any) -> Any:
    return load_config(None, [f"{name.replace('__', '.')}={value}" for name, value in values.items()])


@pytest.mark.parametrize(("changes", "said"), OTHERS)
def test_other_adapters_are_refused(changes: dict[str, Any], said: str) -> None:
    check_settings_of_checkpoint(manifest(), settings(**WITH))
    with pytest.raises(ConfigError) as caught:
        check_settings_of_checkpoint(manifest(), settings(**WITH | changes))
    assert said in str(caught.value) and "tools/merge_checkpoint.py" in str(caught.value)


def test_targets_have_no_order() -> None:
    saved = manifest(model__lora__targets="[q_proj,v_proj]")
    check_settings_of_checkpoint(saved, settings(**WITH, model__lora__targets="[v_proj,q_proj]"))
    with pytest.raises(ConfigError, match=r"set model\.lora\.targets=\[q_proj,v_proj\]"):
        check_settings_of_checkpoint(saved, settings(**WITH, model__lora__targets="[v_proj]"))


def test_adapters_for_a_step_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 2, but step 4 was saved without adapters; set model\.lora\.rank=0"):
        check_settings_of_checkpoint(manifest(model__lora__rank=0), settings(**WITH))
    check_settings_of_checkpoint(manifest(model__lora__rank=0, model__lora__alpha=16), settings(model__lora__alpha=64))


def test_a_critic_keeps_what_it_trains() -> None:
    gae = {"algo__advantage": "gae"}
    changed = settings(**WITH, **gae, critic__lora="false")
    with pytest.raises(ConfigError, match=r"critic\.lora: got false, but the critic of step 4 was trained with true"):
        check_settings_of_checkpoint(manifest(critic=True, **gae), changed)
    check_settings_of_checkpoint(manifest(critic=False, **gae), changed)  # a critic that is new
    check_settings_of_checkpoint(
        manifest(critic=True, **gae), settings(**WITH, critic__lora="false")
    )  # a critic that is dropped


def test_the_plan_of_a_run_refuses_them_too(root: Path) -> None:
    save([root], 4, (A, B), {("model", name): value for name, value in VALUES.items()}, config=manifest().config)
    assert preview_resume(root, settings(**WITH)) is not None
    with pytest.raises(ConfigError, match=r"model\.lora\.rank"):
        preview_resume(root, settings())


def test_another_base_model_is_refused() -> None:
    check_same_base(manifest({"model": BASE}), {"model": replace(BASE, path="/elsewhere")})
    other = BaseDigests("org/other", {"layers.0.up.weight": FrozenTensor("bfloat16", "0" * 16)})
    with pytest.raises(ConfigError) as caught:
        check_same_base(manifest({"model": BASE}), {"model": other})
    assert str(caught.value) == (
        "model.path: got org/other, but step 4 holds adapters of another base model (its layers.0.up.weight differs); "
        "give the model that the run was started with, org/base"
    )
    with pytest.raises(ConfigError, match="its files have changed since then"):
        check_same_base(manifest({"model": BASE}), {"model": replace(other, path="org/base")})
    with pytest.raises(ConfigError, match=r"critic\.path: got org/other"):
        check_same_base(manifest({"model": BASE, "critic": BASE}), {"model": BASE, "critic": other})
    with pytest.raises(ConfigError, match=r"model\.path: got org/other"):  # the critic starts from model.path too
        check_same_base(manifest({"model": BASE, "critic": BASE}), {"model": other, "critic": other})
    check_same_base(manifest({"model": BASE}), {"model": BASE, "critic": other})  # a critic that is new
    with pytest.raises(ConfigError, match="does not name the base model of its adapters"):
        check_same_base(manifest(), {"model": BASE})


def test_a_run_without_adapters_has_no_base_model() -> None:
    check_same_base(manifest({}, model__lora__rank=0), {})
    model = torch.nn.Linear(3, 2)
    assert digest_base(model, "x", Path("nowhere"), None, Share(0, 1)) is None, "and reads no files"  # type: ignore[arg-type]
