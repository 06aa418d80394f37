"""Pack sequences into micro-batches under a token budget. Pure functions: lengths in, lists of indices out."""

import math
from collections.abc import Sequence

MAX_IMBALANCE = 1.02  # maximum cost of an owner relative to the mean; groups are moved only above it


def estimate_costs(lengths: Sequence[int], hidden_size: int) -> list[float]:
    """Return the cost of each sequence, in units of one token without attention.

    A transformer layer has about 12 hidden_size^2 weights, and a token attends to half of its sequence on average.
    """
    return [length * (1 + length / (12 * hidden_size)) for length in lengths]


def count_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """Return how many micro-batches first-fit-decreasing packing needs. A sequence above the budget gets its own."""
    return len(_first_fit(lengths, max_tokens))


def pack(lengths: Sequence[float], costs: Sequence[float], max_tokens: float, count: int) -> list[list[int]]:
    """Return `count` micro-batches, as even in cost as the budget allows. Some may be empty.

    `count` must be at least count_micro_batches(lengths, max_tokens).
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, part_costs = [0.0] * count, [0.0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [part for part in range(count) if not parts[part] or tokens[part] + lengths[index] <= max_tokens]
        if not fitting:  # balancing left no room for this sequence, and the budget matters more
            tight = _first_fit(lengths, max_tokens)
            return tight + [[] for _ in range(count - len(tight))]
        part = min(fitting, key=part_costs.__getitem__)
        parts[part].append(index)
        tokens[part] += lengths[index]
        part_costs[part] += costs[index]
    return [sorted(part) for part in parts]


def _first_fit(lengths: Sequence[float], max_tokens: float) -> list[list[int]]:
    parts: list[list[int]] = []
    room: list[float] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        part = next((part for part, left in enumerate(room) if left >= lengths[index]), len(parts))
        if part == len(parts):
            parts.append([])
            room.append(max_tokens)
        parts[part].append(index)
        room[part] -= lengths[index]
    return [sorted(part) for part in parts]


def mini_batch_of(position: int, num_prompts: int, num_mini_batches: int) -> int:
    """Return the index of a prompt's mini-batch. Mini-batches are consecutive prompts, in nearly equal numbers."""
    return position * num_mini_batches // num_prompts


def split_evenly(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Assign each sequence, the most expensive first, to the cheapest part so far. Return the sorted parts."""
    return pack(costs, costs, math.inf, num_parts)


def balance_owners(
    costs: Sequence[float], owners: Sequence[int], num_owners: int, mini_batches: Sequence[int]
) -> list[int]:
    """Return new owners of the groups, such that every mini-batch costs all owners about the same.

    A mini-batch is an optimizer step, so each is balanced on its own. Whole groups are assigned, the most expensive
    first, to the owner with the lowest cost so far. In a tie the present owner is preferred. A mini-batch is left
    unchanged if it is balanced well enough, or if the new owners would not improve it.
    """
    new_owners = list(owners)
    for mini_batch in sorted(set(mini_batches)):
        groups = [group for group, other in enumerate(mini_batches) if other == mini_batch]
        before, after = [0.0] * num_owners, [0.0] * num_owners
        for group in groups:
            before[owners[group]] += costs[group]
        if max(before) * num_owners <= MAX_IMBALANCE * sum(before):
            continue
        assigned = {}
        for group in sorted(groups, key=lambda g: -costs[g]):
            least, present = min(after), owners[group]
            assigned[group] = present if after[present] == least else after.index(least)
            after[assigned[group]] += costs[group]
        if max(after) < max(before):
            for group, owner in assigned.items():
                new_owners[group] = owner
    return new_owners
