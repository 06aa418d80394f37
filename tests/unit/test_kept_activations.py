"""What a compiled layer keeps for its backward pass is what rl/model/activations.py counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl.model import attention, load, rotary
from rl.model.load import Compute

SIZES = {"hidden_size": 64, "intermediate_size": 208, "num_attention_heads": 4, "num_key_value_heads": 2}
HEADS = 6 * 16  # queries and keys of a token
NUM_TOKENS = 14


@pytest.fixture
def partition_only(monkeypatch: pytest.MonkeyPatch, compiles: None) -> None:
    """Let torch.compile divide the work between forward and backward pass, but compile no code."""
    lookup = load.lookup_backend
    monkeypatch.setattr(load, "lookup_backend", lambda name: lookup("aot_eager_decomp_partition"))


@torch.library.custom_op("oneworld_tests::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stand in for an attention kernel, which torch.compile does not look into."""
    return query + torch.cat([key, value], dim=1)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(query)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs, output)  # as attention kernels do


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
    query, key, value, output = ctx.saved_tensors
    return gradient * query * output, gradient[:, :2] * key, gradient[:, 2:] * value


attend.register_autograd(_differentiate, setup_context=_keep)


def attention_of_tests(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    flat = [attention.in_memory_order(x) for x in (query, key, value)]
    return attend(*flat).unsqueeze(0), None


@pytest.mark.parametrize(
    ("family", "config", "num_heads"),
    [(LlamaForCausalLM, LlamaConfig, 2 * HEADS), (Qwen3ForCausalLM, Qwen3Config, 3 * HEADS)],
)
def test_a_compiled_layer_keeps_nothing_that_is_cheap_to_compute(
    family: Callable[[Any], Any], config: Callable[..., Any], num_heads: int, partition_only: None
) -> None:
    """It keeps its input and the result of the attention's projection, queries, keys, values and the attention's result
    (Qwen3: also queries and keys before their norms), and both inputs of the activation function times the gate."""
    attention.AttentionInterface.register("of tests", attention_of_tests)
    sizes = SIZES | {"head_dim": 16, "num_hidden_layers": 1, "vocab_size": 8, "attn_implementation": "of tests"}
    model = family(config(**sizes))
    rotary.replace(model)
    load._set_compute(model, Compute(compiled=True))
    hidden, angles = torch.randn(1, NUM_TOKENS, 64, requires_grad=True), torch.randn(1, NUM_TOKENS, 16)
    given = {each.data_ptr() for each in (*model.parameters(), angles)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model.layers[0](hidden, position_embeddings=(angles, angles))
    output.sum().backward()
    sizes_kept = [tensor.numel() / NUM_TOKENS for place, tensor in kept.items() if place not in given]
    assert sum(size for size in sizes_kept if size >= 16) == 2 * 64 + num_heads + 2 * 208
