"""A layer with adapters computes what an engine with its merged weight does, and has the gradients of peft's layer."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from rl.model.adapter_names import ADAPTER
from rl.model.merged_linear import patch_to_merge

INPUTS, OUTPUTS, RANK, ALPHA = 24, 16, 3, 6
HALF_BIT = 2.0**-8  # half of the last bit of a bfloat16 between 1 and 2


def make_layer(dtype: torch.dtype, size_of_change: float, bias: bool = False) -> Any:
    """Return peft's layer. The frozen weights are between 1 and 2, and B x A changes each by +-size_of_change."""
    torch.manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype)
    linear.weight.data.uniform_(1.1, 1.9)
    layer: Any = Linear(linear, ADAPTER, LoraConfig(init_lora_weights=False), r=RANK, lora_alpha=ALPHA)
    layer.requires_grad_(False)
    first, second = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    for adapter in (first, second):
        adapter.data = adapter.data.zero_().to(dtype)
        adapter.requires_grad_(True)
    first.data[0] = torch.where(torch.rand(INPUTS) < 0.5, -1.0, 1.0)
    second.data[:, 0] = size_of_change * RANK / ALPHA
    return layer


def merged_weight(layer: Any) -> Tensor:
    """Return what an engine gets: merged in float32, and rounded once."""
    change = ALPHA / RANK * layer.lora_B[ADAPTER].weight.float() @ layer.lora_A[ADAPTER].weight.float()
    return (layer.base_layer.weight.float() + change).to(layer.base_layer.weight.dtype)


@pytest.mark.parametrize("share", [0.5, 1.5, 20.0])
def test_it_computes_with_the_rounded_merged_weight(share: float) -> None:
    """A change below half of the last bit is lost, as in an engine. peft's own layer computes with it."""
    layer = make_layer(torch.bfloat16, share * HALF_BIT)
    weight = merged_weight(layer)
    inputs = layer.lora_A[ADAPTER].weight[0].detach() * torch.rand(5, INPUTS).bfloat16()  # so that changes add up
    assert torch.equal(weight, layer.base_layer.weight) == (share < 1)
    of_peft, of_engine = layer(inputs), nn.functional.linear(inputs, weight)
    patch_to_merge(layer)
    torch.testing.assert_close(layer(inputs), of_engine, atol=0, rtol=0)
    if share < 1:
        assert not torch.equal(of_peft, of_engine)


def test_a_layer_with_a_bias_starts_as_the_frozen_layer() -> None:
    """The bias is added before the sum is rounded. Otherwise the policy would not start as the reference."""
    layer = make_layer(torch.bfloat16, 0.0, bias=True)
    layer.base_layer.bias.data.uniform_(-9, 9)
    inputs = torch.rand(50, INPUTS).bfloat16()
    patch_to_merge(layer)
    assert torch.equal(layer(inputs), layer.base_layer(inputs))


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_peft(bias: bool) -> None:
    plain = make_layer(torch.float64, 0.3, bias)
    for name, parameter in plain.named_parameters():
        if "lora" in name:
            parameter.data.uniform_(-1, 1)
    patched, results = copy.deepcopy(plain), []
    patch_to_merge(patched)
    for layer in (plain, patched):
        inputs = torch.linspace(-1, 1, 2 * 5 * INPUTS, dtype=torch.float64).view(2, 5, INPUTS).requires_grad_()
        outputs = layer(inputs)
        (outputs**3).sum().backward()
        results.append([outputs, inputs.grad, layer.lora_A[ADAPTER].weight.grad, layer.lora_B[ADAPTER].weight.grad])
    for ours, theirs in zip(*results, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs)
    assert patched.base_layer.weight.grad is None


def test_without_adapters_it_is_the_frozen_layer() -> None:
    layer = make_layer(torch.float32, 0.5)
    patch_to_merge(layer)
    inputs = torch.rand(4, INPUTS)
    assert not torch.allclose(layer(inputs), layer.base_layer(inputs))
    layer._disable_adapters = True
    assert torch.equal(layer(inputs), layer.base_layer(inputs))
