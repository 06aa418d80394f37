"""Compare our Triton kernels with torch on the CPU: `TRITON_INTERPRET=1 python -m tests.interpreted_kernels`.

Triton reads this variable when it is imported, so the kernels need a process of their own.
"""

from unittest.mock import patch

import torch
from torch.testing import assert_close

from rl.model import head, head_gpu
from rl.rollout.vllm import decode_attention, scores

BLOCK_SIZE = 16
# Sequences of two parts, of one, and of none, as in the padded rows of a CUDA graph.
LENGTHS = [decode_attention.MAX_TOKENS + 1, decode_attention.MAX_TOKENS, 17, 0]
SHAPES = [(4, 2, 16), (3, 3, 24)]  # heads, heads of keys and values, head size


def check_head(dtype: torch.dtype) -> None:
    """Check scores and gradients. The vocabulary is longer than two tiles and no multiple of them."""
    logits, targets = torch.randn(4, 2 * head_gpu.TILE + 100).to(dtype), torch.tensor([5, 5000, 8250, 0])
    scores, factors = head._score_chunk(logits, targets, 0.7, None), torch.randn(3, 4)
    assert_close(head_gpu.score(logits, targets, 0.7), scores[:3], atol=1e-5, rtol=1e-5)
    expected = head._score_chunk_backward(logits, targets, scores, factors, 0.7, None)
    gradient = head_gpu.differentiate(logits, targets, scores, factors, 0.7)
    assert_close(gradient, expected, atol=2e-7, rtol=1e-5 if dtype == torch.float32 else 2e-3)


def check_head_without_first_tokens(dtype: torch.dtype) -> None:
    """Check rows whose first tiles have no probability. Their entropy is NaN in torch too."""
    logits, targets = torch.randn(2, 3 * head_gpu.TILE).to(dtype), torch.tensor([5000, 9000])
    logits[0, : head_gpu.TILE] = logits[1, : 2 * head_gpu.TILE] = -torch.inf
    logprobs, _, log_sums, _ = head._score_chunk(logits, targets, 0.7, None)
    assert torch.isfinite(logprobs).all()
    assert_close(head_gpu.score(logits, targets, 0.7)[[0, 2]], torch.stack([logprobs, log_sums]), atol=1e-5, rtol=1e-5)


def check_sampled_tokens(dtype: torch.dtype) -> None:
    """Check the logprobs of sampled tokens in the form that vLLM's sampler expects, on rows that others separate."""
    logits, sampled = torch.randn(4, 9000).to(dtype)[::2, :8999], torch.tensor([5, 8998])
    found = scores.compute_scores(logits, 0, sampled, None, max_per_req_token_ids=0, logits_mode=False)
    expected = logits.float().log_softmax(-1).gather(-1, sampled[:, None])
    assert_close(found.logprobs, expected, atol=1e-5, rtol=1e-5)
    assert found.logprob_token_ids.tolist() == [[5], [8998]] and found.selected_token_ranks.shape == sampled.shape
    scores.score_sampled_tokens()
    assert scores.sampler.compute_topk_scores is scores.compute_scores
    with patch.object(scores, "vllms_own", return_value="vLLM's"):
        asked = [
            (2, None, {}),
            (0, [0, 2], {}),
            (0, None, {"max_per_req_token_ids": 1}),
            (0, None, {"logits_mode": True}),
        ]
        others = [scores.compute_scores(logits, number, sampled, ends, **options) for number, ends, options in asked]
    assert others == 4 * ["vLLM's"]


def check_attention(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_size: int) -> None:
    """Check the kernel for decoding against attention that is written out."""
    num_blocks = -(-max(LENGTHS) // BLOCK_SIZE)
    total = len(LENGTHS) * num_blocks
    cache = torch.randn(total, BLOCK_SIZE, num_kv_heads, 2 * head_size).to(dtype)
    keys, values = cache.split(head_size, dim=-1)
    table, lengths = torch.randperm(total).int().view(len(LENGTHS), num_blocks), torch.tensor(LENGTHS).int()
    queries, scale = torch.randn(len(LENGTHS), num_heads, head_size).to(dtype), head_size**-0.5
    outputs = torch.full_like(queries, 9.0)
    decode_attention.attend(queries, keys, values, table, lengths, scale, outputs, max_tokens=max(LENGTHS))
    for number, length in enumerate(LENGTHS):
        tokens = cache[table[number]].flatten(0, 1)[:length].float()
        own_keys, own_values = tokens.repeat_interleave(num_heads // num_kv_heads, dim=1).split(head_size, dim=-1)
        weights = (torch.einsum("hd,thd->ht", queries[number].float(), own_keys) * scale).softmax(-1)
        expected = torch.einsum("ht,thd->hd", weights, own_values)
        assert_close(outputs[number].float(), expected, atol=1e-5 if dtype == torch.float32 else 1e-3, rtol=1e-3)


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        check_head(dtype)
        check_head_without_first_tokens(dtype)
        check_sampled_tokens(dtype)
        torch.set_default_dtype(dtype)  # the kernel for decoding must not depend on it
        for shape in SHAPES:
            check_attention(dtype, *shape)
        torch.set_default_dtype(torch.float32)
    print("all kernels agree with torch")


if __name__ == "__main__":
    main()
