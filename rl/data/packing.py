"""Cuts sequences into micro-batches by a token budget. Pure: lengths in, lists of sequence indices out."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fills micro-batches in order; a sequence longer than the budget goes alone."""
    micro_batches: list[list[int]] = []
    used = max_tokens
    for index, length in enumerate(lengths):
        if used + length > max_tokens:
            micro_batches.append([])
            used = 0
        micro_batches[-1].append(index)
        used += length
    return micro_batches


def pad_to(micro_batches: list[list[int]], count: int) -> list[list[int]]:
    """Empty micro-batches at the end: each rank of a mesh runs the same number of forwards."""
    return micro_batches + [[] for _ in range(count - len(micro_batches))]


def mini_batch_of(position: int, num_prompts: int, num_mini_batches: int) -> int:
    """Mini-batches are runs of whole groups in stream order, as even as can be, whatever the number of ranks."""
    return position * num_mini_batches // num_prompts


def split_evenly(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Deals sequences to parts, the longest first to the part with the fewest tokens; each part stays in order."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    tokens = [0] * num_parts
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        part = tokens.index(min(tokens))
        parts[part].append(index)
        tokens[part] += lengths[index]
    return [sorted(part) for part in parts]
