"""Load the rows of a checkpoint at any number of ranks."""

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch

from rl.checkpoint.manifest import CheckpointError, Manifest
from rl.checkpoint.resume import SliceReader, fill, find_checkpoint, restore
from rl.config.schema import ConfigError
from rl.model.shards import LocalSlice, TensorInfo
from rl.world.messages import PeerLost
from tests.saved_steps import BIAS, MODEL, OpenStores, Values, W, rows_of, save, values_of

Parts = list[tuple[str, LocalSlice]]


def empty_parts(infos: Sequence[TensorInfo], values: Values, shard: int, num_shards: int) -> Parts:
    """A rank's memory before it is filled."""
    by_name = {info.name: info for info in infos}
    parts = []
    for (kind, name), whole in values.items():
        rows = rows_of(whole, by_name[name], shard, num_shards)
        data = torch.full_like(rows, -1, dtype=by_name[name].torch_dtype)
        parts.append((kind, LocalSlice(by_name[name], data)))
    return parts


def check_filled(parts: Parts, values: Values, shard: int, num_shards: int) -> None:
    for kind, part in parts:
        expected = rows_of(values[kind, part.info.name], part.info, shard, num_shards)
        assert torch.equal(part.data, expected), (kind, part.info.name)


def test_seven_rows_from_three_ranks_to_two(roots: list[Path], open_stores: OpenStores) -> None:
    """3, 3 and 1 rows become 4 and 3: the second rank takes 2 of the second shard and all of the third."""
    store, *_ = open_stores(roots)
    values = {("model", "w"): torch.arange(21.0).view(7, 3)}
    save(roots, 4, (W,), values, num_shards=3)
    reader = SliceReader(find_checkpoint(store, "auto"), store, own_lead=0)
    data = torch.zeros(3, 3)
    fill([("model", LocalSlice(W, data))], reader, 1, 2)
    assert data.tolist() == [[12, 13, 14], [15, 16, 17], [18, 19, 20]]
    data = torch.zeros(4, 3)
    fill([("model", LocalSlice(W, data))], reader, 0, 2)
    assert data.view(-1).tolist() == list(range(12))


@pytest.mark.parametrize("num_readers", [1, 2, 3, 5])
@pytest.mark.parametrize("num_writers", [1, 2, 3, 5])
def test_any_number_of_ranks_gets_its_rows(
    roots: list[Path], open_stores: OpenStores, num_writers: int, num_readers: int
) -> None:
    """`bias` has two rows, so of five ranks three have none; `w` then has 2, 2, 2, 1 and none."""
    stores = open_stores(roots)
    values = values_of(MODEL)
    save(roots, 4, MODEL, values, num_shards=num_writers)
    found = find_checkpoint(stores[0], "auto")
    for shard in range(num_readers):
        node = shard % 3
        parts = empty_parts(MODEL, values, shard, num_readers)
        fill(parts, SliceReader(found, stores[node], own_lead=node), shard, num_readers)
        check_filled(parts, values, shard, num_readers)


def test_from_one_to_two_to_three_to_five_ranks_and_back(tmp_path: Path, open_stores: OpenStores) -> None:
    values = values_of(MODEL)
    for step, num_shards in enumerate([1, 2, 3, 5, 1], start=1):
        root = tmp_path / str(step) / "checkpoints"
        save([root], step, MODEL, values, num_shards=num_shards)
        (store,) = open_stores([root])
        reader = SliceReader(find_checkpoint(store, "auto"), store, own_lead=0)
        parts = empty_parts(MODEL, values, 0, 1)
        fill(parts, reader, 0, 1)
        values = {(kind, part.info.name): part.data for kind, part in parts}
    assert all(torch.equal(values[key], whole) for key, whole in values_of(MODEL).items())


def test_float32_masters_are_read_if_the_export_is_narrower(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    exact = torch.linspace(0, 1, 21).view(7, 3)
    assert not torch.equal(exact.bfloat16().float(), exact)
    save([root], 4, (W,), {("model", "w"): exact.bfloat16(), ("master", "w"): exact}, num_shards=3)
    parts = [("model", LocalSlice(W, torch.zeros(7, 3)))]
    fill(parts, SliceReader(find_checkpoint(store, "auto"), store, 0), 0, 1)
    assert torch.equal(parts[0][1].data, exact)


def test_slices_of_another_node_are_read_in_chunks(
    roots: list[Path], open_stores: OpenStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 12 bytes: three on each of two nodes, one on the third; a rank's own node is asked nothing."""
    stores = open_stores(roots)
    values = {("model", "w"): torch.arange(21.0).view(7, 3)}
    save(roots, 4, (W,), values, num_shards=3)
    found = find_checkpoint(stores[0], "auto")
    asked: list[tuple[int, int | None]] = []
    call = stores[0].call

    def record(rank: int, *args: Any) -> Any:
        asked.append((rank, args[-1]))
        return call(rank, *args)

    monkeypatch.setattr(stores[0], "call", record)
    monkeypatch.setattr("rl.checkpoint.resume.MESSAGE_BYTES", 16)
    parts = empty_parts((W,), values, 0, 1)
    fill(parts, SliceReader(found, stores[0], own_lead=0), 0, 1)
    check_filled(parts, values, 0, 1)
    assert asked == [(1, 16), (1, 16), (1, 4), (2, 12)]


def corrupt_slice(folder: Path, manifest: Manifest, file_name: str, key: str) -> None:
    """Another byte in this slice, in a file of the same size."""
    file = next(file for file in manifest.files if file.name == file_name)
    part = next(part for part in file.slices if part.key == key)
    data = bytearray((folder / file_name).read_bytes())
    data[part.begin + 5] ^= 1
    (folder / file_name).write_bytes(data)


@pytest.mark.parametrize("own_lead", [0, 1, 2])
def test_a_corrupt_slice_is_read_from_the_other_copy(roots: list[Path], open_stores: OpenStores, own_lead: int) -> None:
    stores = open_stores(roots)
    values = values_of(MODEL)
    manifest = save(roots, 4, MODEL, values, num_shards=3, copies=2)
    corrupt_slice(roots[0] / "step_4", manifest, "model-00000-of-00003.safetensors", "w")
    corrupt_slice(roots[2] / "step_4", manifest, "optimizer-00002-of-00003.safetensors", "exp_avg/w")
    found = find_checkpoint(stores[0], "auto")
    parts = empty_parts(MODEL, values, 0, 1)
    fill(parts, SliceReader(found, stores[own_lead], own_lead), 0, 1)
    check_filled(parts, values, 0, 1)


@pytest.mark.parametrize("own_lead", [0, 1])
def test_a_file_that_was_cut_since_is_read_from_the_other_copy(
    roots: list[Path], open_stores: OpenStores, own_lead: int
) -> None:
    stores = open_stores(roots)
    values = values_of(MODEL)
    save(roots, 4, MODEL, values, num_shards=3, copies=2)
    found = find_checkpoint(stores[0], "auto")
    os.truncate(roots[0] / "step_4" / "model-00000-of-00003.safetensors", 50)
    (roots[0] / "step_4" / "optimizer-00000-of-00003.safetensors").unlink()
    parts = empty_parts(MODEL, values, 0, 1)
    fill(parts, SliceReader(found, stores[own_lead], own_lead), 0, 1)
    check_filled(parts, values, 0, 1)


@pytest.mark.parametrize("own_lead", [0, 1])
def test_a_slice_that_is_corrupt_everywhere_is_an_error(
    roots: list[Path], open_stores: OpenStores, own_lead: int
) -> None:
    stores = open_stores(roots)
    manifest = save(roots, 4, num_shards=3)
    name = "model-00000-of-00003.safetensors"
    corrupt_slice(roots[0] / "step_4", manifest, name, "w")
    found = find_checkpoint(stores[0], "auto")
    with pytest.raises(ConfigError) as caught:
        fill(
            empty_parts(MODEL, values_of(MODEL), 0, 1),
            SliceReader(found, stores[own_lead], own_lead),
            0,
            1,
        )
    text = str(caught.value)
    assert text.startswith(
        f"step 4 cannot be read: the bytes of w in {roots[0]}/step_4/{name} on the node of rank 0 differ "
    )
    assert "Nothing was changed; restore the file, or resume from an older step in a new run" in text


@pytest.mark.parametrize("own_lead", [0, 1, 2])
def test_corrupt_bytes_in_all_copies_are_a_config_error(
    roots: list[Path], open_stores: OpenStores, own_lead: int
) -> None:
    """The same error again after every restart: the run does not try once more."""
    stores = open_stores(roots)
    manifest = save(roots, 4, num_shards=3, copies=2)
    name = "model-00000-of-00003.safetensors"
    for root in roots[:2]:
        corrupt_slice(root / "step_4", manifest, name, "w")
    found = find_checkpoint(stores[0], "auto")
    with pytest.raises(ConfigError) as caught:
        fill(
            empty_parts(MODEL, values_of(MODEL), 0, 1),
            SliceReader(found, stores[own_lead], own_lead),
            0,
            1,
        )
    for rank in (0, 1):
        assert f"the bytes of w in {roots[rank]}/step_4/{name} on the node of rank {rank} differ" in str(caught.value)


@pytest.mark.parametrize("own_lead", [0, 1])
@pytest.mark.parametrize("fault", ["gone", "cut", "a folder"])
def test_a_file_that_cannot_be_read_may_be_readable_later(
    roots: list[Path], open_stores: OpenStores, own_lead: int, fault: str
) -> None:
    stores = open_stores(roots)
    save(roots, 4, num_shards=3)
    found = find_checkpoint(stores[0], "auto")
    path = roots[0] / "step_4" / "model-00000-of-00003.safetensors"
    if fault == "cut":
        os.truncate(path, 50)
    else:
        path.unlink()
    if fault == "a folder":
        path.mkdir()
    with pytest.raises(CheckpointError, match=rf"^step 4 cannot be read: .*{path}.*Nothing was changed"):
        fill(
            empty_parts(MODEL, values_of(MODEL), 0, 1),
            SliceReader(found, stores[own_lead], own_lead),
            0,
            1,
        )


@pytest.mark.parametrize("corrupt", [0, 1])
def test_the_error_names_every_copy(roots: list[Path], open_stores: OpenStores, corrupt: int) -> None:
    """One was read and is wrong, but the other may be good."""
    stores = open_stores(roots)
    manifest = save(roots, 4, num_shards=3, copies=2)
    found = find_checkpoint(stores[0], "auto")
    name = "model-00000-of-00003.safetensors"
    corrupt_slice(roots[corrupt] / "step_4", manifest, name, "w")
    (roots[1 - corrupt] / "step_4" / name).unlink()
    with pytest.raises(CheckpointError) as caught:
        fill(empty_parts(MODEL, values_of(MODEL), 0, 1), SliceReader(found, stores[0], 0), 0, 1)
    assert f"the bytes of w in {roots[corrupt]}/step_4/{name} on the node of rank {corrupt} differ" in str(caught.value)
    assert f"No such file or directory: '{roots[1 - corrupt]}/step_4/{name}'" in str(caught.value)


@pytest.mark.parametrize("moment", ["before it is asked", "before it answers"])
def test_a_node_that_is_lost_ends_the_world(
    roots: list[Path], open_stores: OpenStores, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It is no unreadable file, which another copy or a restart of this rank alone would mend."""
    stores = open_stores(roots)
    save(roots, 4, num_shards=3, copies=2)
    found = find_checkpoint(stores[2], "auto")
    mail = stores[2].mail
    if moment == "before it is asked":
        mail._gone.add(0)
    else:
        monkeypatch.setattr(stores[2], "call", lambda rank, *given, **meta: Future())
        mail.fail(PeerLost("the connection of rank 0 has ended"))
    with pytest.raises(PeerLost, match=r"rank 0.* has ended"):
        fill(empty_parts(MODEL, values_of(MODEL), 0, 1), SliceReader(found, stores[2], own_lead=2), 0, 1)


OTHER_MODELS = {
    "another shape": (
        (TensorInfo("w", (8, 3), "float32", True), BIAS),
        r"w is \(7, 3\) there and \(8, 3\) in the model",
    ),
    "one tensor more": (
        (W, BIAS, TensorInfo("v", (2,), "float32", True)),
        r"v is absent there and \(2,\) in the model",
    ),
    "one tensor less": ((W,), r"bias is \(2,\) there and absent in the model"),
}


@pytest.mark.parametrize(("infos", "said"), OTHER_MODELS.values(), ids=OTHER_MODELS.keys())
def test_a_checkpoint_of_another_model_is_refused(
    root: Path, open_stores: OpenStores, infos: tuple[TensorInfo, ...], said: str
) -> None:
    (store,) = open_stores([root])
    save([root], 4, (W, BIAS))
    parts = empty_parts(infos, values_of(infos), 0, 1)
    with pytest.raises(
        ConfigError, match=rf"the checkpoint's model differs from model\.path: {said}; give the model that"
    ):
        fill(parts, SliceReader(find_checkpoint(store, "auto"), store, 0), 0, 1)
    assert all((part.data == -1).all() for _, part in parts)


def test_a_checkpoint_of_another_optimizer_is_refused(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    save([root], 4, (W,), values_of((W,), ("model", "momentum")))
    parts = empty_parts((W,), values_of((W,)), 0, 1)
    with pytest.raises(ConfigError, match="step 4 has no exp_avg of w: it was saved with another optimizer"):
        fill(parts, SliceReader(find_checkpoint(store, "auto"), store, 0), 0, 1)


def test_missing_rows_are_reported(root: Path, open_stores: OpenStores) -> None:
    (store,) = open_stores([root])
    values = {("model", "w"): torch.arange(21.0).view(7, 3)}
    save([root], 4, (W,), values, num_shards=3)
    found = find_checkpoint(store, "auto")
    files = tuple(file for file in found.manifest.files if "00001-of" not in file.name)
    cut = dataclasses.replace(found, manifest=dataclasses.replace(found.manifest, files=files))
    reader = SliceReader(cut, store, 0)
    with pytest.raises(ConfigError, match="step 4 has 3 of the 4 rows of model w that this rank needs"):
        fill([("model", LocalSlice(W, torch.zeros(4, 3)))], reader, 0, 2)


@pytest.mark.parametrize("trains", [True, False])
def test_a_run_that_only_evaluates_makes_no_optimizer_state(trains: bool) -> None:
    state = {"num_updates": 3, "num_critic_updates": 5, "actors": {}}
    saved = Mock(has_critic=True, manifest=Mock(state=state))
    saved.manifest.slices.return_value = {}
    learner, critic = Mock(), Mock()
    for trainer in (learner, critic):
        trainer.state_slices.return_value = []
    restore(learner, critic, saved, Mock(), MagicMock(), trains)
    for trainer, num_updates in ((learner, 3), (critic, 5)):
        trainer.state_slices.assert_called_once_with(with_moments=trains, with_frozen=False)
        assert trainer.restore_schedule.call_args_list == [call(num_updates)] * trains
