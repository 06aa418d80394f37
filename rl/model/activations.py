"""Estimate the device memory of an update and of an engine beyond weights and training state. No torch.

The numbers of elements that a layer keeps for its backward pass are those of a layer of llama or Qwen. How far
the estimates are from measured peaks is in tests/unit/test_activations.py.
"""

from dataclasses import dataclass

from rl.config.schema import Config, LoraConfig, Recompute
from rl.model.memory import DTYPE_BYTES
from rl.model.shape import ModelShape, ModelSize

LOGITS_BYTES = 10 << 27  # logits that the learner computes at once, with copies and gradients (rl/model/head.py)
FRAGMENTS = 1.1  # what torch's allocator takes for activations, compared with what they need
# A model of at most this many parameters is gathered as a whole. The host needs about 1 ms per layer and pass to gather
# layers one by one, and in a small model the device, or the one core of a rank, is idle meanwhile.
MAX_GATHERED_AT_ONCE = 1 << 28
GATHERED_LAYERS = 3  # the current one, the next one that is being gathered, and the last one that is being freed
BLOCK = 16  # tokens in a block of the KV cache
PART_TOKENS = 2048  # MAX_TOKENS of rl/rollout/vllm/decode_attention.py, which needs triton
LOGIT_BYTES = 8  # per sequence and entry of the vocabulary, in the pass with which vLLM measures its memory
SAMPLING_BYTES = 24  # in addition, while an engine samples: several float32 copies of the logits
ENGINE_BYTES = 1_500_000_000  # graphs, workspaces and buffers of an engine
TP_BYTES = 1_000_000_000  # buffers of its collectives, if it has several ranks
# An engine computes many prompts in one step, so that it takes few such steps, which have no CUDA graphs. It keeps
# memory for the activations of the largest step.
MIN_BATCHED_TOKENS, MAX_BATCHED_TOKENS, BATCH_BYTES = 4096, 16_384, 512 << 20
LONG_RESPONSE = 2048  # tokens; longer limits than this are seldom reached by many responses at once


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes that an update needs on one rank, besides the training state."""

    fixed: int
    per_token: int  # of a micro-batch

    def of(self, num_tokens: int) -> int:
        return self.fixed + self.per_token * num_tokens


def update_memory(
    config: Config, shape: ModelShape, recompute: Recompute, lora: LoraConfig, is_critic: bool = False
) -> UpdateMemory:
    """Estimate an update of a policy or critic. Layers are gathered one after the other, embedding and head at once."""
    dtype, num_layers, hidden = DTYPE_BYTES[config.model.dtype], shape.num_layers, shape.hidden
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    if config.actor.compile:  # of a layer, per token
        kept = 2 * hidden + (3 if shape.has_qk_norm else 2) * heads + 2 * shape.intermediate
    else:  # also the results of elementwise operations
        kept = 8 * hidden + (5 if shape.has_qk_norm else 2) * heads + 4 * shape.intermediate
    num_recomputed = {"full": num_layers, "selective": -(-num_layers // 2)}.get(recompute, 0)
    elements = (num_layers - num_recomputed) * kept + num_recomputed * hidden + (kept if num_recomputed else 0)
    gradients = heads + 6 * hidden + 3 * shape.intermediate  # of the layer that is computed
    head = shape.vocabulary * hidden
    root = head if is_critic else shape.num_in_root
    is_small = shape.size.num_parameters <= MAX_GATHERED_AT_ONCE
    num_gathered, num_reduced = (num_layers, num_layers) if is_small else (GATHERED_LAYERS, 1)
    fixed = dtype * (root + num_gathered * shape.num_in_layer)
    if not is_critic:
        fixed += LOGITS_BYTES * (2 if config.algo.kl_coef and config.algo.kl_estimator == "full" else 1)
    if not lora.is_set:
        fixed += 8 * num_reduced * shape.num_in_layer + (
            0 if is_critic else (4 + dtype) * head
        )  # gradients before their reduction
    logits = 0 if is_critic else kept_logits_bytes(config, shape, recompute)  # freed before a layer has gradients
    per_token = int(FRAGMENTS * dtype * elements + max(logits, FRAGMENTS * dtype * gradients))
    return UpdateMemory(fixed, per_token)


def kept_logits_bytes(config: Config, shape: ModelShape, recompute: Recompute) -> int:
    """Return the bytes of a token's logits if they are kept for the backward pass."""
    return int(FRAGMENTS * DTYPE_BYTES[config.model.dtype] * shape.vocabulary) if recompute == "none" else 0


def scoring_bytes(config: Config, shape: ModelShape, num_tokens: int) -> int:
    """Estimate a pass without gradients."""
    dtype = DTYPE_BYTES[config.model.dtype]
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    of_token = int(FRAGMENTS * dtype * (4 * shape.hidden + 2 * heads + 3 * shape.intermediate))
    gathered = dtype * (shape.num_in_root + GATHERED_LAYERS * shape.num_in_layer)
    return num_tokens * of_token + gathered + LOGITS_BYTES


@dataclass(frozen=True)
class EngineMemory:
    """Bytes that an engine needs on each of its ranks."""

    weights: int
    kv: int  # for all of its sequences at full length
    enough_kv: int  # for all of them at a length that most do not exceed; with keep_kv, for those of a step
    least_kv: int  # for one sequence
    other: int  # activations, logits, graphs
    beside: int  # what sampling takes besides the share of the GPU that vLLM is given

    @property
    def total(self) -> int:
        """What the share of the GPU must hold."""
        return self.weights + self.kv + self.other

    @property
    def enough(self) -> int:
        return self.weights + self.enough_kv + self.other

    @property
    def least(self) -> int:
        return self.weights + self.least_kv + self.other


def engine_memory(
    config: Config, shape: ModelShape, size: ModelSize, num_slots: int, num_sequences: int, num_of_step: int = 0
) -> EngineMemory:
    """Estimate an engine that decodes `num_slots` sequences at once, and in training `num_sequences`. `num_of_step` are
    those that it starts in a step; 0: all of them."""
    dtype, rollout, tp = DTYPE_BYTES[config.model.dtype], config.rollout, config.rollout.tensor_parallel_size
    of_token = 2 * dtype * shape.num_layers * -(-shape.num_kv_heads // tp) * shape.head_dim
    shares_prompts = rollout.engine_options.get("enable_prefix_caching") is not False
    num_prompts = -(-num_sequences // rollout.num_samples_per_prompt) if shares_prompts else num_sequences
    longest, prompt = config.max_training_tokens, config.data.max_prompt_tokens

    def kv_of(num_new_tokens: int) -> int:
        """The samples of a prompt share its KV cache. Their own part of it begins and ends in the middle of a block."""
        return of_token * (num_sequences * (num_new_tokens + 2 * BLOCK) + num_prompts * prompt)

    least = of_token * (config.max_sequence_tokens + 2 * BLOCK)  # of an evaluation too, or vLLM refuses to start
    whole, enough = max(least, kv_of(longest)), max(least, kv_of(min(longest, max(LONG_RESPONSE, longest // 4))))
    if rollout.keep_kv and 0 < num_of_step < num_sequences:  # it is in the learner's way, and many responses end soon
        enough = max(least, enough * num_of_step // num_sequences)
    if rollout.kv_cache_mb:
        whole = enough = rollout.kv_cache_mb << 20
    num_batched = rollout.engine_options.get("max_num_batched_tokens")
    num_batched = num_batched or max_batched_tokens(num_slots, shape, dtype, tp)
    activations = num_batched * _batched_bytes(shape, dtype, tp)
    logits = num_slots * shape.vocabulary
    num_parts = -(-config.max_sequence_tokens // PART_TOKENS)  # of the longest sequence, in decode_attention.py
    parts = 4 * num_slots * -(-shape.num_heads // tp) * (shape.head_dim + 1) * num_parts if num_parts > 1 else 0
    other = LOGIT_BYTES * logits + activations + parts + ENGINE_BYTES + (TP_BYTES if tp > 1 else 0)
    weights = dtype * size.num_parameters // tp
    return EngineMemory(weights, whole, enough, least, other, beside=SAMPLING_BYTES * logits)


def max_batched_tokens(num_slots: int, shape: ModelShape | None, dtype_bytes: int, tp: int) -> int:
    """Return the most tokens that an engine on a GPU computes in one step. Longer prompts are computed in several."""
    fitting = BATCH_BYTES // _batched_bytes(shape, dtype_bytes, tp) if shape is not None else 0
    return max(MIN_BATCHED_TOKENS, num_slots, min(fitting // 1024 * 1024, MAX_BATCHED_TOKENS))


def _batched_bytes(shape: ModelShape, dtype_bytes: int, tp: int) -> int:
    """Return the bytes of activations of a token in an engine's step."""
    return dtype_bytes * (6 * shape.hidden + 3 * -(-shape.intermediate // tp))
