"""An attention backend for vLLM: FlashAttention, except where decode_attention.py is faster.

Our kernel is used in steps in which every sequence decodes one token, if there are enough sequences. build.py registers
the backend by name, and vLLM imports it.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from rl.rollout.vllm.decode_attention import attend

# Minimum of (sequences x heads of keys) per multiprocessor. With fewer, FlashAttention is faster, since it splits every
# sequence (benchmarks/RESULTS.md).
MIN_HEADS_PER_PROCESSOR = 4


class DecodeImpl(FlashAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._model_is_plain = (
            self.attn_type == AttentionType.DECODER
            and self.kv_cache_dtype in ("auto", "float16", "bfloat16")
            and self.sliding_window == (-1, -1)
            and not self.logits_soft_cap
            and self.alibi_slopes is None
            and self.sinks is None
            and not self.batch_invariant_enabled
        )
        self._max_tokens = get_current_vllm_config().model_config.max_model_len
        num_processors = torch.cuda.get_device_properties().multi_processor_count
        self._min_sequences = MIN_HEADS_PER_PROCESSOR * num_processors / self.num_kv_heads

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if not self._model_is_plain or not self._step_is_plain(attn_metadata):
            scales = (output_scale, output_block_scale)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        block_table, lengths = attn_metadata.block_table, attn_metadata.seq_lens
        rows = slice(len(lengths))  # the rest is padding
        attend(query[rows], keys, values, block_table, lengths, self.scale, output[rows], self._max_tokens)
        return output

    def _step_is_plain(self, metadata: FlashAttentionMetadata | None) -> bool:
        """Return whether our kernel can compute this step. Some of these fields exist only in some vLLM versions."""
        return (
            metadata is not None
            and metadata.max_query_len == 1
            and len(metadata.seq_lens) >= self._min_sequences
            and not getattr(metadata, "use_cascade", False)
            and getattr(metadata, "sliding_window", None) in (None, (-1, -1))
            and getattr(metadata, "rswa_prefix_lens", None) is None
            and getattr(metadata, "dcp_context_kv_lens", None) is None
        )


class DecodeBuilder(FlashAttentionMetadataBuilder):
    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Limit CUDA graphs to uniform batches, so that graphs with one token per sequence capture our kernel."""
        return AttentionCGSupport.UNIFORM_BATCH


class DecodeBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[DecodeImpl]:
        return DecodeImpl

    @staticmethod
    def get_builder_cls() -> type[DecodeBuilder]:
        return DecodeBuilder
