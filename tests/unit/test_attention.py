"""Attention that the learner does not support is an error: otherwise results would be silently wrong."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from rl.config.schema import ConfigError
from rl.data.shared_prompts import Rows
from rl.model import attention
from rl.model.attention import RAGGED, VARLEN, ragged_attention, varlen_attention


def arguments(name: str) -> dict[str, Any]:
    """Return the arguments for a row with one sequence."""
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name), shares_prompts=False)
    return attention.arguments(model, [3], Rows(torch.arange(3), torch.arange(3), [3]), 0, torch.device("cpu"))


WHERE = {ragged_attention: arguments(RAGGED), varlen_attention: arguments(VARLEN)}


@pytest.mark.parametrize("other", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}])
@pytest.mark.parametrize("attend", WHERE)
def test_sinks_and_caps(attend: Any, other: dict[str, Any]) -> None:
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ConfigError, match=f"{next(iter(other))}.*give model.path a family"):
        attend(torch.nn.Identity(), query, query, query, attention_mask=None, **WHERE[attend], **other)


@pytest.mark.parametrize("is_told", [True, False])
def test_keys_of_grouped_queries_are_not_repeated(is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of torch 2.11 has no argument for grouped queries, and does not need one."""
    given: dict[str, Any] = {}

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        given.update(options, heads=[each.shape[1] for each in (query, key, value)])
        return query

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "TAKES_GQA", is_told)
    query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    varlen_attention(torch.nn.Identity(), query, key, key, attention_mask=None, **WHERE[varlen_attention])
    assert given["heads"] == [4, 2, 2] and given.get("enable_gqa", False) == is_told


def test_the_name_that_transformers_has_for_it() -> None:
    attention.register()
    shape = {"hidden_size": 16, "intermediate_size": 16, "head_dim": 8, "vocab_size": 8, "num_hidden_layers": 1}
    config = Gemma2Config(**shape, num_attention_heads=2, num_key_value_heads=2, attn_implementation=RAGGED)
    with pytest.raises(ConfigError, match="softcap"):
        Gemma2ForCausalLM(config)(torch.zeros(1, 3, dtype=torch.int64), **WHERE[ragged_attention])
