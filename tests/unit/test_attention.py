"""What the learner's attention does not compute is refused: results would be wrong without a word. And how queries and
keys get to it."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from rl.config import ConfigError
from rl.model import attention
from rl.model.attention import RAGGED, VARLEN, ragged_attention, varlen_attention

WHERE: dict[Any, dict[str, Any]] = {
    ragged_attention: attention.arguments(RAGGED, [3], 0, torch.device("cpu")),
    varlen_attention: attention.arguments(VARLEN, [3], 0, torch.device("cpu")),
}


SHAPE = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "vocab_size": 8, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize("other", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
@pytest.mark.parametrize("attend", WHERE)
def test_sinks_and_caps(attend: Any, other: dict[str, Any]) -> None:
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ConfigError, match=f"{next(iter(other))}.*give model.path a family"):
        attend(torch.nn.Identity(), query, query, query, None, **WHERE[attend], **other)


def test_the_name_that_transformers_has_for_it() -> None:
    attention.register()
    config = Gemma2Config(**SHAPE, **HEADS, attn_implementation=RAGGED)
    with pytest.raises(ConfigError, match="softcap"):
        Gemma2ForCausalLM(config)(torch.zeros(1, 3, dtype=torch.int64), **WHERE[ragged_attention])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "granite", "phi3"])
def test_positions_are_rotated_in_the_order_of_memory(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model computes stays the same to the last bit."""
    attention.register()
    config = AutoConfig.for_model(family, **SHAPE, **HEADS, pad_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=RAGGED)
    module, orders = sys.modules[type(model).__module__], []
    rotate: Any = module.apply_rotary_pos_emb

    def watched(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        orders.append(q.shape[unsqueeze_dim] == k.shape[unsqueeze_dim] == 2 and q.stride(2) <= q.stride(1))
        return rotate(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", watched)
    results = [model(torch.tensor([[1, 2, 3]]), **WHERE[ragged_attention]).logits]
    for _ in range(2):  # as each model of a run does
        attention.rotate_as_they_lie(model)
        results.append(model(torch.tensor([[1, 2, 3]]), **WHERE[ragged_attention]).logits)
    assert orders == [False, True, True]
    assert results[0].equal(results[1]) and results[0].equal(results[2])
