"""Floating-point operations of an update, and the peak of known GPUs: what MFU is made of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

# Dense operations per second in bfloat16, by a part of the name that torch reports. The first match counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}


def peak_flops(gpu_name: str) -> float | None:
    """Return the peak of a GPU in bfloat16, or None if it is not known."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in gpu_name), None)


class ModelFlops(NamedTuple):
    """What the operations of a model depend on."""

    num_trained: int  # parameters
    num_frozen: int  # parameters without a gradient, as under LoRA adapters
    attention_width: int  # layers x heads x size of a head

    @staticmethod
    def of(model: Any) -> "ModelFlops":
        """Read a model, which may be sharded. Without attention heads in its config, attention is not counted."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)
        size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
        width = getattr(config, "num_hidden_layers", 0) * heads * size
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        num_trained = sum(count for count, is_trained in counts if is_trained)
        return ModelFlops(num_trained, sum(count for count, _ in counts) - num_trained, width)

    def of_update(self, lengths: Sequence[int], repeated: Sequence[int] = ()) -> int:
        """Return the operations of the forward and backward passes of these sequences. `repeated` are the lengths of
        prompts that are computed with another sequence.

        A trained parameter takes 6 per token: one multiplication and one addition in the forward pass, and twice that
        in the backward pass, for the gradients of inputs and of weights. A frozen one takes 4. Attention takes
        6 x width per pair of tokens: two products of one multiplication and one addition each, three times, for half of
        all pairs. Passes that are only repeated to save memory do not count.
        """
        of_token = 6 * self.num_trained + 4 * self.num_frozen
        num_tokens, num_pairs = (sum(x**n for x in lengths) - sum(x**n for x in repeated) for n in (1, 2))
        return of_token * num_tokens + 6 * self.attention_width * num_pairs
