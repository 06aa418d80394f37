"""The rows of each rank in a sharded model, and the dtypes in which its tensors are sent."""

import pytest
import torch
from torch import nn

from rl.model.shards import TensorInfo, local_slices
from rl.placement.roles import plan
from rl.sync.plan import transferred_tensors
from rl.sync.weights import share_tensors
from tests.mails import connected


def info(*shape: int, name: str = "weight", dtype: str = "float32", sharded: bool = True) -> TensorInfo:
    return TensorInfo(name, shape, dtype, sharded)


@pytest.mark.parametrize(
    ("tensor", "num_ranks", "rows"),
    [
        (info(8, 3), 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (info(8, 3), 1, [(0, 8)]),
        (info(10), 4, [(0, 3), (3, 6), (6, 9), (9, 10)]),  # uneven: chunks of ceil(10 / 4) = 3
        (info(9, 2), 4, [(0, 3), (3, 6), (6, 9), (9, 9)]),  # uneven, and the last rank has nothing
        (info(2, 5), 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),  # fewer rows than ranks
        (info(1), 3, [(0, 1), (1, 1), (1, 1)]),
        (info(0, 4), 2, [(0, 0), (0, 0)]),
        (info(6, 2, sharded=False), 3, [(0, 6), (6, 6), (6, 6)]),  # replicated: the first owns it
        (info(sharded=False), 2, [(0, 1), (1, 1)]),  # scalar
        (info(), 2, [(0, 1), (1, 1)]),
    ],
)
def test_rows(tensor: TensorInfo, num_ranks: int, rows: list[tuple[int, int]]) -> None:
    assert [tensor.rows(index, num_ranks) for index in range(num_ranks)] == rows


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 9, 64, 65])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 32])
def test_slices_cover_every_row_once_and_are_those_of_torch(num_rows: int, num_ranks: int) -> None:
    whole = torch.arange(num_rows)
    slices = [slice(*info(num_rows).rows(index, num_ranks)) for index in range(num_ranks)]
    assert torch.cat([whole[part] for part in slices]).tolist() == whole.tolist()
    chunks = [chunk.tolist() for chunk in whole.chunk(num_ranks)]
    assert [whole[part].tolist() for part in slices if part.start < part.stop] == chunks


@pytest.mark.parametrize(
    ("tensor", "num_elements", "row_elements"),
    [(info(4, 3, 2), 24, 6), (info(5), 5, 1), (info(), 1, 1), (info(0, 4), 0, 4)],
)
def test_element_counts(tensor: TensorInfo, num_elements: int, row_elements: int) -> None:
    assert tensor.num_elements == num_elements
    end = tensor.rows(0, 1)[1]
    assert tensor.span(0, 1) == (0, end * row_elements)


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 24), ("bfloat16", 12), ("int64", 48), ("uint8", 6)])
def test_bytes(dtype: str, num_bytes: int) -> None:
    assert info(3, 2, dtype=dtype).num_bytes == num_bytes


def test_the_leader_tells_ranks_without_a_model_the_tensors() -> None:
    placement = plan({"actor": "0", "rollout": "1"}, 1, 2)
    with connected(2) as mails:
        told = share_tensors(mails[0], placement, Tied(), "bfloat16")
        assert share_tensors(mails[1], placement, None, "bfloat16") == told
    assert {info.torch_dtype for info in told} >= {torch.bfloat16}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.register_buffer("computed", torch.ones(2), persistent=False)


def test_local_slices_are_views_of_each_stored_tensor_once() -> None:
    model = Tied()
    slices = list(local_slices(model))
    assert [part.info for part in slices] == [
        info(3, 2, name="embed.weight", sharded=False),
        info(name="steps", dtype="int64", sharded=False),
        info(2, name="scale", sharded=False),
    ]
    slices[0].data.fill_(9.0)
    assert model.head.weight.detach().tolist() == [[9.0, 9.0]] * 3


def test_parameters_travel_in_the_engines_dtype_and_buffers_in_their_own() -> None:
    assert [(part.name, part.dtype) for part in transferred_tensors(Tied(), "bfloat16")] == [
        ("embed.weight", "bfloat16"),
        ("steps", "int64"),
        ("scale", "float32"),
    ]
