"""Compare our Triton kernels with torch on the CPU: `TRITON_INTERPRET=1 python -m tests.interpreted_kernels`.

Triton reads this variable when it is imported, so the kernels need a process of their own.
"""

from unittest.mock import patch

import torch
import triton.language as tl
from torch.testing import assert_close

from rl.model import head, head_gpu
from rl.rollout.vllm import decode_attention, sampling

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


def check_sampling(dtype: torch.dtype) -> None:
    """Check tokens and their logprobs on rows that others separate. The last tile of the vocabulary is not whole."""
    num_rows, vocabulary = 120, 3 * sampling.TILE + 9  # no token of the second tile has a probability
    likely = torch.tensor([0, 7, 2 * sampling.TILE + 5, 2 * sampling.TILE + 6, vocabulary - 1])
    probabilities = torch.tensor([0.05, 0.25, 0.4, 0.1, 0.2])
    logits = torch.full((2 * num_rows, vocabulary + 3), -torch.inf, dtype=dtype)
    logits[:, likely] = probabilities.log().to(dtype)
    logits[:, vocabulary:] = 9.0  # beyond the vocabulary
    logits = logits[::2, :vocabulary]
    slots = torch.stack([torch.arange(num_rows, dtype=torch.int32)] * 2, 1)[:, 0]  # others lie between them
    positions = torch.full((num_rows, 2), 60)[:, 0]
    temperatures, seeds = torch.ones(num_rows + 1)[1:], (torch.arange(num_rows + 1) - (1 << 40))[1:]
    temperatures[:10] = 0.0
    slots[10:14] = -1  # rows of padding
    ours = sampling.TokenSampler()
    tokens = ours.sample(logits, slots, temperatures, seeds, positions, apply_temperature=False, use_fp64=False)
    found = ours.score(logits, 0, tokens, None, max_per_req_token_ids=0, logits_mode=False)
    expected = logits.float().log_softmax(-1).gather(-1, tokens[:, None])
    assert_close(found.logprobs, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(found.logprob_token_ids, tokens[:, None]) and found.selected_token_ranks.shape == tokens.shape
    assert tokens[:14].eq(likely[2]).all(), "without a temperature, the most probable token is chosen"
    shares = tokens[14:, None].eq(likely).float().mean(0)
    deviations = (probabilities * (1 - probabilities) / (num_rows - 14)).sqrt()
    assert ((shares - probabilities).abs() < 3 * deviations).all(), shares

    rows = torch.tensor([70, 55, 110])
    again, _ = sampling.sample(logits[rows], slots[rows], temperatures, seeds, positions[rows])
    assert torch.equal(again, tokens[rows]), "a token depends on its seed and position alone"
    same, _ = sampling.sample(logits[:40], torch.full((40,), 60), temperatures, seeds, torch.arange(40))
    assert len(same.unique()) == len(likely), "the positions of a request have different noise"


def check_rare_tokens() -> None:
    """Check that tokens behind a very likely one are drawn, whose probabilities are lost in a sum in float32."""
    logits = torch.full((1, sampling.TILE), -18.0)
    logits[:, 3] = 0.0
    slots, ones = torch.zeros(300, dtype=torch.int32), torch.ones(1)
    with patch.object(sampling.tl, "rand4x", lambda seed, offset: (0.0, offset.to(tl.float32) * 3e-9, 0.0, 0.0)):
        tokens, _ = sampling.sample(logits.expand(300, -1), slots, ones, torch.zeros(1).long(), torch.arange(300))
    # Each of the other 63 tokens has a probability of 1.5e-8, which is 5 draws of these 300.
    assert tokens[:5].tolist() == 5 * [0] and 55 <= len(tokens.unique()) <= 64
    assert tokens.unique(return_counts=True)[1].max() <= 6, "all of them are equally likely"


def check_sampling_without_probabilities() -> None:
    """Check rows whose logits are not finite: tokens are in the vocabulary, and that of the only inf is chosen."""
    logits = torch.randn(3, sampling.TILE + 10)
    logits[0], logits[1] = torch.nan, -torch.inf
    logits[2, sampling.TILE + 3] = torch.inf
    slots = torch.arange(3)
    tokens, logprobs = sampling.sample(logits, slots, torch.ones(3), slots, slots)
    assert (tokens >= 0).all() and (tokens < logits.shape[1]).all() and tokens[2] == sampling.TILE + 3
    assert not torch.isfinite(logprobs).any()
    few, _ = sampling.sample(torch.full((1, 10), torch.nan), slots[:1], torch.ones(1), slots[:1], slots[:1])
    assert 0 <= few < 10


def check_what_is_left_to_vllm() -> None:
    logits, ours = torch.randn(2, 50), sampling.TokenSampler()
    slots, ones = torch.arange(2), torch.ones(2)
    with patch.multiple(sampling, vllms_sample=lambda *_, **__: "vLLM's", vllms_scores=lambda *_, **__: "vLLM's"):
        for is_applied, options in [(True, {}), (False, {"use_fp64": True}), (False, {"logits_cache": logits})]:
            assert ours.sample(logits, slots, ones, slots, slots, apply_temperature=is_applied, **options) == "vLLM's"
        tokens = ours.sample(logits, slots, ones, slots, slots, apply_temperature=False, is_drafting=False)
        expected = logits.log_softmax(-1).gather(-1, tokens[:, None])
        assert_close(ours.score(logits, 0, tokens).logprobs, expected)
        theirs = torch.tensor([7, 9])
        assert_close(ours.score(logits, 0, theirs).logprobs, logits.log_softmax(-1).gather(-1, theirs[:, None]))
        others = [
            (2, None, {}),
            (0, [0, 2], {}),
            (0, None, {"max_per_req_token_ids": 1}),
            (0, None, {"logits_mode": True}),
        ]
        for number, ends, options in others:
            assert ours.score(logits, number, tokens, ends, **options) == "vLLM's"
    sampling.use_our_sampler(must_repeat=True)
    assert sampling.sampler.gumbel_sample is sampling.vllms_sample
    sampling.use_our_sampler(must_repeat=False)
    functions = sampling.sampler.gumbel_sample, sampling.sampler.compute_topk_scores
    assert [function.__func__ for function in functions] == [sampling.TokenSampler.sample, sampling.TokenSampler.score]
    assert functions[0].__self__ is functions[1].__self__


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
        with patch.object(sampling, "TILE", 64):  # the interpreter adds up a tile in Python
            check_sampling(dtype)
        torch.set_default_dtype(dtype)  # the kernel for decoding must not depend on it
        for shape in SHAPES:
            check_attention(dtype, *shape)
        torch.set_default_dtype(torch.float32)
    with patch.object(sampling, "TILE", 64):
        check_rare_tokens()
        check_sampling_without_probabilities()
    check_what_is_left_to_vllm()
    print("all kernels agree with torch")


if __name__ == "__main__":
    main()
