"""Each optimizer gives the same weights at any number of ranks, and those of torch on whole tensors."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.distributed.optimizer_worker import LR, NUM_STEPS, Model, fill, seeded
from tests.launcher import run_program

WORLDS = ("1", "3", "4", "2x2")  # numbers of shards, and replicas x shards
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
NAMES = ["adamw", "sgd", "muon", *(["adamw_8bit"] if HAS_TORCHAO else [])]
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
every_name = pytest.mark.parametrize("name", [*NAMES[:3], pytest.param("adamw_8bit", marks=needs_torchao)])
pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("optimizers")
    words = ["tests/distributed/optimizer_worker.py", str(folder), json.dumps(NAMES)]
    code, output = run_program(*words, timeout_s=150)
    assert code == 0, output
    return {(name, world): load_file(folder / f"{name}.{world}.safetensors") for name in NAMES for world in WORLDS}


def torch_weights(name: str) -> dict[str, Tensor]:
    """Return what torch's own optimizers make of the whole tensors."""
    model = Model()
    fill(model)
    matrices = [each for each in model.layer.parameters() if each.ndim == 2] if name == "muon" else []
    others = [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]
    if name == "sgd":
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(others, LR, momentum=0.9, weight_decay=0.1)]
    else:
        optimizers = [torch.optim.AdamW(others, LR, weight_decay=0.1)]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, LR, 0.1, 0.9, adjust_lr_fn="match_rms_adamw"))
    for step in range(1, NUM_STEPS + 1):
        for of, value in seeded(model, step).items():
            model.get_parameter(of).grad = value
        for optimizer in optimizers:
            optimizer.step()
    return {of: each.detach() for of, each in model.named_parameters()}


@every_name
def test_the_number_of_ranks_changes_no_bit(name: str, weights: dict[tuple[str, str], dict[str, Tensor]]) -> None:
    alone = weights[name, "1"]
    for world in WORLDS[1:]:
        for of, value in weights[name, world].items():
            assert torch.equal(value, alone[of]), (world, of, (value - alone[of]).abs().max())


@every_name
def test_it_is_the_optimizer_of_torch(name: str, weights: dict[tuple[str, str], dict[str, Tensor]]) -> None:
    """8-bit moments are rounded: after 3 steps their updates still point where those of float32 moments do."""
    model: nn.Module = Model()
    before, wanted = seeded(model, 0), torch_weights(name)
    for of, value in weights[name, "1"].items():
        moved, expected = (each - before[of] for each in (value, wanted[of]))
        assert expected.abs().max() > LR / 2, "nothing has moved"
        if name == "adamw_8bit" and of.endswith("weight") and of != "head.weight" and "1" not in of:
            assert not torch.equal(moved, expected), "the moments are not quantized"
            assert nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), 0) > 0.99
        else:
            assert torch.allclose(moved, expected, rtol=1e-4, atol=1e-6), (of, (moved - expected).abs().max())
