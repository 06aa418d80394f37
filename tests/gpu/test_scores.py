"""The logprobs of sampled tokens are those of vLLM's own kernels."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_rows", "vocabulary"), [(1, 37), (7, 4096), (512, 151_936)])
def test_they_equal_those_of_vllm(num_rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    from rl.rollout.vllm.scores import compute_scores, vllms_own

    torch.manual_seed(0)
    logits = (4 * torch.randn(num_rows, vocabulary + 64, device="cuda")).to(dtype)[:, :vocabulary]
    logits[:, : vocabulary // 2] = -torch.inf  # as top-k leaves them
    sampled = torch.randint(vocabulary // 2, vocabulary, (num_rows,), device="cuda")
    ours, theirs = (function(logits, 0, sampled, None, logits_mode=False) for function in (compute_scores, vllms_own))
    assert torch.equal(ours.logprob_token_ids, theirs.logprob_token_ids)
    assert ours.selected_token_ranks.shape == theirs.selected_token_ranks.shape
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, atol=2e-5, rtol=1e-5)
    more, expected = (function(logits, 2, sampled, None, logits_mode=False) for function in (compute_scores, vllms_own))
    assert torch.equal(more.logprobs, expected.logprobs), "other calls are left to vLLM"
