"""The memory layout of an engine that fuses and cuts tensors as vLLM does: traced, filled and read back."""

from collections.abc import Iterable, Mapping

import pytest
import torch
from torch import Tensor, nn

from rl.model.shards import TensorInfo
from rl.placement.roles import plan
from rl.sync.digest import Digests, flat_part
from rl.sync.layout import Destination, MemoryLayout, Region, Untraceable, trace
from rl.sync.verification import Verifier

CPU = torch.device("cpu")
HIDDEN, VOCAB, PADDED_VOCAB = 6, 10, 12
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (VOCAB, HIDDEN),
    "q": (4, HIDDEN),
    "k": (2, HIDDEN),
    "v": (2, HIDDEN),
    "o": (HIDDEN, 4),
    "gate": (8, HIDDEN),
    "up": (8, HIDDEN),
    "down": (HIDDEN, 8),
    "norm": (HIDDEN,),
}
TENSORS = [TensorInfo(name, shape, "float32", True) for name, shape in SHAPES.items()]
TENSORS.append(TensorInfo("steps", (), "int64", False))  # a buffer that engines do not need
STEPS = len(TENSORS) - 1


class Engine(nn.Module):
    """One tensor-parallel rank of an engine like vLLM, with a padded vocabulary and a tied head."""

    def __init__(self, tp_rank: int, tp_size: int, dtype: torch.dtype = torch.float32):
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0, dtype=dtype))

        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.embed = parameter(PADDED_VOCAB // tp_size, HIDDEN)
        self.qkv = parameter(8 // tp_size, HIDDEN)
        self.o = parameter(HIDDEN, 4 // tp_size)
        self.gate_up = parameter(16 // tp_size, HIDDEN)
        self.down = parameter(HIDDEN, 8 // tp_size)
        self.norm = parameter(HIDDEN)
        self.head = self.embed

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fused = {"q": (self.qkv, 0), "k": (self.qkv, 4), "v": (self.qkv, 6)}
        fused |= {"gate": (self.gate_up, 0), "up": (self.gate_up, 8)}
        for name, weight in weights:
            if name == "embed":
                first = self.tp_rank * len(self.embed)
                weight = weight[first : first + len(self.embed)]
                self.embed[: len(weight)].data.copy_(weight)
                self.embed[len(weight) :].data.fill_(0)
            elif name in fused:
                parameter, offset = fused[name]
                size = len(weight) // self.tp_size
                target = parameter.data.narrow(0, offset // self.tp_size, size)
                target.copy_(weight.narrow(0, self.tp_rank * size, size))
            elif name in ("o", "down"):
                size = weight.shape[1] // self.tp_size
                getattr(self, name).data.copy_(weight.narrow(1, self.tp_rank * size, size))
            elif name == "norm":
                self.norm.data.copy_(weight)


def flat(start: int, count: int) -> list[Region]:
    return [Region(start, 1, count, 0)]


WHOLE = [flat(0, torch.Size(shape).numel()) for shape in SHAPES.values()] + [[]]
FIRST_HALF = [flat(0, 36), flat(0, 12), flat(0, 6), flat(0, 6), [Region(0, 6, 2, 4)]]
FIRST_HALF += [flat(0, 24), flat(0, 24), [Region(0, 6, 4, 8)], flat(0, 6), []]
SECOND_HALF = [flat(36, 24), flat(12, 12), flat(6, 6), flat(6, 6), [Region(2, 6, 2, 4)]]
SECOND_HALF += [flat(24, 24), flat(24, 24), [Region(4, 6, 4, 8)], flat(0, 6), []]
RANKS = pytest.mark.parametrize(
    ("tp_rank", "tp_size", "regions"), [(0, 1, WHOLE), (0, 2, FIRST_HALF), (1, 2, SECOND_HALF)]
)


@RANKS
def test_regions_are_what_the_loader_takes(tp_rank: int, tp_size: int, regions: list[list[Region]]) -> None:
    engine = Engine(tp_rank, tp_size)
    layout = trace(TENSORS, engine, engine.load_weights, CPU)
    assert layout.regions == regions
    assert layout.is_whole == [found == whole != [] for found, whole in zip(regions, WHOLE, strict=True)]
    assert all(bool((parameter == 7).all()) for parameter in engine.parameters())  # the copies were recorded, not made


def whole_tensors(seed: int = 0) -> dict[int, Tensor]:
    """Return tensors side by side in the memory of one bucket."""
    sizes = [info.num_elements for info in TENSORS]
    pieces = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed)).split(sizes)
    tensors = {index: pieces[index].view(info.shape) for index, info in enumerate(TENSORS)}
    return tensors | {STEPS: torch.tensor(seed)}


@RANKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fill_does_what_the_loader_does(
    tp_rank: int, tp_size: int, regions: list[list[Region]], dtype: torch.dtype
) -> None:
    """The source may be wider than the engine's memory, such as float32 masters for a bfloat16 engine."""
    infos = [TensorInfo(info.name, info.shape, str(dtype)[6:], True) for info in TENSORS[:-1]] + TENSORS[-1:]
    engine, loaded = Engine(tp_rank, tp_size, dtype), Engine(tp_rank, tp_size, dtype)
    whole = whole_tensors()
    layout = trace(infos, engine, engine.load_weights, CPU)
    layout.fill_zeros()
    for bucket in ((0, 1), (2, 3, 4, STEPS), (5, 6, 7, 8)):
        layout.fill({index: whole[index] for index in bucket})
    loaded.load_weights((infos[index].name, tensor.to(infos[index].torch_dtype)) for index, tensor in whole.items())
    for name, parameter in loaded.named_parameters():
        assert getattr(engine, name).tolist() == parameter.tolist(), name
    assert (engine.embed[4:].abs().sum() == 0) == (tp_rank == 1)


CUTS = [[(0, 5), (5, info.num_elements - 5)] for info in TENSORS[:-1]] + [[(0, 1)]]  # as if from two owners


def misplaced(layout: MemoryLayout, whole: Mapping[int, Tensor]) -> list[str]:
    """Return the names of the tensors of which the engine holds other values than it was given."""
    held, expected, arrived = (Digests(len(TENSORS), CPU) for _ in range(3))
    held.add(layout.held(CUTS))
    expected.add(layout.expected(whole))
    for index, tensor in whole.items():
        flat_tensor, dtype = tensor.view(-1), TENSORS[index].torch_dtype
        arrived.add([flat_part(index, flat_tensor[a : a + count], a, dtype) for a, count in CUTS[index]])
    is_whole = torch.tensor(layout.is_whole).unsqueeze(1)
    wanted = torch.where(is_whole, arrived.result(), expected.result())
    wrong = (held.result() != wanted).any(1)
    return [info.name for info, is_wrong in zip(TENSORS, wrong, strict=True) if is_wrong]


CHANGES = [("embed", 0, "embed"), ("qkv", 0, "q"), ("qkv", -1, "v"), ("gate_up", -1, "up"), ("o", 3, "o")]


@RANKS
@pytest.mark.parametrize(("parameter", "element", "name"), [*CHANGES, ("down", -1, "down"), ("norm", 2, "norm")])
def test_what_is_held_is_read_back(
    tp_rank: int, tp_size: int, regions: list[list[Region]], parameter: str, element: int, name: str
) -> None:
    engine = Engine(tp_rank, tp_size)
    layout, whole = trace(TENSORS, engine, engine.load_weights, CPU), whole_tensors()
    layout.fill(whole_tensors(seed=1))
    assert misplaced(layout, whole) == list(SHAPES)
    layout.fill(whole)
    assert misplaced(layout, whole) == []
    cut = [index for index, taken in enumerate(regions) if taken and not layout.is_whole[index]]
    assert [part.tensor for part in layout.expected(whole)] == cut  # whole ones are compared with what arrived
    with torch.no_grad():
        getattr(engine, parameter).view(-1)[element] += 1
    assert misplaced(layout, whole) == [name]


@pytest.mark.parametrize(
    ("regions", "is_whole"),
    [
        ([Region(0, 1, 12, 0)], True),
        ([], False),
        ([Region(0, 1, 11, 0)], False),
        ([Region(0, 3, 4, 4), Region(0, 3, 4, 4)], False),
        ([Region(0, 1, 12, 0), Region(0, 1, 12, 0)], False),  # all of it, at two places
        ([Region(0, 1, 6, 0), Region(6, 1, 6, 0)], False),  # all of it, in two pieces
    ],
)
def test_whole_is_one_region_that_is_everything(regions: list[Region], is_whole: bool) -> None:
    infos = [TensorInfo("a", (2,), "float32", True), TensorInfo("b", (3, 4), "float32", True)]
    layout = [Destination(1, region, torch.zeros(region.num_rows, region.num_columns)) for region in regions]
    assert MemoryLayout(infos, layout).is_whole == [False, is_whole]


def test_whole_tensors_are_read_back_in_the_parts_that_arrived_and_others_as_they_lie() -> None:
    infos = [TensorInfo("a", (3, 4), "bfloat16", True), TensorInfo("b", (3, 4), "float32", True)]
    memory = torch.arange(24.0)
    landing_a = Destination(0, Region(0, 1, 12, 0), memory[:12].view(1, 12))
    landing_b = Destination(1, Region(2, 3, 2, 4), memory[12:18].view(3, 2))
    layout = MemoryLayout(infos, [landing_b, landing_a])
    cuts = [[(0, 8), (8, 4)], [(0, 8), (8, 4)]]
    found = [(part.tensor, part.values.tolist(), part.start, part.row_stride) for part in layout.held(cuts)]
    halves = [(0, [[0, 1, 2, 3, 4, 5, 6, 7]], 0, 0), (0, [[8, 9, 10, 11]], 8, 0)]
    assert found == [*halves, (1, [[12, 13], [14, 15], [16, 17]], 2, 4)]
    assert [part.dtype for part in layout.held(cuts)] == [torch.bfloat16, torch.bfloat16, torch.float32]
    memory[:] = 1  # the views are kept, and show what lies there now
    assert layout.held(cuts) is layout.held(cuts)
    assert layout.held(cuts)[1].values.tolist() == [[1, 1, 1, 1]]


class Untied(Engine):
    """A head with memory of its own, for which the model has no tensor."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.head = nn.Parameter(torch.zeros(PADDED_VOCAB, HIDDEN))


def test_a_parameter_that_nothing_fills_is_named() -> None:
    engine = Untied()
    with pytest.raises(Untraceable, match=r"^no tensor of the policy fills all of its head \[12, 6\]$"):
        trace(TENSORS, engine, engine.load_weights, CPU)


@pytest.mark.parametrize("missing", ["embed", "k", "up", "down", "norm"])
def test_a_policy_without_one_of_the_tensors_leaves_a_parameter_unfilled(missing: str) -> None:
    engine = Engine(0, 1)
    name = {"k": "qkv", "up": "gate_up"}.get(missing, missing)
    with pytest.raises(Untraceable, match=f"fills all of its {name} "):
        trace([info for info in TENSORS if info.name != missing], engine, engine.load_weights, CPU)


def test_a_bucket_of_which_a_receiver_takes_nothing() -> None:
    engine = Engine(0, 1)
    layout = trace(TENSORS, engine, engine.load_weights, CPU)
    layout.fill({STEPS: torch.tensor(3)})
    layout.fill({})
    assert bool((engine.embed == 7).all())


@pytest.mark.parametrize(
    ("by_rank", "names"),
    [
        ([WHOLE], []),
        ([WHOLE, WHOLE], []),  # the same regions on both
        ([FIRST_HALF, SECOND_HALF], []),  # regions apart, and `norm` on both
        ([FIRST_HALF, FIRST_HALF], ["embed", "q", "k", "v", "o", "gate", "up", "down"]),
        ([SECOND_HALF], ["embed", "q", "k", "v", "o", "gate", "up", "down"]),
        ([FIRST_HALF, [*SECOND_HALF[:4], [], *SECOND_HALF[5:]]], ["o"]),
        ([WHOLE, FIRST_HALF], ["embed", "q", "k", "v", "o", "gate", "up", "down"]),  # more than all
        ([[*WHOLE[:8], [], []]], ["norm"]),
    ],
)
def test_the_ranks_of_an_engine_take_all_of_every_parameter(
    by_rank: list[list[list[Region]]], names: list[str]
) -> None:
    assert Verifier(TENSORS, plan({"actor,rollout": "all"}, 1, 1)).uncovered(by_rank) == names
