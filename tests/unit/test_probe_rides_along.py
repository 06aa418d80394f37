"""A probe in the forward pass of a micro-batch: its logits are right, and nothing else changes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from rl.data.batch import Batch, batch_of_responses, empty_batch
from rl.model import attention
from rl.model.logprobs import patch_forward_to_score, score_responses

CPU = torch.device("cpu")
PROBE = [5, 3, 30, 7, 7, 1, 2]
SHAPE = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def batch_of(*lengths: int) -> Batch:
    count = sum(lengths)
    return batch_of_responses(
        tokens=torch.randint(0, 37, (count,), generator=torch.Generator().manual_seed(count)),
        lengths=torch.tensor(lengths),
        prompt_lengths=torch.full((len(lengths),), 2),
        versions=torch.zeros(count, dtype=torch.int32),
        rollout_logprobs=torch.zeros(count),
        rewards=torch.zeros(len(lengths)),
        group_ids=torch.arange(len(lengths)),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


@pytest.fixture(params=[LlamaConfig, Qwen3Config], ids=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    attention.register()
    config = request.param(**SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.RAGGED)
    patch_forward_to_score(model)
    return model


def plain_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Return logits by transformers' own attention."""
    model.set_attn_implementation("sdpa")
    logits = type(model).forward(model, torch.tensor([tokens])).logits[0]
    model.set_attn_implementation(attention.RAGGED)
    return logits


@pytest.mark.parametrize("lengths", [(9, 4, 20), (3,), ()], ids=["three", "shorter than the probe", "empty"])
def test_logits_of_the_probe_and_the_same_scores(model: torch.nn.Module, lengths: tuple[int, ...]) -> None:
    batch = batch_of(*lengths) if lengths else empty_batch()
    alone = score_responses(model, batch, 0.7, CPU)
    carried = score_responses(model, batch, 0.7, CPU, PROBE)
    assert alone.probe_logits.shape == (0, 37)
    assert (carried.probe_logits - plain_logits(model, PROBE)).abs().max() < 1e-5
    assert (carried.logprobs - alone.logprobs).abs().sum() < 1e-5
    assert len(carried.logprobs) == int(batch.response_lengths.sum())


def test_it_has_no_part_in_the_gradient_and_keeps_no_other_logits(model: torch.nn.Module) -> None:
    batch = batch_of(9, 4, 20)
    gradients = []
    for probe in ((), PROBE):
        scores = score_responses(model, batch, 1.0, CPU, probe)
        scores.logprobs.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() < 1e-4
    assert not scores.probe_logits.requires_grad
    assert scores.probe_logits.untyped_storage().nbytes() == scores.probe_logits.nbytes
