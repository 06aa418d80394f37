"""Cuts sequences into micro-batches by a token budget. Pure: lengths in, lists of sequence indices out."""

from collections.abc import Sequence


def costs_of(lengths: Sequence[int], hidden_size: int) -> list[float]:
    """What sequences cost, in tokens without attention: a layer of a transformer has about 12 hidden_size^2 weights,
    and a token attends to half of its sequence."""
    return [length * (1 + length / (12 * hidden_size)) for length in lengths]


def count_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """As few as first-fit of the longest first needs; a sequence longer than the budget goes alone."""
    return len(_first_fit(lengths, max_tokens))


def pack(lengths: Sequence[int], costs: Sequence[float], max_tokens: int, count: int) -> list[list[int]]:
    """So many micro-batches, even in cost as far as the budget allows; `count` is at least count_micro_batches. Some
    may be empty: each rank of a mesh runs the same number of forwards."""
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, spent = [0] * count, [0.0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [part for part in range(count) if not parts[part] or tokens[part] + lengths[index] <= max_tokens]
        if not fitting:  # evening out left the last ones no room: uneven, but within the budget
            tight = _first_fit(lengths, max_tokens)
            return tight + [[] for _ in range(count - len(tight))]
        part = min(fitting, key=spent.__getitem__)
        parts[part].append(index)
        tokens[part] += lengths[index]
        spent[part] += costs[index]
    return [sorted(part) for part in parts]


def _first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        part = next((part for part, left in enumerate(room) if left >= lengths[index]), len(parts))
        if part == len(parts):
            parts.append([])
            room.append(max_tokens)
        parts[part].append(index)
        room[part] -= lengths[index]
    return [sorted(part) for part in parts]


def mini_batch_of(position: int, num_prompts: int, num_mini_batches: int) -> int:
    """Mini-batches are runs of whole groups in stream order, as even as can be, whatever the number of ranks."""
    return position * num_mini_batches // num_prompts


def split_evenly(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Deals sequences to parts, the dearest first to the part that has spent least; each part stays in order."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    spent = [0.0] * num_parts
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        part = spent.index(min(spent))
        parts[part].append(index)
        spent[part] += costs[index]
    return [sorted(part) for part in parts]


EVEN_ENOUGH = 1.02  # the fullest over the mean


def even_owners(
    costs: Sequence[float], owners: Sequence[int], num_owners: int, mini_batches: Sequence[int]
) -> list[int]:
    """Owners of groups, counted from 0, such that each mini-batch, an optimizer step of its own, costs all the same as
    far as whole groups allow: the dearest first to the owner that has spent least, to the present one among equals.
    What is even enough, or would not get better, stays."""
    new_owners = list(owners)
    for mini_batch in sorted(set(mini_batches)):
        groups = [group for group, other in enumerate(mini_batches) if other == mini_batch]
        before, after = [0.0] * num_owners, [0.0] * num_owners
        for group in groups:
            before[owners[group]] += costs[group]
        if max(before) * num_owners <= EVEN_ENOUGH * sum(before):
            continue
        dealt = {}
        for group in sorted(groups, key=lambda g: -costs[g]):
            least, present = min(after), owners[group]
            dealt[group] = present if after[present] == least else after.index(least)
            after[dealt[group]] += costs[group]
        if max(after) < max(before):
            for group, owner in dealt.items():
                new_owners[group] = owner
    return new_owners
