"""Sampled tokens have the probabilities of the softmax, and their logprobs are those of vLLM's own kernels."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(1, 37), (7, 4096), (512, 151_936)])
def test_logprobs_equal_those_of_vllm(num_rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    from rl.rollout.vllm.sampling import TokenSampler, vllms_scores

    torch.manual_seed(0)
    logits = (4 * torch.randn(num_rows, vocabulary + 64, device="cuda")).to(dtype)[:, :vocabulary]
    logits[:, : vocabulary // 2] = -torch.inf  # as top-k leaves them
    slots, ours = torch.arange(num_rows, device="cuda"), TokenSampler()
    temperatures = (slots > num_rows // 2).float()
    tokens = ours.sample(logits, slots.int(), temperatures, slots, slots, apply_temperature=False)
    assert (tokens >= vocabulary // 2).all()
    is_greedy = temperatures == 0
    chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
    assert torch.equal(chosen[is_greedy], logits.max(-1).values[is_greedy])
    found, expected = (function(logits, 0, tokens, None, logits_mode=False) for function in (ours.score, vllms_scores))
    assert torch.equal(found.logprob_token_ids, expected.logprob_token_ids)
    assert found.selected_token_ranks.shape == expected.selected_token_ranks.shape
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-5, rtol=1e-5)
    more, expected = (function(logits, 2, tokens, None, logits_mode=False) for function in (ours.score, vllms_scores))
    assert torch.equal(more.logprobs, expected.logprobs), "other calls are left to vLLM"


@pytest.mark.parametrize("vocabulary", [50_257, 151_936])
def test_tokens_have_their_probabilities(vocabulary: int) -> None:
    """Draw a million tokens, and compare their counts in 200 bins of equal probability with a chi-squared test."""
    from rl.rollout.vllm.sampling import sample

    num_draws, num_bins, rows = 1 << 20, 200, 1024
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(vocabulary, device="cuda", generator=generator).bfloat16()
    probabilities = logits.double().softmax(-1)
    order = torch.randperm(vocabulary, device="cuda", generator=generator)
    bins = torch.empty_like(order)
    bins[order] = (probabilities[order].cumsum(0) * num_bins).long().clamp(max=num_bins - 1)
    expected = torch.zeros(num_bins, dtype=torch.float64, device="cuda").index_add(0, bins, probabilities) * num_draws
    counts = torch.zeros(num_bins, dtype=torch.float64, device="cuda")
    slots, ones = torch.arange(rows, device="cuda"), torch.ones(rows, device="cuda")
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,), device="cuda", generator=generator)
    for position in range(num_draws // rows):
        tokens, _ = sample(logits.expand(rows, -1), slots, ones, seeds, torch.full_like(slots, position))
        counts += torch.bincount(bins[tokens], minlength=num_bins)
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert 120 < chi_squared < 300, "199 degrees of freedom: mean 199, standard deviation 20"
