"""The copies in host memory, and the states of the random generators."""

import json
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from rl.checkpoint import snapshot
from rl.checkpoint.snapshot import HostCopier, get_rng_states, set_rng_states


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "PIECE_BYTES", 256)


def joined(pieces: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([torch.empty(0, dtype=like.dtype), *pieces]).view(like.shape)


def counts(copies: list[list[Tensor]]) -> list[list[int]]:
    return [[piece.numel() for piece in pieces] for pieces in copies]


def test_a_tensor_larger_than_a_slab_is_copied_in_pieces() -> None:
    """A slab has 64 floats."""
    tensors = [
        torch.arange(10.0),
        torch.arange(100.0, 150.0).view(5, 10),
        torch.arange(150.0),
        torch.arange(3, dtype=torch.uint8),
    ]
    host = HostCopier(torch.device("cpu"))
    copies = host.copy(tensors, host.record_event())
    assert counts(copies) == [[10], [50], [64, 64, 22], [3]]
    for pieces, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(joined(pieces, tensor), tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 4), (7, 3), (33, 5), (64,), (65,)])
def test_every_shape_and_dtype_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    tensors = [torch.randint(0, 2, (5,)).to(dtype), torch.randint(0, 2, shape).to(dtype), torch.ones(2, dtype=dtype)]
    copies = HostCopier(torch.device("cpu")).copy(tensors, None)
    for pieces, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(joined(pieces, tensor), tensor)
    assert bool(copies[1]) == bool(tensors[1].numel())


def test_elements_come_in_the_tensors_order_not_the_memorys() -> None:
    tensor = torch.arange(200.0).view(20, 10).T
    (pieces,) = HostCopier(torch.device("cpu")).copy([tensor], None)
    assert torch.cat(pieces)[:3].tolist() == [0.0, 10.0, 20.0]
    assert torch.equal(joined(pieces, tensor), tensor)


def test_what_changes_later_does_not_change_the_copy() -> None:
    tensor, expected = torch.arange(100.0), torch.arange(100.0)
    (pieces,) = HostCopier(torch.device("cpu")).copy([tensor], None)
    tensor.fill_(-1)
    assert torch.equal(torch.cat(pieces), expected)


def test_memory_is_kept_from_save_to_save() -> None:
    host = HostCopier(torch.device("cpu"))
    first = host.copy([torch.arange(100.0), torch.zeros(40)], None)
    pointers = [piece.data_ptr() for pieces in first for piece in pieces]
    second = host.copy([torch.arange(100.0, 200.0), torch.ones(40)], None)
    assert [piece.data_ptr() for pieces in second for piece in pieces] == pointers
    assert torch.equal(torch.cat(second[0]), torch.arange(100.0, 200.0))
    third = host.copy([torch.arange(300.0)], None)
    assert torch.equal(torch.cat(third[0]), torch.arange(300.0))


def draw() -> tuple[list[float], list[float], list[int], list[float]]:
    numbers = [random.random() for _ in range(3)]
    return torch.rand(3).tolist(), numbers, torch.randperm(5).tolist(), np.random.random(3).tolist()


def test_generators_go_on_where_they_were() -> None:
    torch.manual_seed(3)
    random.seed(4)
    draw()
    states = json.loads(json.dumps(get_rng_states()))  # as it lies in the manifest
    expected = draw()
    assert draw() != expected
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)
    set_rng_states(states)
    assert draw() == expected
    set_rng_states(states)
    assert draw() == expected
    older = {name: state for name, state in states.items() if name != "numpy"}
    set_rng_states(older)
    assert draw()[:3] == expected[:3], "checkpoints of older versions have no state of numpy"


def test_the_second_of_a_pair_of_gaussian_numbers_is_kept() -> None:
    """Python makes them in pairs and keeps the other one beside the generator."""
    random.seed(4)
    random.gauss(0, 1)
    states = json.loads(json.dumps(get_rng_states()))
    expected = [random.gauss(0, 1) for _ in range(3)]
    random.seed(6)
    set_rng_states(states)
    assert [random.gauss(0, 1) for _ in range(3)] == expected
    states = get_rng_states()  # none is kept now
    assert random.getstate()[2] is None
    expected = [random.gauss(0, 1) for _ in range(3)]
    random.seed(6)
    random.gauss(0, 1)
    set_rng_states(states)
    assert [random.gauss(0, 1) for _ in range(3)] == expected


def test_telling_the_state_draws_nothing() -> None:
    def seed() -> None:
        torch.manual_seed(3)
        random.seed(4)
        np.random.seed(5)

    seed()
    expected = draw()
    seed()
    first, second = get_rng_states(), get_rng_states()
    assert first == second
    assert draw() == expected
    assert get_rng_states() != first
