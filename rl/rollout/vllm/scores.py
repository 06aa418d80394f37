"""Logprobs of sampled tokens, for vLLM's sampler on GPUs.

vLLM reads the logits of a step three times for them: twice for the logprobs, and once to rank the sampled tokens, which
nothing here uses. The learner's kernel reads them once.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import sampler

from rl.model.head_gpu import score

vllms_own = sampler.compute_topk_scores


def score_sampled_tokens() -> None:
    """Replace vLLM's function where only the logprobs of sampled tokens are asked for."""
    sampler.compute_topk_scores = compute_scores


def compute_scores(
    logits: Tensor, num_logprobs: int, sampled: Tensor, cu_num_logits: Any = None, **options: Any
) -> LogprobsTensors:
    asks_for_more = num_logprobs or options.get("max_per_req_token_ids") or options.get("logits_mode")
    if asks_for_more or cu_num_logits is not None:
        return vllms_own(logits, num_logprobs, sampled, cu_num_logits, **options)
    logprobs = score(logits, sampled, temperature=1.0)[0]  # the sampler has divided by the temperature
    return LogprobsTensors(
        logprob_token_ids=sampled.unsqueeze(-1),
        logprobs=logprobs.unsqueeze(-1),
        selected_token_ranks=torch.zeros_like(sampled),
    )
