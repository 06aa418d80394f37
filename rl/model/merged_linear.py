"""A linear layer with a LoRA adapter, computed as an engine does: with the merged weight, rounded to the model's dtype.

A change of a weight that is smaller than half of its last bit is lost in the merged weight. In bfloat16 that is most of
an adapter after its first updates. If the learner computed W x + B A x instead, its logprobs would contain what the
engine's lack. So the forward pass merges the weight of one layer at a time. The backward pass is that of W x + B A x,
which is the same but for the rounding: adapters are float32 masters, and collect what is too small to be seen yet.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rl.model.adapter_names import ADAPTER


def patch_to_merge(layer: Any) -> None:
    """Replace the forward method of a LoRA layer of peft."""
    layer.forward = MethodType(_forward, layer)


def _forward(self: Any, inputs: Tensor) -> Tensor:
    if self._disable_adapters:
        return self.base_layer(inputs)
    a, b = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
    return _MergedLinear.apply(inputs, self.base_layer.weight, a, b, self.scaling[ADAPTER], self.base_layer.bias)


class _MergedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,  # [..., in]
        weight: Tensor,  # [out, in], frozen
        a: Tensor,  # [rank, in]
        b: Tensor,  # [out, rank]
        scale: float,
        bias: Tensor | None,  # [out], frozen; added before the sum is rounded, as in a layer without adapters
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight, a, b)
        ctx.scale = scale
        return F.linear(inputs, torch.addmm(weight, b, a, alpha=scale), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None, None]:
        inputs, weight, a, b = ctx.saved_tensors
        rows, grad = inputs.flatten(0, -2), gradients[0].flatten(0, -2)
        grad_inner = ctx.scale * (grad @ b)  # of A x
        grad_b = ctx.scale * (grad.t() @ (rows @ a.t()))
        grad_inputs = None
        if ctx.needs_input_grad[0]:
            grad_inputs = torch.addmm(grad @ weight, grad_inner, a).view_as(inputs)
        return grad_inputs, None, grad_inner.t() @ rows, grad_b, None, None
