"""Operations of an update and MFU, worked out by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rl.model.flops import ModelFlops, peak_flops
from rl.rollout.dispatch import BatchTime
from rl.run.reporter import measure_mfu


class Model(nn.Module):
    def __init__(self, **config: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10, 10))
        text = SimpleNamespace(hidden_size=12, **config)
        self.config = SimpleNamespace(get_text_config=lambda: text)


def test_operations_of_an_update() -> None:
    """100 parameters; 2 layers x 3 heads of 4. Sequences of 5 and 2 tokens are 7 tokens and 29 pairs."""
    flops = ModelFlops.of(Model(num_hidden_layers=2, num_attention_heads=3))
    assert flops == ModelFlops(100, 0, 24)
    assert flops.of_update([5, 2]) == 6 * 100 * 7 + 6 * 24 * 29
    assert ModelFlops.of(Model(num_hidden_layers=2, num_attention_heads=3, head_dim=8)).attention_width == 48
    assert ModelFlops.of(Model()) == ModelFlops(100, 0, 0)
    assert flops.of_update([]) == 0
    assert flops.of_update([5, 5, 2], [3]) == 6 * 100 * 9 + 6 * 24 * (29 + 25 - 9), "two begin with the same 3 tokens"


def test_a_frozen_parameter_takes_no_operations_for_its_gradient() -> None:
    """100 frozen parameters: 2 operations per token in the forward pass, and 2 for the gradient of their inputs."""
    model = Model(num_hidden_layers=2, num_attention_heads=3)
    model.adapter = nn.Parameter(torch.zeros(10))
    model.weight.requires_grad_(False)
    flops = ModelFlops.of(model)
    assert flops == ModelFlops(10, 100, 24)
    assert flops.of_update([5, 2]) == 6 * 10 * 7 + 4 * 100 * 7 + 6 * 24 * 29


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
    ],
)
def test_peaks(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops


def test_mfu_counts_all_seconds_of_the_update() -> None:
    """6000 Tflop in 2 s of the stage and 1 s during the rollout, of 4000 Tflop/s."""
    values, seconds = {"perf/update_tflop": 6000.0}, {"time/update": 2.0}
    rounds = [BatchTime(9.0, 0, 0.0, trained_s=1.0)]
    assert measure_mfu(values, seconds, rounds, 4e15) == {"perf/mfu": 0.5}
    assert measure_mfu(values, seconds, [], 4e15) == {"perf/mfu": 0.75}
    assert measure_mfu(values, seconds, rounds, None) == {}
